"""Mixture-of-experts weights of a Megatron rank.

Expert e of E lives on expert-parallel rank e // (E / ep) as its local expert e % (E / ep), and is cut by etp. Router and
shared experts are dense: the router is whole on every rank, shared experts are cut by tp.

Worked example: 8 experts, ep 2, etp 2, intermediate size 48. The rank with ep 1 and etp 1 holds experts 4..7, of each the
gate and up rows 24..47 in one tensor [gate; up] of 48 rows, and the columns 24..47 of down.

Source: megatron-core 0.16.1 and 0.19.2, ``transformer/moe/experts.py``, ``router.py``, ``shared_experts.py`` and
``extensions/transformer_engine.py`` (grouped linear).
"""

from __future__ import annotations

from hybridrl.layout.box import Box, DType
from hybridrl.layout.megatron.layout import ExpertContainer
from hybridrl.layout.megatron.slices import RankSlices, glu_runs
from hybridrl.layout.mlp import ExpertStorage, MoeMlp


def place_experts(out: RankSlices, moe: MoeMlp, local: str) -> None:
    """Declare router, routed experts and shared experts; `local` is e.g. ``0.decoder.layers.3.mlp``."""
    _place_router(out, moe, f"{local}.router")
    if moe.shared:
        shared = f"{local}.shared_experts"
        out.gated(moe.shared, f"{shared}.linear_fc1.weight", f"{shared}.linear_fc2.weight", out.tp, "tp_size")
    if moe.shared_gate:
        out.whole(moe.shared_gate, f"{local}.shared_experts.gate_weight")
    experts = out.ep.of(moe.num_experts, f"{local}.experts", "ep_size")
    mine = out.etp.of(moe.intermediate_size, f"{local}.experts rows", "etp_size")
    for slot, expert in enumerate(experts):
        fc1, fc2 = (_weight(out, moe, local, layer, slot, len(experts), len(mine)) for layer in ("fc1", "fc2"))
        if moe.storage is ExpertStorage.STACKED:
            _place_stacked(out, moe, expert, mine, fc1, fc2)
            _place_stacked_bias(out, moe, expert, mine, _bias(out, local, "fc1", slot), _bias(out, local, "fc2", slot))
        else:
            mlp = moe.expert(expert)
            out.place_gate_up(mlp, mine, *fc1, out.layout.glu_interleave_size)
            out.place_columns(mlp.down, mine, *fc2)


def _place_router(out: RankSlices, moe: MoeMlp, local: str) -> None:
    out.whole(moe.router, f"{local}.weight", out.layout.router_dtype)
    if moe.router_bias:
        out.whole(moe.router_bias, f"{local}.bias", out.layout.router_dtype)
    if moe.correction_bias:
        out.whole(moe.correction_bias, f"{local}.expert_bias", DType.FLOAT32)


def _weight(
    out: RankSlices, moe: MoeMlp, local: str, layer: str, slot: int, num_slots: int, num_rows: int
) -> tuple[str, int]:
    """Declare the tensor that holds a local expert's weight; return it and the element where the expert begins."""
    shape = (2 * num_rows, moe.hidden_size) if layer == "fc1" else (moe.hidden_size, num_rows)
    container = out.layout.expert_container
    if container is ExpertContainer.SINGLE_GROUPED:
        name = f"{local}.experts.linear_{layer}.weight"
        if slot == 0:
            out.out.local(name, (num_slots, *shape), out.layout.dtype)
        return name, slot * shape[0] * shape[1]
    name = _parameter(out, local, layer, slot, "weight")
    out.out.local(name, shape, out.layout.dtype)
    return name, 0


def _bias(out: RankSlices, local: str, layer: str, slot: int) -> str:
    return _parameter(out, local, layer, slot, "bias")


def _parameter(out: RankSlices, local: str, layer: str, slot: int, kind: str) -> str:
    if out.layout.expert_container is ExpertContainer.SEQUENTIAL:
        return f"{local}.experts.local_experts.{slot}.linear_{layer}.{kind}"
    return f"{local}.experts.linear_{layer}.{kind}{slot}"


def _place_stacked(
    out: RankSlices, moe: MoeMlp, expert: int, mine: range, fc1: tuple[str, int], fc2: tuple[str, int]
) -> None:
    """Put one expert of stacked tensors: both are transposed, and gate and up columns leave their alternation."""
    hidden = moe.hidden_size
    local, offset = fc1
    for run in glu_runs(mine, out.layout.glu_interleave_size, local):
        for which, row in enumerate((run.gate_row, run.up_row)):
            box = Box((expert, 0, run.rows.start, which), (expert + 1, hidden, run.rows.stop, which + 1))
            strides = (0, 1, run.step * hidden, 0)
            out.out.place_view(moe.stacked("gate_up_proj"), box, local, offset + row * hidden, strides)
    local, offset = fc2
    box = Box((expert, mine.start, 0), (expert + 1, mine.stop, hidden))
    out.out.place_view(moe.stacked("down_proj"), box, local, offset, (0, 1, len(mine)))


def _place_stacked_bias(out: RankSlices, moe: MoeMlp, expert: int, mine: range, fc1: str, fc2: str) -> None:
    out.out.local(fc1, (2 * len(mine),), out.layout.dtype)
    for run in glu_runs(mine, out.layout.glu_interleave_size, fc1):
        for which, row in enumerate((run.gate_row, run.up_row)):
            box = Box((expert, run.rows.start, which), (expert + 1, run.rows.stop, which + 1))
            out.out.place_view(moe.stacked("gate_up_proj_bias"), box, fc1, row, (0, run.step, 0))
    out.out.local(fc2, (moe.hidden_size,), out.layout.dtype)
    box = Box((expert, 0), (expert + 1, moe.hidden_size))
    out.out.place_view(moe.stacked("down_proj_bias"), box, fc2, 0, (0, 1))
