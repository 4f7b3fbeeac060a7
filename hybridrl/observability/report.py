"""``report.html``: one self-contained page with the run's curves and sample rollouts.

The page is ``report_page.html`` beside this file (``page.py``). What it draws is decided by the page's own script, so this module
only gathers data and bounds its size: long runs are thinned to a fixed number of points and of steps with samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from hybridrl.observability.page import write_page
from hybridrl.observability.records import Metric, Outcome, RolloutRecord

_MAX_POINTS = 2000
_MAX_SAMPLED_STEPS = 32
_SAMPLES_PER_STEP = 8
_MAX_TEXT_CHARACTERS = 4000
_WORST_PER_STEP = 5
_CONTEXT_TOKENS = 12

Decode = Callable[[Sequence[int]], str]


class Report:
    """Gathers what the page shows and writes it.

    Args:
        path: File to write.
        name: Name of the run.
        num_steps: Steps that the run intends to take.
        resolved_config: YAML text of its configuration.
        decode: Turns token ids into text, for the tokens on which the two engines differ most.
    """

    def __init__(self, path: Path, name: str, num_steps: int, resolved_config: str, decode: Decode = str) -> None:
        self.path = path
        self._name = name
        self._num_steps = num_steps
        self._resolved_config = resolved_config
        self._started = _now()
        self._rows: list[tuple[int, dict[str, float | None]]] = []
        self._decode = decode
        self._samples: dict[int, list[dict[str, object]]] = {}
        self._worst: dict[int, list[dict[str, object]]] = {}
        self._sample_stride = 1

    def add_metrics(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Add the metrics of one step."""
        numbers = {name: float(value) for name, value in metrics.items()}
        self._rows.append((step, {name: value if math.isfinite(value) else None for name, value in numbers.items()}))

    def add_rollouts(
        self, step: int, rollouts: Sequence[RolloutRecord], held_out: Sequence[RolloutRecord] = ()
    ) -> None:
        """Add some rollouts of one step; samples of the newest step and of evenly spaced earlier ones are kept.

        Args:
            held_out: Samples of the evaluation that belongs to the step; some of them follow the others.
        """
        trained = [_sample(rollout) for rollout in _some(rollouts)]
        self._samples[step] = trained + [_held_out_sample(rollout) for rollout in _some(held_out)]
        self._worst[step] = _worst_tokens(rollouts, self._decode)
        if len(self._samples) > _MAX_SAMPLED_STEPS:
            self._sample_stride *= 2
        self._samples = {
            kept: rows for kept, rows in self._samples.items() if kept == step or kept % self._sample_stride == 0
        }
        self._worst = {kept: self._worst[kept] for kept in self._samples}

    def write(self, outcome: Outcome) -> None:
        """Replace the page by one with everything added so far."""
        write_page(self.path, "report_page.html", self._data(outcome))

    def _data(self, outcome: Outcome) -> dict[str, object]:
        stride = math.ceil(len(self._rows) / _MAX_POINTS) or 1
        rows = [
            row for index, row in enumerate(reversed(self._rows)) if index % stride == 0 or "eval/reward_mean" in row[1]
        ][::-1]
        names = sorted({name for _, metrics in rows for name in metrics})
        return {
            "name": self._name,
            "outcome": outcome.value,
            "num_steps": self._num_steps,
            "started": self._started,
            "updated": _now(),
            "config": self._resolved_config,
            "steps": [step for step, _ in rows],
            "series": {name: [metrics.get(name) for _, metrics in rows] for name in names},
            "samples": self._samples,
            "worst": self._worst,
        }


def _sample(rollout: RolloutRecord) -> dict[str, object]:
    produced = rollout.loss_mask
    advantage = float(rollout.advantages[produced].mean()) if produced.any() else 0.0
    gap = float(np.abs(rollout.rollout_logprobs - rollout.old_logprobs)[produced].max(initial=0.0))
    numbers = {"reward": rollout.reward, "advantage": advantage, "gap": gap}
    return {
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "prompt": _shortened(rollout.prompt),
        "response": _shortened(rollout.response),
        "answer": _shortened(rollout.answer),
        "finish": rollout.finish_reason,
        "turns": rollout.num_turns,
        "tokens": int(produced.sum()),
        "version": int(rollout.policy_versions.max(initial=-1)),
    }


def _held_out_sample(rollout: RolloutRecord) -> dict[str, object]:
    """Return what is shown of a sample on which nothing is trained."""
    return {**_sample(rollout), "advantage": None, "gap": None, "finish": f"{rollout.finish_reason} (held out)"}


def _some(rollouts: Sequence[RolloutRecord]) -> Sequence[RolloutRecord]:
    every = max(1, len(rollouts) // _SAMPLES_PER_STEP)
    return rollouts[::every][:_SAMPLES_PER_STEP]


def _worst_tokens(rollouts: Sequence[RolloutRecord], decode: Decode) -> list[dict[str, object]]:
    """Return the tokens whose two log-probs lie farthest apart, with what stands around them."""
    found = []
    for rollout in rollouts:
        gaps = np.where(rollout.loss_mask, np.abs(rollout.rollout_logprobs - rollout.old_logprobs), -1.0)
        for token in np.argsort(-gaps)[:_WORST_PER_STEP]:
            if math.isfinite(gaps[token]) and gaps[token] >= 0:
                found.append((float(gaps[token]), rollout, int(token)))
    found.sort(key=lambda entry: -entry[0])
    return [_worst_token(gap, rollout, token, decode) for gap, rollout, token in found[:_WORST_PER_STEP]]


def _worst_token(gap: float, rollout: RolloutRecord, token: int, decode: Decode) -> dict[str, object]:
    ids = rollout.token_ids.tolist()
    return {
        "gap": gap,
        "sampler": float(rollout.rollout_logprobs[token]),
        "trainer": float(rollout.old_logprobs[token]),
        "where": f"{rollout.prompt_id} sample {rollout.sample_index}, token {token} of {len(ids)}",
        "version": int(rollout.policy_versions[token]),
        "before": decode(ids[max(0, token - _CONTEXT_TOKENS) : token]),
        "token": decode(ids[token : token + 1]),
        "after": decode(ids[token + 1 : token + 1 + _CONTEXT_TOKENS]),
    }


def _shortened(text: str) -> str:
    rest = len(text) - _MAX_TEXT_CHARACTERS
    return text if rest <= 0 else f"{text[:_MAX_TEXT_CHARACTERS]} ... ({rest} more characters in the parquet file)"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
