"""What a model is made of, in the words of its Hugging Face checkpoint.

A family file (``families/*.py``) turns an HF ``config.json`` into a :class:`ModelSpec`; the layouts of Megatron
(``megatron.py``) and vLLM (``vllm.py``), and the engines, read only the spec. So a new family is one declaration.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.layout.shard import CanonicalTensor


@dataclass(frozen=True, slots=True)
class GqaAttention:
    """Grouped-query attention of one layer; `prefix` is e.g. ``model.layers.3.self_attn``."""

    prefix: str
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qkv_bias: bool
    has_qk_norm: bool


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """A dense SwiGLU MLP; `prefix` is e.g. ``model.layers.3.mlp``."""

    prefix: str
    hidden_size: int
    intermediate_size: int


@dataclass(frozen=True, slots=True)
class MoeMlp:
    """A routed mixture of SwiGLU experts.

    Attributes:
        prefix: e.g. ``model.layers.3.mlp``; experts are ``{prefix}.experts.{e}.{gate,up,down}_proj.weight``.
        router: Canonical name of the router weight, e.g. ``model.layers.3.mlp.gate.weight``.
        intermediate_size: Per expert.
        num_experts_per_token: Top-k.
        is_topk_normalized: Whether the chosen probabilities are rescaled to sum to one.
    """

    prefix: str
    router: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    num_experts_per_token: int
    is_topk_normalized: bool


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One transformer layer; `index` is global and counts from 0."""

    index: int
    prefix: str
    input_norm: str
    attention: GqaAttention
    post_attention_norm: str
    mlp: GatedMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model.

    Attributes:
        family: Name of the family that declared it.
        vocab_size: Without padding.
        rope_theta: Base of the rotary embedding.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    norm_epsilon: float
    is_tied: bool
    embedding: str
    final_norm: str
    output: str
    layers: tuple[DecoderLayer, ...]

    def tensors(self) -> dict[str, CanonicalTensor]:
        """Return every tensor of the checkpoint by name, in model order."""
        shapes: dict[str, tuple[int, ...]] = {self.embedding: (self.vocab_size, self.hidden_size)}
        for layer in self.layers:
            shapes[layer.input_norm] = (self.hidden_size,)
            shapes |= _attention_shapes(layer.attention)
            shapes[layer.post_attention_norm] = (self.hidden_size,)
            shapes |= _mlp_shapes(layer.mlp)
        shapes[self.final_norm] = (self.hidden_size,)
        if not self.is_tied:
            shapes[self.output] = (self.vocab_size, self.hidden_size)
        return {name: CanonicalTensor(name, shape) for name, shape in shapes.items()}


def _attention_shapes(attention: GqaAttention) -> dict[str, tuple[int, ...]]:
    query, kv, hidden = (
        attention.num_heads * attention.head_dim,
        attention.num_kv_heads * attention.head_dim,
        attention.hidden_size,
    )
    prefix = attention.prefix
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.q_proj.weight": (query, hidden),
        f"{prefix}.k_proj.weight": (kv, hidden),
        f"{prefix}.v_proj.weight": (kv, hidden),
        f"{prefix}.o_proj.weight": (hidden, query),
    }
    if attention.has_qkv_bias:
        shapes |= {f"{prefix}.{part}_proj.bias": (query if part == "q" else kv,) for part in "qkv"}
    if attention.has_qk_norm:
        shapes |= {f"{prefix}.{part}_norm.weight": (attention.head_dim,) for part in "qk"}
    return shapes


def _mlp_shapes(mlp: GatedMlp | MoeMlp) -> dict[str, tuple[int, ...]]:
    if isinstance(mlp, GatedMlp):
        return gated_shapes(mlp.prefix, mlp.hidden_size, mlp.intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {mlp.router: (mlp.num_experts, mlp.hidden_size)}
    for expert in range(mlp.num_experts):
        shapes |= gated_shapes(f"{mlp.prefix}.experts.{expert}", mlp.hidden_size, mlp.intermediate_size)
    return shapes


def gated_shapes(prefix: str, hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a gate/up/down triple."""
    return {
        f"{prefix}.gate_proj.weight": (intermediate_size, hidden_size),
        f"{prefix}.up_proj.weight": (intermediate_size, hidden_size),
        f"{prefix}.down_proj.weight": (hidden_size, intermediate_size),
    }
