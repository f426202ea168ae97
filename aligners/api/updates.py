"""What becomes of things that live in a model's states when the model is updated."""

from collections.abc import Callable
from typing import Any

from aligners.api.maps import ArrayMap
from aligners.errors import UserError
from aligners.maps.base import Aligner
from aligners.probing.artefacts.files import read_artefacts, write_artefact
from aligners.probing.artefacts.kinds import Artefact, Dictionary, Direction, Head

__all__ = ["Artefact", "Dictionary", "Direction", "Head", "carry", "read_artefacts", "write_artefact"]


def carry(artefact: Artefact, map: ArrayMap | Aligner, forward: ArrayMap | Aligner | None = None, **about: Any) -> Any:
    """An artefact for another model: it says of the new model's states what it said of the old one's.

    Args:
        artefact: of `read_artefacts`; or a `Head`, `Direction` or `Dictionary`. `Head.of(clf.coef_, clf.intercept_)`
            takes what scikit-learn has fitted.
        map: g from rows of the new model to rows of the old one, fitted on the same tokens, words or texts; no labels.
        forward: a map from the old model's rows to the new one's: a vector to steer by and a dictionary's decoder go
            through it. Default: the (pseudo-)inverse of `map`.
        about: fields that change, `model` and `site` among them; `write_artefact` needs the name of the new model.

    Returns:
        An artefact of the same kind. Where `map` is not affine, it is kept beside what was carried.

    Raises:
        ValueError: the map is of other widths or several sites, or not fitted.
    """
    return artefact.carried(_bank(map, "map"), None if forward is None else _bank(forward, "forward"), **about)


def _bank(map: ArrayMap | Aligner | Callable[..., Any], name: str) -> Aligner:
    bank = map.bank if isinstance(map, ArrayMap) else map
    if not isinstance(bank, Aligner):
        raise UserError(f"Expected `{name}` to be a fitted map of this package, but got a {type(map).__name__}.")
    return bank
