"""Parses what a user writes for sites and layers."""

from collections.abc import Sequence

from aligners.errors import UserError
from aligners.models.architectures import Component, first_site

DEEPEST = 10**6  # blocks that no model has


def parse_sites(
    sites: str | Sequence[str | int], depth_x: int, depth_y: int, component: Component = "residual"
) -> list[tuple[int, int]]:
    """Parse the site pairs that a user wrote.

    Args:
        sites: as in `sites_of_each`, such as `1,3:5` (X's site 3, Y's site 5); or `grid`, every block of X with every
            block of Y.
        depth_x: L of X.
        depth_y: L of Y.
        component: what is read there.

    Raises:
        ValueError: as `sites_of_each`.
    """
    if sites == "grid":
        return [(i, j) for i in range(1, depth_x + 1) for j in range(1, depth_y + 1)]
    return [(i, j) for i, j in sites_of_each(sites, [depth_x, depth_y], component)]


def sites_of_each(
    sites: str | Sequence[str | int], depths: Sequence[int], component: Component = "residual"
) -> list[tuple[int, ...]]:
    """Parse what a user wrote for the sites of some models that belong together: one of each model.

    Args:
        sites: `all` (0..L, of a sub-layer 1..L), `blocks` (1..L), or layers `3` of all models and tuples with one of
            each, `3:5` of two, as one string `1,3:5` or as a list.
        depths: L of each model.
        component: what is read there.

    Raises:
        ValueError: something else was written, a site twice, or `all` and `blocks` at unequal depths.
    """
    if isinstance(sites, str) and sites in ("all", "blocks"):
        if len(set(depths)) > 1:
            raise UserError(
                f"`sites` {sites!r} pairs equal layers, but the models have {_listed(depths)} blocks. Name one of "
                f"each, for example `sites` '{_tuple(1, depths)}, {_tuple(2, depths)}'."
            )
        return [
            (site,) * len(depths)
            for site in range(first_site(component) if sites == "all" else 1, depths[0] + 1)
        ]
    entries = sites.replace(",", " ").split() if isinstance(sites, str) else list(sites)
    _check_base_60(entries, depths)
    try:
        named = [tuple(map(int, str(entry).split(":"))) for entry in entries]
        found = [given * len(depths) if len(given) == 1 else given for given in named]
    except ValueError:
        found = [()]
    if any(len(given) != len(depths) for given in found):
        raise UserError(
            "Expected `sites` to be 'all', 'blocks', 'grid' (of two models), or a list of layers (3) and of one layer "
            f"for each of the {len(depths)} models ({_tuple(3, depths)}), but got {sites!r}. Write for example `sites` "
            f"'1, {_tuple(2, depths)}'."
        )
    if not found or len(set(found)) < len(found):
        raise UserError(
            f"Expected `sites` to name at least one site and none twice, but got {sites!r}."
        )
    return found


def check_written(sites: str | Sequence[str | int], models: int) -> None:
    """Raise if no depth of so many models makes these sites right; nothing is loaded for it.

    Args:
        sites: as for `sites_of_each`, or `grid`.
        models: how many belong together.

    Raises:
        ValueError: something else was written, or a site twice.
    """
    if sites not in ("all", "blocks", "grid"):
        sites_of_each(sites, [DEEPEST] * models)


def _check_base_60(entries: Sequence[str | int], depths: Sequence[int]) -> None:
    """Raise if YAML seems to have read a pair as one number."""
    swallowed = [n for n in entries if isinstance(n, int) and n >= 60 and n > max(depths)]
    if swallowed:
        raise UserError(
            f"`sites` holds {swallowed[0]}, but the models have {_listed(depths)} blocks. If you wrote "
            f"{swallowed[0] // 60}:{swallowed[0] % 60} in a list: YAML reads that as a number of base 60. "
            "Write the list as one string, without brackets: `sites` '1, 2:3'."
        )


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _tuple(first: int, depths: Sequence[int]) -> str:
    """An example of sites of so many models."""
    return ":".join(str(first + m) for m in range(len(depths)))


def route_sites(
    sites: str | Sequence[str | int],
    depths: Sequence[int],
    source: int,
    target: int,
    component: Component = "residual",
) -> list[tuple[int, int]]:
    """Parse the site pairs of the route from one model to another, or to itself.

    A pair that the user wrote holds from an earlier model to a later one. On the way back it is turned round; from a
    model to itself, its own end of the pair is taken twice. A grid is every block with every block on any route.

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
        return [(j, i) for i, j in parse_sites(sites, depths[target], depths[source], component)]
    partner = 1 if source == 0 else 0
    ends = parse_sites(sites, depths[min(source, partner)], depths[max(source, partner)], component)
    unique = dict.fromkeys(pair[0] if source == 0 else pair[1] for pair in ends)
    return [(site, site) for site in unique]


def parse_layers(
    layers: str | Sequence[int], depth: int, component: Component = "residual"
) -> list[int]:
    """Parse layers of a model with L = `depth` blocks: `all` (0..L, of a sub-layer 1..L), `blocks` (1..L), or a list.

    Raises:
        ValueError: something else was written, nothing, or a layer twice.
    """
    if isinstance(layers, str):
        if layers not in ("all", "blocks"):
            raise UserError(
                f"Expected `layers` to be 'all', 'blocks' or a list of numbers, but got {layers!r}."
            )
        return list(range(first_site(component) if layers == "all" else 1, depth + 1))
    if not layers or len(set(layers)) < len(layers):
        raise UserError(
            f"Expected `layers` to name at least one layer and none twice, but got {list(layers)}."
        )
    return list(layers)
