"""`train.py recover`: whether maps find a bijection that is known to exist."""

from __future__ import annotations

from functools import partial

from aligners.cli.train.fit import fit_and_measure, fit_parser
from aligners.fitting.recovering import target_states

parser = partial(
    fit_parser,
    "recover",
    "Pair a model's states with random invertible networks of them, fit maps, and measure how well each finds the "
    "network (Ren et al. 2023, Table 3), by strength of the non-linearity and by site.",
    target_states,
)
run = partial(fit_and_measure, "recover", "recovery")
