from typing import Any

import pytest

from aligners.errors import UserError, check_known, check_range


@pytest.mark.parametrize(
    ("limits", "good", "bad", "said"),
    [
        ({"least": 1}, 1, 0, "`x` to be at least 1, but got 0."),
        ({"above": 0}, 1e-9, 0, "`x` to be above 0, but got 0."),
        ({"least": 0, "below": 1}, 0, 1, "`x` to be at least 0 and below 1, but got 1."),
        ({"above": 0, "most": 1}, 1, float("nan"), "`x` to be above 0 and at most 1, but got nan."),
        ({"least": 2}, [2, 3], [2, 1], r"`x` to be at least 2, but got \[2, 1\]."),
        ({"least": 2}, None, [], r"`x` to be at least 2, but got \[\]."),
    ],
)
def test_a_number_outside_its_range_is_named(limits: dict[str, float], good: Any, bad: Any, said: str) -> None:
    check_range(**limits, y=good, x=good)
    with pytest.raises(UserError, match=f"Expected {said}"):
        check_range(**limits, y=good, x=bad)


def test_an_unknown_name_is_said_with_those_that_are_known() -> None:
    check_known(["a", "b"], x="a", y=["a", "b"], z=None)
    with pytest.raises(ValueError, match="Expected `x` to be one of a, b, but got 'c'"):
        check_known(["a", "b"], x="c")
    with pytest.raises(ValueError, match="Expected `x` out of a, b, but got c, d"):
        check_known(["a", "b"], x=["c", "a", "d"])
