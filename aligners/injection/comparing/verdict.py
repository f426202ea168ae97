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

    kind: Literal["rounding", "coordinates", "weights", "head", "changed", "different"]
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
    first = {
        name: next((s for s, fine in enumerate(sites) if not fine), None)
        for name, sites in within.items()
    }
    if first.get(AS_IS, 0) is None and same is not False:
        return Verdict(
            "rounding" if not changed else "coordinates" if alike() else "weights",
            AS_IS,
            None,
            None,
            same,
        )
    same = same if first.get(AS_IS, 0) is None else same_elsewhere
    whole = [name for name in (*KEEPING, LINEAR) if first.get(name, 0) is None]
    if (
        whole and same is not False and not first.get(AS_IS)
    ):  # a change there would also show in the first states
        return Verdict("coordinates", whole[0], None, None, same)
    begun = [
        name for name in KEEPING if first.get(name, 0) != 0
    ]  # the maps that hold at the first site
    begun = begun or [name for name in KEEPING if name in fvu and fvu[name][0] <= NEAR]
    if begun and first[begun[0]] is None:  # and its answers differ
        return Verdict("head", begun[0], None, None, same)
    best = begun[0] if begun else min(fvu, key=lambda name: fvu[name][-1])
    most = max(range(len(fvu[best])), key=lambda s: fvu[best][s])
    return (
        Verdict("changed", best, first[best], most, same)
        if begun
        else Verdict("different", None, 0, most, same)
    )
