"""Rewards from a service: one POST per sample, with retries, backoff and a bound on the rate.

The process that scores makes one request at a time. A service that keeps failing is a failure of the sample, never a
score.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from http import HTTPStatus

from hybridrl.config.schema import HttpRewardConfig
from hybridrl.errors import DataError
from hybridrl.rewards.request import ScoreRequest

_MAX_REPLY_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Another host must get neither the samples nor the token."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Follow none, so that a redirect is an error with its status."""
        return


_OPENER = urllib.request.build_opener(_NoRedirects)


class HttpReward:
    """Asks a service for rewards.

    Args:
        num_processes: Processes that share ``requests_per_s``; each takes an equal part.

    Raises:
        DataError: When the token's environment variable is not set.
    """

    def __init__(self, config: HttpRewardConfig, num_processes: int) -> None:
        assert config.url is not None, config
        self._config = config
        self._url = config.url
        self._headers = {"Content-Type": "application/json"}
        if config.token_variable is not None:
            token = os.environ.get(config.token_variable)
            if not token:
                raise DataError(f"reward.http.token_variable: {config.token_variable} is not set; export it")
            self._headers["Authorization"] = f"Bearer {token}"
        self._interval_s = num_processes / config.requests_per_s
        self._next_s = 0.0

    def __call__(self, request: ScoreRequest) -> float:
        """Return the reward that the service gives.

        Raises:
            DataError: When no attempt was answered, or the answer is no finite reward.
        """
        content = {
            "prompt": request.prompt,
            "response": request.response,
            "answer": request.answer,
            "data_source": request.data_source,
        }
        body = json.dumps(content).encode()
        fault = ""
        for attempt in range(self._config.num_attempts):
            if attempt:
                time.sleep(self._config.backoff_s * 2 ** (attempt - 1))
            try:
                return self._read(self._post(body))
            except urllib.error.HTTPError as e:
                fault = f"status {e.code}: {e.read(_SHOWN_CHARACTERS).decode('utf-8', 'replace')}"
                if e.code != HTTPStatus.TOO_MANY_REQUESTS and e.code < HTTPStatus.INTERNAL_SERVER_ERROR:
                    break
            except (OSError, http.client.HTTPException) as e:
                fault = str(e)
        raise DataError(f"{self._url}: no reward after {attempt + 1} attempts; the last one: {fault}")

    def _post(self, body: bytes) -> bytes:
        """Send one request when it is its turn; return the reply."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            time.sleep(self._next_s - now_s)
        self._next_s = max(now_s, self._next_s) + self._interval_s
        request = urllib.request.Request(self._url, data=body, headers=self._headers, method="POST")
        with _OPENER.open(request, timeout=self._config.attempt_timeout_s) as reply:
            return bytes(reply.read(_MAX_REPLY_BYTES))

    def _read(self, reply: bytes) -> float:
        try:
            content = json.loads(reply)
        except ValueError as e:
            raise DataError(f"{self._url}: the reply is not JSON: {reply[:_SHOWN_CHARACTERS]!r}") from e
        reward = content.get("reward") if isinstance(content, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise DataError(
                f'{self._url}: got {str(content)[:_SHOWN_CHARACTERS]}, expected {{"reward": a finite number}}'
            )
        return float(reward)
