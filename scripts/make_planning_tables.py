"""Write the tables of the shipped recipes into ``docs/planning.md``, from their plans.

    python scripts/make_planning_tables.py

Everything after the line ``## The recipes`` is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hybridrl.planning.memory import DeviceMemory, Phase
from hybridrl.planning.pools import run_pools
from hybridrl.planning.run_plan import RunPlan, cluster_of, plan_run
from hybridrl.planning.timing import Seconds
from hybridrl.planning.units import binary, decimal
from hybridrl.preflight.check import load_planned

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planning.md"
HEADING = "## The recipes"
RECIPES = ("qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


def main() -> None:
    plans = []
    for name in RECIPES:
        checked = load_planned(ROOT / "configs" / "recipes" / f"{name}.yaml", [])
        plans.append(plan_run(checked.config, checked.spec, cluster_of(checked.config)))
    PAGE.write_text(with_recipes(PAGE.read_text(encoding="utf-8"), plans), encoding="utf-8")
    print(PAGE)


def with_recipes(page: str, plans: Sequence[RunPlan]) -> str:
    """Return the page with the tables of some plans."""
    before = page.partition(f"\n{HEADING}\n")[0].rstrip()
    return f"{before}\n\n{HEADING}\n\n" + "\n".join(_recipes(plans)) + "\n"


def _recipes(plans: Sequence[RunPlan]) -> Iterator[str]:
    yield "Written by `scripts/make_planning_tables.py` from `configs/recipes`. Memory is that of the fullest device."
    yield from ("", "| | " + " | ".join(plan.config.name for plan in plans) + " |", "| --- |" + " --- |" * len(plans))
    columns = [dict(_facts(plan)) for plan in plans]
    for label in columns[0]:
        yield f"| {label} | " + " | ".join(column.get(label, "-") for column in columns) + " |"
    for plan in plans:
        yield from ("", f"### Stages of {plan.config.name}", "")
        yield "| stage | layers | dense | experts | weights | gradients | optimizer | activations in flight | logits |"
        yield "| --- |" + " --- |" * 8
        yield from _stages(plan)


def _facts(plan: RunPlan) -> Iterator[tuple[str, str]]:
    sizes, work, timing, price = plan.config.actor.parallel, plan.work, plan.timing, plan.sync.price
    yield (
        "devices",
        f"{plan.num_devices}: " + " + ".join(f"{pool.num_devices} {pool.name}" for pool in run_pools(plan.config)),
    )
    degrees = f"tp {sizes.tp_size}, pp {sizes.pp_size}, ep {sizes.ep_size}, dp {sizes.dp_size}"
    yield "actor", degrees
    yield "rollout", f"{plan.config.rollout.num_replicas} x tp {plan.config.rollout.tp_size}"
    yield "step", f"{work.num_samples:,} samples, {work.tokens_per_step:,} tokens"
    yield "micro-batches per rank", f"{work.num_micro_batches} of at most {work.micro_batch_tokens:,} tokens"
    for phase in Phase:
        yield f"training rank, {phase.value}", _fullest(plan, phase, is_training=True)
    for phase in (Phase.ROLLOUT, Phase.WEIGHT_SYNC):
        yield f"rollout worker, {phase.value}", _fullest(plan, phase, is_training=False)
    replica = plan.memory.replica
    yield "weights in a rollout worker", binary(replica.weight_bytes)
    yield "KV cache", f"{replica.kv_tokens:,} tokens, {replica.running_samples} samples at once"
    yield (
        "checkpoint, with optimizer",
        f"{decimal(plan.memory.export_bytes)}, {decimal(plan.memory.training_state_bytes)}",
    )
    yield "weight sync, on the wire", f"{decimal(price.wire_bytes)} = lower bound"
    yield "weight sync", f"{_range(timing.weight_sync)} s"
    yield "GFLOP per token", f"{timing.training_flops_per_token / 1e9:,.2f} at {work.sample_tokens} tokens"
    yield "MFU, bubble", f"{timing.mfu.low:.0%} - {timing.mfu.high:.0%}, {timing.bubble:.1%}"
    yield (
        "decoding step",
        f"{1e3 * timing.decode.seconds[1]:.1f} - {1e3 * timing.decode.seconds[0]:.1f} ms, {timing.decode.bound}",
    )
    phases = {"rollout": timing.rollout, **timing.passes, "step at lag 0": timing.lag_0}
    for label, seconds in phases.items():
        yield f"{label}, s", _range(seconds)
    if timing.lag_1 is not None:
        yield "step at lag 1, s", f"{_range(timing.lag_1)}, the faster side idle {timing.idle_share:.0%}"


def _fullest(plan: RunPlan, phase: Phase, *, is_training: bool) -> str:
    devices = [d for d in plan.memory.devices if d.phase is phase and (d.pp_rank is not None) is is_training]
    worst: DeviceMemory = max(devices, key=lambda device: device.total)
    where = f" (stage {worst.pp_rank})" if is_training else ""
    return f"{binary(worst.total)}{where}, {worst.verdict.value}"


def _stages(plan: RunPlan) -> Iterator[str]:
    rows: dict[str, list[int]] = {}
    for stage in plan.memory.stages:
        own, static, used = stage.parameters, stage.static, stage.activations
        counts = f"{own.num_layers} | {own.num_dense / 1e6:,.1f} M | {own.num_expert / 1e6:,.1f} M"
        sizes = (static.weights, static.gradients, static.optimizer, used.training, used.loss)
        row = f"{counts} | " + " | ".join(binary(size) for size in sizes)
        rows.setdefault(row, []).append(own.pp_rank)
    for row, ranks in rows.items():
        yield f"| {', '.join(map(str, ranks))} | {row} |"


def _range(seconds: Seconds) -> str:
    return f"{seconds.low:,.1f} - {seconds.high:,.1f}"


if __name__ == "__main__":
    main()
