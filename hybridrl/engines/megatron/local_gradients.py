"""Gradients that Megatron-core's layers without Transformer Engine do not get right, and what sets them right."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

Output = tuple[torch.Tensor, torch.Tensor | None]


def correct_gradients(model: torch.nn.Module) -> None:
    """Correct the layers of a chunk that need it; Transformer Engine's do not."""
    for module in model.modules():
        if isinstance(module, SequentialMLP) and module.config.add_bias_linear:
            for expert in module.local_experts:
                expert.linear_fc2.register_forward_hook(_copy)
                # Marked like a layer outside experts, it would get the gradients of the tp ranks' other experts too.
                expert.linear_fc2.bias.sequence_parallel = False
                # Other tp ranks hold other experts: the norm of all gradients must count each bias, not tp rank 0's alone.
                expert.linear_fc2.bias.tensor_model_parallel = True
        if isinstance(module, MLASelfAttention) and module.config.sequence_parallel:
            down = module.linear_kv_down_proj
            if isinstance(down, ColumnParallelLinear):
                down.register_forward_hook(_scatter_sequence)


def _copy(layer: torch.nn.Module, inputs: Any, output: Output) -> Output:
    """Let experts add their bias in place.

    On a single expert rank the output is a view that an autograd function handed on, which autograd does not let change.
    """
    return output[0].clone(), output[1]


def _scatter_sequence(layer: ColumnParallelLinear, inputs: Any, output: Output) -> Output:
    """Turn [tokens, batch, columns / tp] into [tokens / tp, batch, columns], what Transformer Engine's layer returns.

    From the former, attention gathers the rotary key and takes only its own heads' gradient of it back; from the latter it
    sums the gradients of all heads.
    """
    columns = gather_from_tensor_model_parallel_region(output[0], group=layer.tp_group)
    return scatter_to_sequence_parallel_region(columns, group=layer.tp_group), output[1]
