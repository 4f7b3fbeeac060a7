"""The output layer of critics and reward models.

The head is whole on every tensor-parallel rank of the last stage. With sequence parallelism a rank applies it to its own tokens and
the values are gathered; the gradient of the head is then a sum over the ranks, which Megatron-core adds up for parameters
that are marked so, as for norms.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.layout.model import ValueHead


class ValueOutput(torch.nn.Module):
    """A linear layer [hidden -> num_labels] that computes in float32.

    A new head is normal with deviation 1 / sqrt(hidden + 1). Source: arXiv 2403.17031 (initialisation of the reward head).

    Args:
        seed: The same on all ranks, which must hold the same head.
        tp: The tensor-parallel ranks.
    """

    def __init__(self, head: ValueHead, config: TransformerConfig, seed: int, tp: dist.ProcessGroup) -> None:
        super().__init__()
        self._tp = tp
        self.sequence_parallel: bool = config.sequence_parallel
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(head.num_labels, config.hidden_size, generator=generator) / (config.hidden_size + 1) ** 0.5
        self.weight = torch.nn.Parameter(weight.to(config.params_dtype))
        bias = torch.zeros(head.num_labels, dtype=config.params_dtype)
        self.bias = torch.nn.Parameter(bias) if head.bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(
        self, hidden: torch.Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return values [tokens, batch, num_labels] float32; the signature is that of Megatron-core's output layers."""
        bias = None if self.bias is None else self.bias.float()
        values = F.linear(hidden.float(), self.weight.float(), bias)
        if self.sequence_parallel:
            # Every rank computes the same loss from all values: each takes its own tokens' gradient back.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=self._tp)
        return values, None
