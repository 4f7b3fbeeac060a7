"""Attention of one layer, in the words of its Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.layout.shard import CanonicalTensor


@dataclass(frozen=True, slots=True)
class GqaAttention:
    """Grouped-query attention; `prefix` is e.g. ``model.layers.3.self_attn``.

    Attributes:
        has_output_bias: Whether ``o_proj`` has a bias.
        has_output_gate: Whether ``q_proj`` yields, per head, the query and then a gate of as many rows.
        has_sinks: Whether each head has a learnt sink logit.
        window: Tokens that a query sees, or None for all.
    """

    prefix: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_qk_norm: bool
    has_output_bias: bool = False
    has_output_gate: bool = False
    has_sinks: bool = False
    window: int | None = None

    @property
    def query_rows_per_head(self) -> int:
        """Rows of ``q_proj`` that belong to one head."""
        return self.head_dim * (2 if self.has_output_gate else 1)

    def tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint."""
        rows = {
            "q": self.num_heads * self.query_rows_per_head,
            "k": self.num_kv_heads * self.head_dim,
            "v": self.num_kv_heads * self.head_dim,
        }
        for part, num_rows in rows.items():
            yield CanonicalTensor(f"{self.prefix}.{part}_proj.weight", (num_rows, self.hidden_size))
        yield CanonicalTensor(f"{self.prefix}.o_proj.weight", (self.hidden_size, self.num_heads * self.head_dim))
        if self.has_qkv_bias:
            for part, num_rows in rows.items():
                yield CanonicalTensor(f"{self.prefix}.{part}_proj.bias", (num_rows,))
        if self.has_output_bias:
            yield CanonicalTensor(f"{self.prefix}.o_proj.bias", (self.hidden_size,))
        if self.has_qk_norm:
            for part in "qk":
                yield CanonicalTensor(f"{self.prefix}.{part}_norm.weight", (self.head_dim,))
        if self.has_sinks:
            yield CanonicalTensor(f"{self.prefix}.sinks", (self.num_heads,))


@dataclass(frozen=True, slots=True)
class MlaAttention:
    """Multi-head latent attention; `prefix` is e.g. ``model.layers.3.self_attn``.

    Rows of the up projections are ordered by head; a head's rows are [content, rotary] in the query and [content, value] in
    ``kv_b_proj``. Rotary dimensions rotate as interleaved pairs.

    Attributes:
        q_lora_rank: Width of the compressed query, or None when ``q_proj`` makes the query directly.
        kv_lora_rank: Width of the compressed keys and values.
        qk_nope_head_dim: Content part of a query or key head.
        qk_rope_head_dim: Rotary part, shared by all heads on the key side.
        norm_epsilon: Of the norms of the compressed query and of the compressed keys and values.
    """

    prefix: str
    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_epsilon: float

    @property
    def query_rows_per_head(self) -> int:
        """Rows of the query projection that belong to one head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_rows_per_head(self) -> int:
        """Rows of ``kv_b_proj`` that belong to one head."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def compressed_kv_rows(self) -> int:
        """Rows of ``kv_a_proj_with_mqa``."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query(self) -> str:
        """Name of the projection that yields the query heads."""
        return f"{self.prefix}.{'q_proj' if self.q_lora_rank is None else 'q_b_proj'}.weight"

    def tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint."""
        prefix, query_rows = self.prefix, self.num_heads * self.query_rows_per_head
        if self.q_lora_rank is None:
            yield CanonicalTensor(self.query, (query_rows, self.hidden_size))
        else:
            yield CanonicalTensor(f"{prefix}.q_a_proj.weight", (self.q_lora_rank, self.hidden_size))
            yield CanonicalTensor(f"{prefix}.q_a_layernorm.weight", (self.q_lora_rank,))
            yield CanonicalTensor(self.query, (query_rows, self.q_lora_rank))
        yield CanonicalTensor(f"{prefix}.kv_a_proj_with_mqa.weight", (self.compressed_kv_rows, self.hidden_size))
        yield CanonicalTensor(f"{prefix}.kv_a_layernorm.weight", (self.kv_lora_rank,))
        yield CanonicalTensor(f"{prefix}.kv_b_proj.weight", (self.num_heads * self.kv_rows_per_head, self.kv_lora_rank))
        yield CanonicalTensor(f"{prefix}.o_proj.weight", (self.hidden_size, self.num_heads * self.v_head_dim))
