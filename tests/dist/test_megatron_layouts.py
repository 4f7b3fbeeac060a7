"""Every layout and every micro-batch size computes what one rank computes."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from hybridrl.config.schema import MicroBatchConfig, ParallelConfig
from hybridrl.layout.families import model_spec
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import run_ranks

NUM_ROWS = 11
TEMPERATURE = 0.7
MODELS = {"moe": ranks.MOE, "dense": ranks.DENSE, "tied": {**ranks.DENSE, "tie_word_embeddings": True}}
LAYOUTS = [
    ("moe", ParallelConfig(tp_size=2, pp_size=2, ep_size=2), 2),
    ("moe", ParallelConfig(tp_size=2, etp_size=2), 3),
    ("moe", ParallelConfig(tp_size=2, ep_size=2), 16),
    ("moe", ParallelConfig(dp_size=2, ep_size=2), 2),
    ("moe", ParallelConfig(dp_size=2), 4),
    ("moe", ParallelConfig(pp_size=2), 4),
    ("moe", ParallelConfig(dp_size=2, tp_size=2, ep_size=2, etp_size=2), 3),
    ("moe", ParallelConfig(dp_size=2, tp_size=2, ep_size=4), 2),
    ("moe", ParallelConfig(tp_size=4, ep_size=2, etp_size=2), 4),
    ("dense", ParallelConfig(tp_size=2, pp_size=2), 4),
    ("dense", ParallelConfig(tp_size=2, sequence_parallel=False), 4),
    ("tied", ParallelConfig(tp_size=2, pp_size=2), 4),
    ("tied", ParallelConfig(dp_size=2), 4),
]


def name(layout) -> str:
    model, parallel, micro_batch = layout
    sizes = "".join(
        f"{axis}{getattr(parallel, f'{axis}_size')}"
        for axis in ("tp", "pp", "ep", "etp", "dp")
        if getattr(parallel, f"{axis}_size") > 1
    )
    return f"{model}-{sizes}-mb{micro_batch}" + ("" if parallel.sequence_parallel else "-nosp")


def outcome(model: str, parallel: ParallelConfig, micro_batch: int):
    spec = model_spec(MODELS[model])
    setup = ranks.Setup(
        MODELS[model], ranks.random_weights(spec), parallel, ranks.SHOW_GRADIENT, micro_batch=MicroBatchConfig(tokens=13 * micro_batch)
    )
    batch = ranks.ragged_batch(NUM_ROWS, spec.vocab_size)
    world_size = parallel.tp_size * parallel.pp_size * parallel.dp_size
    return merge(run_ranks(ranks.logprobs_and_step, world_size, setup, batch, TEMPERATURE), spec, batch)


def merge(outcomes, spec, batch):
    logprobs = np.full(batch.loss_mask.shape, np.nan, dtype=np.float32)
    entropies, during = logprobs.copy(), logprobs.copy()
    parameters = {tensor.name: torch.full(tensor.shape, torch.nan) for tensor in spec.tensors().values()}
    reported = [one.metrics for one in outcomes if one.metrics]
    for one in outcomes:
        if one.before:
            logprobs[one.rows], entropies[one.rows], during[one.rows] = (
                one.before.logprobs,
                one.before.entropies,
                one.metrics.logprobs,
            )
        for tensor, box, values in one.parameters:
            held = parameters[tensor][box]
            assert torch.equal(held[~held.isnan()], values[~held.isnan()]), f"replicas of {tensor} differ"
            parameters[tensor][box] = values
    return logprobs, entropies, during, reported, parameters


@cache
def one_rank(model: str):
    return outcome(model, ParallelConfig(), 16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
def test_layout_and_micro_batch_size_change_nothing(layout):
    want_logprobs, want_entropies, _, (want,), want_parameters = one_rank(layout[0])
    logprobs, entropies, during, reported, parameters = outcome(*layout)
    # float32 sums in another order: 1e-5 of values around 5.
    np.testing.assert_allclose(logprobs, want_logprobs, atol=5e-5)
    np.testing.assert_allclose(entropies, want_entropies, atol=5e-5)
    mask = ranks.ragged_batch(NUM_ROWS, model_spec(MODELS[layout[0]]).vocab_size).loss_mask
    np.testing.assert_allclose(during[mask], logprobs[mask], atol=1e-6)
    assert len({metrics.grad_norm for metrics in reported}) == 1
    for metrics in reported:
        for field in ("loss", "grad_norm", "entropy", "approx_kl", "clip_fraction", "ratio_mean", "ref_kl"):
            assert getattr(metrics, field) == pytest.approx(getattr(want, field), rel=1e-5), field
        assert metrics.num_tokens == want.num_tokens and not metrics.is_skipped
    start = ranks.random_weights(model_spec(MODELS[layout[0]]))
    for tensor, value in parameters.items():
        gradient, want_gradient = start[tensor] - value, start[tensor] - want_parameters[tensor]
        error = (gradient - want_gradient).norm() / want_gradient.norm()
        assert error < 5e-5, f"{tensor}: gradient differs by {error:.1e} of its norm"
