"""What a rank holds in memory while its state is written, and after it could not be."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybridrl.checkpoint.state_file import Kind, RankState
from hybridrl.config.choices import Platform, Precision
from hybridrl.config.schema import ParallelConfig
from hybridrl.errors import EngineError
from hybridrl.layout.box import DType
from hybridrl.layout.roles import ModelRole
from hybridrl.layout.shard import LocalTensor, Place, ShardMap
from hybridrl.roles.megatron_launch import MegatronLaunch
from hybridrl.roles.megatron_worker import MegatronWorker

ACTOR = ModelRole.ACTOR
FILE = "actor_00000.safetensors"


class FakeState:
    """One tensor, and what is left of the copies of it."""

    def __init__(self) -> None:
        self.copies: list[weakref.ref[torch.Tensor]] = []

    @property
    def num_alive(self) -> int:
        return sum(copy() is not None for copy in self.copies)

    def snapshot(self) -> RankState:
        tensor = torch.zeros(1 << 20)
        self.copies.append(weakref.ref(tensor))
        described = {"weight": LocalTensor("weight", (tensor.numel(),), DType.FLOAT32)}
        shard_map = ShardMap(Place("actor", 0, "node", "cpu"), described, (), {})
        return RankState(shard_map, {Kind.PARAM: {"weight": tensor}}, {})


@contextmanager
def stuck(path: Path) -> Iterator[None]:
    """A pipe that takes a few bytes and then no more, and breaks in the end."""
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)
    try:
        yield
    finally:
        path.unlink()
        os.close(reader)


@pytest.fixture
def state() -> FakeState:
    return FakeState()


@pytest.fixture
def worker(state: FakeState, monkeypatch: pytest.MonkeyPatch) -> MegatronWorker:
    for name in ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"):  # it sets them
        monkeypatch.setenv(name, "1")
    worker = MegatronWorker(0, MegatronLaunch(ParallelConfig(), Precision.FLOAT32, Platform.CPU, 1, 0, 1.0, ()))
    worker._policies[ACTOR] = SimpleNamespace(state=state)
    return worker


def test_a_save_that_fails_leaves_no_copy_of_the_state(
    worker: MegatronWorker, state: FakeState, tmp_path: Path
) -> None:
    (tmp_path / FILE).symlink_to("/dev/full")
    worker.begin_save(ACTOR, tmp_path)
    assert "No space left on device" in str(worker.poll_save(ACTOR, 60.0).error)
    worker._writer.submit(int).result()  # then the thread is through with the save
    assert state.num_alive == 0


def test_no_second_copy_is_made_while_the_first_is_written(
    worker: MegatronWorker, state: FakeState, tmp_path: Path
) -> None:
    with stuck(tmp_path / FILE):
        worker.begin_save(ACTOR, tmp_path)
        assert not worker.poll_save(ACTOR, 0.0).is_done
        with pytest.raises(EngineError, match="begin_save of actor while the one before it is written"):
            worker.begin_save(ACTOR, tmp_path)
        assert len(state.copies) == state.num_alive == 1
    assert worker.poll_save(ACTOR, 60.0).is_done
    (tmp_path / "next").mkdir()
    worker.begin_save(ACTOR, tmp_path / "next")
    assert worker.poll_save(ACTOR, 60.0).record is not None
