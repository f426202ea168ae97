"""Floors of an injection: what can be achieved without any information about the text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from aligners.similarity.algebra.moments import Moments


class GaussianStates:
    """Draws states with Y's mean and covariance at each site: `random_embedding`.

    The draw of a text depends on the seed and the text's number alone, so it is the same for any batching and
    any number of ranks.

    Args:
        moments: moments of the fitting rows.
        seed: the seed of the draws.
    """

    def __init__(self, moments: Moments, seed: int) -> None:
        # Eigenvectors, not Cholesky: states after a LayerNorm have an exactly singular covariance.
        covariance = moments.yy / moments.n
        values, vectors = torch.linalg.eigh(covariance)
        sizes = values.clamp(min=0).sqrt()
        sizes = sizes[:, None]
        root = vectors * sizes @ vectors.mT  # signs of vectors cancel
        mean = moments.mean_y[:, None]
        self.root = root.float()
        self.mean = mean.float()
        self.seed = seed

    def __call__(
        self,
        text: Sequence[int],
        counts: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Draw states for the rows of a batch, (S, N, d_y), without waiting for the device.

        Args:
            text: the numbers of the B texts.
            counts: the number of rows of each text.
            device: where the states are to be.
        """
        self.mean = self.mean.to(device)  # once
        self.root = self.root.to(device)
        noise = self._drawn(text, counts)
        if self.mean.is_cuda:
            noise = noise.pin_memory()  # or the copy would wait
        there = noise.to(device, non_blocking=True)
        return self.mean + there @ self.root

    def _drawn(self, text: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Standard normal rows of all texts, one text after the other, (N, d_y)."""
        noise = []
        for number, rows in zip(text, counts, strict=True):
            of_text = self._noise(number, rows)
            noise.append(of_text)
        return torch.cat(noise)

    def _noise(self, number: int, rows: int) -> Tensor:
        """Standard normal rows of a text, (rows, d_y)."""
        # Neighbouring seeds give related streams in some generators; a large odd factor spreads them.
        seed = self.seed * 1_000_003 + number * 2_654_435_761 + 1
        generator = torch.Generator()
        generator.manual_seed(seed % 2**63)
        width = self.mean.shape[-1]
        return torch.randn(rows, width, generator=generator)


def random_labels(texts: int, classes: int, seed: int) -> Tensor:
    """Draw a class for each text, uniformly at random: (texts,)."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randint(classes, (texts,), generator=generator)
