"""What the figures of a comparison say: nothing, other coordinates, or from which block on a model has changed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

AS_IS, TURNED, LINEAR = "identity", "rotation", "linear"
KEEPING = (
    AS_IS,
    "permutation",
    TURNED,
)  # maps that the function of a model can survive, the simplest first
LEAST = 1e-14  # a floor below which float64 itself rounds
NEAR = 0.1  # FVU up to which first states that differ are still those of one model, changed from its embeddings on
TIMES = 30.0  # a tolerance, in units of the floor that was measured


class Verdict(NamedTuple):
    """What has changed.

    Attributes:
        kind: "rounding": nothing beyond it; "coordinates": the states, or what is inside the blocks, are written in
            other coordinates; "weights": only weights differ, and no text shows it; "head": all states agree and the
            answers do not; "changed": from a site on; "different": no map joins the first states, even
            nearly.
        map: by which the states agree up to there, or nearly at the first site, if that has changed: identity,
            permutation, rotation or linear; None: by none.
        first: number, among the site pairs, of the first that differs; None: none does.
        most: number of the one that differs most; None likewise.
        same_answers: whether the answers are the same but for rounding; None: nothing is compared.
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
        fvu: map -> what it leaves unexplained at each site pair, in the order of the sites.
        within: map -> whether rounding explains it.
        same: whether the answers are the same but for rounding; None: nothing is compared.
        same_elsewhere: whether they are but for rounding in other coordinates.
        changed: names of weights that differ by more than rounding, where weights can be compared.
        alike: says whether those have the singular values that they had.
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
    ):  # of which the first states, too, would tell
        return Verdict("coordinates", whole[0], None, None, same)
    begun = [
        name for name in KEEPING if first.get(name, 0) != 0
    ]  # which hold at the first site
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
