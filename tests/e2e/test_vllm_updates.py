"""Weight updates of a live vLLM engine: exact, versioned, and never visible half-done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from hybridrl.data.generation import SamplingSpec
from hybridrl.errors import EngineError, WeightSyncError
from hybridrl.layout.box import DType
from hybridrl.layout.families import read_model_spec
from hybridrl.layout.vllm import VllmLayout, vllm_shard_map
from hybridrl.reshard.transports import Fill, Label, Transport
from tests.e2e.rollout_world import World, reference_logprobs, rollout_world
from tests.e2e.tiny_models import save_qwen3, save_qwen3_moe

PROMPT = list(range(3, 60))
GREEDY = SamplingSpec(temperature=0.0, top_p=1.0, max_tokens=24, stop_token_ids=(), seed=None)
SAMPLED = SamplingSpec(temperature=0.7, top_p=1.0, max_tokens=24, stop_token_ids=(), seed=7)
# fp32 on both sides; the two stacks sum in different orders.
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORLDS = {
    "moe-tp1": (save_qwen3_moe, 1),
    "moe-tp2": (save_qwen3_moe, 2),
    "tied-tp1": (save_qwen3, 1),
    "tied-tp2": (save_qwen3, 2),
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request, tmp_path_factory):
    save, tp_size = WORLDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    first, second = save(folder / "first", 1), save(folder / "second", 2)
    with rollout_world(first, tp_size=tp_size) as running:
        running.first, running.second, running.tp_size = first, second, tp_size
        yield running


@pytest.fixture(autouse=True)
def first_weights(world):
    """Every test starts from the first checkpoint, in force and running."""
    world.update(world.first)


def assert_matches_reference(world: World, folder, sampling=SAMPLED) -> None:
    completion = world.run(world.engine.generate(PROMPT, sampling))
    expected = reference_logprobs(folder, PROMPT, completion, sampling.temperature or 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **TOLERANCE)
    assert completion.policy_version == world.version


def test_updates_there_and_back_give_the_log_probs_of_each_checkpoint(world):
    for folder in (world.second, world.first, world.second, world.first):
        world.update(folder)
        assert_matches_reference(world, folder)


def test_an_update_is_bit_identical_to_the_same_weights_before(world):
    before = world.run(world.engine.generate(PROMPT, SAMPLED))
    world.update(world.second)
    assert world.run(world.engine.generate(PROMPT, SAMPLED)).token_ids != before.token_ids
    world.update(world.first)
    after = world.run(world.engine.generate(PROMPT, SAMPLED))
    assert after == replace(before, policy_version=world.version)


def test_learned_layout_equals_the_declared_one(world):
    spec = read_model_spec(world.first)
    for learned in world.maps:
        layout = VllmLayout(spec, world.tp_size, DType.FLOAT32)
        declared = vllm_shard_map(layout, learned.place.rank, learned.place)
        assert list(learned.tensors) == list(declared.tensors)
        assert learned.padding == declared.padding
        assert set(learned.shards) == set(declared.shards)
        assert learned.canonical == declared.canonical


def test_cached_prefixes_are_gone_after_a_commit(world):
    long_prompt = [3 + i % 140 for i in range(200)]  # more than one cache block of 128 tokens
    world.run(world.engine.generate(long_prompt, GREEDY))
    world.update(world.second)
    completion = world.run(world.engine.generate(long_prompt, GREEDY))
    expected = reference_logprobs(world.second, long_prompt, completion, 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, **TOLERANCE)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_logprobs_are_those_of_the_tempered_distribution(world, temperature):
    assert_matches_reference(world, world.first, replace(SAMPLED, temperature=temperature))


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


def test_a_half_delivered_update_stays_paused_under_the_old_version(world):
    world.run(world.engine.pause(30.0))
    with pytest.raises(EngineError, match=r"receive failed on . of . workers; worker .*closed its side"):
        world.transfer(world.second, world.version + 1, wrap=lambda transport: Faulty(transport, die_in_the_middle))
    with pytest.raises(WeightSyncError, match=f"version {world.version} stays in force"):
        world.run(world.engine.commit(world.version + 1))
    with pytest.raises(WeightSyncError, match=f"version {world.version} stays in force and nothing is sampled"):
        world.run(world.engine.resume())
    assert world.engine.policy_version == world.version
    world.update(world.second)
    assert_matches_reference(world, world.second)


def test_a_flipped_bit_is_found_and_a_second_transfer_heals_it(world):
    world.run(world.engine.pause(30.0))
    mismatches = world.transfer(world.second, world.version + 1, wrap=lambda transport: Faulty(transport, flip_one_bit))
    assert len(mismatches) == 1
    assert "rollout rank" in mismatches[0] and "actor rank 0 sent" in mismatches[0]
    world.update(world.second)
    assert_matches_reference(world, world.second)


def test_receiving_while_generating_is_refused(world):
    with pytest.raises(WeightSyncError, match="receive while generating; pause the engine first"):
        world.run(world.engine.receive(version=1, verify=True, deadline_s=1.0))
