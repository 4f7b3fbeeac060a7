"""What vLLM is told when a replica starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.config.choices import Platform
from hybridrl.config.schema import RolloutConfig
from hybridrl.engines.vllm.settings import engine_arguments, environment
from hybridrl.errors import EngineError


def test_each_worker_is_bound_to_its_cores():
    variables = environment(Platform.CPU, RolloutConfig(tp_size=2, kv_cache_gib=3), [[0, 1], [2, 3]])
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert variables["VLLM_CPU_KVCACHE_SPACE"] == "3"


@pytest.mark.parametrize("num_threads", [1, 2])
def test_without_cores_the_threads_of_a_worker_run_anywhere(num_threads):
    variables = environment(Platform.CPU, RolloutConfig(threads_per_rank=num_threads), None)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables["OMP_NUM_THREADS"] == str(num_threads)


def test_a_core_list_per_worker_is_expected():
    with pytest.raises(EngineError, match=r"got lists for 1 workers, expected rollout\.tp_size = 2"):
        environment(Platform.CPU, RolloutConfig(tp_size=2), [[0]])


def test_cpu_settings_stay_off_cuda():
    assert not any("CPU" in name for name in environment(Platform.CUDA, RolloutConfig(), None))


def test_log_probs_are_the_processed_ones_and_the_checkpoint_sets_no_sampling():
    arguments = engine_arguments(Path("model"), Platform.CUDA, RolloutConfig(gpu_memory_fraction=0.5), 3)
    assert arguments.logprobs_mode == "processed_logprobs"
    assert arguments.generation_config == "vllm"
    assert arguments.skip_tokenizer_init
    assert arguments.gpu_memory_utilization == 0.5
    assert arguments.seed == 3
