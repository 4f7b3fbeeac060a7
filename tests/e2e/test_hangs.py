"""Runs that get stuck on the real stack: each ends with a sentence that names the cause, and leaves stacks and no process.

From the moment in which nothing moves any more to the end of the command: the limit, a tenth of it between two looks, and `MARGIN_S` for the
stacks and the clean-up.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hybridrl.cli.main import main
from hybridrl.roles import megatron_pool, rollout_group
from tests.e2e import faulty_workers, stuck_workers
from tests.e2e.runs import CALC, one_rank

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LIMIT_S = 8.0
MARGIN_S = 15.0
COMMON = (
    f"trainer.hang_timeout_s={LIMIT_S}",
    "trainer.num_steps=2",
    "trainer.eval_every_steps=0",
    "trainer.save_hf_at_end=false",
    "algorithm.prompts_per_step=4",
    "algorithm.samples_per_prompt=2",
)


@pytest.fixture
def train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Return what runs a command that gets stuck; it returns the exit code, what the user sees and the stacks."""
    struck = tmp_path / "struck"
    monkeypatch.setenv(faulty_workers.STRUCK_FILE_VARIABLE, str(struck))

    def run(*overrides: str) -> tuple[int, str, str]:
        before = set(psutil.Process().children(recursive=True))
        code = main(["train", str(CALC), f"runs_dir={tmp_path}", "name=stuck", *COMMON, *overrides])
        seconds = time.time() - struck.stat().st_mtime
        assert LIMIT_S < seconds < 1.1 * LIMIT_S + MARGIN_S
        _, alive = psutil.wait_procs(list(set(psutil.Process().children(recursive=True)) - before), timeout=5)
        assert not alive, [process.cmdline() for process in alive]
        assert (tmp_path / "stuck" / "report.html").is_file()
        return code, capsys.readouterr().err, (tmp_path / "stuck" / "hang" / "stacks.txt").read_text()

    return run


def _block(stacks: str, process: str) -> str:
    """Return what the file has of one process."""
    found = re.search(rf"^==== {re.escape(process)} .*?(?=^====|\Z)", stacks, re.MULTILINE | re.DOTALL)
    assert found, stacks
    return found[0]


def test_a_rank_that_does_not_join_a_collective_is_named_with_those_that_wait(
    monkeypatch: pytest.MonkeyPatch, train: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr(megatron_pool, "MegatronWorker", stuck_workers.SleepsInUpdate)
    code, seen, stacks = train(
        "actor.parallel.tp_size=2",
        "actor.parallel.pp_size=1",
        "actor.parallel.ep_size=2",
        "checkpoint.every_steps=1",
        "trainer.resume=auto",
    )
    assert code == 75
    assert "the run failed (HangError)" in seen
    assert re.search(
        r"hang in phase update: no progress for \d+ s; actor rank 1 has not joined reduce_scatter_tensor \(\S+\.py:\d+ in \w+\), in "
        r"which actor rank 0 waits; actor rank 1 is in `time\.sleep\(FOR_EVER_S\)` \(tests/e2e/stuck_workers\.py:\d+ in update\)",
        seen,
    )
    assert "The same command goes on from the newest checkpoint" in seen
    assert "time.sleep(FOR_EVER_S)" in _block(stacks, "actor rank 1")
    assert "in reduce_scatter_tensor" in _block(stacks, "actor rank 0")
    assert "in wait_all" in _block(stacks, "controller")
    assert "_process_input_queue" in _block(stacks, "rollout rank 0's vLLM engine")


def test_a_reward_that_sleeps_is_named_with_its_sample(
    tmp_path: Path, train: Callable[..., tuple[int, str, str]]
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import pathlib, time\n\n\ndef score(response, answer):\n"
        f"    pathlib.Path({str(tmp_path / 'struck')!r}).touch()\n    time.sleep(3600)\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"id": f"row-{i}", "prompt": f"{i}+{i}=", "answer": "0"}) + "\n" for i in range(8))
    )
    code, seen, stacks = train(
        *one_rank(),
        "data.task=file",
        f"data.train_path={rows}",
        "data.id_key=id",
        f"reward.function={reward}:score",
        "reward.sample_timeout_s=600",
        "reward.timeout_s=900",
    )
    assert code == 1
    assert re.search(
        r"hang in phase reward: no progress for \d+ s; reward process 0 is in `time\.sleep\(3600\)` \(\S*reward\.py:6 in score\) "
        r"for sample \d of prompt row-\d@0",
        seen,
    )
    assert "time.sleep(3600)" in _block(stacks, "reward process 0")


def test_a_sampler_that_is_stopped_is_named_and_ended(
    monkeypatch: pytest.MonkeyPatch, train: Callable[..., tuple[int, str, str]]
) -> None:
    monkeypatch.setattr(rollout_group, "RolloutReplica", stuck_workers.StopsItsSampler)
    code, seen, stacks = train(*one_rank())
    assert code == 1
    assert re.search(
        r"hang in phase rollout: no progress for \d+ s; rollout rank 0's vLLM engine is stopped by a signal", seen
    )
    assert "The same command would begin anew" in seen
    assert "does not answer" in _block(stacks, "rollout rank 0's vLLM engine")
    assert "main_loop" in _block(stacks, "actor rank 0")
