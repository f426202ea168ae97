"""The conclusion of a comparison: no change, other coordinates, or a change from some block on."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

AS_IS, TURNED, LINEAR = "identity", "rotation", "linear"
KEEPING = (
    AS_IS,
    "permutation",
    TURNED,
)  # maps under which the function of a model can stay the same, the simplest first
LEAST = 1e-14  # below this, a floor is float64 rounding
NEAR = 0.1  # largest FVU at which differing first states still belong to one model, whose embeddings changed
TIMES = 30.0  # tolerance, as a multiple of the measured floor
Kind = Literal["rounding", "coordinates", "weights", "head", "changed", "different"]


class Verdict(NamedTuple):
    """What has changed.

    Attributes:
        kind: "rounding": nothing has changed beyond rounding; "coordinates": the states, or the insides of the blocks,
            are in other coordinates; "weights": only weights differ, and no text shows it; "head": all states agree but
            the answers differ; "changed": states differ from some site on; "different": no map fits the first states
            even nearly.
        map: simplest map under which the states agree before the change, or nearly agree at the first site if that has
            changed: identity, permutation, rotation or linear; None: no map.
        first: number of the first site pair that differs; None: none does.
        most: number of the site pair that differs most; None: none does.
        same_answers: whether the answers are equal up to rounding; None: nothing is compared.
    """

    kind: Kind
    map: str | None
    first: int | None
    most: int | None
    same_answers: bool | None


def decide(
    fvu: Mapping[str, Sequence[float]], within: Mapping[str, Sequence[bool]], same: bool | None, *,
    same_elsewhere: bool | None = None, changed: Sequence[str] = (), alike: Callable[[], bool] = bool,
) -> Verdict:  # fmt: skip
    """Decide what has changed.

    Args:
        fvu: map -> FVU at each site pair, in the order of the sites.
        within: map -> whether rounding explains the FVU at each site pair.
        same: whether the answers are equal up to rounding; None: nothing is compared.
        same_elsewhere: whether the answers are equal up to rounding in other coordinates.
        changed: names of weights that differ by more than rounding, if weights can be compared.
        alike: tells whether those weights kept their singular values.
    """
    first = {name: _first_beyond(sites) for name, sites in within.items()}
    states_agree = first.get(AS_IS, 0) is None
    if states_agree and same is not False:
        kind = _unseen_change(changed, alike)
        return Verdict(kind, AS_IS, None, None, same)
    if not states_agree:
        same = same_elsewhere
    whole = [name for name in (*KEEPING, LINEAR) if first.get(name, 0) is None]
    if (
        whole and same is not False and not first.get(AS_IS)
    ):  # a change there would also show in the first states
        return Verdict("coordinates", whole[0], None, None, same)
    begun = _begun(first, fvu)
    if not begun:
        best = min(fvu, key=lambda name: fvu[name][-1])
        return Verdict("different", None, 0, _largest(fvu[best]), same)
    best = begun[0]
    if first[best] is None:  # and its answers differ
        return Verdict("head", best, None, None, same)
    return Verdict("changed", best, first[best], _largest(fvu[best]), same)


def _begun(
    first: Mapping[str, int | None], fvu: Mapping[str, Sequence[float]]
) -> list[str]:
    """Return the maps out of `KEEPING` that hold at the first site; if none does, those that nearly hold there."""
    holding = [name for name in KEEPING if first.get(name, 0) != 0]
    if holding:
        return holding
    return [name for name in KEEPING if name in fvu and fvu[name][0] <= NEAR]


def _first_beyond(within: Sequence[bool]) -> int | None:
    """Return the number of the first site pair whose FVU rounding does not explain, or None."""
    for number, fine in enumerate(within):
        if not fine:
            return number
    return None


def _largest(values: Sequence[float]) -> int:
    """Return the number of the first of the largest values."""
    return max(range(len(values)), key=lambda number: values[number])


def _unseen_change(changed: Sequence[str], alike: Callable[[], bool]) -> Kind:
    """Return what has changed where neither states nor answers differ."""
    if not changed:
        return "rounding"
    return "coordinates" if alike() else "weights"
