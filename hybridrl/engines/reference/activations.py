"""The reference: what transformers computes in float32, operator by operator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybridrl.parity.activations import Activations, Floats, Operator

_ATTENTION = "hybridrl_recorded"
_MODULES = {
    "input_layernorm": Operator.INPUT_NORM,
    "self_attn": Operator.ATTENTION,
    "post_attention_layernorm": Operator.POST_ATTENTION_NORM,
    "mlp": Operator.MLP,
}


@torch.no_grad()
def reference_activations(folder: Path, token_ids: list[int]) -> Activations:
    """Load a checkpoint in float32, score one sequence and return what every operator made of it."""
    recorded = Activations()
    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _recorded_attention(recorded))
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=_ATTENTION, experts_implementation="eager"
    ).eval()
    model.model.embed_tokens.register_forward_hook(_keep(recorded, Operator.EMBEDDING, None))
    for index, layer in enumerate(model.model.layers):
        for name, operator in _MODULES.items():
            getattr(layer, name).register_forward_hook(_keep(recorded, operator, index))
        if hasattr(layer.mlp, "experts"):
            layer.mlp.register_forward_hook(_keep_experts(recorded, index))
        layer.register_forward_hook(_keep(recorded, Operator.LAYER, index))
    model.model.norm.register_forward_hook(_keep(recorded, Operator.FINAL_NORM, None))
    recorded.add(Operator.LOGITS, None, _floats(model(torch.tensor([token_ids])).logits))
    return recorded


def _keep(recorded: Activations, operator: Operator, layer: int | None) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        recorded.add(operator, layer, _floats(output[0] if isinstance(output, tuple) else output))

    return hook


def _keep_experts(recorded: Activations, layer: int) -> Callable[..., None]:
    """Ask the router, and every expert about the last token."""

    def hook(mlp: Any, inputs: tuple[torch.Tensor], output: Any) -> None:
        hidden = inputs[0].flatten(0, -2)
        logits, weights, chosen = (mlp.gate if hasattr(mlp, "gate") else mlp.router)(hidden)
        num_experts = logits.size(-1)
        recorded.add(Operator.ROUTER_LOGITS, layer, _floats(logits))
        recorded.add(
            Operator.ROUTER_WEIGHTS, layer, _floats(torch.zeros_like(logits).scatter(1, chosen, weights.to(logits)))
        )
        every = torch.arange(num_experts).unsqueeze(1)
        answers = mlp.experts(hidden[-1:].expand(num_experts, -1), every, torch.ones(num_experts, 1))
        recorded.add(Operator.EXPERTS, layer, _floats(answers))

    return hook


def _recorded_attention(recorded: Activations) -> Callable[..., Any]:
    """Wrap the attention that a model's own file defines."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **rest: Any
    ) -> Any:
        by_token = [_floats(x[0].transpose(0, 1)) for x in (query, key, value)]
        recorded.add_attention(module.layer_idx, by_token[0], by_token[1], by_token[2], scaling)
        eager = sys.modules[type(module).__module__].eager_attention_forward
        output, weights = eager(module, query, key, value, mask, scaling=scaling, **rest)
        recorded.add(Operator.CORE_ATTENTION, module.layer_idx, _floats(output.flatten(2)))
        return output, weights

    return attend


def _floats(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().float().cpu().numpy().copy()
    return array
