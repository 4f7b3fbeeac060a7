"""What a node that does not answer does to the progress of a run."""

from __future__ import annotations

from hybridrl.roles.node_watch import latest


def test_a_node_that_is_silent_for_a_while_is_no_progress() -> None:
    both: list[dict[int, int]] = [{1: 5}, {2: 7}]
    assert latest([{1: 5}, None], both) == both
    assert latest([{1: 5}, {2: 8}], both) == [{1: 5}, {2: 8}]


def test_a_node_that_was_never_heard_of_has_done_nothing() -> None:
    assert latest([{1: 5}, None], []) == [{1: 5}, {}]
    assert latest([{1: 5}], [{1: 4}, {2: 7}]) == [{1: 5}, {2: 7}], "no longer asked"
