"""The invertible network: the hypothesis of a bijection, as a map."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aligners.errors import UserError, check_known, check_range
from aligners.maps.base import Aligner, Scaling, deviation, mean_square
from aligners.maps.couplings import AffineCoupling, ShuffledHadamard, TriangularPair
from aligners.maps.matrices import batch_inverse, batch_log_det, batch_solve
from aligners.maps.starting_maps import (
    START_NAMES,
    Start,
    StartingMap,
    calm_space,
    invertible_start,
)
from aligners.similarity.algebra.moments import Moments

Mixing = Literal["none", "rotation", "linear"]
Halves = tuple[Tensor, Tensor]  # (S, N, d // 2) and (S, N, d − d // 2)

MUCH_LEFT = 0.25  # FVU of a start, from which all weights have the full rate


class INN(Aligner):
    """Affine couplings on alternating halves, with or without learned linear maps between them.

    g(x) = (A P_0 R_1 C_1 P_1 R_2 C_2 ... R_K C_K M P_K)(x), read from left to right, with couplings C_k. Under mixing
    "rotation", R_k are fixed rotations, which give each coupling other halves; P_k are learned products of two
    triangular matrices, the identity at the start; A is a fixed matrix into the space where steps of the learned ones
    move the map least (see `calm_space`; I where the start is a rotation), and M the fixed one that makes the untrained
    network the starting map. No matrix is inverted in a step: the inverse of a rotation is its transpose, that of a
    triangular matrix a substitution, and those of A and M are computed once. Under "linear", a learned d × d matrix
    stands before the first and after every coupling, and `inverse` inverts them all. Under "none" there are couplings
    only.

    The paper's network is `mixing="none", start="identity", both_ways=False`. Training in one direction leaves an
    inverse that is exact but useless as a map from Y to X, so the default is to train in both.

    References: Dinh, Sohl-Dickstein and Bengio 2016, "Density estimation using Real NVP", arXiv 1605.08803;
    Ren et al., eq. 11 and 12; learned matrices between couplings: Kingma and Dhariwal 2018, "Glow", arXiv 1807.03039.

    Args:
        sites: S, the number of site pairs.
        d_x: width of X's states, at least 2; an odd width is split unevenly.
        d_y: width of Y's states, equal to `d_x`.
        couplings: K, the number of couplings; it takes two to change every dimension.
        hidden: width of the hidden layers of a coupling's network. Default: 3/2 · d_x, and 9/4 · d_x under mixing
            "none", which gives networks of equal size.
        depth: number of those hidden layers.
        mixing: what stands between the couplings: "rotation", "linear" or "none".
        start: the map before training, on centred and scaled states: "identity"; "procrustes"; "linear", least
            squares with its smallest singular values raised to 3 % of the largest; "covariance", the closest of the
            maps that turn X's covariance into Y's; or "best", site by site whichever of these promises the least error.
            Mixing "none" can only start at the identity, which is its default.
        both_ways: train g⁻¹ as a map from Y to X besides g as a map from X to Y.
        recompute: in a step keep the states between couplings alone, and compute everything else again for the
            gradient. That takes about an eighth of the memory for a third to two thirds more time, and gives the same
            map to the bit.

    Raises:
        ValueError: the widths differ, a width is less than 2, or an option is unknown or impossible.
    """

    bijective = invertible = True
    needs_equal_width = True
    couplings: Sequence[AffineCoupling]  # each of the three a ModuleList
    rotations: Sequence[ShuffledHadamard]
    pairs: Sequence[TriangularPair]
    matrices: nn.Parameter | None
    started: Tensor
    step_share: Tensor
    first: Tensor
    first_inverse: Tensor
    last: Tensor
    last_inverse: Tensor

    def __init__(
        self,
        sites: int,
        d_x: int,
        d_y: int,
        *,
        couplings: int = 8,
        hidden: int | None = None,
        depth: int = 1,
        mixing: Mixing = "rotation",
        start: Start | None = None,
        both_ways: bool = True,
        recompute: bool = False,
    ) -> None:
        super().__init__(sites, d_x, d_y)
        if d_x < 2:
            raise UserError(
                f"INN expects states that can be split in two, but `d_x` is {d_x}. Use Linear or MLP."
            )
        if hidden is None:
            hidden = _default_hidden(mixing, d_x)
        if start is None:
            start = _default_start(mixing)
        check_range(least=1, couplings=couplings, hidden=hidden, depth=depth)
        _check_names(mixing, start)

        self.hidden = hidden
        self.depth = depth
        self.mixing = mixing
        self.start = start
        self.both_ways = both_ways
        self.recompute = recompute
        half = d_x // 2
        self.widths = (half, d_x - half)
        self.scaling = Scaling(sites, d_x, d_y)
        self._add_couplings(couplings)
        started = torch.zeros(sites, dtype=torch.long)
        self.register_buffer("started", started)
        self.register_buffer("step_share", torch.ones(sites))
        self._add_mixing(couplings)

    def _add_couplings(self, number: int) -> None:
        """Add couplings: those of even number change the second half, those of odd number the first."""
        couplings = []
        kept, changed = self.widths
        for _ in range(number):
            coupling = AffineCoupling(
                self.sites, kept, changed, self.hidden, self.depth
            )
            couplings.append(coupling)
            kept, changed = changed, kept
        self.couplings = _modules(couplings)

    def _add_mixing(self, couplings: int) -> None:
        """Add what stands between so many couplings."""
        self.matrices = None
        self.rotations = _modules([])
        self.pairs = _modules([])
        if self.mixing == "linear":
            matrices = _telescope(couplings, self.d_x)
            of_sites = matrices.repeat(self.sites, 1, 1, 1)
            self.matrices = nn.Parameter(of_sites)
        elif self.mixing == "rotation":
            self._add_rotations(couplings)

    def _add_rotations(self, number: int) -> None:
        """Add rotations, the learned matrices around them, and the fixed A and M."""
        rotations = []
        for k in range(number):
            rotation = ShuffledHadamard(self.d_x, k)
            rotations.append(rotation)
        pairs = []
        for _ in range(number + 1):
            pair = TriangularPair(self.sites, self.d_x)
            pairs.append(pair)
        self.rotations = _modules(rotations)
        self.pairs = _modules(pairs)

        same = torch.eye(self.d_x)
        back = self._turned_back(same)
        self._add_fixed("first", same)
        self._add_fixed("first_inverse", same)
        self._add_fixed("last", back)
        self._add_fixed("last_inverse", back.mT)

    def _add_fixed(self, name: str, matrix: Tensor) -> None:
        """Add a buffer that holds a matrix (d, d) for each site."""
        of_sites = matrix.repeat(self.sites, 1, 1)
        self.register_buffer(name, of_sites)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        with torch.autocast(x.device.type, enabled=False):
            mapped = self._map(self._scaled(x))
            return self.scaling.unscale_target(mapped)

    def inverse(self, y: Tensor) -> Tensor:
        """(S, N, d) -> (S, N, d), the exact inverse of `forward`."""
        with torch.autocast(y.device.type, enabled=False):
            mapped = self._map_back(self._scaled_target(y))
            return self.scaling.unscale(mapped)

    def loss(self, x: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
        """FVU of g on the batch, or its rows where `real` (N,) is 1, plus that of g⁻¹ under `both_ways`: (S,)."""
        with torch.autocast(x.device.type, enabled=False):
            x = self._scaled(x)
            y = self._scaled_target(y)
            there = mean_square(self._map(x) - y, real)
            if not self.both_ways:
                return there
            back = mean_square(self._map_back(y) - x, real)
            return there + back

    def log_det(self, x: Tensor) -> Tensor:
        """The logarithm of |det ∂g/∂x| at each row: (S, N, d) -> (S, N)."""
        with torch.autocast(x.device.type, enabled=False):
            constant = self._constant_log_det()
            log_dets: list[Tensor] = []
            self._map(self._scaled(x), log_dets)
            of_couplings = torch.stack(log_dets).sum(0)
            return constant + of_couplings

    def _constant_log_det(self) -> Tensor:
        """What all but the couplings add to `log_det`, the same at every row: (S, 1)."""
        scale = self.scaling.scale_y / self.scaling.scale_x
        of_scale = scale.log().squeeze(-1)
        constant = self.d_x * of_scale
        if self.matrices is not None:
            of_matrices = batch_log_det(self.matrices)
            return constant + of_matrices.sum(1, keepdim=True)
        if not self.rotations:
            return constant

        fixed = batch_log_det(self.first) + batch_log_det(self.last)
        of_pairs = []
        for pair in self.pairs:
            of_pairs.append(pair.log_det())
        learned = torch.stack(of_pairs).sum(0)
        return constant + fixed[:, None] + learned[:, None]

    @torch.no_grad()
    def fit(self, moments: Moments) -> None:
        """Set the scaling, and the matrices so that the untrained network is the starting map."""
        self.scaling.fit(moments)
        if self.mixing == "none":
            return
        start = invertible_start(moments, self.start, self.both_ways)
        left = start.error / MUCH_LEFT
        share = left.clamp(0, 1).sqrt()
        self.step_share.copy_(share)
        self._start(moments, start)

    @torch.no_grad()
    def start_at(self, moments: Moments, start: Tensor) -> None:
        """Set the scaling, and the matrices so that the untrained network is a given linear map.

        Args:
            moments: of states, and of what the map makes of them.
            start: the map of centred states, (S, d, d).
        """
        self.scaling.fit(moments)
        of_x = deviation(moments.xx, moments.n)
        of_y = deviation(moments.yy, moments.n)
        weight = start * of_x / of_y
        inverse = batch_inverse(weight)
        linear = START_NAMES.index("linear")
        taken = torch.full_like(self.started, linear)
        unknown = torch.ones_like(self.step_share)
        self.step_share.copy_(unknown)
        given = StartingMap(weight, inverse, taken, unknown)
        self._start(moments, given)

    def _start(self, moments: Moments, given: StartingMap) -> None:
        """Set the matrices so that the untrained network is a given map."""
        self.started.copy_(given.taken)
        start = given.weight
        if self.matrices is not None:
            _start_product(self.matrices, start)
            return
        into, out_of = calm_space(moments, start, given.rigid)
        self.first.copy_(into)
        self.first_inverse.copy_(out_of)
        self.last.copy_(self._turned_back(out_of @ start))
        self.last_inverse.copy_(self._turned(given.inverse @ into))

    def rate_share(self, name: str) -> Tensor | None:
        """Where the start leaves little, the root of what it leaves, for all that is zero or the identity at first.

        The noise of Adam's steps adds an error in proportion to the rate's square, whatever there is to learn. So at a
        site whose start has an FVU R below `MUCH_LEFT` the rate of triangular matrices and of the couplings' last
        layers is √(R / `MUCH_LEFT`) times the others'.
        """
        moved = name.startswith("pairs.") or ".conditioner.last." in name
        if moved and self.rotations:
            return self.step_share
        return None

    def kept_floats(self) -> int:
        """Numbers that a step keeps of each row and site for the gradient, about."""
        floats = super().kept_floats()
        if not self.recompute:
            return floats
        between = self.d_x * len(self.couplings)
        if self.both_ways:
            between *= 2
        return between + floats // len(self.couplings)

    def start_names(self) -> Sequence[str]:
        """The start that was chosen at each site."""
        return [START_NAMES[number] for number in self.started.tolist()]

    def options(self) -> dict[str, Any]:
        """All options of the network and of its loss, but for `recompute`, which changes neither."""
        options = super().options()
        options.pop("recompute")
        options["couplings"] = len(self.couplings)
        return options

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Networks of earlier versions have no matrix A, and train at the full rate."""
        full_rate = torch.ones(self.sites)
        state_dict.setdefault(prefix + "step_share", full_rate)
        if self.rotations:
            one = torch.eye(self.d_x)
            same = one.repeat(self.sites, 1, 1)
            state_dict.setdefault(prefix + "first", same)
            state_dict.setdefault(prefix + "first_inverse", same)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _scaled(self, x: Tensor) -> Tensor:
        """States of X, centred and scaled, in float32 or better."""
        x = _precise(x)
        return self.scaling.scale(x)

    def _scaled_target(self, y: Tensor) -> Tensor:
        """States of Y, centred and scaled, in float32 or better."""
        y = _precise(y)
        return self.scaling.scale_target(y)

    def _turned(self, x: Tensor) -> Tensor:
        """Apply all rotations in turn: x R_1 ... R_K."""
        for rotation in self.rotations:
            x = rotation(x)
        return x

    def _turned_back(self, matrix: Tensor) -> Tensor:
        """(R_1 ... R_K)ᵀ A for a matrix A: the transpose of Aᵀ R_1 ... R_K."""
        turned = self._turned(matrix.mT)
        return turned.mT

    def _map(self, x: Tensor, log_dets: list[Tensor] | None = None) -> Tensor:
        """Apply g to scaled states; append each coupling's log-determinant (S, N) to `log_dets`.

        The halves stay apart where nothing stands between the couplings, or a matrix that can be applied to them
        separately: joining them each time would cost as much as the couplings' own arithmetic.
        """
        matrices = None
        if self.matrices is not None:
            matrices = self.matrices.unbind(1)
            x = x @ matrices[0]
        if self.rotations:
            x = x @ self.first

        halves = self._split(x)
        for k, coupling in enumerate(self.couplings):
            if log_dets is not None:
                halves = self._rotate(k, halves)
                log_scale = coupling.log_scale(halves[k % 2])
                log_dets.append(log_scale.sum(-1))
                halves = _change(k, coupling, halves)
            else:
                halves = self._take(self._couple, k, halves)
            if matrices is not None:
                halves = self._mix(halves, matrices[k + 1])

        x = torch.cat(halves, -1)
        if self.rotations:
            x = self.pairs[-1](x @ self.last)
        return x

    def _map_back(self, y: Tensor) -> Tensor:
        """Apply g⁻¹ to scaled states."""
        matrices = None
        if self.matrices is not None:
            matrices = batch_inverse(self.matrices).unbind(1)
        if self.rotations:
            y = self.pairs[-1].inverse(y)
            y = y @ self.last_inverse

        halves = self._split(y)
        for k in reversed(range(len(self.couplings))):
            if matrices is not None:
                halves = self._mix(halves, matrices[k + 1])
            halves = self._take(self._couple_back, k, halves)

        y = torch.cat(halves, -1)
        if self.rotations:
            y = y @ self.first_inverse
        if matrices is not None:
            y = y @ matrices[0]
        return y

    def _split(self, x: Tensor) -> Halves:
        """Split the features in two."""
        x_a, x_b = x.split(self.widths, dim=-1)
        return x_a, x_b

    def _take(
        self, step: Callable[[int, Halves], Halves], k: int, halves: Halves
    ) -> Halves:
        """Take the k-th step; under `recompute` nothing that is made in it is kept for the gradient."""
        if not self.recompute:
            return step(k, halves)
        return checkpoint(
            step,
            k,
            halves,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )

    def _couple(self, k: int, halves: Halves) -> Halves:
        """Rotate, and change one half by the k-th coupling."""
        halves = self._rotate(k, halves)
        return _change(k, self.couplings[k], halves)

    def _couple_back(self, k: int, halves: Halves) -> Halves:
        """The inverse of `_couple`."""
        halves = _change(k, self.couplings[k].inverse, halves)
        return self._rotate_back(k, halves)

    def _rotate(self, k: int, halves: Halves) -> Halves:
        """The halves of x P_k R_k, with k counted from 0; without rotations, those of x."""
        if not self.rotations:
            return halves
        x = torch.cat(halves, -1)
        x = self.pairs[k](x, self.rotations[k])
        return self._split(x)

    def _rotate_back(self, k: int, halves: Halves) -> Halves:
        """The inverse of `_rotate`."""
        if not self.rotations:
            return halves
        y = torch.cat(halves, -1)
        y = self.pairs[k].inverse(y, self.rotations[k])
        return self._split(y)

    def _mix(self, halves: Halves, matrix: Tensor) -> Halves:
        """The halves of x times a matrix, without joining them."""
        x_a, x_b = halves
        top, bottom = matrix.split(self.widths, dim=-2)
        mixed = torch.baddbmm(x_a @ top, x_b, bottom)
        return self._split(mixed)


def _change(k: int, change: Callable[..., Tensor], halves: Halves) -> Halves:
    """Change one half by the k-th coupling, or its inverse: the second where k is even, the first where it is odd."""
    if k % 2 == 0:
        x_a, x_b = halves
        return x_a, change(x_a, x_b)
    x_b, x_a = halves
    return change(x_a, x_b), x_a


def _start_product(matrices: Tensor, start: Tensor) -> None:
    """Change the last of the matrices (S, K + 1, d, d) of each site so that their product is a given map."""
    product, *rest = matrices.double().unbind(1)
    for matrix in rest:
        product = product @ matrix
    # the draws' product is the identity, unless an earlier fit moved it
    missing = batch_solve(product, start)
    last = matrices[:, -1].double()
    matrices[:, -1] = last @ missing


def _default_hidden(mixing: Mixing, width: int) -> int:
    """The width of hidden layers at which networks of every mixing have one size."""
    if mixing == "none":
        return 9 * width // 4
    return 3 * width // 2


def _default_start(mixing: Mixing) -> Start:
    """The start where none is asked for."""
    if mixing == "none":
        return "identity"
    return "best"


def _check_names(mixing: Mixing, start: Start) -> None:
    """Raise if one of the two is unknown, or they do not go together."""
    check_known(get_args(Mixing), mixing=mixing)
    check_known(get_args(Start), start=start)
    if mixing == "none" and start != "identity":
        raise UserError(
            f"INN with nothing between its couplings can only start at the identity, but `start` is {start!r} and "
            '`mixing` is "none". Leave `start` out, or set `mixing` to "rotation".'
        )


def _modules(modules: Iterable[nn.Module]) -> Any:
    """A ModuleList, known by the type of its modules."""
    return nn.ModuleList(modules)


def _telescope(couplings: int, width: int) -> Tensor:
    """Draw orthogonal matrices Q_1, Q_1ᵀQ_2, ..., Q_Kᵀ, which give each coupling other halves; their product is I.

    Returns:
        (couplings + 1, width, width)
    """
    normal = torch.randn(couplings, width, width)
    draws = torch.linalg.qr(normal).Q
    first = draws[:1]
    between = draws[:-1].mT @ draws[1:]
    last = draws[-1:].mT
    return torch.cat((first, between, last))


def _precise(x: Tensor) -> Tensor:
    """Convert half precision to float32: no inverse is exact in it."""
    if x.dtype.itemsize < 4:
        return x.float()
    return x
