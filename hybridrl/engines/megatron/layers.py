"""Layers of the local spec, for machines without Transformer Engine: RMSNorm and causal attention in plain torch.

Transformer Engine brings its own; the maths is the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention


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
    """Causal softmax attention with grouped key and value heads, perhaps with a sliding window and sinks.

    Rows are right-padded, so under a causal mask no real token sees padding and no padding mask is needed.
    """

    softmax_offset: torch.nn.Parameter | None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if slides else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            assert pg_collection is not None, "attention sinks are cut over the ranks of a tensor-parallel group"
            heads = config.num_attention_heads // pg_collection.tp.size()
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **_: Any
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [tokens, rows, heads, head_dim].
            key: [tokens, rows, kv_heads, head_dim].
            value: [tokens, rows, kv_heads, value_dim].
            attention_mask: Must be None.

        Returns:
            [tokens, rows, heads * value_dim].
        """
        assert attention_mask is None, "causal attention takes no mask"
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        mask = None
        if self.window is not None or self.softmax_offset is not None:
            mask = self._mask(q)
            if self.softmax_offset is not None:
                # A sink is one more key whose logit is the offset and whose value is zero.
                k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    def _mask(self, query: torch.Tensor) -> torch.Tensor:
        """Return what is added to the logits, [rows, heads, tokens, tokens or tokens + 1 with sinks]."""
        num_tokens = query.size(2)
        distance = torch.arange(num_tokens, device=query.device).unsqueeze(1) - torch.arange(
            num_tokens, device=query.device
        )
        is_seen = distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)
        mask = torch.zeros_like(is_seen, dtype=query.dtype).masked_fill(~is_seen, -torch.inf)
        mask = mask.expand(query.size(0), query.size(1), -1, -1)
        if self.softmax_offset is None:
            return mask
        sinks = self.softmax_offset.to(query.dtype).view(1, -1, 1, 1).expand(query.size(0), -1, num_tokens, 1)
        return torch.cat([mask, sinks], -1)
