"""Parses what a user writes for sites and layers."""

from collections.abc import Sequence

from aligners.errors import UserError
from aligners.models.architectures import Component, first_site


def parse_sites(
    sites: str | Sequence[str | int], depth_x: int, depth_y: int, component: Component = "residual"
) -> list[tuple[int, int]]:
    """Parse the site pairs that a user wrote.

    Args:
        sites: `all` (0..L, of a sub-layer 1..L), `blocks` (1..L), `grid` (every block of X with every block of Y), or
            layers `3` and pairs `3:5` (X's site 3, Y's site 5), as one string `1,3:5` or as a list.
        depth_x: L of X.
        depth_y: L of Y.
        component: what is read there.

    Raises:
        ValueError: something else was written, a site twice, or `all` and `blocks` at unequal depths.
    """
    if isinstance(sites, str) and sites in ("all", "blocks"):
        if depth_x != depth_y:
            raise UserError(
                f"`sites` {sites!r} pairs equal layers, but X has {depth_x} blocks and Y has {depth_y}. "
                "Name the pairs, for example `sites` '1:2, 2:4'."
            )
        return [(site, site) for site in range(first_site(component) if sites == "all" else 1, depth_x + 1)]
    if sites == "grid":
        return [(i, j) for i in range(1, depth_x + 1) for j in range(1, depth_y + 1)]
    entries = sites.replace(",", " ").split() if isinstance(sites, str) else list(sites)
    _check_base_60(entries, depth_x, depth_y)
    try:
        pairs = [_pair(str(entry)) for entry in entries]
    except ValueError:
        raise UserError(
            "Expected `sites` to be 'all', 'blocks', 'grid', or a list of layers (3) and pairs (3:5), "
            f"but got {sites!r}. Write for example `sites` '1, 2:3'."
        ) from None
    if not pairs or len(set(pairs)) < len(pairs):
        raise UserError(f"Expected `sites` to name at least one site pair and none twice, but got {sites!r}.")
    return pairs


def _check_base_60(entries: Sequence[str | int], depth_x: int, depth_y: int) -> None:
    """Raise if YAML seems to have read a pair as one number."""
    swallowed = [n for n in entries if isinstance(n, int) and n >= 60 and n > max(depth_x, depth_y)]
    if swallowed:
        raise UserError(
            f"`sites` holds {swallowed[0]}, but the models have {depth_x} and {depth_y} blocks. If you wrote "
            f"{swallowed[0] // 60}:{swallowed[0] % 60} in a list: YAML reads that as a number of base 60. "
            "Write the list as one string, without brackets: `sites` '1, 2:3'."
        )


def _pair(entry: str) -> tuple[int, int]:
    left, colon, right = entry.partition(":")
    return int(left), int(right if colon else left)


def route_sites(
    sites: str | Sequence[str | int], depths: Sequence[int], source: int, target: int, component: Component = "residual"
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


def parse_layers(layers: str | Sequence[int], depth: int, component: Component = "residual") -> list[int]:
    """Parse layers of a model with L = `depth` blocks: `all` (0..L, of a sub-layer 1..L), `blocks` (1..L), or a list.

    Raises:
        ValueError: something else was written, nothing, or a layer twice.
    """
    if isinstance(layers, str):
        if layers not in ("all", "blocks"):
            raise UserError(f"Expected `layers` to be 'all', 'blocks' or a list of numbers, but got {layers!r}.")
        return list(range(first_site(component) if layers == "all" else 1, depth + 1))
    if not layers or len(set(layers)) < len(layers):
        raise UserError(f"Expected `layers` to name at least one layer and none twice, but got {list(layers)}.")
    return list(layers)
