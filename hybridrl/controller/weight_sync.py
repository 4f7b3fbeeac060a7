"""The weight sync protocol: verified and atomic.

    pause all replicas -> send and receive, both sides at once -> compare checksums -> commit on all replicas -> resume
                              ^------------- once more on a mismatch ----------|

waits for: each arrow waits for every rank, bounded by `weight_sync.timeout_s`; the first failing rank ends the wait.

Invariants:
- No token is sampled between pause and resume, and resume is reached only after every rank agreed and every replica
  committed. Otherwise the old version number stays in force, and the replicas stay paused.
- The bytes on the wire are the lower bound, which is computed from the shard maps alone and not from the plan.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.config.schema import WeightSyncConfig
from hybridrl.controller.interfaces import WeightDestination, WeightSource
from hybridrl.errors import WeightSyncError
from hybridrl.reshard.executor import TransferReport, compare_reports
from hybridrl.reshard.plan import Plan
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
    """

    is_verified: bool
    wire_bytes: int
    lower_bound_bytes: int
    num_retries: int
    seconds: float
    checksum_seconds: float

    def metrics(self) -> dict[str, float | int | bool]:
        """Return the metrics under ``weight_sync/``."""
        return {
            "weight_sync/verified": self.is_verified,
            "weight_sync/wire_bytes": self.wire_bytes,
            "weight_sync/lower_bound_bytes": self.lower_bound_bytes,
            "weight_sync/retries": self.num_retries,
            "weight_sync/seconds": self.seconds,
            "weight_sync/checksum_seconds": self.checksum_seconds,
        }


class WeightSyncer:
    """Runs the protocol over two connected roles.

    Args:
        plan: From the actor's ranks to the rollout workers; both roles are connected to it.
        lower_bound_bytes: Of the same shard maps.
    """

    def __init__(
        self,
        actor: WeightSource,
        rollout: WeightDestination,
        plan: Plan,
        lower_bound_bytes: int,
        config: WeightSyncConfig,
    ) -> None:
        assert plan.wire_bytes == lower_bound_bytes, (plan.wire_bytes, lower_bound_bytes)
        self._actor = actor
        self._rollout = rollout
        self._plan = plan
        self._lower_bound_bytes = lower_bound_bytes
        self._config = config
        self._version = 0

    def sync(self, version: int) -> SyncReport:
        """Bring the actor's weights into force as `version` on every replica.

        Raises:
            WeightSyncError: Checksums differed twice; names each tensor with its source and destination rank.
            EngineError: A rank failed or did not answer in time; names role, rank and phase.
        """
        started = time.perf_counter()
        timeout_s = self._config.timeout_s
        wait_for(self._rollout.pause(timeout_s))
        num_retries, sent, received = self._transfer(version)
        wait_for(self._rollout.commit(version, timeout_s))
        self._version = version
        wait_for(self._rollout.resume(timeout_s))
        return SyncReport(
            is_verified=self._config.verify,
            wire_bytes=sum(report.wire_bytes for report in received),
            lower_bound_bytes=self._lower_bound_bytes,
            num_retries=num_retries,
            seconds=time.perf_counter() - started,
            checksum_seconds=max(report.seconds["checksum"] for report in (*sent, *received)),
        )

    def _transfer(self, version: int) -> tuple[int, Sequence[TransferReport], Sequence[TransferReport]]:
        """Transfer until both sides agree; return how many attempts failed before, and the reports of both sides."""
        mismatches: list[str] = []
        for num_retries in range(_NUM_ATTEMPTS):
            timeout_s = self._config.timeout_s
            sent, received = wait_for_both(
                self._actor.send_weights(version, timeout_s),
                self._rollout.receive_weights(version, verify=self._config.verify, timeout_s=timeout_s),
            )
            mismatches = compare_reports(self._plan, sent, received)
            if not mismatches:
                return num_retries, sent, received
        shown = "\n  ".join(mismatches[:_MAX_SHOWN])
        more = f"\n  and {len(mismatches) - _MAX_SHOWN} more" if len(mismatches) > _MAX_SHOWN else ""
        raise WeightSyncError(
            f"weight sync of version {version}: checksums differ after {_NUM_ATTEMPTS} attempts, so version {self._version} stays "
            f"in force and the replicas stay paused:\n  {shown}{more}\nThe bytes were changed on their way; suspect memory or "
            "network of the named ranks"
        )
