"""Numbers and settings of the papers, in configs, code and pages, against a table of them with their places."""

import re
from typing import Any

import pytest
import yaml
from tests.processes import ROOT

FACTS = yaml.safe_load((ROOT / "tests/references/papers.yaml").read_text(encoding="utf-8"))
NUMBERS = {
    name: printed
    for file in (ROOT / "papers").glob("*/numbers.yaml")
    for name, printed in yaml.safe_load(file.read_text(encoding="utf-8")).items()
}
TASKS = ("mnli", "sst2", "mrpc")


def printed(name: str) -> dict[str, list[float]]:
    """The rows of a paper's table as the project has them, in the order of the paper's columns."""
    rows: dict[str, list[float]] = {}
    order = {task: place for place, task in enumerate(TASKS)}
    for entry in sorted(NUMBERS[name]["values"], key=lambda entry: order.get(entry.get("task"), 0)):
        if name == "wu_table_1":
            rows[f"{entry['model']} {entry['variant']}"] = [entry[task] for task in ("sst2", "mnli", "qnli", "qqp")]
        else:
            cells = [entry[key] for key in ("mse", "train", "test", "score") if key in entry]
            rows.setdefault(entry["method"][0], []).extend(number for cell in cells for number in cell)
    return rows


def test_sizes_of_data_sets_are_as_printed() -> None:
    assert {entry["task"]: [entry["train"], entry["test"]] for entry in NUMBERS["ren_table_1"]["values"]} == FACTS[
        "tables"
    ]["ren_table_1"]


@pytest.mark.parametrize("name", ["ren_table_3", "ren_table_4", "ren_table_5", "wu_table_1"])
def test_tables_of_papers_are_as_printed(name: str) -> None:
    assert printed(name) == FACTS["tables"][name]


def test_the_f1_of_probes_are_as_printed() -> None:
    entries = {entry["probed"]: entry for entry in NUMBERS["merchant_table_1"]["values"]}
    printed = FACTS["tables"]["merchant_table_1"]
    assert set(entries) == set(printed)
    for probed, (before, *_, mnli, squad, dep) in printed.items():
        entry = entries[probed]
        assert [entry[key] for key in ("before", "mnli", "squad", "dep")] == [before, mnli, squad, dep]


def value_of(config: str, key: str) -> Any:
    """The value of a config's key: names of maps with dots between them; `len` counts."""
    folder = ROOT if config.startswith("papers/") else ROOT / "aligners/configs"
    value = yaml.safe_load((folder / config).read_text(encoding="utf-8"))
    for name in key.split("."):
        value = len(value) if name == "len" else value[name]
    return value


@pytest.mark.parametrize("fact", FACTS["settings"], ids=lambda fact: f"{fact[0]}, {fact[1]}: {fact[2]}, {fact[3]}")
def test_settings_are_those_of_the_papers(fact: list[Any]) -> None:
    _, _, config, key, value = fact
    assert value_of(config, key) == value


@pytest.mark.parametrize("fact", FACTS["sentences"], ids=lambda fact: f"{fact[0]}, {fact[1]}")
def test_sentences_state_the_papers_numbers(fact: list[str]) -> None:
    *_, file, words = fact
    text = re.sub(r"\s+(# )?", " ", (ROOT / file).read_text(encoding="utf-8"))
    assert words in text
