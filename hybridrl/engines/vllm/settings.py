"""How vLLM is set up for HybridRL, and what differs between platforms.

Everything that the engine is told and is not in :class:`RolloutConfig` stands here with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs

from hybridrl.config.choices import Platform
from hybridrl.config.schema import RolloutConfig
from hybridrl.engines.vllm.rotary import rotary_arguments
from hybridrl.errors import EngineError

_WORKER_EXTENSION = "hybridrl.engines.vllm.worker.WorkerExtension"


def environment(platform: Platform, config: RolloutConfig, cores: Sequence[Sequence[int]] | None) -> dict[str, str]:
    """Return the environment variables that vLLM reads when its processes start.

    Args:
        cores: CPU cores of each tensor-parallel worker (cpu platform); None lets the operating system place the threads.
    """
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR")}
    if platform is not Platform.CPU:
        return variables
    if cores is not None and len(cores) != config.tp_size:
        raise EngineError(
            f"rollout cores: got lists for {len(cores)} workers, expected rollout.tp_size = {config.tp_size}"
        )
    variables |= {
        # The workers of a replica share a host; without this, gloo listens on the address that the host's name resolves to.
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind" if cores is None else "|".join(",".join(map(str, c)) for c in cores),
    }
    if cores is None:
        variables["OMP_NUM_THREADS"] = str(config.threads_per_rank)
    if config.tp_size == 1:
        # One worker runs inside the engine process: a process and two hand-overs per token fewer than vLLM's default on CPU.
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return variables


def engine_arguments(
    folder: Path, platform: Platform, config: RolloutConfig, seed: int, *, records_routing: bool = False
) -> AsyncEngineArgs:
    """Return the arguments of one replica.

    Args:
        records_routing: Record which experts each token chooses.
    """
    arguments: dict[str, object] = {
        "model": str(folder),
        "dtype": config.precision.value,
        "tensor_parallel_size": config.tp_size,
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": config.max_running_samples,
        "enforce_eager": config.enforce_eager,
        "seed": seed,
        # Token ids in, token ids out: agent loops own the text.
        "skip_tokenizer_init": True,
        # Sampling is what the request says; a checkpoint's generation_config.json must not change it.
        "generation_config": "vllm",
        # The log-prob of a token under the distribution that it was drawn from, not under the raw logits.
        "logprobs_mode": "processed_logprobs",
        # The experts of a cached prefix are kept by vLLM itself, and only on GPUs.
        "enable_prefix_caching": not (records_routing and platform is Platform.CPU),
        "disable_log_stats": True,
        "worker_extension_cls": _WORKER_EXTENSION,
    }
    if records_routing and platform is Platform.CUDA:
        arguments["enable_return_routed_experts"] = True
    return AsyncEngineArgs(**(arguments | _placement(platform, config) | rotary_arguments(folder, platform)))


def _placement(platform: Platform, config: RolloutConfig) -> dict[str, object]:
    if platform is Platform.CUDA:
        return {"gpu_memory_utilization": config.gpu_memory_fraction}
    return {
        "distributed_executor_backend": "uni" if config.tp_size == 1 else "mp",
        # vLLM rewinds a seeded request's generator after a partial prefill in a way that CPU generators refuse (0.32).
        "enable_chunked_prefill": False,
    }
