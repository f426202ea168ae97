"""The examples of `docs/how_it_works.md`, "Adding things", as somebody would follow them."""

import ast
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from aligners.cli import table
from aligners.reports import finished
from aligners.reports.publishing import write
from tests.processes import ROOT
from tests.world import TEST_TEXTS, World

PAGE = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")


def add(file: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the page's example for `file` where an import finds it as a part of its package."""
    (code,) = re.findall(rf"^```python\n# {re.escape(file)}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (folder / Path(file).name).write_text(code)
    package = import_module(".".join(Path(file).parent.parts))
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])


def line_of(registry: str) -> dict[str, tuple[str, str]]:
    """The page's line of registration in a file, as an entry of a table."""
    (line,) = re.findall(rf"Its line in `{re.escape(registry)}`[^:]*: `(.*?)`\.", PAGE, re.DOTALL)
    entry: dict[str, tuple[str, str]] = ast.literal_eval(f"{{{' '.join(line.split())}}}")
    return entry


def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add("aligners/reports/runs/sizes.py", tmp_path, monkeypatch)
    (line,) = re.findall(r"Its line in `aligners/reports/kinds.yaml`: `(.*?)`\.", PAGE)
    ((kind, about),) = yaml.safe_load(line).items()
    monkeypatch.setitem(finished.KINDS, kind, about)
    rows = [{"method": "linear", "parameters": 16}, {"method": "mlp", "parameters": 64}]
    write(finished.make_report(kind, {}, rows), tmp_path)
    found = json.loads((tmp_path / "sizes.json").read_text())
    assert found == {"meta": {}, "rows": rows, "findings": ["The largest map is mlp."]}


def test_a_command(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add("aligners/cli/evaluate/count.py", tmp_path, monkeypatch)
    monkeypatch.setattr(table, "COMMANDS", {"evaluate": table.COMMANDS["evaluate"] | line_of("aligners/cli/table.py")})
    texts = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.max_length", "60"]
    table.evaluate(["count", "--data.models", f"[{world.model_x}]", *texts])
    assert capsys.readouterr().out.split()[-1] == str(TEST_TEXTS)
    table.evaluate(["--help"])
    assert "Count the held-out texts." in capsys.readouterr().out
