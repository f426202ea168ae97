"""Similarity of attention heads over a stream of texts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from similarity.functional.attention import AttentionSums, attention_sums, attnsim_from_sums
from similarity.moments import DoubleMetric

__all__ = ["AttentionSimilarity"]


class AttentionSimilarity(DoubleMetric):
    """attnsim (Wu et al. 2020, A.4) between all layers of two models, in one pass.

    Keeps sums over texts and words for all pairs of heads, which batches and ranks add to.

    Args:
        layers_x: L_x, the number of blocks of X.
        heads_x: H_x, heads of each of them.
        layers_y: L_y.
        heads_y: H_y.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True

    def __init__(self, layers_x: int, heads_x: int, layers_y: int, heads_y: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, zeros in AttentionSums.zeros(layers_x, heads_x, layers_y, heads_y)._asdict().items():
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, a: Tensor, b: Tensor, words: Tensor) -> None:
        """Add texts.

        Args:
            a: (L_x, H_x, B, W, W) attention between words of X, as `similarity.algebra.folding.fold` gives it.
            b: (L_y, H_y, B, W, W) that of Y, between the same words.
            words: (B,) number of words of each text.

        Raises:
            ValueError: other layers or heads than announced, or as in `attention_sums`.
        """
        received, expected = (*a.shape[:2], *b.shape[:2]), tuple(self._sums().distance.shape)
        if received != expected:
            raise ValueError(
                f"Expected `a` and `b` of {expected} layers and heads of X and of Y, but got {received}. "
                "Build the metric for these models."
            )
        sums = attention_sums(a, b, words)
        for name in AttentionSums._fields:
            setattr(self, name, getattr(self, name) + getattr(sums, name))

    def compute(self) -> dict[str, Tensor]:
        """`attnsim_norm`, `attnsim_pearson`, `attnsim_js`, each (L_x, L_y), from X to Y.

        Raises:
            ValueError: as in `attnsim_from_sums`.
        """
        return attnsim_from_sums(self._sums())

    def sums(self) -> AttentionSums:
        """The sums over all ranks; `attnsim_from_sums(metric.sums().swap())` is the direction from Y to X."""
        with self.sync_context(dist_sync_fn=self.dist_sync_fn):
            return self._sums()

    def _sums(self) -> AttentionSums:
        return AttentionSums(*(getattr(self, name) for name in AttentionSums._fields))
