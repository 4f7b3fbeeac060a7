"""Faults on the real stack: ranks that die or raise in each phase, and bits that flip on their way.

Each ends the run within 60 s, with an error that names role, rank and phase, and leaves no process behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hybridrl.controller.run import train
from hybridrl.errors import EngineError, WeightSyncError
from hybridrl.roles import megatron_pool
from hybridrl.roles.megatron_worker import MegatronWorker
from tests.e2e import faulty_workers
from tests.e2e.runs import demo_config, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Two ranks that depend on each other in every layer; many small messages, so that a sync has a middle.
LAYOUT = ("actor.parallel.tp_size=2", "actor.parallel.pp_size=1", "actor.parallel.ep_size=2", "weight_sync.chunk_mib=1")
LIMIT_S = 60.0


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file that a fault leaves when it strikes."""
    path = tmp_path / "struck"
    monkeypatch.setenv(faulty_workers.STRUCK_FILE_VARIABLE, str(path))
    return path


def _run(monkeypatch: pytest.MonkeyPatch, folder: Path, worker: type[MegatronWorker], *overrides: str) -> int:
    monkeypatch.setattr(megatron_pool, "MegatronWorker", worker)
    return train(demo_config(folder, "faulty", *LAYOUT, *overrides))


@pytest.fixture
def leftovers() -> Callable[[], list[str]]:
    """Return what tells which children a run left behind; those of earlier tests, such as a fork server, do not count."""
    before = set(psutil.Process().children(recursive=True))

    def find() -> list[str]:
        children = set(psutil.Process().children(recursive=True)) - before
        _, alive = psutil.wait_procs(list(children), timeout=10)
        return [" ".join(process.cmdline()) for process in alive]

    return find


@pytest.mark.parametrize(
    ("worker", "phase", "verb"),
    [
        (faulty_workers.DiesInUpdate, "update", "died"),
        (faulty_workers.DiesInLogprobs, "logprobs", "died"),
        (faulty_workers.DiesInSync, "send_weights", "died"),
        (faulty_workers.RaisesInUpdate, "update", "failed"),
    ],
)
def test_a_lost_rank_ends_the_run_with_its_name_and_phase(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    struck: Path,
    leftovers: Callable[[], list[str]],
    worker: type[MegatronWorker],
    phase: str,
    verb: str,
) -> None:
    with pytest.raises(EngineError) as caught:
        _run(monkeypatch, tmp_path, worker)
    assert time.time() - struck.stat().st_mtime < LIMIT_S
    message = str(caught.value)
    assert message.startswith(f"actor rank 1 {verb} in phase {phase}:"), message
    assert verb == "died" or "ValueError: row 7 is odd" in message
    assert not leftovers()
    assert (tmp_path / "faulty" / "report.html").is_file()


def test_a_flipped_bit_is_caught_and_the_transfer_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _run(monkeypatch, tmp_path, faulty_workers.FlipsOneBit, "trainer.num_steps=2") == 0
    rows = read_metrics(tmp_path / "faulty")
    assert [row["weight_sync/retries"] for row in rows] == [1, 0]
    assert all(row["weight_sync/verified"] is True for row in rows)
    assert all(row["logprob/rollout_vs_old_abs_max"] < 1e-3 for row in rows)


def test_bits_that_flip_every_time_fail_the_sync_with_tensor_and_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leftovers: Callable[[], list[str]]
) -> None:
    with pytest.raises(WeightSyncError) as caught:
        _run(monkeypatch, tmp_path, faulty_workers.FlipsEveryTime)
    message = str(caught.value)
    assert "weight sync of version 1: checksums differ after 2 attempts, so version 0 stays in force" in message
    assert "rollout rank 0 holds checksum" in message and "actor rank 1 sent" in message and "model." in message
    assert not leftovers()
