"""What a whole Megatron model on one rank computes, operator by operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import nn
from torch.utils.hooks import RemovableHandle

from hybridrl.engines.megatron.layers import CausalAttention
from hybridrl.engines.megatron.single_rank import logits_of
from hybridrl.parity.activations import Activations, Floats, Operator

_MODULES = {
    "input_layernorm": Operator.INPUT_NORM,
    "self_attention": Operator.ATTENTION,
    "pre_mlp_layernorm": Operator.POST_ATTENTION_NORM,
    "mlp": Operator.MLP,
}


@torch.no_grad()
def megatron_activations(model: GPTModel, token_ids: list[int]) -> Activations:
    """Score one sequence and return what every operator made of it.

    Norms that Transformer Engine fuses into projections are left out, as is its scale of attention.

    Args:
        model: From :func:`load_whole_model`.
    """
    recorded = Activations()
    with ExitStack() as stack:
        for handle in _hooks(model, recorded):
            stack.callback(handle.remove)
        recorded.add(Operator.LOGITS, None, _floats(logits_of(model, token_ids)))
    return recorded


def _hooks(model: GPTModel, recorded: Activations) -> list[RemovableHandle]:
    handles = [model.embedding.register_forward_hook(_keep(recorded, Operator.EMBEDDING, None))]
    for index, layer in enumerate(model.decoder.layers):
        for name, operator in _MODULES.items():
            if not isinstance(module := getattr(layer, name), IdentityOp):
                handles.append(module.register_forward_hook(_keep(recorded, operator, index)))
        attention = layer.self_attention
        value_dim = attention.config.v_head_dim if attention.config.multi_latent_attention else None
        keep = _keep_attention(recorded, index, value_dim)
        handles.append(attention.core_attention.register_forward_hook(keep, with_kwargs=True))
        if isinstance(layer.mlp, MoELayer):
            handles.append(layer.mlp.register_forward_hook(_keep_experts(recorded, index)))
        handles.append(layer.register_forward_hook(_keep(recorded, Operator.LAYER, index)))
    handles.append(model.decoder.final_layernorm.register_forward_hook(_keep(recorded, Operator.FINAL_NORM, None)))
    return handles


def _keep(recorded: Activations, operator: Operator, layer: int | None) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        result, bias = output if isinstance(output, tuple) else (output, None)
        # The second is a bias yet to be added, but for a layer.
        recorded.add(operator, layer, _floats(result if bias is None else result + bias))

    return hook


def _keep_attention(recorded: Activations, layer: int, value_dim: int | None) -> Callable[..., None]:
    """Keep what enters and leaves core attention, without what Megatron-core 0.17 and later pad latent values by.

    Args:
        value_dim: Width of a value head; None when it is never padded.
    """

    def hook(core: nn.Module, inputs: tuple[torch.Tensor, ...], keywords: Any, output: torch.Tensor) -> None:
        query, key, value = (_floats(tensor) for tensor in inputs[:3])
        scale = core.scale if isinstance(core, CausalAttention) else None
        recorded.add_attention(layer, query, key, value[..., :value_dim], scale)
        heads = _floats(output).reshape(*query.shape[:2], -1)[..., :value_dim]
        recorded.add(Operator.CORE_ATTENTION, layer, heads.reshape(len(heads), -1))

    return hook


def _keep_experts(recorded: Activations, layer: int) -> Callable[..., None]:
    """Ask the router, and every expert about the last token."""

    def hook(mlp: MoELayer, inputs: tuple[torch.Tensor], output: Any) -> None:
        weights, _ = mlp.router(inputs[0])
        recorded.add(Operator.ROUTER_LOGITS, layer, _floats(mlp.router.gating(inputs[0])))
        recorded.add(Operator.ROUTER_WEIGHTS, layer, _floats(weights))
        last = inputs[0].flatten(0, -2)[-1:]
        one_each = torch.ones(weights.size(-1), dtype=torch.long, device=last.device)
        answers, _ = mlp.experts(last.expand(len(one_each), -1).contiguous(), one_each, one_each.to(last))
        recorded.add(Operator.EXPERTS, layer, _floats(answers))

    return hook


def _floats(tensor: torch.Tensor) -> Floats:
    array: Floats = tensor.detach().float().cpu().numpy().copy()
    return array
