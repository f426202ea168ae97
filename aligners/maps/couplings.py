"""What invertible networks are built of: couplings, rotations, and matrices that are cheap to invert."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from aligners.maps.base import BankLinear
from aligners.maps.matrices import (
    by_products,
    identity_like,
    products_in,
    triangular_inverse,
)


class Conditioner(nn.Module):
    """The network inside a coupling: (S, N, d_in) -> (S, N, d_out), zero at the start.

    Args:
        sites: S.
        d_in: width of its input.
        d_out: width of its output.
        hidden: width of its hidden layers.
        depth: number of hidden layers, at least 1.
    """

    def __init__(
        self, sites: int, d_in: int, d_out: int, hidden: int, depth: int
    ) -> None:
        super().__init__()
        self.hidden = nn.ModuleList()
        width = d_in
        for _ in range(depth):
            layer = BankLinear(sites, width, hidden)
            self.hidden.append(layer)
            width = hidden
        self.last = BankLinear(sites, width, d_out)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(S, N, d_in) -> (S, N, d_out)."""
        for layer in self.hidden:
            x = gelu(layer(x))
        return self.last(x)


class AffineCoupling(nn.Module):
    """y_b = x_b ⊙ exp(tanh(r)) + t, where (r, t) is computed from x_a, which passes unchanged.

    The log-scale s = tanh(r) lies in [-1, 1], so neither direction can overflow. A new coupling is the identity.

    Reference: Dinh, Sohl-Dickstein and Bengio 2016, "Density estimation using Real NVP", arXiv 1605.08803,
    eq. 4-8.

    Args:
        sites: S.
        d_keep: width of x_a.
        d_change: width of x_b.
        hidden: width of the conditioner's hidden layers.
        depth: number of the conditioner's hidden layers.
    """

    def __init__(
        self, sites: int, d_keep: int, d_change: int, hidden: int, depth: int
    ) -> None:
        super().__init__()
        conditions = 2 * d_change  # r and t
        self.conditioner = Conditioner(sites, d_keep, conditions, hidden, depth)

    def forward(self, x_a: Tensor, x_b: Tensor) -> Tensor:
        """y_b, (S, N, d_change)."""
        conditions = self.conditioner(x_a)
        return _Affine.apply(x_b, conditions, False)

    def inverse(self, x_a: Tensor, y_b: Tensor) -> Tensor:
        """x_b, (S, N, d_change)."""
        conditions = self.conditioner(x_a)
        return _Affine.apply(y_b, conditions, True)

    def log_scale(self, x_a: Tensor) -> Tensor:
        """s, (S, N, d_change); its sum over the last axis is the log-determinant of `forward`."""
        conditions = self.conditioner(x_a)
        raw, _ = conditions.chunk(2, dim=-1)
        return raw.tanh()


class _Affine(torch.autograd.Function):
    """x ⊙ exp(tanh(r)) + t for conditions (r, t), or its inverse (y − t) ⊙ exp(−tanh(r)).

    Its backward pass writes the gradient of the conditions into one tensor; autograd would make two and join them.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, conditions: Tensor, inverse: bool) -> Tensor:
        raw, shift = conditions.chunk(2, dim=-1)
        log_scale = raw.tanh()
        ctx.inverse = inverse
        if inverse:
            scale = (-log_scale).exp()
            result = (given - shift).mul_(scale)
            x = result
        else:
            scale = log_scale.exp()
            result = torch.addcmul(shift, given, scale)
            x = given
        ctx.save_for_backward(x, log_scale, scale)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, log_scale, scale = ctx.saved_tensors
        scaled = grad * scale
        if not ctx.inverse:
            conditions = _join(scaled * x, log_scale, grad)
            return scaled, conditions, None
        negative = _join(grad * x, log_scale, scaled)
        return scaled, negative.neg_(), None


def _join(grad_log_scale: Tensor, log_scale: Tensor, grad_shift: Tensor) -> Tensor:
    """Return the gradient of (r, t), given those of tanh(r) and t."""
    *lead, width = log_scale.shape
    joined = grad_shift.new_empty(*lead, 2 * width)
    of_raw, of_shift = joined.chunk(2, dim=-1)
    # d tanh(r) / dr = 1 − tanh(r)²
    torch.addcmul(
        grad_log_scale, grad_log_scale, log_scale.square(), value=-1, out=of_raw
    )
    of_shift.copy_(grad_shift)
    return joined


class ShuffledHadamard(nn.Module):
    """A fixed rotation: shuffle the features, flip some signs, then mix blocks of them by Hadamard matrices.

    Blocks have 4, 16 or 64 features, whose Hadamard matrices have entries ±1/2, ±1/4 and ±1/8: no entry is rounded,
    so the transpose is the inverse in any precision. If the width is no multiple of 4, up to three features are
    shuffled but not mixed. One product costs 64 d multiplications a row, not d².

    The same at every site and for every seed: it is part of the architecture, and no checkpoint holds it.

    Reference: Ailon and Chazelle 2009, "The Fast Johnson-Lindenstrauss Transform", SIAM J. Comput. 39, section 2.

    Args:
        width: d.
        number: the seed; each number gives another rotation of this width.
    """

    order: Tensor
    back: Tensor
    signs: Tensor
    block: Tensor

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(number)
        order = torch.randperm(width, generator=draw)
        bits = torch.randint(2, (width,), generator=draw)
        back = order.argsort()
        signs = 2.0 * bits - 1
        block = _hadamard(width)
        left_over = width % len(block)
        self.mixed = width - left_over
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("back", back, persistent=False)
        self.register_buffer("signs", signs, persistent=False)
        self.register_buffer("block", block, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        shuffled = _shuffled(x, self.order)
        signs = self.signs.to(x.dtype)
        return self._mix(shuffled * signs)

    def inverse(self, y: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        signs = self.signs.to(y.dtype)
        flipped = self._mix(y) * signs
        return _shuffled(flipped, self.back)

    def _mix(self, x: Tensor) -> Tensor:
        """Multiply by the blocks, which are symmetric and their own inverses."""
        block = self.block.to(x.dtype)
        covered = x[..., : self.mixed]
        rest = x[..., self.mixed :]
        blocks = covered.unflatten(-1, (-1, len(block)))
        mixed = (blocks @ block).flatten(-2)
        if self.mixed == x.shape[-1]:
            return mixed
        return torch.cat((mixed, rest), -1)


def _hadamard(width: int) -> Tensor:
    """The largest orthogonal Hadamard matrix of 1, 4, 16 or 64 rows that is no wider than this."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    four = torch.kron(two, two) / 2
    largest = min(width, 64)
    block = torch.ones(1, 1)
    while 4 * len(block) <= largest:
        block = torch.kron(block, four)
    return block


def _shuffled(x: Tensor, order: Tensor) -> Tensor:
    """Features in another order. On a CPU, `index_select` would take half as long again along the last dimension."""
    places = order.expand_as(x)
    return x.gather(-1, places)


class TriangularPair(nn.Module):
    """x ↦ x (I + L) (D + U) R: L strictly lower and U strictly upper triangular, D a positive diagonal.

    R is a fixed rotation, or the identity. The map starts at R, where a step can move the product in any direction. Its
    inverse solves two triangular systems, which takes as many multiplications as two matrix products. In training on a
    GPU the triangular matrices are inverted, and U is turned rather than the rows: see `by_products`.

    Reference: Kingma and Dhariwal 2018, "Glow", arXiv 1807.03039, section 3.2.

    Args:
        sites: S.
        width: d.
    """

    def __init__(self, sites: int, width: int) -> None:
        super().__init__()
        # the diagonal holds the logarithm of D, all else is L and U
        entries = torch.zeros(sites, width, width)
        self.entries = nn.Parameter(entries)

    def forward(self, x: Tensor, rotation: ShuffledHadamard | None = None) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        lower, upper = self._factors()
        if rotation is None:
            return x @ lower @ upper
        if by_products(x):
            return x @ lower @ rotation(upper)
        return rotation(x @ lower @ upper)

    def inverse(self, y: Tensor, rotation: ShuffledHadamard | None = None) -> Tensor:
        """(S, N, d) -> (S, N, d)."""
        lower, upper = self._factors()
        if by_products(y):
            return _solved(y, lower, upper, rotation)
        if rotation is not None:
            y = rotation.inverse(y)
        y = torch.linalg.solve_triangular(upper, y, upper=True, left=False)
        return torch.linalg.solve_triangular(
            lower, y, upper=False, left=False, unitriangular=True
        )

    def log_det(self) -> Tensor:
        """The logarithm of the determinant, (S,)."""
        return self._log_diagonal().sum(-1)

    def _factors(self) -> tuple[Tensor, Tensor]:
        """I + L and D + U, each (S, d, d)."""
        entries = self.entries
        same = identity_like(entries)
        lower = entries.tril(-1) + same
        diagonal = self._log_diagonal().exp()
        scaling = torch.diag_embed(diagonal)
        upper = entries.triu(1) + scaling
        return lower, upper

    def _log_diagonal(self) -> Tensor:
        """The logarithm of D's diagonal, (S, d)."""
        return self.entries.diagonal(dim1=-2, dim2=-1)


def _solved(
    y: Tensor, lower: Tensor, upper: Tensor, rotation: ShuffledHadamard | None
) -> Tensor:
    """Y (L U R)⁻¹ by products, for triangular L and U (S, d, d)."""
    with torch.no_grad(), products_in("float32"):
        both = torch.stack((lower, upper.mT))
        inverse_lower, inverse_upper = triangular_inverse(both)
        if rotation is not None:
            inverse_upper = rotation(inverse_upper)
    if rotation is not None:
        upper = rotation(upper)
    y = _Solution.apply(y, upper, inverse_upper.mT)
    return _Solution.apply(y, lower, inverse_lower)


class _Solution(torch.autograd.Function):
    """y A⁻¹ for a matrix A whose inverse is known; gradients are those of a solve, and none goes to the inverse."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, matrix: Tensor, inverse: Tensor) -> Tensor:
        solution = y @ inverse
        ctx.save_for_backward(solution, inverse)
        return solution

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        solution, inverse = ctx.saved_tensors
        grad_y = grad @ inverse.mT
        grad_matrix = -(solution.mT @ grad_y)
        return grad_y, grad_matrix, None
