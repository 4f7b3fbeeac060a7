"""Router replay: what is told is what is routed, in every layout, and a replay that does nothing is an error."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from hybridrl.config.choices import Recompute
from hybridrl.config.schema import MicroBatchConfig, ParallelConfig
from hybridrl.layout.families import model_spec
from hybridrl.layout.parallel import parallel_sizes
from tests.dist import megatron_ranks as ranks
from tests.dist import replay_ranks
from tests.dist.gloo import run_ranks

NUM_ROWS, NUM_EXPERTS, TOP_K, WORLD_SIZE = 6, 8, 2, 4
MODEL = {**ranks.MOE, "mlp_only_layers": [0]}  # dense first
MOE_LAYERS = [1, 2, 3]
LAYOUTS: dict[str, tuple[dict[str, int], Recompute]] = {
    "one rank": ({}, Recompute.NONE),
    "recomputed": ({}, Recompute.FULL),
    "tp2 ep2": ({"tp_size": 2, "ep_size": 2}, Recompute.NONE),
    "cp2 tp2 ep2": ({"cp_size": 2, "tp_size": 2, "ep_size": 2}, Recompute.FULL),
    "pp2 vpp2 dp2": ({"pp_size": 2, "vpp_size": 2, "dp_size": 2}, Recompute.FULL),
    "pp4": ({"pp_size": 4}, Recompute.NONE),
}


@cache
def batch():
    """Ragged rows whose every token but the last is told random experts; row 1 is free."""
    plain = ranks.ragged_batch(NUM_ROWS, 61)
    shape = (*plain.sequences.token_ids.shape, len(MOE_LAYERS))
    rng = np.random.default_rng(3)
    routing = rng.random((*shape, NUM_EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.int16)
    is_told = np.arange(shape[1]) < plain.sequences.lengths[:, None] - 1
    is_told[1] = False
    routing[~is_told] = -1
    return replace(plain, sequences=replace(plain.sequences, routing=routing))


def setup_of(name: str) -> ranks.Setup:
    sizes, recompute = LAYOUTS[name]
    return ranks.Setup(
        MODEL,
        ranks.random_weights(model_spec(MODEL)),
        ParallelConfig(**sizes),
        ranks.SHOW_GRADIENT,
        micro_batch=MicroBatchConfig(tokens=24),
        recompute=recompute,
        replays_routing=True,
    )


@cache
def outcomes() -> dict[str, list[replay_ranks.Outcome]]:
    setups = [setup_of(name) for name in LAYOUTS]
    by_rank = run_ranks(replay_ranks.run_all, WORLD_SIZE, setups, batch(), WORLD_SIZE, timeout_s=180)
    return {
        name: [by_rank[rank][number] for rank in range(parallel_sizes(setup.parallel).world_size)]
        for number, (name, setup) in enumerate(zip(LAYOUTS, setups, strict=True))
    }


def joined(name: str, of):
    """Join the rows that the reporting ranks return."""
    reporting = [(outcome.rows, of(outcome)) for outcome in outcomes()[name] if of(outcome) is not None]
    out = np.zeros((NUM_ROWS, *reporting[0][1].shape[1:]), dtype=reporting[0][1].dtype)
    for rows, values in reporting:
        out[rows] = values
    return out


def gradients_of(name: str) -> dict[str, torch.Tensor]:
    whole = {tensor.name: torch.full(tensor.shape, torch.nan) for tensor in model_spec(MODEL).tensors().values()}
    for outcome in outcomes()[name]:
        for tensor, box, values in outcome.gradients:
            whole[tensor][box] = values
    return whole


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_expert_that_was_told_was_routed_to(name: str) -> None:
    routing = batch().sequences.routing
    sizes = parallel_sizes(setup_of(name).parallel)
    counts = {layer: np.zeros(NUM_EXPERTS, dtype=np.int64) for layer in MOE_LAYERS}
    for outcome in outcomes()[name]:
        for layer, routed in outcome.num_routed.items():
            counts[layer] += routed
    told = routing[routing[..., 0, 0] >= 0]
    num_free = int(batch().sequences.lengths.sum()) - len(told)
    for index, layer in enumerate(MOE_LAYERS):
        surplus = counts[layer] - np.bincount(told[:, index].ravel(), minlength=NUM_EXPERTS)
        assert surplus.min() >= 0, (layer, surplus)
        if sizes.tp == sizes.cp == sizes.dp == 1:  # no alignment and no empty micro-batches: only free tokens are left
            assert surplus.sum() == num_free * TOP_K
    metrics = next(outcome.metrics for outcome in outcomes()[name] if outcome.metrics)
    assert metrics.num_replayed == len(told) * len(MOE_LAYERS)
    assert 0 < metrics.num_replay_changed < metrics.num_replayed


@pytest.mark.parametrize("name", LAYOUTS)
def test_replayed_log_probs_and_gradients_are_the_same_in_every_layout(name: str) -> None:
    replayed, want = (
        joined(at, lambda outcome: outcome.replayed and outcome.replayed.logprobs) for at in (name, "one rank")
    )
    np.testing.assert_allclose(replayed, want, atol=5e-5)
    during = joined(name, lambda outcome: outcome.metrics and outcome.metrics.logprobs)
    mask = batch().loss_mask
    np.testing.assert_allclose(during[mask], replayed[mask], atol=1e-5)
    want_gradients = gradients_of("one rank")
    for tensor, gradient in gradients_of(name).items():
        assert float((gradient - want_gradients[tensor]).norm()) <= 2e-5 * float(want_gradients[tensor].norm()), tensor


@pytest.mark.parametrize("name", LAYOUTS)
def test_recorded_experts_are_those_of_one_rank(name: str) -> None:
    recorded, want = (
        joined(at, lambda outcome: outcome.recorded and outcome.recorded.routing) for at in (name, "one rank")
    )
    assert np.array_equal(np.sort(recorded, -1), np.sort(want, -1))
    lengths = batch().sequences.lengths
    is_real = np.arange(recorded.shape[1]) < lengths[:, None]
    assert (recorded[is_real] >= 0).all() and (recorded[~is_real] == -1).all()


def test_a_replay_that_is_wired_wrongly_is_refused() -> None:
    (answers,) = run_ranks(replay_ranks.refusals, 1, setup_of("one rank"), batch(), timeout_s=120)
    assert "the batch of an update has no routing" in answers[0]
    assert "not one choice of experts was replayed" in answers[1]
    assert "got the experts of 2 layers, expected those of 3 MoE layers" in answers[2]
    assert re.search(r"MoE layer 0 routes \((\d+), 2\) \(tokens, experts\), but was told \(\1, 1\)", answers[3])
    assert "MoE layer 0 replayed 0 of" in answers[4] and "its router does not ask the replay" in answers[4]


def test_gradients_flow_through_the_weights_of_replayed_experts() -> None:
    gradient = gradients_of("one rank")[f"model.layers.{MOE_LAYERS[0]}.mlp.gate.weight"]
    assert torch.count_nonzero(gradient.abs().sum(1)) > TOP_K
