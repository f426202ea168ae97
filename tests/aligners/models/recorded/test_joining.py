"""Rows of several recordings are paired by number or key, and what cannot be paired is refused by name."""

from typing import Any

import numpy as np
import pytest

from aligners.errors import UserError
from aligners.models.recorded.joining import Joined, Side, join


def side(name: str, rows: int = 6, **columns: Any) -> Side:
    return Side(name, rows, **{column: np.asarray(values) for column, values in columns.items()})


def pairs(joined: Joined) -> set[tuple[Any, ...]]:
    """The group and the row numbers of each pair."""
    names = [joined.names[number] for number in joined.group]
    return set(zip(names, *(rows.tolist() for rows in joined.rows), strict=True))


def test_rows_without_keys_are_paired_by_number_and_are_groups_of_their_own() -> None:
    joined = join([side("x", 3), side("y", 3)])
    assert pairs(joined) == {("0", 0, 0), ("1", 1, 1), ("2", 2, 2)}


def test_groups_that_one_source_has_are_those_of_all() -> None:
    joined = join([side("x", 4), side("y", 4, group=["b", "a", "b", "a"])])
    assert pairs(joined) == {("b", 0, 0), ("a", 1, 1), ("b", 2, 2), ("a", 3, 3)}
    assert joined.names == ["b", "a"]


def test_keys_pair_rows_in_any_order() -> None:
    draw = np.random.default_rng(0)
    keys = draw.permutation(50) * 7
    order = draw.permutation(50)
    texts = keys % 5
    one = join([side("x", 50, key=keys, group=texts), side("y", 50, key=keys[order])])
    for x, y in zip(*one.rows, strict=True):
        assert keys[x] == keys[order][y]
    again = join([side("x", 50, key=keys[order], group=texts[order]), side("y", 50, key=keys)])
    assert (keys[one.rows[0]] == keys[order][again.rows[0]]).all()  # the order of pairs is that of the keys
    assert one.names == again.names
    assert (one.group == again.group).all()


def test_a_key_may_come_in_several_groups() -> None:
    group = ["a", "a", "b", "b"]
    x = side("x", 4, key=[0, 1, 0, 1], group=group)
    y = side("y", 4, key=[1, 0, 1, 0], group=group)
    assert pairs(join([x, y])) == {("a", 0, 1), ("a", 1, 0), ("b", 2, 3), ("b", 3, 2)}


def test_a_mask_of_any_source_leaves_a_row_out_of_all() -> None:
    x = side("x", 4, mask=[1, 1, 0, 1])
    y = side("y", 4, mask=[True, False, True, True])
    assert pairs(join([x, y])) == {("0", 0, 0), ("3", 3, 3)}
    x = side("x", 3, key=["a", "b", "b"], mask=["true", "True", "false"])
    y = side("y", 2, key=["b", "a"])
    assert pairs(join([x, y])) == {("a", 0, 1), ("b", 1, 0)}


def test_keys_of_one_source_alone_are_counted() -> None:
    joined = join([side("x", 4, key=[1, 2, 3, 4]), side("y", 3, key=[4, 9, 2])])
    assert pairs(joined) == {("2", 1, 2), ("4", 3, 0)}
    assert [caution.partition(" have keys")[0] for caution in joined.cautions] == [
        "Caution: 2 of the 4 rows of x",
        "Caution: 1 of the 3 rows of y",
    ]


def test_the_digest_is_that_of_the_pairs() -> None:
    keys = np.arange(6)
    same = [join([side("x", key=keys), side("y", key=keys)]).digest() for _ in range(2)]
    other = join([side("x", key=keys), side("y", key=keys[::-1])]).digest()
    grouped = join([side("x", key=keys, group=keys // 2), side("y", key=keys)]).digest()
    assert len({*same, other, grouped}) == 3


@pytest.mark.parametrize(
    ("sides", "said"),
    [
        ([side("x", 3), side("y", 4)], r"x has 3 and y 4\. Name a column .* as `key`"),
        ([side("x", 2, group=["a", "b"]), side("y", 2, group=["a", "c"])], r"row 1 .*group 'b' in the first and"),
        ([side("x", 2, key=[1, 2]), side("y", 2)], r"`key` for all recorded states or for none, but x has one and y"),
        ([side("x", 3, key=[1, 2, 2]), side("y", 2, key=[1, 2])], r"every key of x once, but 1 rows repeat one"),
        ([side("x", 2, key=[1, 2]), side("y", 2, key=[3, 4])], r"there are none: they begin with 1, 2 and 3, 4"),
        ([side("x", 2, key=[1, 2]), side("y", 2, key=["1", "2"])], r"those of x are numbers and those of y are not"),
        ([side("x", 2, key=["a", None]), side("y", 2, key=["a", "b"])], r"a key in every row of x, but 1 have none"),
        ([side("x", 3, tokens=[5, 6, 7]), side("y", 3, tokens=[5, 7, 6])], r"same tokens, but row 1 .* first of 2"),
        ([side("x", 2, mask=[0, 1]), side("y", 2, mask=[1, 0])], r"rows that count in all of x, y, but their masks"),
        ([side("x", 2, mask=[0, 3]), side("y", 2)], r"`mask` of x to be true or false, or 1 or 0"),
        ([side("x", 2, mask=["yes", "no"]), side("y", 2)], r"`mask` of x to be true or false"),
        ([side("x", 2, group=["a", " "]), side("y", 2)], r"a name for every group of x, but got ' '"),
        (
            [side("x", 2, key=[1, 2], group="ab"), side("y", 2, key=[1, 2], group="ac")],
            r"row of key 2 is of the groups 'b' and 'c'",
        ),
    ],
)
def test_what_cannot_be_paired_is_refused(sides: list[Side], said: str) -> None:
    for one in sides:
        if isinstance(one.group, np.ndarray) and one.group.ndim == 0:
            one.group = np.array(list(str(one.group)))
    with pytest.raises(UserError, match=said):
        join(sides)
