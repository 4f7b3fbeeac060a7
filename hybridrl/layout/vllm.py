"""Where a vLLM worker keeps the weights of a model, declared without a process.

Runs use the map that ``engines/vllm/learn.py`` learns from vLLM's own loaders; this one serves planning before anything
starts, and a test holds the two equal. Names and shapes are those of the load format, before vLLM's post-processing.

Source: vllm 0.32 ``model_executor/layers/linear.py`` (QKV and merged columns), ``layers/fused_moe`` (w13 = [gate; up] per
expert), ``layers/vocab_parallel_embedding.py`` (vocabulary padded to 64, then cut).
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.errors import LayoutError
from hybridrl.layout.box import Box, DType
from hybridrl.layout.builder import ShardMapBuilder
from hybridrl.layout.model import DecoderLayer, GatedMlp, GqaAttention, ModelSpec, MoeMlp
from hybridrl.layout.shard import Place, ShardMap

_VOCAB_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class VllmLayout:
    """How a replica lays a model out.

    Attributes:
        tp: Tensor-parallel degree of the replica.
        has_expert_parallel: Whether workers hold whole experts instead of a cut of each.
    """

    spec: ModelSpec
    tp: int
    dtype: DType
    has_expert_parallel: bool = False


def vllm_shard_map(layout: VllmLayout, tp_rank: int, place: Place) -> ShardMap:
    """Declare the shard map of one worker of a replica.

    Raises:
        LayoutError: When a size does not divide by the tensor-parallel degree; names the parameter.
    """
    return _WorkerMap(layout, tp_rank, place).build()


class _WorkerMap:
    def __init__(self, layout: VllmLayout, rank: int, place: Place) -> None:
        self._layout, self._rank, self._tp = layout, rank, layout.tp
        self._out = ShardMapBuilder(place, layout.spec.tensors())

    def build(self) -> ShardMap:
        spec = self._layout.spec
        self._vocab(spec.embedding)
        for layer in spec.layers:
            self._layer(layer)
        self._whole(spec.final_norm)
        if not spec.is_tied:
            self._vocab(spec.output)
        return self._out.build()

    def _whole(self, tensor: str) -> None:
        self._out.whole(tensor, tensor, self._layout.dtype)

    def _share(self, total: int, what: str) -> range:
        if total % self._tp:
            raise LayoutError(
                f"{what}: {total} does not divide by rollout tp_size {self._tp}; choose a degree that divides it"
            )
        mine = total // self._tp
        return range(self._rank * mine, (self._rank + 1) * mine)

    def _vocab(self, tensor: str) -> None:
        spec = self._layout.spec
        rows = self._share(-(-spec.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE, tensor)
        real = range(min(rows.start, spec.vocab_size), min(rows.stop, spec.vocab_size))
        padding = (len(rows) - len(real)) * spec.hidden_size
        self._out.local(tensor, (len(rows), spec.hidden_size), self._layout.dtype, num_padding=padding)
        if real:
            self._out.place_rows(tensor, real, tensor, 0)

    def _layer(self, layer: DecoderLayer) -> None:
        self._attention(layer.attention)
        if isinstance(layer.mlp, MoeMlp):
            self._moe(layer.mlp)
        else:
            self._gated(layer.mlp)
        self._whole(layer.input_norm)
        self._whole(layer.post_attention_norm)

    def _attention(self, attention: GqaAttention) -> None:
        dim = attention.head_dim
        heads = self._share(attention.num_heads, f"{attention.prefix} query heads")
        kv_heads = self._kv_heads(attention)
        for suffix in ("weight", "bias") if attention.has_qkv_bias else ("weight",):
            name = f"{attention.prefix}.qkv_proj.{suffix}"
            tail = (attention.hidden_size,) if suffix == "weight" else ()
            self._out.local(name, ((len(heads) + 2 * len(kv_heads)) * dim, *tail), self._layout.dtype)
            row = 0
            for part, mine in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
                rows = range(mine.start * dim, mine.stop * dim)
                self._out.place_rows(f"{attention.prefix}.{part}_proj.{suffix}", rows, name, row)
                row += len(rows)
        columns = range(heads.start * dim, heads.stop * dim)
        self._columns(f"{attention.prefix}.o_proj.weight", attention.hidden_size, columns)
        if attention.has_qk_norm:
            for part in "qk":
                self._whole(f"{attention.prefix}.{part}_norm.weight")

    def _kv_heads(self, attention: GqaAttention) -> range:
        if self._tp > attention.num_kv_heads and self._tp % attention.num_kv_heads == 0:
            head = self._rank * attention.num_kv_heads // self._tp
            return range(head, head + 1)
        return self._share(attention.num_kv_heads, f"{attention.prefix} KV heads")

    def _columns(self, tensor: str, num_rows: int, columns: range) -> None:
        self._out.local(tensor, (num_rows, len(columns)), self._layout.dtype)
        self._out.place_box(tensor, Box((0, columns.start), (num_rows, columns.stop)), tensor, (0, 0))

    def _gated(self, mlp: GatedMlp) -> None:
        mine = self._share(mlp.intermediate_size, f"{mlp.prefix} intermediate size")
        fused = f"{mlp.prefix}.gate_up_proj.weight"
        self._out.local(fused, (2 * len(mine), mlp.hidden_size), self._layout.dtype)
        self._out.place_rows(f"{mlp.prefix}.gate_proj.weight", mine, fused, 0)
        self._out.place_rows(f"{mlp.prefix}.up_proj.weight", mine, fused, len(mine))
        self._columns(f"{mlp.prefix}.down_proj.weight", mlp.hidden_size, mine)

    def _moe(self, moe: MoeMlp) -> None:
        self._whole(moe.router)
        is_ep, hidden = self._layout.has_expert_parallel, moe.hidden_size
        mine = (
            range(moe.intermediate_size) if is_ep else self._share(moe.intermediate_size, f"{moe.prefix} expert size")
        )
        experts = linear_experts(moe.num_experts, self._tp, self._rank) if is_ep else range(moe.num_experts)
        w13, w2 = (f"{moe.prefix}.experts.routed_experts.{part}_weight" for part in ("w13", "w2"))
        self._out.local(w13, (len(experts) * 2 * len(mine), hidden), self._layout.dtype)
        self._out.local(w2, (len(experts) * hidden, len(mine)), self._layout.dtype)
        for slot, expert in enumerate(experts):
            prefix = f"{moe.prefix}.experts.{expert}"
            self._out.place_rows(f"{prefix}.gate_proj.weight", mine, w13, slot * 2 * len(mine))
            self._out.place_rows(f"{prefix}.up_proj.weight", mine, w13, (slot * 2 + 1) * len(mine))
            self._out.place_box(
                f"{prefix}.down_proj.weight", Box((0, mine.start), (hidden, mine.stop)), w2, (slot * hidden, 0)
            )


def linear_experts(num_experts: int, ep_size: int, ep_rank: int) -> range:
    """Return the experts of a worker under linear placement; the first ranks take the remainder.

    Example: 10 experts on 4 ranks -> 3, 3, 2, 2.
    """
    base, remainder = divmod(num_experts, ep_size)
    start = ep_rank * base + min(ep_rank, remainder)
    return range(start, start + base + (ep_rank < remainder))
