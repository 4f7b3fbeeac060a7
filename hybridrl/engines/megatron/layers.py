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
        """Normalise the last dimension; statistics are float32."""
        output: torch.Tensor = _Normalize.apply(hidden, self.weight, self.eps)
        return output


class _Normalize(torch.autograd.Function):
    """y = w n with n = x / rms(x); dx = (w dy - n mean(w dy n)) / rms(x).

    On a CPU torch composes this from single operations and keeps each result; here the backward pass recomputes n.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = hidden.float()
        inverse = torch.linalg.vecdot(x, x).div_(x.size(-1)).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(hidden, weight, inverse)
        return (x * inverse).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        hidden, weight, inverse = ctx.saved_tensors
        normal = hidden.float() * inverse
        grad = grad.float()
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normal = grad * weight
        mean = torch.linalg.vecdot(grad_normal, normal).div_(normal.size(-1)).unsqueeze(-1)
        return grad_normal.addcmul_(normal, mean, value=-1.0).mul_(inverse).to(hidden.dtype), grad_weight, None


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
