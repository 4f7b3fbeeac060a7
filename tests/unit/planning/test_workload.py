"""Batches and micro-batches of a step."""

from __future__ import annotations

import pytest

from hybridrl.planning.workload import workload
from tests.unit.planning.recipes import recipe


def test_a_step_is_divided_among_updates_ranks_and_micro_batches():
    work = workload(recipe("qwen3-30b-a3b", "algorithm.mini_batches_per_step=4").config)
    assert (work.num_prompts, work.num_samples, work.num_updates) == (64, 1024, 4)
    assert work.tokens_per_step == 1024 * 3200
    # 256 samples per update on 4 data-parallel ranks: 204,800 tokens in micro-batches of 9216.
    assert (work.samples_per_rank, work.num_micro_batches) == (64, 23)
    assert work.mean_micro_batch_tokens == pytest.approx(204_800 / 23)


def test_averages_that_nobody_set_are_half_of_the_longest():
    work = workload(recipe("qwen3-30b-a3b", "plan.mean_prompt_tokens=null", "plan.mean_response_tokens=null").config)
    assert (work.prompt_tokens, work.response_tokens, work.sample_tokens) == (512, 4096, 4608)


def test_an_interleaved_schedule_takes_micro_batches_in_multiples_of_its_stages():
    edges = (
        "actor.parallel.num_layers_in_first_pipeline_stage=null",
        "actor.parallel.num_layers_in_last_pipeline_stage=null",
    )
    overrides = ("actor.parallel.pp_size=2", "actor.parallel.vpp_size=47", "actor.parallel.dp_size=16", *edges)
    assert workload(recipe("qwen3-235b-a22b", *overrides).config).num_micro_batches == 60  # 59 would do


def test_greedy_baselines_are_generated_and_not_trained_on():
    work = workload(recipe("qwen3-30b-a3b", "algorithm.advantage.estimator=remax").config)
    assert (work.num_samples, work.num_generated) == (1024, 1024 + 64)
