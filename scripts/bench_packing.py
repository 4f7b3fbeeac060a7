"""Measures what packing saves: tokens, balance between data-parallel ranks, and seconds of a training step.

    python scripts/bench_packing.py [--json]

Sequences have a skewed length distribution, as responses do: many short ones and a few at the limit. The packed step and
the step with every sequence padded to the longest alternate in one process, on the same rows and with the same budget of
tokens; the fastest of several counts. Goals: at least 95 % real tokens, data-parallel ranks within 5 % of their mean,
and a packed step at least 1.5 times faster. With --json the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from hybridrl.algos.policy_loss import PolicyLossConfig
from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import MicroBatchConfig, OptimizerConfig, ParallelConfig
from hybridrl.data.batch import PolicyBatch, SequenceBatch
from hybridrl.engines.megatron import cpu
from hybridrl.engines.megatron.engine import MegatronEngine
from hybridrl.engines.megatron.micro_batches import PackingRules, split
from hybridrl.engines.megatron.process_groups import ProcessGroups, start_process_group, stop_process_group
from hybridrl.layout.cost import sequence_cost
from hybridrl.layout.families import model_spec
from hybridrl.layout.model import ModelSpec
from hybridrl.roles.dispatch import rows_of_dp_ranks

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 384,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MAX_TOKENS = 512
MIN_REAL, MAX_IMBALANCE, MIN_SPEEDUP = 0.95, 1.05, 1.5
DP_SIZES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class PackingResult:
    """Figures of one run.

    Attributes:
        packed_real_share: Real tokens of all tokens that a packed step computes.
        padded_real_share: The same with padding to the longest.
        imbalance: Dearest data-parallel rank over the mean, by number of ranks.
        packed_s: Seconds of the fastest packed step.
        padded_s: Seconds of the fastest padded step.
    """

    packed_real_share: float
    padded_real_share: float
    imbalance: dict[int, float]
    packed_s: float
    padded_s: float

    @property
    def speedup(self) -> float:
        """How many times faster the packed step is."""
        return self.padded_s / self.packed_s

    @property
    def is_good(self) -> bool:
        """Whether every goal is met."""
        is_even = max(self.imbalance.values()) <= MAX_IMBALANCE
        return self.packed_real_share >= MIN_REAL and is_even and self.speedup >= MIN_SPEEDUP


def skewed_batch(num_samples: int, vocab_size: int, seed: int = 0) -> PolicyBatch:
    """Return rows of log-normal lengths, cut off at the limit."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(4.6, 0.8, num_samples).clip(8, MAX_TOKENS).astype(np.int32)
    lengths[0] = MAX_TOKENS
    shape = (num_samples, MAX_TOKENS)
    positions = np.arange(MAX_TOKENS)
    mask = (positions < lengths[:, None]) & (positions > 0)
    token_ids = rng.integers(0, vocab_size, shape).astype(np.int32)
    floats = np.where(mask, rng.normal(size=shape), 0).astype(np.float32)
    weights = (mask / mask.sum()).astype(np.float32)
    return PolicyBatch(SequenceBatch(token_ids, lengths), mask, floats, floats, None, floats, weights)


def build(spec: ModelSpec, micro_batch: MicroBatchConfig, groups: ProcessGroups) -> MegatronEngine:
    """Return an engine on one rank."""
    return MegatronEngine(
        spec, Path(), ParallelConfig(), Precision.FLOAT32, Platform.CPU, OptimizerConfig(), micro_batch, 1, groups
    )  # fmt: skip


def num_computed_tokens(batch: PolicyBatch, groups: ProcessGroups, max_tokens: int, is_packed: bool) -> int:
    """Return the tokens of all micro-batches, padding included."""
    rules, cost = PackingRules(max_tokens, is_packed, 1, 1, 1), sequence_cost(model_spec(MODEL))
    parts = split(batch.sequences, batch.loss_mask, {}, groups, rules, cost)
    return sum(part.token_ids.numel() for part in parts)


def seconds_of_steps(engines: list[MegatronEngine], batch: PolicyBatch, num_rounds: int) -> list[float]:
    """Return the seconds of each engine's fastest step; the engines take turns."""
    loss = PolicyLossConfig(clip_low=0.2, clip_high=0.28)
    best = [float("inf")] * len(engines)
    for _ in range(num_rounds):
        for index, engine in enumerate(engines):
            started = time.perf_counter()
            engine.update(batch, loss, 1.0)
            best[index] = min(best[index], time.perf_counter() - started)
    return best


def measure(num_samples: int, num_rounds: int, max_tokens: int) -> PackingResult:
    """Measure on one rank."""
    spec = model_spec(MODEL)
    batch = skewed_batch(num_samples, spec.vocab_size)
    costs = sequence_cost(spec)(batch.sequences.lengths)
    imbalance = {}
    for dp_size in DP_SIZES:
        totals = [costs[rows].sum() for rows in rows_of_dp_ranks(costs, dp_size)]
        imbalance[dp_size] = float(max(totals) / np.mean(totals))
    cpu.install()
    with tempfile.TemporaryDirectory() as folder:
        groups = start_process_group(0, ParallelConfig(), Platform.CPU, f"file://{folder}/store", timeout_s=60)
        engines = [build(spec, MicroBatchConfig(max_tokens, is_packed), groups) for is_packed in (True, False)]
        computed = [num_computed_tokens(batch, groups, max_tokens, is_packed) for is_packed in (True, False)]
        packed_s, padded_s = seconds_of_steps(engines, batch, num_rounds)
        stop_process_group()
    shares = [batch.sequences.num_tokens / tokens for tokens in computed]
    return PackingResult(shares[0], shares[1], imbalance, packed_s, padded_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="steps of each kind; the fastest counts")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON in the last line")
    arguments = parser.parse_args()
    result = measure(arguments.samples, arguments.rounds, arguments.tokens)
    print(f"real tokens   {result.packed_real_share:.1%} packed, {result.padded_real_share:.1%} padded")
    print("imbalance    ", ", ".join(f"{value:.4f} on {dp} ranks" for dp, value in result.imbalance.items()))
    print(
        f"step          {result.packed_s:.3f} s packed, {result.padded_s:.3f} s padded: {result.speedup:.2f} times faster"
    )
    if arguments.json:
        print(json.dumps({**asdict(result), "speedup": result.speedup, "is_good": result.is_good}))
    raise SystemExit(0 if result.is_good else 1)


if __name__ == "__main__":
    main()
