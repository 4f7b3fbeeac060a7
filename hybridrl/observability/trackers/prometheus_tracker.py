"""Prometheus: the newest value of every metric at ``http://host:port/metrics``.

The endpoint has no password, so it listens on loopback unless told otherwise; on another interface, everyone who reaches it reads the
metrics, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hybridrl.errors import ConfigError
from hybridrl.observability.records import Metric, Outcome
from hybridrl.observability.trackers.tracker import import_library


class PrometheusTracker:
    """See :class:`hybridrl.observability.trackers.tracker.Tracker`.

    Metric ``reward/mean`` of run ``calc`` is ``hybridrl_reward_mean{run="calc"}``; ``hybridrl_step`` counts steps.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: The package prometheus_client is not installed, or the port is taken.
    """

    name = "prometheus"

    def __init__(self, host: str, port: int, run_name: str) -> None:
        self._library = import_library("prometheus_client")
        self._run_name = run_name
        self._registry = self._library.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._library.start_http_server(port, host, self._registry)
        except OSError as e:
            raise ConfigError(f"tracking.prometheus_port: {host}:{port}: {e}; choose another port") from e
        self.port = int(self._server.server_port)

    def append(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Take the metrics of one step."""
        for name, value in {**metrics, "step": step}.items():
            if name not in self._gauges:
                exposed = "hybridrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
                self._gauges[name] = self._library.Gauge(exposed, name, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run_name).set(float(value))

    def close(self, outcome: Outcome) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
