"""Model families: what is supported, and which checks it passed; `python -m website.families` tries and records all."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from aligners.models import architectures
from aligners.models.architectures import (
    FAMILIES,
    REFUSED,
    architecture_of,
    known_architectures,
)
from tests.contracts.families import heads, passed

__all__ = ["page", "records", "renew"]

RECORD = Path(architectures.__file__).with_name("tested.yaml")
ABOUT = """# By `python -m website.families`: for each family and version of transformers, when it was tried, and what
# passed of the checks of tests/contracts/families.py, on random models of a few thousand weights; or why it is refused.
"""
INTRODUCTION = """# Model families

A model is a Hub id or a local folder whose `config.json` names one of these as its `model_type`. States of all of them
are read, compared and mapped. Mapped states are injected where the model has a head that answers: classes (or numbers),
masked tokens, or the next token.

"Sub-layers" are what `--data.component` can read besides the residual stream. A model with a setting of the column
"refused with" is refused. What a token sees is what is usual in a family: with other settings it may see more, or less,
and every model is asked itself (the last token of a text changes, and the states before it move or do not). Next tokens
are predicted only where it sees those before it.

Tests try every family, with each of the heads listed, on random models of a few thousand weights: what was read is
injected, and the answers must be the same bit for bit at every site; a text must have the same states alone and in a
batch. `aligners/models/tested.yaml` says which checks passed with which version of
`transformers`. Before every evaluation the same self-test runs on the model at hand. [A family of your
own](../adding_things.md#a-model-family) takes one line.

| in transformers | `model_type` | a token sees | heads tested | sub-layers | refused with | last tested |
|---|---|---|---|---|---|---|
"""
HEADS = {"classification": "classes", "causal": "next token", "masked": "masked tokens"}


def records() -> dict[str, dict[str, dict[str, Any]]]:
    """Family -> version of transformers -> the date, and either what passed or why the family is refused."""
    found: dict[str, dict[str, dict[str, Any]]] = (
        yaml.safe_load(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    )
    return found


def renew() -> None:
    """Try every family with the installed version of transformers, and record it beside other versions."""
    known, today = records(), datetime.now(UTC).date().isoformat()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    written = [ABOUT]
    for family in sorted({*FAMILIES, *REFUSED}):
        versions = known.get(family, {})
        if family in CONFIG_MAPPING_NAMES:
            outcome = (
                {"refused": REFUSED[family]}
                if family in REFUSED
                else {"passed": passed(family)}
            )
            versions |= {transformers.__version__: {"date": today, **outcome}}
        written += [
            f"{family}:\n",
            *(f"  {version}: {_flow(record)}" for version, record in versions.items()),
        ]
    RECORD.write_text("".join(written), encoding="utf-8")


def _flow(record: dict[str, Any]) -> str:
    return yaml.safe_dump(record, default_flow_style=True, width=1000, sort_keys=False)


def page() -> str:
    """The page."""
    known = records()
    rows = "\n".join(_row(name, known.get(name, {})) for name in known_architectures())
    reasons = "\n".join(f"* `{name}`: {reason}." for name, reason in REFUSED.items())
    return f"{INTRODUCTION}{rows}\n\nThese families are refused:\n\n{reasons}\n"


def _row(name: str, tried: dict[str, dict[str, Any]]) -> str:
    entry = architecture_of(name)
    version = max(tried, key=lambda version: tried[version]["date"], default=None)
    answers = [] if entry.rereads else [HEADS[head] for head in heads(name)]
    cells = [
        CONFIG_MAPPING_NAMES.get(name, name)
        .removesuffix("Config")
        .removesuffix("Text"),
        f"`{name}`",
        "those before it" if entry.causal else "the whole text",
        ", ".join(answers) or "none: its decoder reads the text again",
        " and ".join(part for part in ("attention", "mlp") if getattr(entry, part))
        or "none known",
        ", ".join(f"`{setting}`" for setting in entry.without) or "",
        f"{version}, {tried[version]['date']}" if version else "not tested",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    renew()
