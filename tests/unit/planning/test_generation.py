"""A replica: bytes of its cache, weights that a decoding step reads, and what decides how long it takes."""

from __future__ import annotations

import numpy as np
import pytest

from hybridrl.planning.generation import decode_step, kv_bytes_per_token
from hybridrl.planning.parameters import num_active_parameters
from tests.unit.planning.recipes import cluster, planned, recipe, spec


@pytest.mark.parametrize(
    ("name", "tp", "expected"),
    [
        ("qwen3-30b-a3b", 1, 2 * 48 * 4 * 128 * 2),
        ("qwen3-30b-a3b", 2, 2 * 48 * 2 * 128 * 2),
        ("qwen3-30b-a3b", 8, 2 * 48 * 1 * 128 * 2),
        # Latent attention: the latent and the rotary part, whole on every worker.
        ("deepseek-v3", 1, 61 * (512 + 64) * 2),
        ("deepseek-v3", 16, 61 * (512 + 64) * 2),
    ],
)
def test_a_token_takes_as_much_cache_as_its_heads(name, tp, expected):
    checked = recipe(name, f"rollout.tp_size={tp}")
    assert kv_bytes_per_token(checked.config, checked.spec) == expected


def test_a_step_reads_the_experts_that_its_sequences_hit():
    checked = recipe("qwen3-30b-a3b")
    draws = np.random.default_rng(0)
    hit = np.mean([len(np.unique([draws.permutation(128)[:8] for _ in range(64)])) for _ in range(200)]) / 128
    step = decode_step(checked.config, checked.spec, cluster("h100"), 64, 0)
    experts = 48 * 128 * 3 * 2048 * 768
    dense = 30_532_122_624 - experts - 151936 * 2048
    assert step.read_bytes == pytest.approx(2 * (dense - 2048 + experts * hit), rel=1e-3)


def test_a_step_of_one_sequence_reads_the_active_parameters():
    checked = recipe("deepseek-v3")
    step = decode_step(checked.config, checked.spec, cluster("h200"), 1, 0)
    model = spec("deepseek-v3")
    active = num_active_parameters(model) - model.vocab_size * model.hidden_size
    assert step.read_bytes == pytest.approx(2 * active, rel=1e-4)


def test_memory_bounds_a_step_until_many_sequences_share_the_weights():
    checked = recipe("qwen3-30b-a3b", "rollout.tp_size=1")
    small, large = (decode_step(checked.config, checked.spec, cluster("h20"), n, 16) for n in (16, 8192))
    assert small.bound == "memory" and large.bound == "compute"
    rate = cluster("h20").memory_gb_per_s * 1e9
    assert small.seconds == pytest.approx((small.read_bytes / rate / 0.5, small.read_bytes / rate / 0.7))


def test_replicas_that_span_nodes_pay_for_it():
    checked = recipe("deepseek-v3")
    near, far = (decode_step(checked.config, checked.spec, cluster(name), 1, 1) for name in ("cpu", "h200"))
    assert near.seconds[0] > 0 and far.bound in ("latency", "memory")
    within, across = (
        decode_step(recipe("deepseek-v3", f"rollout.tp_size={tp}").config, checked.spec, cluster("h200"), 1, 1).seconds[
            0
        ]
        for tp in (8, 16)
    )
    assert across - 2 * 61 * 45e-6 == pytest.approx((within - 2 * 61 * 15e-6) / 2, rel=0.01)


def test_the_pool_is_weights_cache_and_what_a_pass_needs():
    plan = planned("qwen3-30b-a3b")
    replica = plan.memory.replica
    parts = replica.weight_bytes + replica.kv_bytes + replica.activation_bytes + replica.runtime_bytes
    assert parts == replica.pool_bytes == int(0.85 * plan.cluster.memory_bytes)
    # Half the model, and on each worker whole: norms and routers.
    assert replica.weight_bytes == pytest.approx(30_532_122_624, rel=1e-3)
    # One layer's experts in load layout: the largest module.
    assert replica.module_bytes == 2 * 128 * 3 * 2048 * 768 // 2


def test_samples_that_decode_at_once_fit_the_cache_and_the_limit():
    assert planned("qwen3-30b-a3b").memory.replica.running_samples == 256
    replica = planned("deepseek-v3").memory.replica
    assert replica.running_samples == replica.kv_tokens // (200 + 2000) < 256
    assert planned("qwen3-30b-a3b", "rollout.max_running_samples=32").memory.replica.running_samples == 32
