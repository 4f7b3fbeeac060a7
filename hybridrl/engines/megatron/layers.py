"""Layers of the local spec, for machines without Transformer Engine: RMSNorm and causal attention in plain torch.

Transformer Engine brings its own; the maths is the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RmsNorm(torch.nn.Module):
    """RMSNorm that works under sequence parallelism: its weight asks for gradients to be summed over tp ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class CausalAttention(torch.nn.Module):
    """Causal softmax attention with grouped key and value heads.

    Rows are right-padded, so under a causal mask no real token sees padding and no padding mask is needed.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **_: Any
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [tokens, rows, heads, head_dim].
            key: [tokens, rows, kv_heads, head_dim].
            value: [tokens, rows, kv_heads, head_dim].
            attention_mask: Must be None.

        Returns:
            [tokens, rows, heads * head_dim].
        """
        assert attention_mask is None, "causal attention takes no mask"
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)
