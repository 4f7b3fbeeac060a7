"""Measures a planned transfer against gather-and-broadcast of full tensors: real processes, same tensors, same run.

Four training ranks (TP2 PP2 EP2) hand a synthetic mixture-of-experts model to two generation ranks (TP2). The baseline does
what a trainer without a planner does: every training rank gathers every tensor in full (over TP and EP inside its pipeline stage,
then from stage to stage), the first one broadcasts them to the generation ranks over gloo, and each copies its slices. Its buckets
are as large as the plan's chunks. Rounds alternate; every figure is the best round, and the time of a round is its slowest rank's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from hybridrl.layout.box import DType
from hybridrl.layout.families import model_spec
from hybridrl.layout.megatron import MegatronLayout, megatron_shard_map
from hybridrl.layout.parallel import ParallelSizes
from hybridrl.layout.shard import CanonicalTensor, Place, Shard, ShardMap
from hybridrl.layout.vllm import VllmLayout, vllm_shard_map
from hybridrl.reshard.executor import Receiver, Sender, TensorSink, TransferReport, compare_reports
from hybridrl.reshard.plan import Plan
from hybridrl.reshard.planner import build_plan, lower_bound_bytes
from hybridrl.reshard.transports import Rendezvous, open_transport
from hybridrl.roles.ports import free_port

TRAINING, GENERATION_TP = ParallelSizes(tp=2, pp=2, ep=2), 2
NUM_TRAINING, NUM_RANKS = TRAINING.world_size, TRAINING.world_size + GENERATION_TP
MODEL = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
}
HOST = "127.0.0.1"
TIMEOUT_S = 60.0
STAGING_SLACK_BYTES = 1 << 16  # headers and alignment
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Options:
    """What one run measures."""

    transports: tuple[str, ...]
    chunk_bytes: int
    rounds: int
    host: str
    port: int
    store_port: int
    session: str


@dataclass(frozen=True, slots=True)
class Result:
    """What one transport reached."""

    transport: str
    model_bytes: int
    wire_bytes: int
    lower_bound_bytes: int
    seconds: float
    unverified_seconds: float
    checksum_cost: float
    checksum_cpu_cost: float
    baseline_seconds: float
    speedup: float
    staging_peak_bytes: int
    staging_bound_bytes: int


@dataclass(frozen=True)
class World:
    """Both sides' maps and the plan between them, the same on every rank."""

    chunk_bytes: int

    @cached_property
    def canonical(self) -> Mapping[str, CanonicalTensor]:
        """Return the tensors of the model."""
        return model_spec(MODEL).tensors()

    @cached_property
    def sources(self) -> list[ShardMap]:
        """Return the training ranks' maps."""
        layout = MegatronLayout(model_spec(MODEL), TRAINING, DType.BFLOAT16)
        return [megatron_shard_map(layout, Place("actor", r, "node0", f"train-{r}")) for r in range(NUM_TRAINING)]

    @cached_property
    def destinations(self) -> list[ShardMap]:
        """Return the generation ranks' maps."""
        layout = VllmLayout(model_spec(MODEL), GENERATION_TP, DType.BFLOAT16)
        return [vllm_shard_map(layout, r, Place("rollout", r, "node0", f"gen-{r}")) for r in range(GENERATION_TP)]

    @cached_property
    def plan(self) -> Plan:
        """Return the plan."""
        return build_plan(self.sources, self.destinations, chunk_bytes=self.chunk_bytes)

    def map_of(self, rank: int) -> ShardMap:
        """Training ranks come first."""
        return self.sources[rank] if rank < NUM_TRAINING else self.destinations[rank - NUM_TRAINING]


def canonical_values(tensor: CanonicalTensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash(tensor.shape) % 2**31 + len(tensor.name))
    return torch.randn(tensor.shape, generator=generator, dtype=torch.float32).bfloat16()


def view(shard: Shard, tensors: Tensors) -> torch.Tensor:
    return tensors[shard.local].view(-1).as_strided(shard.box.shape, shard.strides, shard.offset)


def slice_of(full: torch.Tensor, shard: Shard) -> torch.Tensor:
    return full[tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))]


def allocate(shard_map: ShardMap) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(t.shape, dtype=torch.bfloat16) for name, t in shard_map.tensors.items()}


def check(shard_map: ShardMap, tensors: Tensors, canonical: Mapping[str, CanonicalTensor]) -> None:
    """Compare every slice with the canonical values, then forget it."""
    for shard in shard_map.shards:
        assert torch.equal(view(shard, tensors), slice_of(canonical_values(canonical[shard.tensor]), shard)), shard
    for tensor in tensors.values():
        tensor.zero_()


class Baseline:
    """Gathers and broadcasts full tensors, bucket by bucket."""

    def __init__(self, world: World, rank: int, tensors: Tensors) -> None:
        self._rank, self._tensors = rank, tensors
        self._stage_size = NUM_TRAINING // TRAINING.pp
        self._by_tensor = [world.map_of(r).by_tensor() for r in range(NUM_RANKS)]
        self._stages = [dist.new_group(list(self._stage(s))) for s in range(TRAINING.pp)]
        self._across = [dist.new_group(list(range(i, NUM_TRAINING, self._stage_size))) for i in range(self._stage_size)]
        self._rollout = dist.new_group([0, *range(NUM_TRAINING, NUM_RANKS)])
        self._buckets = [
            (stage, bucket)
            for stage in range(TRAINING.pp)
            for bucket in buckets([t for t in world.canonical.values() if self._holds(stage, t)], world.chunk_bytes)
        ]

    def run(self) -> None:
        """Transfer everything once."""
        for stage, bucket in self._buckets:
            flat = torch.empty(sum(num_elements(t) for t in bucket), dtype=torch.bfloat16)
            parts = flat.split([num_elements(t) for t in bucket])
            full = {t.name: part.view(t.shape) for t, part in zip(bucket, parts, strict=True)}
            if self._rank in self._stage(stage):
                self._gather(stage, full)
            if self._rank < NUM_TRAINING:
                place = self._rank % self._stage_size
                dist.broadcast(flat, stage * self._stage_size + place, self._across[place])
            if self._rank == 0 or self._rank >= NUM_TRAINING:
                dist.broadcast(flat, 0, self._rollout)
            if self._rank >= NUM_TRAINING:
                for shard in self._shards(self._rank, full):
                    view(shard, self._tensors).copy_(slice_of(full[shard.tensor], shard))

    def _gather(self, stage: int, full: Tensors) -> None:
        pieces = {rank: self._shards(rank, full) for rank in self._stage(stage)}
        sizes = {rank: sum(s.box.num_elements for s in shards) for rank, shards in pieces.items()}
        own = torch.empty(max(sizes.values()), dtype=torch.bfloat16)
        for shard, part in zip(pieces[self._rank], split(own, pieces[self._rank]), strict=True):
            part.copy_(view(shard, self._tensors))
        gathered = [torch.empty_like(own) for _ in pieces]
        dist.all_gather(gathered, own, self._stages[stage])
        for shards, received in zip(pieces.values(), gathered, strict=True):
            for shard, part in zip(shards, split(received, shards), strict=True):
                slice_of(full[shard.tensor], shard).copy_(part)

    def _stage(self, stage: int) -> range:
        return range(stage * self._stage_size, (stage + 1) * self._stage_size)

    def _holds(self, stage: int, tensor: CanonicalTensor) -> bool:
        return any(tensor.name in self._by_tensor[rank] for rank in self._stage(stage))

    def _shards(self, rank: int, full: Tensors) -> list[Shard]:
        return [shard for name in full for shard in self._by_tensor[rank].get(name, ())]


def num_elements(tensor: CanonicalTensor) -> int:
    return torch.Size(tensor.shape).numel()


def split(flat: torch.Tensor, shards: list[Shard]) -> Iterator[torch.Tensor]:
    start = 0
    for shard in shards:
        yield flat[start : start + shard.box.num_elements].view(shard.box.shape)
        start += shard.box.num_elements


def buckets(tensors: list[CanonicalTensor], num_bytes: int) -> list[list[CanonicalTensor]]:
    out: list[list[CanonicalTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = 2 * num_elements(tensor)
        if out[-1] and filled + size > num_bytes:
            out.append([])
            filled = 0
        out[-1].append(tensor)
        filled += size
    return out


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return the slowest rank's seconds, all starting together, and the processor seconds of all ranks."""
    dist.barrier()
    start, start_cpu = time.perf_counter(), time.process_time()
    action()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    processor = torch.tensor(time.process_time() - start_cpu, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    return elapsed.item(), processor.item()


def one_side(
    world: World, rank: int, rendezvous: Rendezvous, tensors: Tensors
) -> tuple[Callable[[bool, int], TransferReport], Callable[[], None]]:
    """Connect and return (run(verify, version), close)."""
    if rank < NUM_TRAINING:
        transport = open_transport(rendezvous, world.plan, source=rank)
        senders = [Sender(world.plan, rank, transport, verify=verify) for verify in (False, True)]
        return lambda verify, version: senders[verify].run(tensors, version, TIMEOUT_S), transport.close
    destination = rank - NUM_TRAINING
    transport = open_transport(rendezvous, world.plan, destination=destination)
    receivers = [Receiver(world.plan, destination, transport, verify=verify) for verify in (False, True)]
    sink = TensorSink(tensors)
    return lambda verify, version: receivers[verify].run(sink, version, TIMEOUT_S), transport.close


def measure(world: World, options: Options, rank: int, kind: str, baseline: Baseline, tensors: Tensors) -> Result:
    rendezvous = Rendezvous(kind, f"{options.session}-{kind}", options.host, options.port, TIMEOUT_S)
    run, close = one_side(world, rank, rendezvous, tensors)
    reports: dict[bool, TransferReport] = {}
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "verified": [], "baseline": []}

    def transfer(verify: bool, version: int) -> None:
        reports[verify] = run(verify, version)

    for number in range(options.rounds + 1):  # the first round only warms up
        for turn in range(2):  # who comes first after the baseline alternates: it finds other caches
            verify = (number + turn) % 2 == 1
            name = "verified" if verify else "plain"
            seconds[name].append(timed(partial(transfer, verify, 2 * number + turn)))
        if number == 0 and rank >= NUM_TRAINING:
            check(world.map_of(rank), tensors, world.canonical)
        seconds["baseline"].append(timed(baseline.run))
        if number == 0 and rank >= NUM_TRAINING:
            check(world.map_of(rank), tensors, world.canonical)
    close()
    gathered: list[TransferReport] = [reports[True]] * NUM_RANKS
    dist.all_gather_object(gathered, reports[True])
    problems = compare_reports(world.plan, gathered[:NUM_TRAINING], gathered[NUM_TRAINING:])
    assert not problems, problems
    best = {name: [min(column) for column in zip(*rounds[1:], strict=True)] for name, rounds in seconds.items()}
    (plain, plain_cpu), (verified, verified_cpu), (base, _) = (best[k] for k in ("plain", "verified", "baseline"))
    return Result(
        transport=kind,
        model_bytes=2 * sum(num_elements(t) for t in world.canonical.values()),
        wire_bytes=sum(report.wire_bytes for report in gathered[NUM_TRAINING:]),
        lower_bound_bytes=lower_bound_bytes(world.sources, world.destinations),
        seconds=verified,
        unverified_seconds=plain,
        checksum_cost=verified / plain - 1,
        checksum_cpu_cost=verified_cpu / plain_cpu - 1,
        baseline_seconds=base,
        speedup=base / verified,
        staging_peak_bytes=max(report.staging_bytes for report in gathered),
        staging_bound_bytes=2 * options.chunk_bytes + STAGING_SLACK_BYTES,
    )


def rank_main(rank: int, options: Options, results: multiprocessing.SimpleQueue[list[Result]]) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore(options.host, options.store_port, NUM_RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    world = World(options.chunk_bytes)
    tensors = allocate(world.map_of(rank))
    if rank < NUM_TRAINING:
        for shard in world.map_of(rank).shards:
            view(shard, tensors).copy_(slice_of(canonical_values(world.canonical[shard.tensor]), shard))
    baseline = Baseline(world, rank, tensors)
    found = [measure(world, options, rank, kind, baseline, tensors) for kind in options.transports]
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def show(results: list[Result]) -> None:
    columns = (
        "transport",
        "wire MB",
        "bound MB",
        "planned s",
        "unverified s",
        "checksum (time, CPU)",
        "baseline s",
        "faster",
        "staging MB",
    )
    table = Table(*columns, title="TP2 PP2 EP2 -> TP2, real processes")
    for r in results:
        table.add_row(
            r.transport,
            f"{r.wire_bytes / 1e6:.1f}",
            f"{r.lower_bound_bytes / 1e6:.1f}",
            f"{r.seconds:.3f}",
            f"{r.unverified_seconds:.3f}",
            f"{r.checksum_cost:+.1%}, {r.checksum_cpu_cost:+.1%}",
            f"{r.baseline_seconds:.3f}",
            f"{r.speedup:.1f}x",
            f"{r.staging_peak_bytes / 1e6:.1f} of {r.staging_bound_bytes / 1e6:.1f}",
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    parser.add_argument("--transports", nargs="+", default=["shm", "gloo"])
    parser.add_argument("--chunk-mib", type=int, default=4, help="bound on what a rank receives per chunk")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    options = Options(
        tuple(arguments.transports),
        arguments.chunk_mib << 20,
        arguments.rounds,
        HOST,
        free_port(HOST),
        free_port(HOST),
        uuid.uuid4().hex[:8],
    )
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.SimpleQueue[list[Result]] = context.SimpleQueue()
    ranks = [context.Process(target=rank_main, args=(r, options, queue), daemon=True) for r in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            raise SystemExit(f"{process.name} ended with exit code {process.exitcode}; its error is above")
    results = queue.get()
    show(results)
    if arguments.json:
        print(json.dumps({"results": [asdict(result) for result in results]}))


if __name__ == "__main__":
    main()
