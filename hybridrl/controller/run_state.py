"""What the controller must remember between two steps, and its files in a checkpoint.

    run.json        step, position in the data, state of the algorithm, accuracies so far
    samples.arrow   batches that were generated and are not trained on yet (``max_policy_lag`` above 0)

Between two steps no rollout is half done: the weight sync waits for those in flight. Nor is a prompt set aside, since dynamic
sampling ends within its step. Seeds of rollouts follow from the run's seed, the prompt and the index of the sample, so they need
no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.manifest import FileRecord, record_of
from hybridrl.config.algorithm import AlgorithmConfig
from hybridrl.config.schema import TrainerConfig
from hybridrl.data.sample import Sample
from hybridrl.data.sample_file import read_samples, write_samples
from hybridrl.data.stream import StreamState

_RUN, _SAMPLES = "run.json", "samples.arrow"


@dataclass(frozen=True, slots=True)
class RunState:
    """How a run stands before a step.

    Attributes:
        step: Steps taken so far, which is the policy version in force.
        stream: Where the training prompts stand.
        algorithm: See ``Algorithm.state_dict``.
        accuracies: Of all evaluations so far.
        waiting: Batches of samples that later steps train on, in order.
        settings: See :func:`batch_settings`.
    """

    step: int
    stream: StreamState
    algorithm: Mapping[str, float]
    accuracies: tuple[float, ...]
    waiting: tuple[tuple[Sample, ...], ...]
    settings: Mapping[str, int] = field(default_factory=dict)


def batch_settings(algorithm: AlgorithmConfig, trainer: TrainerConfig) -> dict[str, int]:
    """Return what decides which samples a step trains on, by key."""
    return {
        "algorithm.prompts_per_step": algorithm.prompts_per_step,
        "algorithm.samples_per_prompt": algorithm.samples_per_prompt,
        "trainer.max_policy_lag": trainer.max_policy_lag,
    }


def write_run_state(folder: Path, state: RunState) -> dict[str, FileRecord]:
    """Write the state into a checkpoint; return its files."""
    body = {
        "step": state.step,
        "stream": asdict(state.stream),
        "algorithm": dict(state.algorithm),
        "accuracies": state.accuracies,
        "num_waiting": len(state.waiting),
        "settings": dict(state.settings),
    }
    (folder / _RUN).write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    write_samples(folder / _SAMPLES, state.waiting)
    return {name: record_of(folder / name) for name in (_RUN, _SAMPLES)}


def read_run_state(folder: Path) -> RunState:
    """Read the state from a checkpoint whose files are as they were written."""
    body = _read_body(folder)
    return RunState(
        step=body["step"],
        stream=StreamState(**body["stream"]),
        algorithm=body["algorithm"],
        accuracies=tuple(body["accuracies"]),
        waiting=tuple(tuple(batch) for batch in read_samples(folder / _SAMPLES, body["num_waiting"])),
        settings=body["settings"],
    )


def read_batch_settings(folder: Path) -> dict[str, int]:
    """Read the settings and the seed alone; none when the file is damaged, which loading says."""
    try:
        body = _read_body(folder)
        return {**body["settings"], "seed": body["stream"]["seed"]}
    except (OSError, ValueError, KeyError):
        return {}


def _read_body(folder: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((folder / _RUN).read_text(encoding="utf-8"))
    return body
