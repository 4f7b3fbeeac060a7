"""Bounds within bounds: what a rank waits for ends before the controller stops waiting for the rank.

A rank that waits for a peer knows which peer; the controller only knows that there was no answer. So the rank gives up
first, and its error is the one that is shown. Example: of 120 s that a weight sync may take, a rank waits for its peers for
115 s; of 10 s, for 9 s.
"""

from __future__ import annotations

_SHARE = 0.1
_MOST_S = 5.0


def inner_s(outer_s: float) -> float:
    """Return the bound on a rank's own waits inside a call that is bounded by `outer_s` seconds."""
    return outer_s - min(_SHARE * outer_s, _MOST_S)
