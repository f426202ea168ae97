"""A rotation between rows that are not paired, in three steps: match, turn, refine (mini-vec2vec)."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from aligners.errors import UserError, check_range
from aligners.maps.solvers import determined_svd
from aligners.maps.unpaired.clusters import k_means, matched_order

KEPT = 3  # of so many matched clusterings one is kept
AT_ONCE = 2**24  # cosines that are held at a time


@dataclass(frozen=True)
class Matching:
    """How rows without partners are matched. The defaults are near those of mini-vec2vec's code.

    Attributes:
        clusters: centres on each side that are matched with each other.
        repeats: how often rows are clustered and centres matched; the matched centres of the best third are anchors.
        runs: random starts of each matching of centres.
        neighbours: rows whose mean is the partner of a row.
        steps: steps of the first refinement, by neighbours.
        sample: rows that a step takes.
        step_size: how far a step goes towards the rotation that it finds, in (0, 1].
        fine_clusters: centres of the second refinement; at most a tenth of the rows.
        seed: of every draw.

    Raises:
        ValueError: an option is out of range.
    """

    clusters: int = 20
    repeats: int = 30
    runs: int = 30
    neighbours: int = 50
    steps: int = 100
    sample: int = 1000
    step_size: float = 0.5
    fine_clusters: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        check_range(least=2, clusters=self.clusters, fine_clusters=self.fine_clusters)
        check_range(least=1, repeats=self.repeats, runs=self.runs, sample=self.sample)
        check_range(least=1, neighbours=self.neighbours)
        check_range(least=0, steps=self.steps)
        check_range(above=0, most=1, step_size=self.step_size)


class Unpaired(NamedTuple):
    """A rotation that was found without pairs.

    Attributes:
        rotation: (d_x, d_y), (semi-)orthogonal, of centred rows.
        nearest: mean cosine of a mapped row and the nearest row of Y, both as directions from their means.
    """

    rotation: Tensor
    nearest: Tensor


def unpaired_rotation(
    x: Tensor, y: Tensor, pairs: Tensor | None = None, how: Matching | None = None
) -> Unpaired:
    """Find the rotation between rows of two models that are not of the same texts (Dar 2025, 2510.02348).

    All rows are directions from their side's mean.

    1. Match. Each side is clustered by k-means, and the centres of the two are matched by how they lie to each other
       (quadratic assignment), several times over; the third that matches best is kept, all in the paper. Matched
       centres are anchors: the partner of a row of X is the mean of the rows of Y whose cosines with Y's anchors are
       most like its own with X's.
    2. Turn. The orthogonal Procrustes map of these partners.
    3. Refine. Steps towards the Procrustes map of rows of X and the means of those of Y that are nearest once mapped;
       rows that are not among the nearest of their own nearest are left out, which the paper does not do. Then one step
       by clusters: Y's are k-means from X's mapped centres on.

    Known pairs are anchors as well, and with as many as `clusters` the only ones. In every Procrustes map they count as
    much as all other partners together.

    It works where the two sides' clusters have the same shape. Where they do not, the matching is wrong from the first
    step on, no refinement mends it, and `nearest` does not tell. It fails on the embedded models, where the Procrustes
    map of the known pairs alone is better at any number of pairs; from MiniLM to E5 it needs pairs. With 2,520 vectors
    of texts a side top 1 of 560 is .004 without pairs, .013 with 5, and .475 with 20, of which that map makes .030,
    and .727 with 50 against .175: `benchmarks/results` has the curves.

    Args:
        x: (N, d_x).
        y: (M, d_y).
        pairs: (P, 2) numbers of rows of X and Y that are partners.
        how: the options.

    Raises:
        ValueError: there are fewer rows than clusters, or `pairs` is out of range.
    """
    how = how or Matching()
    _check(x, y, pairs, how)
    a = _directions(x)
    b = _directions(y)
    draw = torch.Generator().manual_seed(how.seed)
    known = _Known(a, b, pairs)
    search = _Search(a, b, how, draw, known)
    partners = search.partners()
    rotation = known.turn(a, partners)
    rotation = search.by_neighbours(rotation)
    rotation = search.by_clusters(rotation)
    rotation = _orthogonal(rotation)
    mapped = a @ rotation
    cosines = _largest_cosines(mapped, b)
    return Unpaired(rotation, cosines.mean())


def _check(x: Tensor, y: Tensor, pairs: Tensor | None, how: Matching) -> None:
    for name, rows in (("x", x), ("y", y)):
        least = max(how.clusters, how.neighbours)
        if len(rows) < least:
            raise UserError(
                f"Expected at least {least} rows in `{name}`, as many as `clusters` and `neighbours`, but got "
                f"{len(rows)}. Matching by structure takes thousands."
            )
    if pairs is None:
        return
    whole = pairs.dtype in (torch.int64, torch.int32)
    if pairs.ndim != 2 or pairs.shape[1] != 2 or not whole:
        raise UserError(
            "Expected `pairs` (P, 2) of whole numbers, rows of X and of Y that are partners, but got "
            f"{pairs.dtype} of shape {tuple(pairs.shape)}."
        )
    sizes = torch.tensor([len(x), len(y)])
    numbers = pairs.cpu()
    outside = (numbers < 0) | (numbers >= sizes)
    if outside.any():
        raise UserError(
            f"Expected `pairs` of rows 0 to {len(x) - 1} of X and 0 to {len(y) - 1} of Y, but got numbers from "
            f"{pairs.min(0).values.tolist()} to {pairs.max(0).values.tolist()}."
        )


def _directions(rows: Tensor) -> Tensor:
    """Directions of rows (N, d) from their mean, float64."""
    double = rows.double()
    centred = double - double.mean(0)
    return normalize(centred, dim=-1)


class _Known:
    """Pairs that are known, and Procrustes maps in which they count as much as what is matched."""

    def __init__(self, a: Tensor, b: Tensor, pairs: Tensor | None) -> None:
        if pairs is None:
            pairs = torch.zeros(0, 2, dtype=torch.long)
        of_a, of_b = pairs.unbind(1)
        self.a = a[of_a]
        self.b = b[of_b]

    def turn(self, a: Tensor, b: Tensor) -> Tensor:
        """The orthogonal map from rows (n, d_x) to partners (n, d_y)."""
        cross = a.T @ b / len(a)
        if len(self.a):
            of_known = self.a.T @ self.b / len(self.a)
            cross = cross / cross.norm() + of_known / of_known.norm()
        return _orthogonal(cross)


def _orthogonal(matrix: Tensor) -> Tensor:
    """The nearest (semi-)orthogonal matrix."""
    u, _, vh = determined_svd(matrix[None])
    return (u @ vh)[0]


@dataclass(frozen=True)
class _Search:
    """The steps by which partners are found, and the rotation is improved.

    Attributes:
        a: (N, d_x) directions of X's rows from their mean.
        b: (M, d_y) those of Y's.
        how: the options.
        draw: of all that is random.
        known: the known pairs.
    """

    a: Tensor
    b: Tensor
    how: Matching
    draw: torch.Generator
    known: _Known

    def partners(self) -> Tensor:
        """A partner for each row of A, (N, d_y): the first step."""
        known = self.known
        anchors = known.a, known.b
        if len(known.a) < self.how.clusters:
            anchors = self._anchors()
        relative = []
        sides = self.a, self.b
        for rows, of_side in zip(sides, anchors, strict=True):
            directions = normalize(of_side, dim=-1)
            cosines = rows @ directions.T
            of_rows = normalize(cosines, dim=-1)
            relative.append(of_rows)
        of_a, of_b = relative
        partners, _ = _nearest_means(of_a, of_b, self.b, self.how.neighbours)
        return partners

    def _anchors(self) -> tuple[Tensor, Tensor]:
        """Matched centres of both sides, and the known pairs."""
        how = self.how
        found = []
        for repeat in range(how.repeats):
            of_a = self._centres(self.a)
            of_b = self._centres(self.b)
            seed = how.seed + repeat
            order, alike = matched_order(of_a, of_b, how.runs, seed)
            found.append((alike, of_a, of_b[order]))
        # where two clusterings differ, no order of their centres is right
        found.sort(key=lambda matched: -matched[0])
        kept = math.ceil(how.repeats / KEPT)
        of_x = [self.known.a]
        of_y = [self.known.b]
        best = found[:kept]
        for _, of_a, of_b in best:
            of_x.append(of_a)
            of_y.append(of_b)
        return torch.cat(of_x), torch.cat(of_y)

    def _centres(self, rows: Tensor) -> Tensor:
        """Centres of some of the rows of a side, (c, d)."""
        order = torch.randperm(len(rows), generator=self.draw)
        some = order[: 10 * self.how.sample]
        return k_means(rows[some], self.how.clusters, self.draw)

    def by_neighbours(self, rotation: Tensor) -> Tensor:
        """Steps towards the Procrustes map of rows of X and the means of those of Y that are nearest once mapped."""
        how = self.how
        a = self.a
        b = self.b
        for _ in range(how.steps):
            order = torch.randperm(len(a), generator=self.draw)
            chosen = order[: how.sample]
            chosen = chosen.to(a.device)
            rows = a[chosen]
            mapped = rows @ rotation
            partners, mutual = _nearest_means(mapped, b, b, how.neighbours)
            if mutual.any():
                rows = rows[mutual]
                partners = partners[mutual]
            found = self.known.turn(rows, partners)
            rotation = rotation.lerp(found, how.step_size)
        return rotation

    def by_clusters(self, rotation: Tensor) -> Tensor:
        """One step towards the Procrustes map of clusters of X and of those of Y that start at X's, mapped."""
        fewest = min(len(self.a), len(self.b))
        most = fewest // 10
        clusters = min(self.how.fine_clusters, most)
        if clusters < 2:
            return rotation
        centres = k_means(self.a, clusters, self.draw)
        mapped = centres @ rotation
        of_b = k_means(self.b, clusters, self.draw, start=mapped)
        found = self.known.turn(centres, of_b)
        return rotation.lerp(found, self.how.step_size)


def _nearest_means(
    queries: Tensor, candidates: Tensor, values: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The means of the values of the k candidates nearest to each query, and which queries are mutual.

    A query is mutual if it is among the k queries nearest to its own nearest candidate, of few queries the first 5 %.

    Args:
        queries: (n, d).
        candidates: (M, d) of length 1.
        values: (M, d_y).
        k: number of neighbours.

    Returns:
        (n, d_y), and (n,) booleans.
    """
    means = []
    first = []
    at_once = max(1, AT_ONCE // len(candidates))
    for part in queries.split(at_once):
        cosines = part @ candidates.T
        near = cosines.topk(k, dim=-1).indices
        of_near = values[near]
        means.append(of_near.mean(1))
        first.append(near[:, 0])

    nearest = torch.cat(first)
    directions = normalize(queries, dim=-1)
    back = candidates[nearest] @ directions.T
    own = back.diagonal()
    nearer = (back > own[:, None]).sum(1)
    share = len(queries) // 20
    mutual = nearer < min(k, max(1, share))
    return torch.cat(means), mutual


def _largest_cosines(a: Tensor, b: Tensor) -> Tensor:
    """The cosine of each row of A with the nearest row of B, (n,)."""
    directions = normalize(a, dim=-1)
    at_once = max(1, AT_ONCE // len(b))
    largest = []
    for part in directions.split(at_once):
        cosines = part @ b.T
        largest.append(cosines.amax(1))
    return torch.cat(largest)
