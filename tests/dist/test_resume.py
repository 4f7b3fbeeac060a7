"""Training goes on from a saved state as if it had not stopped, on the same layout and on others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from hybridrl.config.choices import LrSchedule, Precision
from hybridrl.config.schema import MoeConfig, OptimizerConfig, ParallelConfig
from hybridrl.layout.families import model_spec
from hybridrl.layout.parallel import parallel_sizes
from tests.dist import megatron_ranks as ranks
from tests.dist.gloo import run_ranks
from tests.dist.resume_ranks import Trained, train
from tests.unit.layout.models import FAMILIES

ONE = ParallelConfig()
FOUR = ParallelConfig(tp_size=2, pp_size=2, ep_size=2)
SHARED = ParallelConfig(tp_size=2, dp_size=2, ep_size=2)
TWO = ParallelConfig(dp_size=2)
# With this epsilon AdamW does not divide the rounding of one gradient by that of another.
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule=LrSchedule.LINEAR, warmup_steps=2, weight_decay=0.1, epsilon=1e-3)


def setup_of(parallel: ParallelConfig, model: dict[str, object] = ranks.MOE, **fields: object) -> ranks.Setup:
    weights = ranks.random_weights(model_spec(model))
    return ranks.Setup(model, weights, parallel, OPTIMIZER, num_optimizer_steps=9, **fields)


def batches(count: int) -> list:
    return [ranks.ragged_batch(6, 61, seed=seed) for seed in range(count)]


def run(setup: ranks.Setup, *args: object) -> list[Trained]:
    return run_ranks(train, parallel_sizes(setup.parallel).world_size, setup, *args)


def whole(outcomes: list[Trained], step: int) -> dict[str, torch.Tensor]:
    """Put the parameters of all ranks after a step together."""
    found: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        for name, box, values in outcome.parameters[step]:
            shape = [
                max(part.stop, size)
                for part, size in zip(box, found[name].shape if name in found else [0] * len(box), strict=True)
            ]
            grown = torch.full(shape, float("nan"))
            if name in found:
                grown[tuple(slice(0, size) for size in found[name].shape)] = found[name]
            grown[box] = values.float()
            found[name] = grown
    return found


def reported(outcomes: list[Trained]) -> list[list[float]]:
    metrics = next(outcome.metrics for outcome in outcomes if outcome.metrics[0] is not None)
    return [[m.loss, m.grad_norm, m.lr, m.entropy, m.ref_kl] for m in metrics]


def run_and_save(
    folder: Path, setup: ranks.Setup, given: list, load_from: list[Path] | None = None
) -> tuple[list[Trained], list[Path]]:
    """Run, saving before the last two updates; return what came of all of them, and the files."""
    folder.mkdir()
    return run(setup, given, load_from, folder), sorted(folder.iterdir())


def assert_as_uninterrupted(resumed: list[Trained], uninterrupted: list[Trained], first: int) -> None:
    """Compare the two updates after `first` ones: float32 sums in another order, so not to the bit."""
    expected = reported(uninterrupted)[first : first + 2]
    np.testing.assert_allclose(reported(resumed)[:2], expected, rtol=1e-5, atol=1e-6)
    for step in (0, 1):
        parameters = whole(uninterrupted, first + step)
        for name, values in whole(resumed, step).items():
            torch.testing.assert_close(values, parameters[name], rtol=1e-5, atol=1e-5, msg=f"{name}, step {step}")


def assert_same(resumed: list[Trained], uninterrupted: list[Trained], first: int) -> None:
    """Compare the two updates after `first` ones, to the bit."""
    for through, again in zip(uninterrupted, resumed, strict=True):
        for step in (0, 1):
            pairs = zip(through.parameters[first + step], again.parameters[step], strict=True)
            assert all(torch.equal(one[2], other[2]) for one, other in pairs)
    assert reported(resumed) == reported(uninterrupted)[first:]


def test_the_same_layout_goes_on_to_the_bit_and_a_change_and_back_leaves_losses_and_parameters_as_without(tmp_path):
    given = batches(6)
    uninterrupted, four = run_and_save(tmp_path / "four", setup_of(FOUR), given[:4])
    assert_same(run(setup_of(FOUR), given[2:4], four), uninterrupted, 2)
    alone, one = run_and_save(tmp_path / "one", setup_of(ONE), given[2:], four)
    assert_as_uninterrupted(alone, uninterrupted, 2)
    assert_as_uninterrupted(run(setup_of(FOUR), given[4:], one), alone, 2)


def test_main_parameters_finer_than_bfloat16_go_on_to_the_bit(tmp_path):
    setup, given = setup_of(TWO, precision=Precision.BFLOAT16), batches(4)
    uninterrupted, files = run_and_save(tmp_path / "saved", setup, given)
    assert_same(run(setup, given[2:], files), uninterrupted, 2)


def test_moments_cut_at_other_places_on_each_rank_and_moved_expert_biases_arrive(tmp_path):
    model, moe = FAMILIES["deepseek_v3"] | {"vocab_size": 61}, MoeConfig(bias_update_rate=0.05)
    given = batches(4)
    uninterrupted, files = run_and_save(tmp_path / "saved", setup_of(SHARED, model, moe=moe), given)
    biases = [values for name, values in whole(uninterrupted, 1).items() if name.endswith("e_score_correction_bias")]
    assert biases and all(values.unique().numel() > 1 for values in biases)
    assert_as_uninterrupted(run(setup_of(ONE, model, moe=moe), given[2:], files), uninterrupted, 2)
