"""The check that makes every evaluation trustworthy: putting back what was read changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from frozen.architectures import Component, first_site

if TYPE_CHECKING:
    from frozen.model import FrozenModel

__all__ = ["self_test"]


def self_test(frozen: FrozenModel, inputs: Mapping[str, Tensor], component: Component = "residual") -> None:
    """Check on one batch that injecting what was read gives bit-identical logits at every site of a component.

    Raises:
        RuntimeError: naming the first site where it does not, and the largest difference there.
        ValueError: as in `FrozenModel.logits` and `FrozenModel.front`.
    """
    sites = range(first_site(component), frozen.depth + 1)
    with torch.no_grad():
        expected = frozen.logits(inputs)
        if not bool(expected.isfinite().all()):
            raise RuntimeError(f"{frozen.name} gives logits that are not finite: nothing read from it can be trusted.")
        for site, states in zip(sites, frozen.front(inputs, sites, component), strict=True):
            received = frozen.tail(inputs, site, states, component)
            if not torch.equal(received, expected):
                what = f"site {site}" if component == "residual" else f"the {component} of block {site}"
                raise RuntimeError(
                    f"Injecting what was read at {what} of {frozen.name} changes its logits by up to "
                    f"{(received - expected).abs().max().item():.3g} instead of by exactly 0. An evaluation would "
                    f"measure that difference: check the entry of {frozen.model.config.model_type!r} in "
                    "frozen/architectures.py, and your own hooks."
                )
