"""A sparse dictionary of two models as plain tensors, its decoders side by side, and the entries of its codes."""

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from aligners.errors import UserError

# numbers gathered at a time: 32 MB of decoder rows
GATHERED = 2**22
MODELS = ("x", "y")
Pair = tuple[Tensor, Tensor]  # of X, of Y


class PairedDictionary(NamedTuple):
    """A dictionary of m latents for two models at S site pairs: x̂ = Σ_j f_j d_x,j + b_x, ŷ = Σ_j f_j d_y,j + b_y.

    Attributes:
        decoder_x: (S, m, d_x); decoder_y: (S, m, d_y).
        bias_x: (S, d_x); bias_y: (S, d_y).
    """

    decoder_x: Tensor
    decoder_y: Tensor
    bias_x: Tensor
    bias_y: Tensor

    @classmethod
    def of(
        cls,
        decoder_x: Tensor,
        decoder_y: Tensor,
        bias_x: Tensor | None = None,
        bias_y: Tensor | None = None,
    ) -> Self:
        """Put a dictionary together in float64; a bias that is left out is 0.

        Raises:
            ValueError: shapes that do not fit, or a number that is not finite.
        """
        if decoder_x.ndim != 3 or decoder_y.ndim != 3:
            raise UserError(
                "Expected `decoder_x` and `decoder_y` of shape (sites, latents, width), but got "
                f"{tuple(decoder_x.shape)} and {tuple(decoder_y.shape)}."
            )
        if decoder_x.shape[:2] != decoder_y.shape[:2]:
            raise UserError(
                "Expected `decoder_x` and `decoder_y` of the same sites and latents, but got "
                f"{tuple(decoder_x.shape[:2])} and {tuple(decoder_y.shape[:2])}."
            )
        biases = []
        pairs = [("bias_x", bias_x, decoder_x), ("bias_y", bias_y, decoder_y)]
        for name, bias, decoder in pairs:
            shape = decoder.shape[0], decoder.shape[2]
            if bias is None:
                bias = decoder.new_zeros(shape)
            if bias.shape != shape:
                raise UserError(
                    f"Expected `{name}` of shape {shape}, but got {tuple(bias.shape)}."
                )
            biases.append(bias)
        parts = decoder_x, decoder_y, *biases
        for name, part in zip(cls._fields, parts, strict=True):
            _check_finite(name, part)
        return cls(*(part.double() for part in parts))

    @property
    def decoders(self) -> Pair:
        """The decoders of X and of Y."""
        return self.decoder_x, self.decoder_y

    def to(self, device: torch.device) -> Self:
        """Return the dictionary on a device."""
        return type(self)(*(part.to(device) for part in self))


class Firing(NamedTuple):
    """The codes of one site that are above 0: E entries of N rows.

    Attributes:
        row: (E,) numbers of the rows; latent: (E,) of the latents; value: (E,) the codes.
    """

    row: Tensor
    latent: Tensor
    value: Tensor

    def parts(self, width: int) -> Iterator[Self]:
        """Yield so many entries at a time that gathered vectors of this width stay small."""
        entries = max(1, GATHERED // width)
        for row, latent, value in zip(
            *(each.split(entries) for each in self), strict=True
        ):
            yield type(self)(row, latent, value)

    def rebuilt(self, decoder: Tensor, rows: int) -> Tensor:
        """Σ_j f_j d_j of each row, without a bias: decoder (m, d) → (N, d)."""
        sums = decoder.new_zeros(rows, decoder.shape[1])
        for part in self.parts(decoder.shape[1]):
            added = part.value[:, None] * decoder[part.latent]
            sums.index_add_(0, part.row, added)
        return sums

    def along(self, directions: Tensor, targets: Tensor) -> Tensor:
        """The target of each entry's row along the direction of its latent: (m, d) and (N, d) → (E,)."""
        products = []
        for part in self.parts(targets.shape[1]):
            both = directions[part.latent] * targets[part.row]
            products.append(both.sum(1))
        return torch.cat(products) if products else self.value

    def weighted(self, targets: Tensor, latents: int) -> Tensor:
        """Σ f_j t over the rows, for each of m latents: targets (N, d) → (m, d)."""
        sums = targets.new_zeros(latents, targets.shape[1])
        for part in self.parts(targets.shape[1]):
            added = part.value[:, None] * targets[part.row]
            sums.index_add_(0, part.latent, added)
        return sums


def firing(codes: Tensor) -> Firing:
    """Return the entries of codes (N, m) that are above 0, in float64."""
    row, latent = codes.nonzero(as_tuple=True)
    return Firing(row, latent, codes[row, latent].double())


def check_rows_of(
    dictionary: PairedDictionary, codes: Tensor, x: Tensor, y: Tensor
) -> None:
    """Raise unless codes (S, N, m), x (S, N, d_x) and y (S, N, d_y) are rows of this dictionary.

    Raises:
        ValueError: a shape that does not fit, no rows, a negative code, or a number that is not finite.
    """
    sites, latents, d_x = dictionary.decoder_x.shape
    d_y = dictionary.decoder_y.shape[2]
    check_codes(codes, sites, latents)
    for name, part, width in (("x", x, d_x), ("y", y, d_y)):
        _check_shape(name, part, (sites, codes.shape[1], width))
        _check_finite(name, part)


def check_codes(codes: Tensor, sites: int, latents: int) -> None:
    """Raise unless codes are (S, N, m) with rows, finite and at least 0.

    Raises:
        ValueError: they are not.
    """
    rows = codes.shape[1] if codes.ndim == 3 else 0
    if not rows:
        raise UserError(
            f"Expected `codes` of shape (sites, rows, latents) with at least one row, but got {tuple(codes.shape)}."
        )
    _check_shape("codes", codes, (sites, rows, latents))
    _check_finite("codes", codes)
    least = float(codes.min())
    if least < 0:
        raise UserError(
            f"Expected `codes` to be at least 0, as those of a sparse dictionary are, but got {least:g}. Give them "
            "after the activation function."
        )


def check_numbers(name: str, numbers: Tensor, rows: int, below: int) -> None:
    """Raise unless there is a number from 0 to below a limit for each row.

    Args:
        name: of the argument.
        numbers: (N,) integers.
        rows: N.
        below: the limit.

    Raises:
        ValueError: another shape, or a number that is out of range.
    """
    if numbers.shape != (rows,):
        raise UserError(
            f"Expected `{name}` of shape {(rows,)}, a number for each row of `codes`, but got {tuple(numbers.shape)}."
        )
    least = int(numbers.min())
    most = int(numbers.max())
    if least < 0 or most >= below:
        raise UserError(
            f"Expected `{name}` from 0 to {below - 1}, but got {least} to {most}."
        )


def _check_shape(name: str, part: Tensor, expected: tuple[int, int, int]) -> None:
    if part.shape != expected:
        raise UserError(
            f"Expected `{name}` of shape {expected}, as the dictionary and `codes` have it, but got "
            f"{tuple(part.shape)}."
        )


def _check_finite(name: str, part: Tensor) -> None:
    if not part.isfinite().all():
        raise UserError(
            f"Expected `{name}` to be finite, but it holds NaN or infinity."
        )


def targets_of(
    dictionary: PairedDictionary,
    site: int,
    entries: Firing,
    states: Pair,
    counting: Pair,
) -> tuple[Pair, Pair]:
    """Return the errors x − x̂ and y − ŷ of the rows of one site, and what some latents rebuild of each, without biases.

    Args:
        dictionary: of both models.
        site: number of the site pair.
        entries: codes of its rows.
        states: (N, d_x) and (N, d_y).
        counting: (S, m) each, latents that count in what is rebuilt of X, and of Y.
    """
    biases = dictionary.bias_x, dictionary.bias_y
    errors, rebuilt = [], []
    for side, decoder in enumerate(dictionary.decoders):
        rows = states[side].double()
        of_all = entries.rebuilt(decoder[site], len(rows))
        errors.append(rows - of_all - biases[side][site])
        some = counting[side][site]
        if not some.all():
            of_all = entries.rebuilt(decoder[site] * some[:, None], len(rows))
        rebuilt.append(of_all)
    return (errors[0], errors[1]), (rebuilt[0], rebuilt[1])


def relative_norms(
    dictionary: PairedDictionary, variance_x: Tensor, variance_y: Tensor
) -> Tensor:
    """The share of Y in the decoder norms of each latent, r_j = ‖d_y,j‖ / (‖d_x,j‖ + ‖d_y,j‖): 0 only X's, 1 only Y's.

    Both models' states are scaled to a total variance of 1 first, or a model with larger states would own what is
    shared. From Lindsey et al. 2024, "Sparse crosscoders for cross-layer features and model diffing".

    Args:
        dictionary: of both models.
        variance_x: (S,) total variance of X's states, the mean of ‖x − x̄‖².
        variance_y: (S,) of Y's.

    Returns:
        (S, m); NaN where both decoders are 0.

    Raises:
        ValueError: a variance that is not above 0.
    """
    scaled = []
    parts = zip(MODELS, dictionary.decoders, (variance_x, variance_y), strict=True)
    for model, decoder, variance in parts:
        if not bool((variance > 0).all()):
            raise UserError(
                f"Expected `variance_{model}` to be above 0 at every site, but got {variance.tolist()}: the states do "
                "not vary."
            )
        norms = torch.linalg.vector_norm(decoder, dim=2)
        scaled.append(norms / variance.double().sqrt()[:, None])
    norms_x, norms_y = scaled
    return norms_y / (norms_x + norms_y)


def decoder_cosines(dictionary: PairedDictionary) -> Tensor:
    """Cosines of the two decoders of each latent, (S, m), for models that share a space, as a fine-tuned and its base.

    NaN where one of the two is 0.

    Raises:
        ValueError: the widths differ, so there is no space that both are in.
    """
    decoder_x, decoder_y = dictionary.decoders
    check_one_space(dictionary)
    products = torch.linalg.vecdot(decoder_x, decoder_y)
    norms_x = torch.linalg.vector_norm(decoder_x, dim=2)
    norms_y = torch.linalg.vector_norm(decoder_y, dim=2)
    return products / (norms_x * norms_y)


def check_one_space(dictionary: PairedDictionary) -> None:
    """Raise unless both models have the same width.

    Raises:
        ValueError: the widths differ.
    """
    d_x = dictionary.decoder_x.shape[2]
    d_y = dictionary.decoder_y.shape[2]
    if d_x != d_y:
        raise UserError(
            f"A direction of one model is a direction of the other only in a common space, but `decoder_x` has width "
            f"{d_x} and `decoder_y` {d_y}. Use `FittedReadings`, which needs none."
        )
