"""What a person reads after a replay: a line per quantity, then the first difference."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.replay.recompute import Check
from hybridrl.replay.replay_step import ReplayStep


def replay_report(step: ReplayStep, checks: Sequence[Check]) -> str:
    """Return the report."""
    num_tokens = int(step.policy.loss_mask.sum())
    head = (
        f"step {step.step}, policy version {step.version}: {len(step.samples):,} samples, {num_tokens:,} trained tokens, "
        f"{len(step.updates)} update(s)"
    )
    lines = [head, *(f"  {check.quantity:14}{_outcome(check)}" for check in checks)]
    for check in checks:
        if check.first is not None:
            found = check.first
            got, expected = f"got {found.got!r}", f"expected {found.expected!r}"
            return "\n".join([*lines, f"first difference: {check.quantity} of {found.where}: {got}, {expected}"])
    return "\n".join([*lines, "no difference"])


def _outcome(check: Check) -> str:
    if check.skipped:
        return f"not computed: {check.skipped}"
    if check.first is None:
        return f"{check.num_compared:,} agree, largest difference {check.largest:.1e}"
    return f"{check.num_different:,} of {check.num_compared:,} differ, largest difference {check.largest:.3g}"
