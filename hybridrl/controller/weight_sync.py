"""The weight sync protocol: verified and atomic.

    pause all replicas -> send and receive, both sides at once -> compare checksums -> commit on all replicas -> resume -> probe
                              ^------------- once more on a mismatch ----------|                        (when it is due)

waits for: each arrow waits for every rank, bounded by `weight_sync.timeout_s`; the first failing rank ends the wait.

Invariants:
- No token is sampled between pause and resume, and resume is reached only after every rank agreed and every replica
  committed. Otherwise the old version number stays in force, and the replicas stay paused.
- The bytes on the wire are the lower bound, which is computed from the shard maps alone and not from the plan.
- The first sync of a connection is probed, and version 1 and every `weight_sync.probe_every`-th after it. A probe that fails ends the run; whoever
  calls `sync` starts no rollout before it returns, so no sample of a faulty replica is trained on.
- Replicas that join generate nothing before their first commit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.config.schema import WeightSyncConfig
from hybridrl.controller.connection import Connection, Connector
from hybridrl.controller.interfaces import WeightDestination, WeightSource
from hybridrl.controller.probe import Probe
from hybridrl.errors import EngineError, WeightSyncError
from hybridrl.layout.shard import ShardMap
from hybridrl.reshard.executor import TransferReport, compare_reports
from hybridrl.roles.future import wait_for, wait_for_both

_NUM_ATTEMPTS = 2
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one committed sync cost.

    Attributes:
        is_verified: Whether both sides' checksums were compared and agreed.
        wire_bytes: Payload that left the memory of a device, in the attempt that was committed.
        lower_bound_bytes: The fewest bytes that any plan could have put on the wire.
        num_retries: Attempts before that one.
        seconds: From pause to resume.
        checksum_seconds: Longest time that a rank spent on checksums by themselves; those taken along with a copy are not in it.
        probe_abs_max: Largest log-prob difference between the engines on the probe prompt; None when no probe was due.
    """

    is_verified: bool
    wire_bytes: int
    lower_bound_bytes: int
    num_retries: int
    seconds: float
    checksum_seconds: float
    probe_abs_max: float | None = None

    def metrics(self) -> dict[str, float | int | bool]:
        """Return the metrics under ``weight_sync/``."""
        probed = {} if self.probe_abs_max is None else {"weight_sync/probe_abs_max": self.probe_abs_max}
        return probed | {
            "weight_sync/verified": self.is_verified,
            "weight_sync/wire_bytes": self.wire_bytes,
            "weight_sync/lower_bound_bytes": self.lower_bound_bytes,
            "weight_sync/retries": self.num_retries,
            "weight_sync/seconds": self.seconds,
            "weight_sync/checksum_seconds": self.checksum_seconds,
        }


class WeightSyncer:
    """Runs the protocol over two roles, once :meth:`connect` has connected them."""

    def __init__(
        self,
        actor: WeightSource,
        rollout: WeightDestination,
        connector: Connector,
        config: WeightSyncConfig,
        probe: Probe,
    ) -> None:
        self._actor = actor
        self._rollout = rollout
        self._connector = connector
        self._config = config
        self._probe = probe
        self._connection: Connection | None = None
        self._num_syncs = 0
        self._version = 0

    def connect(self, rollout_maps: Sequence[ShardMap]) -> None:
        """Plan for the replicas that there are and connect both roles; call it again when replicas have come or gone.

        Training ranks keep their state; they close the old transport and open the new one. Replicas that joined wait for the next
        sync, which may be one of the version in force.

        Args:
            rollout_maps: One per worker of the replicas that are there, in the order in which they answer.

        Raises:
            ReshardError: No plan exists; names the parameter and the range.
            EngineError: A rank could not connect; names role, rank and phase.
        """
        self._connection = None
        self._connection = self._connector.connect(rollout_maps)
        self._num_syncs = 0

    def sync(self, version: int) -> SyncReport:
        """Bring the actor's weights into force as `version` on every replica.

        Raises:
            WeightSyncError: Checksums differed twice; names each tensor with its source and destination rank. Or the probe showed
                that the engines compute different models.
            EngineError: The roles are not connected, or a rank failed or did not answer in time; names role, rank and phase.
        """
        connection, started = self._connected(), time.perf_counter()
        timeout_s = self._config.timeout_s
        wait_for(self._rollout.pause(timeout_s))
        num_retries, sent, received = self._transfer(connection, version)
        wait_for(self._rollout.commit(version, timeout_s))
        self._version = version
        wait_for(self._rollout.resume(timeout_s))
        seconds = time.perf_counter() - started
        probed = self._probe_if_due(version)
        self._num_syncs += 1
        return SyncReport(
            is_verified=self._config.verify,
            wire_bytes=sum(report.wire_bytes for report in received),
            lower_bound_bytes=connection.lower_bound_bytes,
            num_retries=num_retries,
            seconds=seconds,
            checksum_seconds=max(report.seconds["checksum"] for report in (*sent, *received)),
            probe_abs_max=probed,
        )

    def _connected(self) -> Connection:
        if self._connection is None:
            raise EngineError("weight sync: the roles are not connected; connect them first")
        return self._connection

    def _probe_if_due(self, version: int) -> float | None:
        every = self._config.probe_every
        is_first = self._num_syncs == 0
        if not is_first and not (every and (version - 1) % every == 0):
            return None
        return self._probe.measure(self._actor, self._rollout, version, self._config.timeout_s)

    def _transfer(
        self, connection: Connection, version: int
    ) -> tuple[int, Sequence[TransferReport], Sequence[TransferReport]]:
        """Transfer until both sides agree; return how many attempts failed before, and the reports of both sides."""
        mismatches: list[str] = []
        for num_retries in range(_NUM_ATTEMPTS):
            timeout_s = self._config.timeout_s
            sent, received = wait_for_both(
                self._actor.send_weights(version, timeout_s),
                self._rollout.receive_weights(version, verify=self._config.verify, timeout_s=timeout_s),
            )
            mismatches = compare_reports(connection, sent, received)
            if not mismatches:
                return num_retries, sent, received
        shown = "\n  ".join(mismatches[:_MAX_SHOWN])
        more = f"\n  and {len(mismatches) - _MAX_SHOWN} more" if len(mismatches) > _MAX_SHOWN else ""
        raise WeightSyncError(
            f"weight sync of version {version}: checksums differ after {_NUM_ATTEMPTS} attempts, so version {self._version} stays "
            f"in force and the replicas stay paused:\n  {shown}{more}\nThe bytes were changed on their way; suspect memory or "
            "network of the named ranks"
        )
