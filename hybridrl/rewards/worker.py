"""The process that runs a user's reward function: ``python -m hybridrl.rewards.worker``.

One JSON object per line. First in: ``{"path", "name"}``; first out: ``{}`` once the file is loaded. Then, in:
``{"response", "answer"}``; out: ``{"reward"}``. Either output can be ``{"kind", "message"}`` instead, for a failure.
What the function prints goes to standard error, so that it cannot be taken for an answer.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import TextIO

from hybridrl.config.user_function import FunctionReference
from hybridrl.rewards.function import RewardFunction, load_function
from hybridrl.rewards.result import FailureKind

_MAX_MESSAGE_CHARACTERS = 2000


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    where = json.loads(requests.get())
    try:
        function = load_function(FunctionReference(Path(where["path"]), where["name"]))
    except Exception:  # noqa: BLE001  # the user's own code, at a process boundary: the parent reports it
        _reply(replies, _failure(FailureKind.EXCEPTION, traceback.format_exc()))
        return
    _reply(replies, {})
    while True:
        request = json.loads(requests.get())
        _reply(replies, _score(function, request["response"], request["answer"]))


def _read_requests(requests: queue.Queue[str]) -> None:
    """Pass lines on; end the process with its parent, even while the function is running."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _score(function: RewardFunction, response: str, answer: str) -> dict[str, object]:
    try:
        value: object = function(response, answer)
    except Exception:  # noqa: BLE001  # the user's own code, at a process boundary: the parent reports it
        return _failure(FailureKind.EXCEPTION, traceback.format_exc())
    if not isinstance(value, numbers.Real):
        return _failure(FailureKind.WRONG_TYPE, f"returned {type(value).__name__}, expected a number")
    reward = float(value)
    if not math.isfinite(reward):
        return _failure(FailureKind.NOT_FINITE, f"returned {reward}, expected a finite number")
    return {"reward": reward}


def _failure(kind: FailureKind, message: str) -> dict[str, object]:
    return {"kind": kind.value, "message": message.strip()[-_MAX_MESSAGE_CHARACTERS:]}


def _reply(replies: TextIO, content: dict[str, object]) -> None:
    print(json.dumps(content), file=replies, flush=True)


if __name__ == "__main__":
    main()
