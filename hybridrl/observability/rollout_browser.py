"""``hybridrl rollouts``: the samples of a run as one self-contained page to filter and read (``rollouts_page.html``).

The page carries the samples, so its size is bounded by tokens: when a run has more, steps are thinned evenly, the last one always
stays, and of a single step too large the samples are. Of a very long sample the middle is left out. The page says what it lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybridrl.observability.page import write_page
from hybridrl.observability.records import RolloutRecord
from hybridrl.observability.rollout_file import num_tokens_in, read_rollouts
from hybridrl.observability.run_folder import RunFolder
from hybridrl.observability.token_text import Decode, token_texts

_MAX_TEXT_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class PageLimits:
    """Bounds on the page.

    Attributes:
        max_tokens: Tokens of all samples together.
        max_sample_tokens: Tokens of one sample; of a longer one, so many from both ends are shown.
    """

    max_tokens: int = 400_000
    max_sample_tokens: int = 4096


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """The samples of a training step, or the held-out ones of a policy version.

    Attributes:
        number: Of the step or version.
    """

    path: Path
    number: int
    is_held_out: bool
    num_tokens: int


def write_rollouts_page(
    path: Path, run: RunFolder, decode: Decode | None, is_wanted: Callable[[int], bool], limits: PageLimits
) -> str:
    """Write the page; return what it shows and lacks.

    Args:
        decode: Turns token ids into text; None shows ids.
        is_wanted: Whether a step, or the version of held-out samples, is to be shown.

    Raises:
        DataError: A file of samples cannot be read.
    """
    found = [file for file in rollout_files(run) if is_wanted(file.number)]
    files = fitting(found, limits.max_tokens)
    gathered = _Samples(decode, limits)
    num_dropped = sum(gathered.add(file) for file in files)
    note = _note(found, files, len(gathered.rows), num_dropped, gathered.num_cut)
    data = {"run": run.name, "path": str(run.path), "note": note, "tokens": gathered.tokens, "samples": gathered.rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, "rollouts_page.html", data)
    return note


def rollout_files(run: RunFolder) -> list[RolloutFile]:
    """Return every file of samples of a run, training first."""
    kinds = ((run.rollout_files(), False), (run.evaluation_files(), True))
    return [
        RolloutFile(path, number, is_held_out, num_tokens_in(path))
        for files, is_held_out in kinds
        for number, path in files.items()
    ]


def fitting(files: Sequence[RolloutFile], max_tokens: int) -> list[RolloutFile]:
    """Return the largest evenly spaced selection, of training steps and held-out versions alike, that has room; the last ones at least."""
    stride = 1
    while True:
        kinds = ([file for file in files if file.is_held_out is held_out] for held_out in (False, True))
        kept = [file for kind in kinds for file in kind[::-1][::stride][::-1]]
        if stride >= len(files) or sum(file.num_tokens for file in kept) <= max_tokens:
            return kept
        stride *= 2


class _Samples:
    """Gathers the page's rows, and each pair of token id and text once."""

    def __init__(self, decode: Decode | None, limits: PageLimits) -> None:
        self.rows: list[dict[str, object]] = []
        self.tokens: list[tuple[int, str]] = []
        self.num_cut = 0
        self._decode = decode
        self._limits = limits
        self._room = limits.max_tokens
        self._indices: dict[tuple[int, str], int] = {}

    def add(self, file: RolloutFile) -> int:
        """Add the samples of a file, evenly thinned to the room that is left; return how many did not fit."""
        rollouts = read_rollouts(file.path)
        stride = max(1, math.ceil(file.num_tokens / max(1, self._room)))
        kept = rollouts[::stride]
        for rollout in kept:
            self.rows.append(self._row(file, rollout))
        self._room -= sum(len(rollout.token_ids) for rollout in kept)
        return len(rollouts) - len(kept)

    def _row(self, file: RolloutFile, rollout: RolloutRecord) -> dict[str, object]:
        shown = self._shown(len(rollout.token_ids))
        produced = shown[rollout.loss_mask[shown]]
        differences = (rollout.old_logprobs - rollout.rollout_logprobs)[produced]
        is_trained = not file.is_held_out
        return {
            "step": file.number,
            "held_out": file.is_held_out,
            "prompt_id": rollout.prompt_id,
            "index": rollout.sample_index,
            "source": rollout.data_source,
            "prompt": _shortened(rollout.prompt),
            "response": _shortened(rollout.response),
            "answer": _shortened(rollout.answer),
            "reward": _rounded(rollout.reward),
            "finish": rollout.finish_reason,
            "turns": rollout.num_turns,
            "length": int(rollout.loss_mask.sum()),
            "versions": sorted({int(version) for version in rollout.policy_versions[rollout.loss_mask]}),
            "omitted": len(rollout.token_ids) - len(shown),
            "tokens": self._token_indices(rollout.token_ids[shown]),
            "spans": run_lengths(rollout.loss_mask[shown]),
            "logprobs": [_rounded(value) for value in rollout.rollout_logprobs[produced]],
            "differences": [_rounded(value) for value in differences] if is_trained else None,
            "advantages": _advantages(rollout.advantages[produced]) if is_trained else None,
        }

    def _shown(self, num_tokens: int) -> NDArray[np.int64]:
        """Return the positions that are shown: all, or as many from both ends."""
        positions = np.arange(num_tokens)
        if num_tokens <= self._limits.max_sample_tokens:
            return positions
        self.num_cut += 1
        half = self._limits.max_sample_tokens // 2
        return np.concatenate([positions[:half], positions[-half:]])

    def _token_indices(self, token_ids: NDArray[np.int32]) -> list[int]:
        ids = token_ids.tolist()
        texts = token_texts(ids, self._decode) if self._decode else [f"{token} " for token in ids]
        return [self._index(pair) for pair in zip(ids, texts, strict=True)]

    def _index(self, pair: tuple[int, str]) -> int:
        index = self._indices.setdefault(pair, len(self.tokens))
        if index == len(self.tokens):
            self.tokens.append(pair)
        return index


def run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Return the lengths of the runs of equal values, the first of which is False.

    Example: F F T T T F T is 2, 3, 1, 1, and T F is 0, 1, 1.
    """
    changes = np.flatnonzero(np.diff(mask, prepend=False))
    return [int(length) for length in np.diff(changes, prepend=0, append=len(mask))]


def _advantages(values: NDArray[np.float32]) -> float | list[float | None] | None:
    """Return one number where all tokens have the same, as without a critic."""
    if len(values) and (values == values[0]).all():
        return _rounded(values[0])
    return [_rounded(value) for value in values]


def _rounded(value: float | np.floating) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARACTERS else text[:_MAX_TEXT_CHARACTERS] + " ..."


def _note(
    found: Sequence[RolloutFile], files: Sequence[RolloutFile], num_shown: int, num_dropped: int, num_cut: int
) -> str:
    parts = [f"{num_shown:,} samples of {len(files):,} steps and evaluations"]
    if len(files) < len(found):
        parts.append(f"{len(found) - len(files):,} of {len(found):,} steps and evaluations left out")
    if num_dropped:
        parts.append(f"{num_dropped:,} samples of the shown steps left out")
    if num_cut:
        parts.append(f"the middle of {num_cut:,} long samples left out")
    return "; ".join(parts)
