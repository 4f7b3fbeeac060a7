"""Weight updates of a live vLLM engine: exact, versioned, and never visible half-done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from hybridrl.config.choices import Precision
from hybridrl.data.generation import Completion, SamplingSpec
from hybridrl.errors import PeerLostError, WeightSyncError
from hybridrl.layout.box import DType
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.vllm import VllmLayout, vllm_shard_map
from hybridrl.reshard.transports import Fill, Label, Transport
from tests.e2e.rollout_world import World, reference_logprobs, rollout_world
from tests.e2e.tiny_models import save_qwen3, save_qwen3_moe

PROMPT = list(range(3, 60))
GREEDY = SamplingSpec(temperature=0.0, top_p=1.0, max_tokens=24, stop_token_ids=(), seed=None)
SAMPLED = SamplingSpec(temperature=0.7, top_p=1.0, max_tokens=24, stop_token_ids=(), seed=7)
TOLERANCE = 1e-4  # fp32: the two stacks sum in different orders
TYPICAL_BF16 = 0.1  # bf16: a router near a tie may pick another expert, so single tokens may differ by much

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def replicated_kv(folder: Path, seed: int) -> Path:
    """One KV head: two workers hold a copy each."""
    return save_qwen3_moe(folder, seed, num_kv_heads=1)


WORLDS = {
    "moe-tp1": (save_qwen3_moe, {}),
    "moe-bf16-tp1": (save_qwen3_moe, {"precision": Precision.BFLOAT16}),
    "moe-replicated-kv-tp2": (replicated_kv, {"tp_size": 2}),
    "dense-tied-tp2": (save_qwen3, {"tp_size": 2}),
}


@dataclass(frozen=True)
class Case:
    """A running engine, two checkpoints, and what vLLM's own load of the first one generates."""

    world: World
    first: Path
    second: Path
    fresh: Completion
    precision: Precision
    tp_size: int


@pytest.fixture(scope="module", params=WORLDS)
def case(request, tmp_path_factory):
    save, settings = WORLDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    first, second = save(folder / "first", 1), save(folder / "second", 2)
    with rollout_world(first, **settings) as world:
        fresh = world.run(world.engine.generate(PROMPT, SAMPLED))
        precision = settings.get("precision", Precision.FLOAT32)
        yield Case(world, first, second, fresh, precision, settings.get("tp_size", 1))


@pytest.fixture
def world(case):
    """Every test starts from the first checkpoint, in force and running."""
    case.world.update(case.first)
    return case.world


def assert_matches_reference(case: Case, folder: Path, prompt=PROMPT, sampling=SAMPLED) -> None:
    completion = case.world.run(case.world.engine.generate(prompt, sampling))
    expected = reference_logprobs(folder, prompt, completion, sampling.temperature or 1.0)
    error = (torch.tensor(completion.logprobs) - expected).abs()
    if case.precision is Precision.FLOAT32:
        assert error.max() < TOLERANCE
    else:
        assert error.median() < TYPICAL_BF16
    assert completion.policy_version == case.world.version


def test_updates_there_and_back_give_the_log_probs_of_each_checkpoint(case, world):
    for folder in (case.second, case.first, case.second, case.first):
        world.update(folder)
        assert_matches_reference(case, folder)


def test_an_update_is_bit_identical_to_a_fresh_load(case, world):
    world.update(case.second)
    assert world.run(world.engine.generate(PROMPT, SAMPLED)).token_ids != case.fresh.token_ids
    world.update(case.first)
    again = world.run(world.engine.generate(PROMPT, SAMPLED))
    assert again == replace(case.fresh, policy_version=world.version)


def test_the_learned_layout_equals_the_declared_one(case):
    spec = read_model_spec(case.first)
    dtype = {Precision.FLOAT32: DType.FLOAT32, Precision.BFLOAT16: DType.BFLOAT16}[case.precision]
    for learned in case.world.maps:
        declared = vllm_shard_map(VllmLayout(spec, case.tp_size, dtype), learned.place.rank, learned.place)
        assert list(learned.tensors) == list(declared.tensors)
        assert {t.dtype for t in learned.tensors.values()} == {dtype}
        assert learned.padding == declared.padding
        assert set(learned.shards) == set(declared.shards)
        assert learned.canonical == declared.canonical


def test_cached_prefixes_are_gone_after_a_commit(case, world):
    long_prompt = [3 + i % 140 for i in range(200)]  # more than one cache block of 128 tokens
    world.run(world.engine.generate(long_prompt, GREEDY))
    world.update(case.second)
    assert_matches_reference(case, case.second, long_prompt, GREEDY)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_the_tempered_distribution(case, world, temperature):
    assert_matches_reference(case, case.first, sampling=replace(SAMPLED, temperature=temperature))


class Faulty:
    """A transport whose `fault` sees every message that is about to be sent."""

    def __init__(self, inner: Transport, fault: Callable[[int, torch.Tensor], None]) -> None:
        self._inner, self._fault, self._count = inner, fault, 0

    def submit_send(self, peer: int, label: Label, fill: Fill) -> None:
        number, self._count = self._count, self._count + 1

        def faulty_fill(buffer: torch.Tensor) -> None:
            fill(buffer)
            self._fault(number, buffer)

        self._inner.submit_send(peer, label, faulty_fill)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class SourceDied(Exception):
    pass


def die_in_the_middle(number: int, buffer: torch.Tensor) -> None:
    if number == 2:
        raise SourceDied


def flip_one_bit(number: int, buffer: torch.Tensor) -> None:
    if number == 1:
        buffer[5] ^= 4


def test_a_half_delivered_update_stays_paused_under_the_old_version(case, world):
    world.run(world.engine.pause(30.0))
    with pytest.raises(PeerLostError, match=r"receive failed on . of . workers; worker .*closed its side"):
        world.transfer(case.second, world.version + 1, wrap=lambda transport: Faulty(transport, die_in_the_middle))
    with pytest.raises(WeightSyncError, match=f"version {world.version} stays in force"):
        world.run(world.engine.commit(world.version + 1))
    with pytest.raises(WeightSyncError, match=f"version {world.version} stays in force and nothing is sampled"):
        world.run(world.engine.resume())
    assert world.engine.policy_version == world.version
    world.update(case.second)
    assert_matches_reference(case, case.second)


def test_a_flipped_bit_is_found_and_a_second_transfer_heals_it(case, world):
    world.run(world.engine.pause(30.0))
    mismatches = world.transfer(case.second, world.version + 1, wrap=lambda transport: Faulty(transport, flip_one_bit))
    assert len(mismatches) == 1
    assert "rollout rank" in mismatches[0] and "actor rank 0 sent" in mismatches[0]
    world.update(case.second)
    assert_matches_reference(case, case.second)


def test_receiving_while_generating_is_refused(world):
    with pytest.raises(WeightSyncError, match="receive while generating; pause the engine first"):
        world.run(world.engine.receive(version=1, verify=True, deadline_s=1.0))
