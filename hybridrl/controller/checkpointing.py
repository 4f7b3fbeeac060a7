"""Saves a run every so often.

    step done -> due?    ranks copy their state to host memory, the controller writes its own; training goes on
              -> begun?  ask the ranks: all files on disk -> manifest, and older checkpoints go

A checkpoint is begun after its step was recorded, so what the run's folder says of later steps is dropped on resume. At most one
save is under way. A save that fails is reported after the next step, leaves nothing behind, and the run goes on: the checkpoint
before it is still there. While ranks still write one that was given up, on storage that hangs, none is begun: each would take memory
for one more copy.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybridrl.checkpoint.folder import MODEL, CheckpointFolder
from hybridrl.checkpoint.manifest import FileRecord, record_of
from hybridrl.config.schema import CheckpointConfig
from hybridrl.controller.interfaces import Recorder, SavedModel
from hybridrl.controller.run_state import RunState, write_run_state
from hybridrl.reshard.checkpoint import copy_companions
from hybridrl.roles.future import wait_all

if TYPE_CHECKING:
    from hybridrl.roles.megatron_state import RoleSave

_POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class _Begun:
    """A save under way; `own` are the files that the controller wrote."""

    step: int
    own: Mapping[str, FileRecord]
    deadline: float


class Checkpointer:
    """Saves one run.

    Args:
        folder: Where to.
        models: Those that are trained.
        model_folder: HF checkpoint whose config and tokenizer belong to the weights.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: CheckpointFolder,
        models: Sequence[SavedModel],
        recorder: Recorder,
        model_folder: Path,
    ) -> None:
        self._config = config
        self._folder = folder
        self._models = models
        self._recorder = recorder
        self._model_folder = model_folder
        self._begun: _Begun | None = None
        self._overdue: int | None = None  # step of the save that was given up before all ranks had written it

    def after_step(self, state: RunState, *, is_last: bool) -> None:
        """Complete what was begun if it is ready, and begin what is due, as the last step always is."""
        with self._recorder.phase("checkpoint"):
            self._complete(wait_s=0.0)
            if is_last or state.step % self._config.every_steps == 0:
                self.save(state, is_last=is_last)

    def save(self, state: RunState, *, is_last: bool) -> None:
        """Begin a checkpoint, and end it unless that is to happen meanwhile. The last one waits for ranks that are late with another."""
        self.finish()
        if self._overdue is not None:
            if not self._are_through(self._config.timeout_s if is_last else 0.0):
                self._give_up(state.step, f"ranks still write that after step {self._overdue}; look at their storage")
                return
            self._overdue = None
        try:
            folder = self._folder.begin(state.step)
            own = write_run_state(folder, state) | self._write_model(folder / MODEL)
        except OSError as e:
            self._give_up(state.step, str(e))
            return
        wait_all([model.begin_save(folder) for model in self._models])
        self._begun = _Begun(state.step, own, time.monotonic() + self._config.timeout_s)
        if not self._config.is_async:
            self.finish()

    def finish(self) -> None:
        """Wait for what was begun."""
        while self._begun is not None:
            self._complete(_POLL_S)

    def _complete(self, wait_s: float) -> None:
        begun = self._begun
        if begun is None:
            return
        saves = self._poll(wait_s)
        is_done = all(save.is_done for save in saves)
        if not is_done and time.monotonic() <= begun.deadline:
            return
        self._begun = None
        self._overdue = None if is_done else begun.step
        errors = [error for save in saves for error in save.errors]
        if errors or not is_done:
            self._give_up(begun.step, "; ".join(errors) or f"not done after {self._config.timeout_s:g} s")
            return
        try:
            self._folder.complete(begun.step, {**begun.own, **{n: r for save in saves for n, r in save.files.items()}})
        except OSError as e:
            self._give_up(begun.step, str(e))

    def _are_through(self, within_s: float) -> bool:
        """Whether all ranks have written what they began, within a time."""
        until = time.monotonic() + within_s
        while not all(save.is_done for save in self._poll(min(_POLL_S, within_s))):
            if time.monotonic() >= until:
                return False
        return True

    def _poll(self, wait_s: float) -> list[RoleSave]:
        polls = [model.poll_save(wait_s) for model in self._models]
        wait_all(polls)
        return [poll.value() for poll in polls]

    def _give_up(self, step: int, reason: str) -> None:
        self._recorder.status(
            f"the checkpoint after step {step} could not be written into {self._folder.path(step)}, the run goes on: {reason}"
        )
        self._folder.discard(step)

    def _write_model(self, folder: Path) -> dict[str, FileRecord]:
        folder.mkdir()
        return {f"{MODEL}/{path.name}": record_of(path) for path in copy_companions(self._model_folder, folder)}
