"""Scores one sequence with a whole model, each implementation in a fresh process that gives its memory back.

A process imports what it needs only after its environment is set.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from hybridrl.config.choices import Platform
from hybridrl.config.schema import ExperimentConfig, ParallelConfig, RolloutConfig
from hybridrl.errors import EngineError
from hybridrl.parity.activations import Activations, Floats

T = TypeVar("T")


def score_with_transformers(config: ExperimentConfig, token_ids: list[int]) -> Activations:
    """Return the reference.

    Raises:
        EngineError: The process died, as it does when memory runs out.
    """
    return run_in_process("transformers", _transformers, config, token_ids)


def score_with_megatron(config: ExperimentConfig, token_ids: list[int]) -> Activations:
    """Return what Megatron computes on one rank.

    Raises:
        EngineError: As above.
    """
    return run_in_process("Megatron on one rank", _megatron, config, token_ids)


def score_with_vllm(config: ExperimentConfig, token_ids: list[int]) -> Floats:
    """Return the logits after each token but the last, [tokens - 1, vocabulary] float32.

    Raises:
        EngineError: As above.
    """
    return run_in_process("vLLM", _vllm, config, token_ids)


def run_in_process(
    name: str, score: Callable[[ExperimentConfig, list[int]], T], config: ExperimentConfig, token_ids: list[int]
) -> T:
    """Call `score` in a fresh process.

    Raises:
        EngineError: The process died.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(score, config, token_ids).result()
        except BrokenProcessPool as e:
            raise EngineError(
                f"{name}: its process died while it scored {len(token_ids)} tokens, perhaps for want of memory; free some, or "
                "compare a smaller model of the same family"
            ) from e


def _transformers(config: ExperimentConfig, token_ids: list[int]) -> Activations:
    _set_threads(config)
    from hybridrl.engines.reference.activations import reference_activations

    return reference_activations(Path(config.model.path), token_ids)


def _megatron(config: ExperimentConfig, token_ids: list[int]) -> Activations:
    _set_threads(config)
    from hybridrl.engines.megatron import cpu
    from hybridrl.engines.megatron.activations import megatron_activations
    from hybridrl.engines.megatron.process_groups import start_process_group
    from hybridrl.engines.megatron.single_rank import load_whole_model

    if config.platform is Platform.CPU:
        cpu.install()
    with tempfile.NamedTemporaryFile() as store:
        groups = start_process_group(
            0, ParallelConfig(), config.platform, f"file://{store.name}", config.trainer.startup_timeout_s
        )
        model = load_whole_model(Path(config.model.path), groups, config.platform)
        return megatron_activations(model, token_ids)


def _vllm(config: ExperimentConfig, token_ids: list[int]) -> Floats:
    from hybridrl.engines.vllm.settings import environment

    os.environ.update(environment(config.platform, RolloutConfig(kv_cache_gib=1), None))
    from hybridrl.engines.vllm.logits import sequence_logits

    logits: Floats = sequence_logits(Path(config.model.path), token_ids, len(token_ids) // 2, config.platform).numpy()
    return logits


def _set_threads(config: ExperimentConfig) -> None:
    os.environ["OMP_NUM_THREADS"] = str(config.actor.threads_per_rank)
