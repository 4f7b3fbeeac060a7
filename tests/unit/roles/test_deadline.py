"""Inner bounds end before outer ones."""

from __future__ import annotations

import pytest

from hybridrl.roles.deadline import inner_s


@pytest.mark.parametrize(("outer_s", "expected_s"), [(120.0, 115.0), (10.0, 9.0), (0.1, 0.09)])
def test_a_rank_gives_up_a_tenth_or_five_seconds_before_the_controller(outer_s: float, expected_s: float) -> None:
    assert inner_s(outer_s) == pytest.approx(expected_s)
