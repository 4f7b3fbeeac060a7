"""Layers of the local spec, for machines without Transformer Engine: RMSNorm and causal attention in plain torch.

Transformer Engine brings its own; the maths is the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention

from hybridrl.engines.megatron.packing import Bucket, PackedSequences


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
    """Causal softmax attention over packed sequences, with grouped key and value heads, perhaps with a window and sinks.

    With context parallelism every rank gathers the keys and values of all ranks and computes its own queries. Value heads may
    be narrower than key heads, as in multi-head latent attention; they are padded, since torch's fused kernel wants one
    width.
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
        self.cp_group = pg_collection.cp if pg_collection and config.context_parallel_size > 1 else None
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if slides else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            assert pg_collection is not None, "attention sinks are cut over the ranks of a tensor-parallel group"
            heads = config.num_attention_heads // pg_collection.tp.size()
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype, device=device))
            # Each tp rank has sinks of its own: the norm of all gradients must count them all.
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> torch.Tensor:
        """Attend. Collective over the context-parallel ranks.

        Args:
            query: [tokens, heads, key_dim]; tokens of this rank.
            key: [tokens, kv_heads, key_dim].
            value: [tokens, kv_heads, value_dim].
            attention_mask: Must be None.

        Returns:
            [tokens, heads * value_dim].
        """
        assert attention_mask is None, "causal attention takes no mask"
        value_dim = value.size(-1)
        value = F.pad(value, (0, query.size(-1) - value_dim)) if value_dim < query.size(-1) else value
        if self.cp_group is not None:
            key, value = _GatherTokens.apply(torch.stack([key, value], dim=1), self.cp_group).unbind(1)
        parts = [self._attend(bucket, query, key, value) for bucket in packed_seq_params.buckets]
        out = torch.cat(parts) if len(parts) > 1 else parts[0]
        return out.index_select(0, packed_seq_params.results)[..., :value_dim].flatten(1)

    def _attend(self, bucket: Bucket, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return [rows * query_width, heads, key_dim]."""
        q, k, v = (
            x.index_select(0, index).unflatten(0, (bucket.num_sequences, -1)).transpose(1, 2)
            for x, index in ((query, bucket.queries), (key, bucket.keys), (value, bucket.keys))
        )
        mask = self._mask(bucket, q)
        if self.softmax_offset is not None:
            # A sink is one more key whose logit is the offset and whose value is zero.
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, bucket: Bucket, query: torch.Tensor) -> torch.Tensor | None:
        """Return the keys that are seen or, with sinks, what is added to the logits; None for the plain causal mask."""
        if self.window is None and self.softmax_offset is None:
            return bucket.mask
        rows, heads, num_queries, _ = query.shape
        sees = bucket.mask
        if sees is None:
            sees = (
                torch.ones(num_queries, num_queries, dtype=torch.bool, device=query.device)
                .tril()
                .view(1, 1, num_queries, num_queries)
            )
        if self.window is not None:
            # A query at position p sees p + 1 keys before the window is applied.
            sees = sees & (torch.arange(sees.size(-1), device=query.device) >= sees.sum(-1, keepdim=True) - self.window)
        if self.softmax_offset is None:
            return sees
        mask = torch.zeros_like(sees, dtype=query.dtype).masked_fill(~sees, -torch.inf)
        sinks = self.softmax_offset.to(query.dtype).view(1, -1, 1, 1).expand(rows, -1, num_queries, 1)
        return torch.cat([mask.expand(rows, heads, -1, -1), sinks], -1)


class _GatherTokens(torch.autograd.Function):
    """Puts the tokens of all ranks one behind the other; gradients of a token are summed on the rank that holds it."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        out = tokens.new_empty((group.size() * len(tokens), *tokens.shape[1:]))
        dist.all_gather_into_tensor(out, tokens.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_empty((len(grad) // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
