"""`train.py fit_attention`: aligners between the attention weights of two models."""

from __future__ import annotations

from functools import partial

from aligners.cli.train.fit import fit_and_measure, fit_parser
from datamodules.pairings import attention_states

parser = partial(
    fit_parser,
    "fit_attention",
    "Fit aligners between the attention weights of two models' blocks, the heads as dimensions, and measure their "
    "errors on held-out texts (Ren et al. 2023, Figures 4 and 5b).",
    attention_states,
)
run = partial(fit_and_measure, "fit_attention", "attention")
