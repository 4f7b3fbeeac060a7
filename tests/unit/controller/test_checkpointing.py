"""When checkpoints are made and become complete, and what a save that fails does."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridrl.checkpoint.folder import CheckpointFolder, find_checkpoints
from hybridrl.config.schema import CheckpointConfig
from hybridrl.controller.checkpointing import Checkpointer
from hybridrl.controller.run_state import RunState, read_run_state
from hybridrl.data.stream import StreamState
from hybridrl.layout.roles import ModelRole
from tests.unit.controller.fakes import FakeRecorder, FakeSavedModel


def state(step: int) -> RunState:
    return RunState(step, StreamState(8 * step, 0, 1), {"reward_kl_coef": 0.1}, (0.25,), ())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def checkpointer(
    tmp_path: Path,
    actor: FakeSavedModel,
    recorder: FakeRecorder,
    critic: FakeSavedModel | None = None,
    **settings: object,
) -> Checkpointer:
    config = CheckpointConfig(**{"every_steps": 2, "keep": 2} | settings)
    return Checkpointer(
        config,
        CheckpointFolder(tmp_path / "saved", config.keep),
        [actor, *([critic] if critic else [])],
        recorder,
        tmp_path / "model",
    )


def steps_saved(tmp_path: Path) -> list[int]:
    return [each.manifest.step for each in find_checkpoints(tmp_path / "saved").complete]


def test_every_nth_step_and_the_last_are_saved_with_everything_that_belongs_to_them(
    tmp_path: Path, model: Path
) -> None:
    saving = checkpointer(tmp_path, FakeSavedModel(), FakeRecorder(), is_async=False, keep=9)
    for step in range(1, 6):
        saving.after_step(state(step), is_last=step == 5)
    assert steps_saved(tmp_path) == [5, 4, 2]
    newest = find_checkpoints(tmp_path / "saved").complete[0]
    assert sorted(newest.manifest.files) == [
        "actor_00000.safetensors", "actor_00001.safetensors", "model/config.json", "model/tokenizer.json", "run.json",
        "samples.arrow",
    ]  # fmt: skip
    assert read_run_state(newest.folder) == state(5)


def test_training_goes_on_while_the_ranks_write_and_the_manifest_comes_when_all_are_done(
    tmp_path: Path, model: Path
) -> None:
    actor, recorder = FakeSavedModel(pending=2), FakeRecorder()
    saving = checkpointer(tmp_path, actor, recorder, every_steps=4)
    complete = []
    for step in range(4, 8):
        saving.after_step(state(step), is_last=False)
        complete.append(steps_saved(tmp_path))
    assert complete == [[], [], [], [4]]
    assert recorder.phases == ["checkpoint"] * 4


def test_the_next_save_waits_for_the_one_before_and_finish_for_the_last(tmp_path: Path, model: Path) -> None:
    actor = FakeSavedModel(pending=3)
    saving = checkpointer(tmp_path, actor, FakeRecorder(), every_steps=1)
    saving.after_step(state(1), is_last=False)
    saving.after_step(state(2), is_last=False)
    assert steps_saved(tmp_path) == [1]
    actor.pending = 3
    saving.finish()
    assert steps_saved(tmp_path) == [2, 1]


def test_a_rank_that_cannot_write_is_reported_after_the_next_step_and_the_run_goes_on(
    tmp_path: Path, model: Path
) -> None:
    actor, recorder = FakeSavedModel(), FakeRecorder()
    saving = checkpointer(tmp_path, actor, recorder)
    saving.after_step(state(2), is_last=False)
    saving.after_step(state(3), is_last=False)
    actor.errors = ("actor rank 1: No space left on device",)
    saving.after_step(state(4), is_last=False)
    assert recorder.said == []
    saving.after_step(state(5), is_last=False)
    assert recorder.said == [
        f"the checkpoint after step 4 could not be written into {tmp_path / 'saved' / 'step_000004'}, the run goes on: "
        "actor rank 1: No space left on device"
    ]
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["step_000002"]
    actor.errors = ()
    saving.after_step(state(6), is_last=True)
    saving.finish()
    assert steps_saved(tmp_path) == [6, 2]


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, model: Path) -> None:
    (tmp_path / "saved").write_text("a file")
    recorder = FakeRecorder()
    checkpointer(tmp_path, FakeSavedModel(), recorder).after_step(state(2), is_last=False)
    assert len(recorder.said) == 1 and "step 2 could not be written" in recorder.said[0]


def test_a_save_that_takes_too_long_counts_as_failed(tmp_path: Path, model: Path) -> None:
    recorder = FakeRecorder()
    saving = checkpointer(tmp_path, FakeSavedModel(pending=10**9), recorder, timeout_s=1e-9)
    saving.after_step(state(2), is_last=False)
    saving.finish()
    assert recorder.said == [
        f"the checkpoint after step 2 could not be written into {tmp_path / 'saved' / 'step_000002'}, the run goes on: "
        "not done after 1e-09 s"
    ]
    assert list((tmp_path / "saved").iterdir()) == []


def test_no_checkpoint_is_begun_while_ranks_still_write_one_that_was_given_up(tmp_path: Path, model: Path) -> None:
    actor, recorder = FakeSavedModel(pending=10**9), FakeRecorder()
    saving = checkpointer(tmp_path, actor, recorder, is_async=False, timeout_s=1e-9)
    saving.after_step(state(2), is_last=False)
    actor.files = {}
    saving.after_step(state(4), is_last=False)
    assert actor.files == {}, "begun"
    assert recorder.said[1:] == [
        f"the checkpoint after step 4 could not be written into {tmp_path / 'saved' / 'step_000004'}, the run goes on: "
        "ranks still write that after step 2; look at their storage"
    ]
    actor.pending = 0
    saving.after_step(state(6), is_last=False)
    assert steps_saved(tmp_path) == [6] and len(recorder.said) == 2


def test_the_last_checkpoint_waits_for_ranks_that_are_late_with_another(tmp_path: Path, model: Path) -> None:
    actor, recorder = FakeSavedModel(pending=10**9), FakeRecorder()
    saving = checkpointer(tmp_path, actor, recorder, is_async=False, timeout_s=0.5)
    saving.after_step(state(2), is_last=False)
    actor.pending = 3
    saving.after_step(state(3), is_last=True)
    assert steps_saved(tmp_path) == [3] and len(recorder.said) == 1


def test_a_critic_is_saved_beside_the_actor_and_both_are_waited_for(tmp_path: Path, model: Path) -> None:
    critic = FakeSavedModel(ModelRole.CRITIC, num_ranks=1, pending=1)
    saving = checkpointer(tmp_path, FakeSavedModel(), FakeRecorder(), critic)
    saving.after_step(state(2), is_last=False)
    saving.after_step(state(3), is_last=False)
    assert steps_saved(tmp_path) == []
    saving.finish()
    (saved,) = find_checkpoints(tmp_path / "saved").complete
    assert [path.name for path in saved.rank_files("critic")] == ["critic_00000.safetensors"]
    assert len(saved.rank_files("actor")) == 2
