"""Feed-forward weights of a vLLM worker.

Worked example: experts of intermediate size 48 on 2 workers without expert parallelism. Worker 1 holds of every expert the rows
24..47 of gate, then those of up: ``w13_weight`` is [experts, 48, hidden] and ``w2_weight`` [experts, hidden, 24]. With expert
parallelism it holds the second half of the experts, each whole.

Source: vllm 0.32 ``model_executor/layers/fused_moe/routed_experts.py`` (w13, w2), ``models/gpt_oss.py`` (GPT-OSS keeps gate
and up rows in alternation, and counts the bias of down on one worker only).
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.layout.box import Box, DType
from hybridrl.layout.mlp import ExpertStorage, GatedMlp, MoeMlp
from hybridrl.layout.vllm.placement import physical_experts, placed_experts
from hybridrl.layout.vllm.slices import WorkerSlices


def place_gated(out: WorkerSlices, mlp: GatedMlp, *, is_whole: bool = False) -> None:
    """Declare a dense SwiGLU MLP."""
    size = mlp.intermediate_size
    mine = range(size) if is_whole else out.share(size, f"{mlp.prefix} intermediate size")
    out.stacked_rows(out.layout.local_name(f"{mlp.prefix}.gate_up_proj.weight"), [(mlp.gate, mine), (mlp.up, mine)])
    out.columns(mlp.down, mine)


def place_experts(out: WorkerSlices, moe: MoeMlp, layer: int) -> None:
    """Declare router, shared experts and routed experts of layer `layer`."""
    if moe.correction_bias:
        out.whole(moe.correction_bias, DType.FLOAT32)
    if moe.router_bias:
        out.whole(moe.router_bias)
    out.whole(moe.router, DType.FLOAT32 if moe.is_router_float32 else None)
    if moe.shared_gate:
        out.whole(moe.shared_gate)
    if moe.shared:
        place_gated(out, moe.shared, is_whole=out.layout.has_sequence_parallel_moe)
    size = moe.intermediate_size
    if out.layout.has_expert_parallel:
        experts, mine = _experts(out, moe, layer), range(size)
    else:
        experts, mine = range(moe.num_experts), out.expert_share(size, f"{moe.prefix} expert size")
    local = out.layout.local_name(f"{moe.prefix}.experts.routed_experts")
    if moe.storage is ExpertStorage.STACKED:
        _place_stacked(out, moe, local, experts, mine)
    else:
        _place_routed(out, moe, local, experts, mine)


def _experts(out: WorkerSlices, moe: MoeMlp, layer: int) -> Sequence[int]:
    slots = out.layout.physical_to_logical.get(layer)
    if slots is not None:
        return physical_experts(slots, moe.num_experts, out.expert_size, out.expert_rank, f"{moe.prefix}.experts")
    return placed_experts(out.layout.placement, moe.num_experts, out.expert_size, out.expert_rank)


def _place_routed(out: WorkerSlices, moe: MoeMlp, local: str, experts: Sequence[int], mine: range) -> None:
    hidden, rows, dtype = moe.hidden_size, len(mine), out.layout.dtype
    w13, w2 = f"{local}.w13_weight", f"{local}.w2_weight"
    out.out.local(w13, (len(experts), 2 * rows, hidden), dtype)
    out.out.local(w2, (len(experts), hidden, rows), dtype)
    for slot, index in enumerate(experts):
        expert, first = moe.expert(index), slot * 2 * rows * hidden
        box = Box((mine.start, 0), (mine.stop, hidden))
        out.out.place_view(expert.gate, box, w13, first, (hidden, 1))
        out.out.place_view(expert.up, box, w13, first + rows * hidden, (hidden, 1))
        box = Box((0, mine.start), (hidden, mine.stop))
        out.out.place_view(expert.down, box, w2, slot * hidden * rows, (rows, 1))


def _place_stacked(out: WorkerSlices, moe: MoeMlp, local: str, experts: Sequence[int], mine: range) -> None:
    hidden, rows, dtype = moe.hidden_size, len(mine), out.layout.dtype
    has_down_bias = out.layout.has_expert_parallel or out.expert_rank == 0
    shapes = {
        "w13_weight": (2 * rows, hidden),
        "w13_bias": (2 * rows,),
        "w2_weight": (hidden, rows),
        "w2_bias": (hidden,),
    }
    for name, shape in shapes.items():
        num_padding = 0 if name != "w2_bias" or has_down_bias else len(experts) * hidden
        out.out.local(f"{local}.{name}", (len(experts), *shape), dtype, num_padding=num_padding)
    slot = 0
    for run in _runs(experts):
        e, stop = run.start, run.stop
        box = Box((e, 0, mine.start, 0), (stop, hidden, mine.stop, 2))
        w13, w2, bias = (2 * rows * hidden, 1, 2 * hidden, hidden), (rows * hidden, 1, rows), (2 * rows, 2, 1)
        out.out.place_view(moe.stacked("gate_up_proj"), box, f"{local}.w13_weight", slot * w13[0], w13)
        box = Box((e, mine.start, 0), (stop, mine.stop, hidden))
        out.out.place_view(moe.stacked("down_proj"), box, f"{local}.w2_weight", slot * w2[0], w2)
        box = Box((e, mine.start, 0), (stop, mine.stop, 2))
        out.out.place_view(moe.stacked("gate_up_proj_bias"), box, f"{local}.w13_bias", slot * bias[0], bias)
        if has_down_bias:
            box = Box((e, 0), (stop, hidden))
            out.out.place_view(moe.stacked("down_proj_bias"), box, f"{local}.w2_bias", slot * hidden, (hidden, 1))
        slot += len(run)


def _runs(experts: Sequence[int]) -> list[range]:
    """Cut experts into runs of consecutive ones. Example: 0 1 2 5 6 -> 0..2, 5..6."""
    runs: list[range] = []
    for expert in experts:
        if runs and runs[-1].stop == expert:
            runs[-1] = range(runs[-1].start, expert + 1)
        else:
            runs.append(range(expert, expert + 1))
    return runs
