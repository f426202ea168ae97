"""Model families: what is supported, and which tests it passed; `python -m website.families` tries all and records it."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import transformers
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from aligners.models import architectures
from aligners.models.architectures import FAMILIES, REFUSED, architecture_of, known_architectures
from tests.contracts.families import heads, passed

__all__ = ["page", "records"]

RECORD = Path(architectures.__file__).with_name("tested.yaml")
RECORDED = """# By `python -m website.families`: for each family and version of transformers, what passed and when, of the checks of
# tests/contracts/families.py, on random models of a few thousand weights; or why the family is refused.
"""
INTRODUCTION = """# Model families

A model is a Hub id or a local folder whose `config.json` names one of these as its `model_type`. States of all of them
are read, compared and mapped. Mapped states are injected where the model has a head that answers: classes (or numbers),
masked tokens, or the next token.

"Sub-layers" are what `--data.component` can read besides the residual stream. A model with a setting of the column
"refused with" is refused. Tests try every family, with each of the heads listed, on random models of a few thousand
weights: what was read is injected, and the answers must be the same bit for bit at every site; a text must have the same
states alone and in any batch. `aligners/models/tested.yaml` says which version of `transformers` passed what. Before
every evaluation the same self-test runs on the model at hand. [A family of your
own](../adding_things.md#a-model-family) takes one line.

| in transformers | `model_type` | a token sees | heads tested | sub-layers | refused with | last tested |
|---|---|---|---|---|---|---|
"""
HEADS = {"classification": "classes", "causal": "next token", "masked": "masked tokens"}


def records() -> dict[str, dict[str, dict[str, Any]]]:
    """Family -> version of transformers -> the date, and either what passed or why the family is refused."""
    kept: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    return kept


def renew() -> None:
    """Try every family, and record what passed under the installed version of transformers."""
    kept, today = records(), datetime.now(UTC).date().isoformat()
    written = [RECORDED]
    for family in sorted({*FAMILIES, *REFUSED}):
        found = f'refused: "{REFUSED[family]}"' if family in REFUSED else f"passed: [{', '.join(passed(family))}]"
        versions = {name: _line(about) for name, about in kept.get(family, {}).items()}
        versions[transformers.__version__] = f"{{date: {today}, {found}}}"
        written += [f"{family}:\n", *(f"  {name}: {about}\n" for name, about in versions.items())]
    RECORD.write_text("".join(written), encoding="utf-8")


def page() -> str:
    """The page."""
    table, known = "\n".join(map(_row, known_architectures())), records()
    reasons = "\n".join(f"* `{name}`: {reason}." for name, reason in REFUSED.items())
    assert known
    return f"{INTRODUCTION}{table}\n\nNot supported, whatever the config says:\n\n{reasons}\n"
