"""Parses the sites and layers that a user names."""

from collections.abc import Sequence
from itertools import product

from aligners.errors import UserError
from aligners.models.architectures import Component, first_site

DEEPEST = 10**6  # a number of blocks that no model has
NORM = "norm"  # the site after the final norm, L + 1


def parse_sites(
    sites: str | Sequence[str | int],
    depth_x: int,
    depth_y: int,
    component: Component = "residual",
) -> list[tuple[int, int]]:
    """Parse the site pairs that a user wrote.

    Args:
        sites: what the user wrote, as in `sites_of_each`, such as `1,3:5` (site 1 of both; X's site 3 with Y's site 5);
            or `grid`, every block of X with every block of Y.
        depth_x: L of X.
        depth_y: L of Y.
        component: what is read there.

    Raises:
        ValueError: as `sites_of_each`.
    """
    if sites == "grid":
        blocks_x = range(1, depth_x + 1)
        blocks_y = range(1, depth_y + 1)
        return list(product(blocks_x, blocks_y))
    found = sites_of_each(sites, [depth_x, depth_y], component)
    return [(i, j) for i, j in found]


def sites_of_each(
    sites: str | Sequence[str | int],
    depths: Sequence[int],
    component: Component = "residual",
) -> list[tuple[int, ...]]:
    """Parse the sites that a user wrote for several models, into lists with one site for each model.

    Args:
        sites: `all` (0..L, of a sub-layer 1..L), `blocks` (1..L), or a list of layers that all models share, such as
            `3`, and of sites for each model, such as `3:5` for two; as one string `1,3:5` or as a list. `norm` is
            L + 1 of each, the output of the final norm.
        depths: L of each model.
        component: what is read there.

    Raises:
        ValueError: `sites` is none of these, names a site twice, or is `all` or `blocks` at unequal depths.
    """
    if isinstance(sites, str) and sites in ("all", "blocks"):
        return _equal_layers(sites, depths, component)
    entries: Sequence[str | int] = sites
    if isinstance(sites, str):
        entries = sites.replace(",", " ").split()
    found = []
    for entry in entries:
        layers = _layers(str(entry), depths)
        if layers is None:
            raise UserError(
                "Expected `sites` to be 'all', 'blocks', 'grid' (of two models), or a list of layers (3) and of one "
                f"layer for each of the {len(depths)} models ({_example(3, depths)}), but got {sites!r}. Write for "
                f"example `sites` '1, {_example(2, depths)}'."
            )
        found.append(layers)
    if not found or len(set(found)) < len(found):
        raise UserError(
            f"Expected `sites` to name at least one site and none twice, but got {sites!r}."
        )
    return found


def _equal_layers(
    sites: str, depths: Sequence[int], component: Component
) -> list[tuple[int, ...]]:
    """Return the same layers for all models."""
    if len(set(depths)) > 1:
        last = " and ".join(map(str, depths))
        raise UserError(
            f"`sites` {sites!r} pairs equal sites, but the last ones are {last} (counted from 0). Name one of each, "
            f"for example `sites` '{_example(1, depths)}, {_example(2, depths)}'."
        )
    layers = parse_layers(sites, depths[0], component)
    return [(layer,) * len(depths) for layer in layers]


def _layers(entry: str, depths: Sequence[int]) -> tuple[int, ...] | None:
    """Return the layers that `3`, `3:5` or `3:norm` names, one for each model; None if it names none."""
    words = entry.split(":")
    if len(words) == 1:
        words *= len(depths)
    if len(words) != len(depths):
        return None
    try:
        return tuple(map(_layer, words, depths))
    except ValueError:
        return None


def _layer(word: str, depth: int) -> int:
    """Return the layer that a word names.

    Raises:
        ValueError: it names none, or one that depends on a depth that is not known (-1).
    """
    if word == NORM and depth >= 0:
        return depth + 1
    return int(word)


def _example(first: int, depths: Sequence[int]) -> str:
    """Return an example of sites for so many models."""
    return ":".join(map(str, range(first, first + len(depths))))


def check_written(sites: str | Sequence[str | int], models: int) -> None:
    """Raise if these sites cannot be right for models of any depth; loads nothing.

    Args:
        sites: what the user wrote, as for `sites_of_each`, or `grid`.
        models: number of models whose sites belong together.

    Raises:
        ValueError: `sites` is none of these, or names a site twice.
    """
    if sites not in ("all", "blocks", "grid"):
        sites_of_each(sites, [DEEPEST] * models)


def route_sites(
    sites: str | Sequence[str | int],
    depths: Sequence[int],
    source: int,
    target: int,
    component: Component = "residual",
) -> list[tuple[int, int]]:
    """Parse the site pairs of the route from one model to another, or to itself.

    A pair that the user wrote holds from an earlier model to a later one. On the way back the pair is reversed; from a
    model to itself, the model's own site is taken twice. On any route, a grid pairs every block with every block.

    Args:
        sites: as the user wrote them.
        depths: L of each model.
        source: number of the model that is read.
        target: number of the model that is run from there.
        component: what is read there.
    """
    if source < target or sites == "grid":
        return parse_sites(sites, depths[source], depths[target], component)
    if source > target:
        pairs = parse_sites(sites, depths[target], depths[source], component)
        return [(j, i) for i, j in pairs]
    side = min(source, 1)  # the first model is X, any other is Y
    own: dict[int, None] = {}
    for pair in parse_sites(sites, depths[0], depths[source or 1], component):
        own[pair[side]] = None
    return [(site, site) for site in own]


def parse_layers(
    layers: str | Sequence[int], depth: int, component: Component = "residual"
) -> list[int]:
    """Parse layers of a model with L = `depth` blocks: `all` (0..L, of a sub-layer 1..L), `blocks` (1..L), or a list.

    In a list, L + 1 is the output of the final norm.

    Raises:
        ValueError: `layers` is none of these, is empty, or names a layer twice.
    """
    if isinstance(layers, str):
        if layers not in ("all", "blocks"):
            raise UserError(
                f"Expected `layers` to be 'all', 'blocks' or a list of numbers, but got {layers!r}."
            )
        first = 1
        if layers == "all":
            first = first_site(component)
        return list(range(first, depth + 1))
    if not layers or len(set(layers)) < len(layers):
        raise UserError(
            f"Expected `layers` to name at least one layer and none twice, but got {list(layers)}."
        )
    return list(layers)
