"""The process that scores: ``python -m hybridrl.rewards.worker``.

One JSON object per line. First in: ``{"config"}``, the pickled :class:`RewardConfig` and identity in base64; first out: ``{}`` once every
part of the reward is built. Then, in: ``name`` and the fields of a :class:`ScoreRequest`; out: ``{"reward"}``. Either output can be
``{"kind", "message"}`` instead, for a failure. What a user's function prints goes to standard error, so that it cannot be
taken for an answer.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import TextIO

from hybridrl.observability.heartbeat import HEARTBEAT
from hybridrl.rewards.parts import WeightedPart, make_parts, total
from hybridrl.rewards.request import ScoreRequest
from hybridrl.rewards.result import FailureKind, ScoringFailure

_MAX_MESSAGE_CHARACTERS = 2000


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    config, identity = pickle.loads(base64.b64decode(json.loads(requests.get())["config"]))
    HEARTBEAT.show(identity)
    try:
        parts = make_parts(config)
    except Exception:  # noqa: BLE001  # the user's own code, at a process boundary: the parent reports it
        _reply(replies, _failure(FailureKind.EXCEPTION, traceback.format_exc()))
        return
    _reply(replies, {})
    while True:
        fields = json.loads(requests.get())
        HEARTBEAT.doing(fields.pop("name"))
        _reply(replies, _score(parts, ScoreRequest(**fields)))
        HEARTBEAT.doing("")


def _read_requests(requests: queue.Queue[str]) -> None:
    """Pass lines on; end the process with its parent, even while a part of the reward is running."""
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def _score(parts: Sequence[WeightedPart], request: ScoreRequest) -> dict[str, object]:
    try:
        score = total(parts, request)
    except Exception:  # noqa: BLE001  # the user's own code, at a process boundary: the parent reports it
        return _failure(FailureKind.EXCEPTION, traceback.format_exc())
    return _failure(score.kind, score.message) if isinstance(score, ScoringFailure) else {"reward": score}


def _failure(kind: FailureKind, message: str) -> dict[str, object]:
    return {"kind": kind.value, "message": message.strip()[-_MAX_MESSAGE_CHARACTERS:]}


def _reply(replies: TextIO, content: dict[str, object]) -> None:
    print(json.dumps(content), file=replies, flush=True)


if __name__ == "__main__":
    main()
