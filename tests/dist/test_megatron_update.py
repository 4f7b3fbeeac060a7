"""Optimizer steps: clipping, schedule, non-finite gradients, empty batches, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hybridrl.algos.policy_loss import PolicyLossConfig
from hybridrl.config.choices import LrSchedule, PolicyLossKind, Precision
from hybridrl.config.schema import MicroBatchConfig, OptimizerConfig, ParallelConfig
from hybridrl.layout.families import model_spec
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import run_ranks

SPEC = model_spec(ranks.MOE)
WEIGHTS = ranks.random_weights(SPEC)
BATCH = ranks.ragged_batch(6, SPEC.vocab_size)


def setup_of(optimizer: OptimizerConfig | None, **fields) -> ranks.Setup:
    return ranks.Setup(ranks.MOE, WEIGHTS, optimizer=optimizer, **fields)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum(float((a[name] - b[name]).double().square().sum()) for name in a) ** 0.5


def poisoned(batch):
    return replace(batch, advantages=np.where(batch.loss_mask, np.float32(np.nan), np.float32(0)))


@pytest.mark.parametrize(
    ("parallel", "world_size"), [(ParallelConfig(), 1), (ParallelConfig(tp_size=2, pp_size=2, ep_size=2), 4)]
)
def test_a_non_finite_gradient_is_skipped_and_counted(parallel, world_size):
    setup = setup_of(OptimizerConfig(lr=1e-2), parallel=parallel)
    outcomes = run_ranks(ranks.updates, world_size, setup, [BATCH, poisoned(BATCH), BATCH])
    for outcome in outcomes:
        (_, first), (_, second), (_, third) = outcome
        assert distance(first, second) == 0 and distance(second, third) > 0
    reported = [[metrics for metrics, _ in outcome] for outcome in outcomes if outcome[0][0]]
    assert [[(m.is_skipped, m.num_skipped) for m in metrics] for metrics in reported] == [
        [(False, 0), (True, 1), (False, 1)]
    ]


def test_clipping_bounds_the_step_and_reports_the_norm_before_it():
    free = ranks.SHOW_GRADIENT
    (((metrics, parameters),),) = run_ranks(ranks.updates, 1, setup_of(free), [BATCH])
    bound = metrics.grad_norm / 10
    (((clipped_metrics, clipped),),) = run_ranks(
        ranks.updates, 1, setup_of(replace(free, clip_grad_norm=bound)), [BATCH]
    )
    (((loose_metrics, loose),),) = run_ranks(
        ranks.updates, 1, setup_of(replace(free, clip_grad_norm=metrics.grad_norm * 2)), [BATCH]
    )
    start = run_ranks(ranks.updates, 1, setup_of(replace(free, lr=1e-30)), [BATCH])[0][0][1]
    assert clipped_metrics.grad_norm == metrics.grad_norm == loose_metrics.grad_norm
    assert distance(start, parameters) == pytest.approx(metrics.grad_norm, rel=1e-3)
    assert distance(start, clipped) == pytest.approx(bound, rel=1e-3)
    assert distance(parameters, loose) == 0


def test_the_learning_rate_of_each_step_follows_the_schedule():
    optimizer = OptimizerConfig(lr=1e-3, min_lr=1e-4, schedule=LrSchedule.LINEAR, warmup_steps=2)
    (outcome,) = run_ranks(ranks.updates, 1, setup_of(optimizer, num_optimizer_steps=5), [BATCH] * 5)
    assert [metrics.lr for metrics, _ in outcome] == pytest.approx([5e-4, 1e-3, 1e-3, 5.5e-4, 1e-4])


def test_supervised_updates_learn_the_targets():
    weights = BATCH.loss_mask.astype(np.float32) / BATCH.loss_mask.sum()
    setup = setup_of(OptimizerConfig(lr=3e-2), parallel=ParallelConfig(tp_size=2, ep_size=2))
    outcomes = run_ranks(ranks.supervised_updates, 2, setup, BATCH.sequences, weights, 8)
    losses = [metrics.loss for metrics in outcomes[0]]
    assert losses[0] > 3 and losses[-1] < 0.5


def test_bfloat16_trains_with_float32_main_parameters():
    weights = BATCH.loss_mask.astype(np.float32) / BATCH.loss_mask.sum()
    setup = setup_of(
        OptimizerConfig(lr=3e-3), parallel=ParallelConfig(tp_size=2, pp_size=2, ep_size=2), precision=Precision.BFLOAT16
    )
    outcomes = run_ranks(ranks.supervised_updates, 4, setup, BATCH.sequences, weights, 8)
    losses = [metrics.loss for metrics in outcomes[2]]
    assert losses[-1] < 0.6 * losses[0], losses


def test_steps_below_the_resolution_of_bfloat16_add_up():
    setup = setup_of(OptimizerConfig(lr=5e-4), precision=Precision.BFLOAT16)
    (outcome,) = run_ranks(ranks.updates, 1, setup, [BATCH] * 12)
    first, second, *_, last = [
        torch.cat([tensor.flatten() for name, tensor in parameters.items() if "layernorm" in name])
        for _, parameters in outcome
    ]
    # Norms lie near 1, where neighbouring values are at least 0.0039 apart; a step moves them by at most 0.0005.
    assert torch.equal(first, second)
    assert (first != last).float().mean() > 0.3


def test_data_parallel_ranks_share_the_float32_main_parameters():
    dense = ranks.Setup(
        ranks.DENSE,
        ranks.random_weights(model_spec(ranks.DENSE)),
        optimizer=OptimizerConfig(),
        precision=Precision.BFLOAT16,
    )
    (alone,) = run_ranks(ranks.main_parameters, 1, dense)
    shares = run_ranks(ranks.main_parameters, 2, replace(dense, parallel=ParallelConfig(dp_size=2)))
    assert {dtype for held in [alone, *shares] for dtype, _ in held} == {torch.float32}
    whole = sum(size for _, size in alone)
    sizes = [sum(size for _, size in held) for held in shares]
    assert sum(sizes) == whole and max(sizes) < 0.6 * whole


def test_rows_without_a_trained_token_leave_the_parameters_alone():
    nothing = np.zeros_like(BATCH.loss_mask)
    masked = replace(BATCH, loss_mask=nothing, loss_weights=nothing.astype(np.float32))
    (outcome,) = run_ranks(ranks.updates, 1, setup_of(OptimizerConfig(lr=1e-2)), [masked, masked])
    (metrics, first), (_, second) = outcome
    assert (metrics.loss, metrics.grad_norm, metrics.num_tokens, metrics.entropy) == (0.0, 0.0, 0, 0.0)
    assert distance(first, second) == 0


def test_a_data_parallel_rank_without_rows_takes_part():
    one_row = BATCH.select(np.array([0]))
    setup = setup_of(ranks.SHOW_GRADIENT, parallel=ParallelConfig(dp_size=2, ep_size=2))
    both = run_ranks(ranks.updates, 2, setup, [one_row])
    alone = run_ranks(ranks.updates, 1, setup_of(ranks.SHOW_GRADIENT), [one_row])
    assert both[0][0][0].grad_norm == pytest.approx(alone[0][0][0].grad_norm, rel=1e-5)
    assert both[1][0][0].loss == pytest.approx(alone[0][0][0].loss, rel=1e-5)


def test_no_layout_and_no_micro_batch_size_changes_a_policy_loss_or_its_gradient():
    losses = [PolicyLossConfig(kind=kind, clip_low=0.1, clip_high=0.2) for kind in PolicyLossKind]
    near = replace(BATCH, old_logprobs=np.where(BATCH.loss_mask, np.float32(-4.2), np.float32(0)))
    still = OptimizerConfig(lr=1e-30)  # all losses see the same parameters
    (together,) = run_ranks(
        ranks.updates_with_losses, 1, setup_of(still, micro_batch=MicroBatchConfig(1000)), near, losses
    )
    data_parallel = setup_of(still, micro_batch=MicroBatchConfig(16), parallel=ParallelConfig(dp_size=2, ep_size=2))
    apart, _ = run_ranks(ranks.updates_with_losses, 2, data_parallel, near, losses)
    for loss, one, other in zip(losses, together, apart, strict=True):
        assert one.grad_norm > 0, loss.kind
        assert other.loss == pytest.approx(one.loss, rel=1e-5), loss.kind
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5), loss.kind
        assert (other.clip_fraction, other.num_tokens) == (one.clip_fraction, one.num_tokens), loss.kind
    assert len({one.grad_norm for one in together}) == len(losses)


POLICY = PolicyLossConfig(clip_low=0.2, clip_high=0.28)
REFUSED = {
    "frozen": (None, BATCH, POLICY, "update was called on a frozen model; give the engine an optimizer"),
    "no reference": (
        OptimizerConfig(),
        replace(BATCH, ref_logprobs=None),
        replace(POLICY, kl_coef=0.1),
        "kl_coef is 0.1, but the batch has no ref_logprobs",
    ),
    "weight outside mask": (
        OptimizerConfig(),
        replace(BATCH, loss_mask=np.zeros_like(BATCH.loss_mask)),
        POLICY,
        "is not 0, but loss_mask leaves it out",
    ),
    "first token": (
        OptimizerConfig(),
        replace(BATCH, loss_mask=BATCH.loss_mask | (np.arange(16) == 0)),
        POLICY,
        "selects token 0 of row 0 .* nothing predicts",
    ),
    "beyond the end": (
        OptimizerConfig(),
        replace(BATCH, loss_mask=BATCH.loss_mask | (np.arange(16) == 15)),
        POLICY,
        "selects token 15 of row 0 .* lies beyond",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_impossible_update_is_refused_with_its_reason(case):
    optimizer, batch, loss, message = REFUSED[case]
    (text,) = run_ranks(ranks.message_of, 1, setup_of(optimizer), batch, loss)
    assert re.search(message, text), text


def test_uninstalling_the_cpu_adaptation_restores_torch_and_megatron():
    assert run_ranks(ranks.adaptation_round_trip, 1) == [[]]
