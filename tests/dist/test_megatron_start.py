"""Starting: what fits, what is refused and why, and waits that end."""

from __future__ import annotations

import numpy as np
import pytest

from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.families import model_spec
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import run_ranks

WEIGHTS = ranks.random_weights(model_spec(ranks.MOE))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (
            ParallelConfig(ep_size=2),
            "EngineError: tp_size * cp_size * dp_size is 1, which does not divide by ep_size * etp_size 2",
        ),
        (ParallelConfig(pp_size=3), "LayoutError: 4 layers do not divide into pp_size 3 equal stages"),
        (
            ParallelConfig(dp_size=3, ep_size=3),
            "LayoutError: 0.decoder.layers.0.mlp.experts: 8 does not divide by ep_size 3",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_refused_on_every_rank(parallel, message):
    setup = ranks.Setup(ranks.MOE, WEIGHTS, parallel)
    world_size = parallel.tp_size * parallel.pp_size * parallel.dp_size
    for text in run_ranks(ranks.build_error, world_size, setup, True):
        assert text.startswith(message), text


def test_an_engine_without_the_cpu_adaptation_says_what_to_call():
    (text,) = run_ranks(ranks.build_error, 1, ranks.Setup(ranks.MOE, WEIGHTS), False)
    assert text == "EngineError: the cpu platform needs hybridrl.engines.megatron.cpu.install() first, in this process"


def test_a_rank_whose_peer_never_comes_gives_up_in_time():
    (text, seconds), _ = run_ranks(ranks.wait_alone, 2, timeout_s=60)
    assert "training rank 0: the 2 ranks did not meet at file://" in text and "within 2 s" in text
    assert seconds < 30


def test_a_frozen_reference_beside_the_actor_stays_as_it_was():
    setup = ranks.Setup(ranks.MOE, WEIGHTS, ParallelConfig(tp_size=2, pp_size=2, ep_size=2), ranks.SHOW_GRADIENT)
    results = run_ranks(ranks.actor_and_reference, 4, setup, ranks.ragged_batch(5, 61))
    ((before, after, actor),) = [result for result in results if result[0]]
    np.testing.assert_array_equal(before.logprobs, after.logprobs)
    assert np.abs(actor.logprobs - before.logprobs).max() > 1e-3
