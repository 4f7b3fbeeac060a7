"""One process that scores, as seen from the parent; the protocol is in ``worker.py``.

A process works on one sample at a time, so that a part of the reward that hangs or crashes costs that sample and no other.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

from hybridrl.config.schema import RewardConfig
from hybridrl.observability import stacks
from hybridrl.observability.hang_verdict import standpoint
from hybridrl.observability.heartbeat import Identity
from hybridrl.rewards.request import ScoreRequest
from hybridrl.rewards.result import FailureKind, Score, ScoringFailure

_STACKS_S = 1.0


class ScoringProcess:
    """A process that is starting (`is_ready` False), idle (`index` None) or scoring sample `index`.

    Args:
        identity: That it shows its heartbeat under.

    Attributes:
        deadline_s: Monotonic time at which the current start or sample is given up.
    """

    def __init__(self, config: RewardConfig, startup_timeout_s: float, identity: Identity) -> None:
        self.index: int | None = None
        self._session = identity.session
        self.is_ready = False
        self.deadline_s = time.monotonic() + startup_timeout_s
        self._folder = tempfile.mkdtemp(prefix="hybridrl-reward-")
        Path(self._folder).chmod(0o755)
        command = [sys.executable, "-m", "hybridrl.rewards.worker"]
        # A session of its own: Ctrl-C reaches the parent, which ends the process.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={**os.environ, "TMPDIR": self._folder},
        )
        self._send({"config": base64.b64encode(pickle.dumps((config, identity))).decode()})

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the process replies or ends."""
        return self._stream(self._process.stdout).fileno()

    def submit(self, index: int, request: ScoreRequest, name: str, timeout_s: float) -> None:
        """Start scoring one sample; `name` is shown to who asks what the process does."""
        assert self.is_ready and self.index is None, (self.is_ready, self.index)
        self.index = index
        self.deadline_s = time.monotonic() + timeout_s
        self._send({"name": name, **asdict(request)})

    def receive(self) -> Score | None:
        """Return the reply that has arrived: a score, or None once the reward is ready."""
        line = self._stream(self._process.stdout).readline()
        if not line:
            code = self._process.wait()
            return ScoringFailure(FailureKind.CRASH, f"the scoring process ended with exit code {code}")
        reply = json.loads(line)
        if "kind" in reply:
            return ScoringFailure(FailureKind(reply["kind"]), reply["message"])
        if self.is_ready:
            return float(reply["reward"])
        self.is_ready = True
        return None

    def place(self) -> str:
        """Return what the process is in, for an error: ``; it was in `time.sleep(9)` (reward.py:6 in score)``; empty if it does not say."""
        reports = stacks.collect(self._session, _STACKS_S, self._process.pid)
        call = standpoint(reports[0]).call if reports else None
        return "" if call is None else f"; it was in {call}"

    def kill(self) -> None:
        """End the process and its children now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with whatever the reward function started
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            self._stream(stream).close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, content: dict[str, str]) -> None:
        try:
            self._stream(self._process.stdin).write(json.dumps(content).encode() + b"\n")
        except BrokenPipeError:
            return  # it ended: `receive` reports that

    @staticmethod
    def _stream(stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None
        return stream
