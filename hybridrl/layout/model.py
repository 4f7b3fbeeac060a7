"""What a model is made of, in the words of its Hugging Face checkpoint.

A family file (``families/*.py``) turns an HF ``config.json`` into a :class:`ModelSpec`; the layouts of Megatron
(``megatron/``) and vLLM (``vllm/``), and the engines, read only the spec. So a new family is one declaration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from hybridrl.layout.attention import GqaAttention, MlaAttention
from hybridrl.layout.mlp import GatedMlp, MoeMlp
from hybridrl.layout.rope import Rope
from hybridrl.layout.shard import CanonicalTensor

__all__ = ["DecoderLayer", "GatedMlp", "GqaAttention", "MlaAttention", "ModelSpec", "MoeMlp", "MtpLayer", "ValueHead"]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One transformer layer; `index` is global and counts from 0."""

    index: int
    prefix: str
    input_norm: str
    attention: GqaAttention | MlaAttention
    post_attention_norm: str
    mlp: GatedMlp | MoeMlp

    def tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint."""
        norm_shape = (self.attention.hidden_size,)
        yield CanonicalTensor(self.input_norm, norm_shape)
        yield from self.attention.tensors()
        yield CanonicalTensor(self.post_attention_norm, norm_shape)
        yield from self.mlp.tensors()


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """A multi-token-prediction layer, which predicts one token further ahead.

    It shares the model's embedding and output. Checkpoints repeat those under the layer's own prefix; the copies are not
    canonical tensors.

    Attributes:
        embedding_norm: Norm of the next token's embedding.
        hidden_norm: Norm of the previous depth's hidden states.
        projection: Weight [hidden, 2 * hidden] on [embedding, hidden states].
    """

    layer: DecoderLayer
    embedding_norm: str
    hidden_norm: str
    projection: str
    final_norm: str

    @classmethod
    def of(cls, layer: DecoderLayer) -> MtpLayer:
        """Name the parts around `layer` as DeepSeek-V3 does."""
        p = layer.prefix
        return cls(
            layer, f"{p}.enorm.weight", f"{p}.hnorm.weight", f"{p}.eh_proj.weight", f"{p}.shared_head.norm.weight"
        )

    def tensors(self) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint."""
        hidden = self.layer.attention.hidden_size
        yield CanonicalTensor(self.embedding_norm, (hidden,))
        yield CanonicalTensor(self.hidden_norm, (hidden,))
        yield CanonicalTensor(self.projection, (hidden, 2 * hidden))
        yield from self.layer.tensors()
        yield CanonicalTensor(self.final_norm, (hidden,))


@dataclass(frozen=True, slots=True)
class ValueHead:
    """The linear output layer of a critic or reward model.

    Attributes:
        weight: [num_labels, hidden].
        bias: [num_labels]; None without one.
    """

    weight: str
    bias: str | None
    num_labels: int

    def tensors(self, hidden_size: int) -> Iterator[CanonicalTensor]:
        """Yield the tensors of the checkpoint."""
        yield CanonicalTensor(self.weight, (self.num_labels, hidden_size))
        if self.bias:
            yield CanonicalTensor(self.bias, (self.num_labels,))


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model.

    Attributes:
        family: Name of the family that declared it.
        vocab_size: Without padding.
        mtp_layers: Empty unless they were asked for.
        value_head: Takes the place of the vocabulary projection; `output` and `is_tied` then mean nothing.
    """

    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    rope: Rope
    norm_epsilon: float
    is_tied: bool
    embedding: str
    final_norm: str
    output: str
    layers: tuple[DecoderLayer, ...]
    mtp_layers: tuple[MtpLayer, ...] = ()
    value_head: ValueHead | None = None

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Indices of the decoder layers with experts."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mlp, MoeMlp))

    def tensors(self) -> dict[str, CanonicalTensor]:
        """Return every tensor of the checkpoint by name, in model order."""
        return dict(_index_tensors(self))


@lru_cache(maxsize=4)
def _index_tensors(spec: ModelSpec) -> dict[str, CanonicalTensor]:
    """Index a model's tensors; kept, since planning asks once per rank and a large mixture has tens of thousands."""
    return {tensor.name: tensor for tensor in _model_tensors(spec)}


def _model_tensors(spec: ModelSpec) -> Iterator[CanonicalTensor]:
    yield CanonicalTensor(spec.embedding, (spec.vocab_size, spec.hidden_size))
    for layer in spec.layers:
        yield from layer.tensors()
    yield CanonicalTensor(spec.final_norm, (spec.hidden_size,))
    if spec.value_head:
        yield from spec.value_head.tensors(spec.hidden_size)
    elif not spec.is_tied:
        yield CanonicalTensor(spec.output, (spec.vocab_size, spec.hidden_size))
    for mtp in spec.mtp_layers:
        yield from mtp.tensors()
