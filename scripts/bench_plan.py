"""Measures the planner on large models, prices their weight syncs, and compares with Megatron-core's own planner.

No weights, no processes: the maps of all ranks are declared, and one rank's whole plan is built from them on one thread, what it
serves and what it receives. Seconds are the best of several repeats. The comparison builds the plan of one rank of a Megatron ->
Megatron reshard with both planners, in turn, from what each calls its input: shard tables, metadata rosters.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import megatron_rosters
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import LayerSpec, MegatronLayout, PipelineLayout
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.vllm import VllmLayout
from hybridrl.reshard.bound import lower_bounds
from hybridrl.reshard.planner import Planner
from hybridrl.reshard.pricing import PlanPrice, price_plan, price_table
from hybridrl.reshard.table import ShardTable, shard_tables
from hybridrl.reshard.topology import H100_CLUSTER
from hybridrl.reshard.worlds import Devices, megatron_world, vllm_world

PER_NODE = 8
RANK = 3
MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
MEGATRON_FOLDER = Path(__file__).resolve().parents[1] / ".venv-mcore19"
T = TypeVar("T")


def shape(name: str) -> dict[str, object]:
    config: dict[str, object] = json.loads((MODELS / name / "config.json").read_text())
    return config


@dataclass(frozen=True, slots=True)
class Case:
    """One weight sync; generation ranks follow the training ranks unless they are colocated.

    Attributes:
        expected_gb: Known size of what one generation rank holds.
        limit_s: Bound on planning for one rank.
    """

    name: str
    config: dict[str, object]
    sizes: ParallelSizes
    pipeline: PipelineLayout
    tp: int
    dp: int
    num_replicas: int
    is_colocated: bool
    expected_gb: float
    limit_s: float


def edges(first: int, last: int) -> PipelineLayout:
    return PipelineLayout(num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last)


CASES = (
    Case(
        "qwen3-30b-a3b 16 -> 8 x TP2",
        shape("qwen3-30b-a3b"),
        ParallelSizes(tp=2, ep=8, dp=8),
        PipelineLayout(),
        tp=2,
        dp=1,
        num_replicas=8,
        is_colocated=False,
        expected_gb=30.5,
        limit_s=0.1,
    ),
    Case(
        "qwen3-235b-a22b 64 -> 8 x (TP8 EP8)",
        shape("qwen3-235b-a22b"),
        ParallelSizes(tp=2, pp=8, ep=8, dp=4),
        edges(11, 11),
        tp=8,
        dp=1,
        num_replicas=8,
        is_colocated=False,
        expected_gb=59.0,
        limit_s=0.5,
    ),
    Case(
        "qwen3-235b-a22b 128 colocated -> 16 x (TP8 EP8)",
        shape("qwen3-235b-a22b"),
        ParallelSizes(tp=2, pp=8, ep=8, dp=8),
        edges(11, 11),
        tp=8,
        dp=1,
        num_replicas=16,
        is_colocated=True,
        expected_gb=59.0,
        limit_s=0.5,
    ),
    Case(
        "deepseek-v3 256 -> 8 x (TP8 DP4 EP32)",
        shape("deepseek-v3"),
        ParallelSizes(pp=16, ep=16, dp=16),
        edges(3, 2),
        tp=8,
        dp=4,
        num_replicas=8,
        is_colocated=False,
        expected_gb=47.0,
        limit_s=2.0,
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What one case took; bytes are those of the generation rank that has the most, unless named total.

    Attributes:
        seconds: Plan of one rank, what it serves and what it receives, from the tables of all ranks.
        maps_seconds: Declaring the maps of all ranks and turning them into tables.
        whole_seconds: The moves of all ranks.
        bytes_per_gen_rank: Weights that it receives, from its own device included.
        lower_bound_bytes: The fewest bytes that it can take off the wire; `wire_bytes` is what the plan lets it take.
        predicted_seconds: Of the whole sync with staggered destinations, the plan that is priced and timed here; also for
            destinations that all begin at the first layer, and for staggered ones that share inside their nodes.
    """

    name: str
    seconds: float
    limit_s: float
    maps_seconds: float
    whole_seconds: float
    bytes_per_gen_rank: int
    expected_gb: float
    wire_bytes: int
    lower_bound_bytes: int
    total_wire_bytes: int
    total_lower_bound_bytes: int
    predicted_seconds: float
    predicted_seconds_in_layer_order: float
    predicted_seconds_shared: float


def timed(run: Callable[[], T], repeats: int = 1) -> tuple[float, T]:
    """Return the least wall time of several runs, and the last result."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        times.append(time.perf_counter() - start)
    return min(times), result


def declare(case: Case) -> tuple[list[ShardTable], list[ShardTable]]:
    """Declare the maps of all ranks of both sides, as tables."""
    spec = model_spec(case.config)
    training = MegatronLayout(
        spec, case.sizes, DType.BFLOAT16, LayerSpec.TRANSFORMER_ENGINE, vocab_divisor=128, pipeline=case.pipeline
    )
    generation = VllmLayout(spec, case.tp, DType.BFLOAT16, has_expert_parallel=case.tp * case.dp > 2, dp=case.dp)
    first = 0 if case.is_colocated else case.sizes.world_size
    return (
        shard_tables(megatron_world(training, Devices(PER_NODE))),
        shard_tables(vllm_world(generation, case.num_replicas, Devices(PER_NODE, first))),
    )


def plan_one_rank(sources: list[ShardTable], destinations: list[ShardTable]) -> None:
    planner = Planner(sources, destinations, is_staggered=True)
    planner.for_source(RANK)
    planner.for_destination(RANK)


def measure(case: Case, repeats: int) -> tuple[Result, PlanPrice]:
    maps_seconds, (sources, destinations) = timed(lambda: declare(case))
    seconds, _ = timed(lambda: plan_one_rank(sources, destinations), repeats)
    whole_seconds, plan = timed(lambda: Planner(sources, destinations, is_staggered=True).whole())
    bounds = lower_bounds(sources, destinations)
    price = price_plan(plan, H100_CLUSTER, sum(bounds))
    assert price.wire_bytes == sum(bounds), (price.wire_bytes, sum(bounds))
    others = [
        price_plan(Planner(sources, destinations, **options).whole(), H100_CLUSTER, sum(bounds)).seconds
        for options in ({}, {"is_staggered": True, "is_shared": True})
    ]
    result = Result(
        name=case.name,
        seconds=seconds,
        limit_s=case.limit_s,
        maps_seconds=maps_seconds,
        whole_seconds=whole_seconds,
        bytes_per_gen_rank=price.bytes_per_destination,
        expected_gb=case.expected_gb,
        wire_bytes=max(sum(rank.received_bytes[1:]) for rank in price.destinations),
        lower_bound_bytes=max(bounds),
        total_wire_bytes=price.wire_bytes,
        total_lower_bound_bytes=price.lower_bound_bytes,
        predicted_seconds=price.seconds,
        predicted_seconds_in_layer_order=others[0],
        predicted_seconds_shared=others[1],
    )
    return result, price


def show(results: list[Result]) -> None:
    plans = Table("case", "one rank", "limit", "all ranks", "maps", title="Planner, one thread", title_justify="left")
    syncs = Table(
        "case",
        "per generation rank",
        "expected",
        "predicted",
        "in layer order",
        "shared in nodes",
        title=f"Weight syncs on {H100_CLUSTER.name}",
        title_justify="left",
    )
    for r in results:
        is_met = r.seconds <= r.limit_s
        seconds = (f"{value:.2f} s" for value in (r.whole_seconds, r.maps_seconds))
        plans.add_row(r.name, f"{r.seconds:.3f} s", f"{r.limit_s} s {'met' if is_met else 'MISSED'}", *seconds)
        error = r.bytes_per_gen_rank / 1e9 / r.expected_gb - 1
        predictions = (r.predicted_seconds, r.predicted_seconds_in_layer_order, r.predicted_seconds_shared)
        predicted = (f"{value:.2f} s" for value in predictions)
        size = f"{r.bytes_per_gen_rank / 1e9:.2f} GB"
        syncs.add_row(r.name, size, f"{r.expected_gb} GB {error:+.1%}", *predicted)
    Console().print(plans, syncs)


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds to plan one rank of a world with more replicas on both sides."""

    num_ranks: int
    seconds: float


def grow(case: Case, repeats: int) -> list[Growth]:
    """Plan one rank of a case, then of 2, 4 and 8 times as many replicas: its own moves stay as many."""
    found = []
    for times in (1, 2, 4, 8):
        sizes = replace(case.sizes, dp=times * case.sizes.dp)
        sides = declare(replace(case, sizes=sizes, num_replicas=times * case.num_replicas))
        seconds, _ = timed(lambda sides=sides: plan_one_rank(*sides), repeats)  # type: ignore[misc]
        found.append(Growth(sum(len(side) for side in sides), seconds))
    return found


def show_growth(case: Case, growth: list[Growth]) -> None:
    table = Table("ranks of both sides", "one rank", title=f"{case.name}, with more replicas", title_justify="left")
    for entry in growth:
        table.add_row(str(entry.num_ranks), f"{entry.seconds:.3f} s")
    Console().print(table)


def compare(folder: Path, case: Case, repeats: int) -> megatron_rosters.Comparison:
    """Plan from the training layout of a case to one without pipeline stages, on the same ranks, with both planners."""
    spec, size = model_spec(case.config), case.sizes.world_size
    generation = ParallelSizes(tp=4, ep=8, dp=size // 4)
    layouts = [
        MegatronLayout(spec, sizes, DType.BFLOAT16, LayerSpec.TRANSFORMER_ENGINE, vocab_divisor=128, pipeline=pipeline)
        for sizes, pipeline in ((case.sizes, case.pipeline), (generation, PipelineLayout()))
    ]
    name = f"{case.name.split()[0]} {size} -> {size}, Megatron -> Megatron"
    return megatron_rosters.compare(folder, name, layouts[0], layouts[1], repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--repeats", type=int, default=7, help="planning runs per case; the best counts")
    parser.add_argument("--megatron", type=Path, default=MEGATRON_FOLDER, help="folder with megatron-core 0.19")
    options = parser.parse_args()
    console = Console()
    results = []
    for case in track(CASES, description="planning", transient=True, console=Console(stderr=True)):
        result, price = measure(case, options.repeats)
        results.append(result)
        console.print(price_table(price, case.name))
    show(results)
    growth = grow(CASES[1], options.repeats)
    show_growth(CASES[1], growth)
    comparisons = []
    if options.megatron.is_dir():
        for case in CASES[:2]:
            comparisons.append(compare(options.megatron, case, options.repeats))
            megatron_rosters.show(comparisons[-1])
    else:
        console.print(f"no {options.megatron}: `make {options.megatron.name}/.packages` installs it for the comparison")
    if options.json:
        lists = {"results": results, "growth": growth, "comparisons": comparisons}
        print(json.dumps({name: [asdict(entry) for entry in entries] for name, entries in lists.items()}))


if __name__ == "__main__":
    main()
