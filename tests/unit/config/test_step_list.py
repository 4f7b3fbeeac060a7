import pytest

from hybridrl.config.step_list import parse_steps
from hybridrl.errors import ConfigError


def test_numbers_ranges_and_strides_make_one_set() -> None:
    steps = parse_steps("3, 10-12,/50")
    assert [step for step in range(101) if step in steps] == [0, 3, 10, 11, 12, 50, 100]


@pytest.mark.parametrize("text", ["", "a", "1;2", "-3", "3-", "/0", "1,,2"])
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected steps such as 0,10-12,/50"):
        parse_steps(text)
