"""What `hybridrl plan` predicts for a rank is what the rank allocates."""

from __future__ import annotations

import pytest

from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import ActorConfig, ExperimentConfig, ModelConfig, ParallelConfig
from hybridrl.layout.families import model_spec
from hybridrl.layout.parallel import parallel_sizes
from hybridrl.layout.roles import megatron_roles
from hybridrl.planning.layouts import role_layout
from hybridrl.planning.memory import static_memory
from hybridrl.planning.parameters import stage_parameters
from tests.dist.allocations import allocated_after_update
from tests.dist.gloo import run_ranks
from tests.dist.megatron_ranks import MOE, SHOW_GRADIENT, Setup, ragged_batch, random_weights
from tests.unit.layout.models import FAMILIES

DEEPSEEK = FAMILIES["deepseek_v3"]
# The plan rounds each buffer's share up to a whole element.
TOLERANCE = 1e-3


@pytest.mark.parametrize(
    ("model", "parallel", "precision"),
    [
        (MOE, ParallelConfig(tp_size=2, pp_size=2, ep_size=2), Precision.FLOAT32),
        (MOE, ParallelConfig(tp_size=2, ep_size=2, dp_size=2), Precision.BFLOAT16),
        (DEEPSEEK, ParallelConfig(pp_size=2, vpp_size=2, ep_size=2, dp_size=2), Precision.BFLOAT16),
    ],
)
def test_weights_gradients_and_optimizer_state_take_what_the_plan_says(model, parallel, precision):
    spec = model_spec(model)
    config = ExperimentConfig(
        platform=Platform.CPU, model=ModelConfig(precision=precision), actor=ActorConfig(parallel=parallel)
    )
    layout = role_layout(config, megatron_roles(config)[0], spec)
    stages = [static_memory(stage, is_trained=True) for stage in stage_parameters(layout)]
    setup = Setup(model, random_weights(spec), parallel, SHOW_GRADIENT, precision)
    world_size = parallel_sizes(parallel).world_size
    found = run_ranks(allocated_after_update, world_size, setup, ragged_batch(8, spec.vocab_size))
    per_stage = world_size // parallel.pp_size
    for pp_rank, planned in enumerate(stages):
        ranks = found[pp_rank * per_stage : (pp_rank + 1) * per_stage]
        for rank in ranks:
            assert rank.weights == planned.weights
            assert rank.gradients == planned.gradients
        # A rank's share ends in the middle of a parameter or of alignment: the plan gives the average.
        average = sum(rank.optimizer for rank in ranks) / len(ranks)
        assert average == pytest.approx(planned.optimizer, rel=TOLERANCE)
