"""What the ranks of Megatron tests run, and the weights and batches that they share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hybridrl.algos.policy_loss import PolicyLossConfig
from hybridrl.config.choices import Platform, Precision, Recompute
from hybridrl.config.schema import MicroBatchConfig, MoeConfig, OptimizerConfig, ParallelConfig
from hybridrl.data.batch import PolicyBatch, SequenceBatch
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.engine import MegatronEngine
from hybridrl.engines.megatron.process_groups import ProcessGroups, start_process_group, stop_process_group
from hybridrl.engines.megatron.results import LogprobResult, UpdateMetrics
from hybridrl.errors import EngineError, HybridRLError, ReshardError
from hybridrl.layout.families import model_spec, read_model_spec
from hybridrl.layout.model import ModelSpec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.shard import Place, ShardMap

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_OF_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
DENSE = {key: value for key, value in MOE.items() if key not in _OF_EXPERTS} | {"model_type": "qwen3"}

# With a huge epsilon AdamW's first step is lr / epsilon times the gradient: the parameters after it show the gradient itself.
SHOW_GRADIENT = OptimizerConfig(lr=1e6, epsilon=1e6, clip_grad_norm=0.0)


@dataclass(frozen=True)
class Setup:
    """One engine, on every rank."""

    model: Mapping[str, object]
    weights: Mapping[str, torch.Tensor]
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig | None = None
    precision: Precision = Precision.FLOAT32
    micro_batch: MicroBatchConfig = field(default_factory=lambda: MicroBatchConfig(tokens=40))
    recompute: Recompute = Recompute.NONE
    replays_routing: bool = False
    moe: MoeConfig = field(default_factory=MoeConfig)
    vocab_divisor: int = 1
    num_optimizer_steps: int = 0


def build(
    setup: Setup, groups: ProcessGroups, optimizer: OptimizerConfig | None, hf_folder: Path = Path()
) -> MegatronEngine:
    built = MegatronEngine(
        spec=model_spec(setup.model),
        hf_folder=hf_folder,
        parallel=setup.parallel,
        precision=setup.precision,
        platform=Platform.CPU,
        optimizer=optimizer,
        micro_batch=setup.micro_batch,
        seed=1,
        groups=groups,
        num_optimizer_steps=setup.num_optimizer_steps,
        vocab_divisor=setup.vocab_divisor,
        recompute=setup.recompute,
        replays_routing=setup.replays_routing,
        moe=setup.moe,
    )
    copy_in(built.shard_map(place(groups.rank)), setup.weights, built.tensors())
    built.parameters_changed()
    return built


@contextmanager
def engine(rank: int, init_method: str, setup: Setup, hf_folder: Path = Path()) -> Iterator[MegatronEngine]:
    """Start the groups, build the engine and fill in the weights."""
    cpu.install()
    groups = start_process_group(rank, setup.parallel, Platform.CPU, init_method, timeout_s=60)
    yield build(setup, groups, setup.optimizer, hf_folder)
    stop_process_group()


def place(rank: int) -> Place:
    return Place("actor", rank, "node", f"cpu:{rank}")


def _views(
    shard_map: ShardMap, tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, tuple[slice, ...], torch.Tensor]]:
    for shard in shard_map.shards:
        local = tensors[shard.local].view(-1)
        box = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
        yield (
            shard.tensor,
            box,
            torch.as_strided(local, shard.box.shape, shard.strides, local.storage_offset() + shard.offset),
        )


def copy_in(shard_map: ShardMap, weights: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    for name, box, view in _views(shard_map, tensors):
        view.copy_(weights[name][box])


def copy_out(
    shard_map: ShardMap, tensors: Mapping[str, torch.Tensor]
) -> list[tuple[str, tuple[slice, ...], torch.Tensor]]:
    return [(name, box, view.clone()) for name, box, view in _views(shard_map, tensors)]


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tensor.shape, generator=generator) * (0.3 if len(tensor.shape) > 1 else 0.1)
        + (len(tensor.shape) == 1)
        for name, tensor in spec.tensors().items()
    }


def ragged_batch(num_rows: int, vocab_size: int, seed: int = 0, width: int = 16, max_tokens: int = 13) -> PolicyBatch:
    """Rows of 3 to `max_tokens` tokens in arrays that may be wider than any of them."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, max_tokens + 1, num_rows).astype(np.int32)
    positions = np.arange(width)
    real = positions < lengths[:, None]
    mask = real & (positions >= 2) & (rng.random((num_rows, width)) < 0.8)
    shape = (num_rows, width)

    def floats(low: float, high: float) -> np.ndarray:
        return (rng.uniform(low, high, shape) * mask).astype(np.float32)

    return PolicyBatch(
        sequences=SequenceBatch((rng.integers(0, vocab_size, shape) * real).astype(np.int32), lengths),
        loss_mask=mask,
        rollout_logprobs=floats(-6, -2),
        old_logprobs=floats(-6, -2),
        ref_logprobs=floats(-6, -2),
        advantages=floats(-1, 1),
        loss_weights=floats(0.1, 1) / np.float32(mask.sum()),
    )


def rows_of_rank(num_rows: int, rank: int, parallel: ParallelConfig) -> np.ndarray:
    sizes = parallel_sizes(parallel)
    return np.array_split(np.arange(num_rows), sizes.dp)[sizes.coordinates(rank).dp]


@dataclass(frozen=True)
class StepOutcome:
    """Of one rank: its rows, its results, and its slices of the parameters after the step."""

    rows: np.ndarray
    before: LogprobResult | None
    metrics: UpdateMetrics | None
    parameters: list[tuple[str, tuple[slice, ...], torch.Tensor]]


LOSS = PolicyLossConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.1, entropy_coef=0.05)


def logprobs_and_step(rank: int, init_method: str, setup: Setup, batch: PolicyBatch, temperature: float) -> StepOutcome:
    rows = rows_of_rank(batch.sequences.num_samples, rank, setup.parallel)
    mine = batch.select(rows)
    with engine(rank, init_method, setup) as built:
        before = built.logprobs(mine.sequences, temperature)
        metrics = built.update(mine, LOSS, temperature, want_logprobs=True)
        return StepOutcome(rows, before, metrics, copy_out(built.shard_map(place(rank)), built.tensors()))


def load_and_logprobs(
    rank: int, init_method: str, setup: Setup, folder: Path, batch: SequenceBatch, temperature: float
) -> LogprobResult | None:
    with engine(rank, init_method, setup) as built:
        built.load_checkpoint(folder)
        return built.logprobs(batch, temperature)


def load_and_save(rank: int, init_method: str, setup: Setup, source: Path, target: Path) -> None:
    with engine(rank, init_method, setup, source) as built:
        built.load_checkpoint(source)
        built.save_checkpoint(target)


def load_frozen(source: Path, parallel: ParallelConfig, groups: ProcessGroups, max_tokens: int) -> MegatronEngine:
    """Build a float32 engine without an optimizer and load a checkpoint into it."""
    built = MegatronEngine(
        spec=read_model_spec(source),
        hf_folder=source,
        parallel=parallel,
        precision=Precision.FLOAT32,
        platform=Platform.CPU,
        optimizer=None,
        micro_batch=MicroBatchConfig(tokens=max_tokens),
        seed=1,
        groups=groups,
    )
    built.load_checkpoint(source)
    return built


def load_score_and_save(
    rank: int,
    init_method: str,
    parallel: ParallelConfig,
    source: Path,
    target: Path,
    batch: SequenceBatch,
    temperature: float,
) -> LogprobResult | None:
    """Load a checkpoint, score with it, write it to another folder."""
    cpu.install()
    groups = start_process_group(rank, parallel, Platform.CPU, init_method, timeout_s=60)
    built = load_frozen(source, parallel, groups, max_tokens=96)
    result = built.logprobs(batch, temperature)
    built.save_checkpoint(target)
    stop_process_group()
    return result


def save_again(rank: int, init_method: str, setup: Setup, source: Path, target: Path) -> str:
    with engine(rank, init_method, setup, source) as built:
        try:
            built.save_checkpoint(target)
        except ReshardError as e:
            return str(e)
    return "saved"


def updates(
    rank: int, init_method: str, setup: Setup, batches: list[PolicyBatch]
) -> list[tuple[UpdateMetrics | None, dict[str, torch.Tensor]]]:
    """Update once per batch; return each metrics with the parameters after it."""
    with engine(rank, init_method, setup) as built:
        mine = [batch.select(rows_of_rank(batch.sequences.num_samples, rank, setup.parallel)) for batch in batches]
        return [
            (built.update(batch, LOSS, 1.0), {name: tensor.clone() for name, tensor in built.tensors().items()})
            for batch in mine
        ]


def updates_with_losses(
    rank: int, init_method: str, setup: Setup, batch: PolicyBatch, losses: list[PolicyLossConfig]
) -> list[UpdateMetrics | None]:
    """Update once per loss, all on the same batch."""
    with engine(rank, init_method, setup) as built:
        mine = batch.select(rows_of_rank(batch.sequences.num_samples, rank, setup.parallel))
        return [built.update(mine, loss, 1.0) for loss in losses]


def supervised_updates(
    rank: int, init_method: str, setup: Setup, batch: SequenceBatch, weights: np.ndarray, num_steps: int
) -> list[UpdateMetrics | None]:
    with engine(rank, init_method, setup) as built:
        return [built.update_supervised(batch, weights) for _ in range(num_steps)]


def step_without_loss(
    rank: int, init_method: str, setup: Setup, batch: SequenceBatch
) -> tuple[UpdateMetrics | None, list[tuple[str, tuple[slice, ...], torch.Tensor]]]:
    """Update on rows that carry no loss; return what was subtracted from each parameter and buffer."""
    with engine(rank, init_method, setup) as built:
        start = {name: tensor.clone() for name, tensor in built.tensors().items()}
        metrics = built.update_supervised(batch, np.zeros(batch.token_ids.shape, dtype=np.float32))
        stepped = {name: start[name] - tensor for name, tensor in built.tensors().items()}
        return metrics, copy_out(built.shard_map(place(rank)), stepped)


def main_parameters(rank: int, init_method: str, setup: Setup) -> list[tuple[torch.dtype, int]]:
    """Return element type and size of what this rank's AdamW works on."""
    with engine(rank, init_method, setup) as built:
        groups = built._optimizer._optimizer.param_groups
        return [(p.dtype, p.numel()) for group in groups for p in group["params"]]


def message_of(rank: int, init_method: str, setup: Setup, batch: PolicyBatch, loss: PolicyLossConfig) -> str:
    """Return the message of the error that an update ends in."""
    with engine(rank, init_method, setup) as built:
        try:
            built.update(batch, loss, 1.0)
        except EngineError as e:
            return str(e)
    return "no error"


def adaptation_round_trip(rank: int, init_method: str) -> list[str]:
    """Return the Megatron modules whose torch differs from torch after install, work and uninstall, and what else is left."""
    before = {
        name: module.__dict__.get("torch") for name, module in sys.modules.items() if name.startswith("megatron.")
    }
    methods = (torch.Tensor.type, torch.Tensor.cuda, torch.zeros, torch.distributed.all_gather)
    setup = Setup(MOE, random_weights(model_spec(MOE)), optimizer=SHOW_GRADIENT)
    with engine(rank, init_method, setup) as built:
        built.update(ragged_batch(2, 61), LOSS, 1.0)
        adapted = {name for name in before if sys.modules[name].__dict__.get("torch") is not before[name]}
    assert adapted and cpu.is_installed()
    cpu.uninstall()
    left = [name for name, value in before.items() if sys.modules[name].__dict__.get("torch") is not value]
    if methods != (torch.Tensor.type, torch.Tensor.cuda, torch.zeros, torch.distributed.all_gather):
        left.append("torch")
    return left


def actor_and_reference(rank: int, init_method: str, setup: Setup, batch: PolicyBatch) -> list[LogprobResult | None]:
    """Return the reference's log-probs before and after the actor beside it learnt, and the actor's after."""
    cpu.install()
    groups = start_process_group(rank, setup.parallel, Platform.CPU, init_method, timeout_s=60)
    actor, reference = (build(setup, groups, optimizer) for optimizer in (setup.optimizer, None))
    before = reference.logprobs(batch.sequences, 1.0)
    actor.update(batch, LOSS, 1.0)
    return [before, reference.logprobs(batch.sequences, 1.0), actor.logprobs(batch.sequences, 1.0)]


def build_error(rank: int, init_method: str, setup: Setup, is_adapted: bool) -> str:
    """Return the message of the error that starting ends in."""
    if is_adapted:
        cpu.install()
    try:
        groups = start_process_group(rank, setup.parallel, Platform.CPU, init_method, timeout_s=60)
        build(setup, groups, None)
    except HybridRLError as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def wait_alone(rank: int, init_method: str) -> tuple[str, float]:
    """Return what a rank hears, and after how long, when its only peer never comes."""
    started = time.monotonic()
    if rank == 0:
        try:
            start_process_group(0, ParallelConfig(dp_size=2), Platform.CPU, init_method, timeout_s=2)
        except EngineError as e:
            return str(e), time.monotonic() - started
    return "", 0.0
