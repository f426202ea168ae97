"""The table of model families: what is supported, and which of it the tests try."""

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from aligners.models.architectures import architecture_of, known_architectures
from tests.tiny import ARCHITECTURES, CLASSIFIERS, LANGUAGE_HEADS

__all__ = ["page"]

INTRODUCTION = """# Model families

A model is a Hub id or a local folder whose `config.json` names one of these as its `model_type`. States of all of them
are read, compared and mapped. Mapped states are injected where the model has a head that answers: classes (or numbers),
masked tokens, or the next token.

"Sub-layers" are what `--data.component` can read besides the residual stream. A model with a setting of the last column
is refused. Tests try every family, with each of the heads listed, on random models of a few thousand weights: what was
read is injected, and the answers must be the same bit for bit at every site. Before every evaluation the same self-test
runs on the model at hand. [A family of your own](../adding_things.md#a-model-family) takes one line.

| in transformers | `model_type` | a token sees | heads tested | sub-layers | refused with |
|---|---|---|---|---|---|
"""
HEADS = {"causal": "next token", "masked": "masked tokens"}


def page() -> str:
    """The page."""
    return INTRODUCTION + "\n".join(map(_row, known_architectures())) + "\n"


def _row(name: str) -> str:
    entry = architecture_of(name)
    heads = [HEADS[task] for family, task in LANGUAGE_HEADS if family == name]
    if name in CLASSIFIERS:
        heads.insert(0, "classes")
    if name not in ARCHITECTURES:
        heads = ["not tested"]
    cells = [
        CONFIG_MAPPING_NAMES[name].removesuffix("Config").removesuffix("Text"),
        f"`{name}`",
        "those before it" if entry.causal else "the whole text",
        ", ".join(heads) or "none: its decoder reads the text again",
        " and ".join(part for part in ("attention", "mlp") if getattr(entry, part)) or "none known",
        ", ".join(f"`{setting}`" for setting in entry.without) or "",
    ]
    return f"| {' | '.join(cells)} |"
