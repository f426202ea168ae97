"""The tables and figures of five papers: importing this registers them for the reports of studies."""

from importlib import import_module

MODULES = (
    "ren2023.ren",
    "wu2020.wu",
    "phang2021.phang",
    "merchant2020.merchant",
    "brown2023.brown",
)
for module in MODULES:  # in the order of reports
    import_module(f"{__name__}.{module}")
