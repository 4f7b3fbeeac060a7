"""Where a Megatron-core rank keeps the weights of a model.

The map is declared from the model and the rank's coordinates alone, so it needs no process; the engine checks it against
the names and shapes of its real modules at start.

Source: megatron-core 0.16.1 and 0.19.2, ``models/gpt/gpt_layer_specs.py`` (names), ``transformer/attention.py``
(interleaved QKV rows), ``transformer/mlp.py`` (gate and up per tensor-parallel rank), ``transformer/moe/experts.py``.

Worked example: fused QKV of 4 query heads, 2 KV groups, head size 8, tp 2. Global rows are q0 q1 k0 v0 q2 q3 k1 v1, 64
rows in all; tp rank 1 holds rows 32..63, so local rows 0..15 are q_proj rows 16..31, local rows 16..23 are k_proj rows
8..15 and local rows 24..31 are v_proj rows 8..15. With more ranks than groups the cut falls inside a group; the same
intersection of row ranges covers it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.model import DecoderLayer, GatedMlp, GqaAttention, ModelSpec, MoeMlp
from hybridrl.layout.parallel import Coordinates, ParallelSizes
from hybridrl.layout.shard import Place, ShardMap


class LayerSpec(enum.Enum):
    """Which Megatron-core layer spec built the model; decides parameter names."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """How a model is laid out over Megatron ranks.

    Attributes:
        vocab_divisor: The padded vocabulary is a multiple of this times tp.
    """

    spec: ModelSpec
    sizes: ParallelSizes
    dtype: DType
    layer_spec: LayerSpec = LayerSpec.LOCAL
    vocab_divisor: int = 1

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding over all tensor-parallel ranks."""
        multiple = self.vocab_divisor * self.sizes.tp
        return -(-self.spec.vocab_size // multiple) * multiple

    def layers_of_stage(self, pp_rank: int) -> range:
        """Return the global indices of a pipeline stage's layers.

        Raises:
            LayoutError: When the layers do not divide evenly.
        """
        num_layers = len(self.spec.layers)
        if num_layers % self.sizes.pp:
            raise LayoutError(f"{num_layers} layers do not divide into pp_size {self.sizes.pp} equal stages")
        per_stage = num_layers // self.sizes.pp
        return range(pp_rank * per_stage, (pp_rank + 1) * per_stage)


def megatron_shard_map(layout: MegatronLayout, place: Place) -> ShardMap:
    """Declare the shard map of rank `place.rank`.

    Local names are ``{chunk}.{parameter}``, where chunk counts the rank's model chunks from 0.

    Raises:
        LayoutError: When a size does not divide; names the parameter and both numbers.
    """
    return _RankMap(layout, layout.sizes.coordinates(place.rank), place).build()


class _RankMap:
    def __init__(self, layout: MegatronLayout, at: Coordinates, place: Place) -> None:
        self._layout = layout
        self._sizes = layout.sizes
        self._at = at
        self._is_te = layout.layer_spec is LayerSpec.TRANSFORMER_ENGINE
        self._out = ShardMapBuilder(place, layout.spec.tensors())

    def build(self) -> ShardMap:
        spec, is_last = self._layout.spec, self._at.pp == self._sizes.pp - 1
        if self._at.pp == 0:
            self._vocab(spec.embedding, "0.embedding.word_embeddings.weight")
        for local_index, index in enumerate(self._layout.layers_of_stage(self._at.pp)):
            self._layer(spec.layers[index], f"0.decoder.layers.{local_index}")
        if is_last:
            self._whole(spec.final_norm, "0.decoder.final_layernorm.weight")
            if not spec.is_tied or self._sizes.pp > 1:
                self._vocab(spec.embedding if spec.is_tied else spec.output, "0.output_layer.weight")
        return self._out.build()

    def _whole(self, tensor: str, local: str) -> None:
        self._out.whole(tensor, local, self._layout.dtype)

    def _vocab(self, tensor: str, local: str) -> None:
        spec = self._layout.spec
        rows = self._layout.padded_vocab_size // self._sizes.tp
        start, stop = (min(spec.vocab_size, rows * t) for t in (self._at.tp, self._at.tp + 1))
        padding = (rows - (stop - start)) * spec.hidden_size
        self._out.local(local, (rows, spec.hidden_size), self._layout.dtype, num_padding=padding)
        if stop > start:
            self._out.place_rows(tensor, range(start, stop), local, 0)

    def _layer(self, layer: DecoderLayer, local: str) -> None:
        attention, is_moe = layer.attention, isinstance(layer.mlp, MoeMlp)
        fused_qkv_norm, fused_fc1_norm = (
            "self_attention.linear_qkv.layer_norm_weight",
            "mlp.linear_fc1.layer_norm_weight",
        )
        self._whole(layer.input_norm, f"{local}.{fused_qkv_norm if self._is_te else 'input_layernorm.weight'}")
        self._attention(attention, f"{local}.self_attention")
        is_fused = self._is_te and not is_moe
        self._whole(layer.post_attention_norm, f"{local}.{fused_fc1_norm if is_fused else 'pre_mlp_layernorm.weight'}")
        if isinstance(layer.mlp, MoeMlp):
            self._moe(layer.mlp, f"{local}.mlp")
        else:
            self._gated(
                layer.mlp,
                f"{local}.mlp.linear_fc1.weight",
                f"{local}.mlp.linear_fc2.weight",
                self._sizes.tp,
                self._at.tp,
            )

    def _attention(self, attention: GqaAttention, local: str) -> None:
        rows = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        per_rank = self._divide(rows, self._sizes.tp, f"{local}.linear_qkv rows", "tp_size")
        mine = range(self._at.tp * per_rank, (self._at.tp + 1) * per_rank)
        for suffix in ("weight", "bias") if attention.has_qkv_bias else ("weight",):
            name = f"{local}.linear_qkv.{suffix}"
            tail = (attention.hidden_size,) if suffix == "weight" else ()
            self._out.local(name, (per_rank, *tail), self._layout.dtype)
            for part, first_row, block in qkv_blocks(attention):
                cut = range(max(block.start, mine.start), min(block.stop, mine.stop))
                if cut:
                    canonical = range(first_row + cut.start - block.start, first_row + cut.stop - block.start)
                    self._out.place_rows(
                        f"{attention.prefix}.{part}_proj.{suffix}", canonical, name, cut.start - mine.start
                    )
        width = attention.num_heads * attention.head_dim
        self._columns(
            f"{attention.prefix}.o_proj.weight", f"{local}.linear_proj.weight", width, self._sizes.tp, self._at.tp
        )
        if attention.has_qk_norm:
            for part in "qk":
                self._whole(f"{attention.prefix}.{part}_norm.weight", f"{local}.{part}_layernorm.weight")

    def _columns(self, tensor: str, local: str, width: int, degree: int, index: int) -> None:
        hidden = self._layout.spec.hidden_size
        mine = self._divide(width, degree, local, "tensor-parallel degree")
        self._out.local(local, (hidden, mine), self._layout.dtype)
        self._out.place_box(tensor, Box((0, index * mine), (hidden, (index + 1) * mine)), local, (0, 0))

    def _gated(self, mlp: GatedMlp, fc1: str, fc2: str, degree: int, index: int) -> None:
        mine = self._divide(mlp.intermediate_size, degree, fc1, "tensor-parallel degree")
        rows = range(index * mine, (index + 1) * mine)
        self._out.local(fc1, (2 * mine, mlp.hidden_size), self._layout.dtype)
        self._out.place_rows(f"{mlp.prefix}.gate_proj.weight", rows, fc1, 0)
        self._out.place_rows(f"{mlp.prefix}.up_proj.weight", rows, fc1, mine)
        self._columns(f"{mlp.prefix}.down_proj.weight", fc2, mlp.intermediate_size, degree, index)

    def _moe(self, moe: MoeMlp, local: str) -> None:
        self._whole(moe.router, f"{local}.router.weight")
        num_local = self._divide(moe.num_experts, self._sizes.ep, f"{local}.experts", "ep_size")
        for k in range(num_local):
            prefix = f"{moe.prefix}.experts.{self._at.ep * num_local + k}"
            expert = GatedMlp(prefix, moe.hidden_size, moe.intermediate_size)
            fc1, fc2 = (
                f"{local}.experts.{fc}.weight{k}" if self._is_te else f"{local}.experts.local_experts.{k}.{fc}.weight"
                for fc in ("linear_fc1", "linear_fc2")
            )
            self._gated(expert, fc1, fc2, self._sizes.etp, self._at.etp)

    @staticmethod
    def _divide(total: int, parts: int, what: str, by: str) -> int:
        if total % parts:
            raise LayoutError(f"{what}: {total} does not divide by {by} {parts}; choose a degree that divides it")
        return total // parts


def qkv_blocks(attention: GqaAttention) -> Iterator[tuple[str, int, range]]:
    """Yield (part, first canonical row, global fused rows) of the interleaved QKV weight, group by group."""
    dim = attention.head_dim
    queries = attention.num_heads // attention.num_kv_heads
    row = 0
    for group in range(attention.num_kv_heads):
        for part, heads, first in (("q", queries, group * queries), ("k", 1, group), ("v", 1, group)):
            yield part, first * dim, range(row, row + heads * dim)
            row += heads * dim
