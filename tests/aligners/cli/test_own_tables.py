"""Tables of one's own and of the papers in a study's report: by files that the command line names, as the docs say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from tests.aligners.cli.small_study import study_file
from tests.processes import ROOT
from tests.world import World

from aligners.cli.table import study
from aligners.errors import UserError
from aligners.reports.study import described_tables, registry

PAGE = (ROOT / "docs" / "study_reports.md").read_text(encoding="utf-8").split("## My own table")[1]
OURS = ["similarity", "errors", "differences", "injection", "errors_by_layer", "all_layers", "updates"]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only our own tables are there, and what a test registers is forgotten after it."""
    ours = {name: registry.CONTENTS[name] for name in OURS}
    monkeypatch.setattr(registry, "CONTENTS", ours)
    monkeypatch.setattr(registry, "_functions", dict(registry._functions))
    monkeypatch.setattr(registry, "NUMBERS", dict(registry.NUMBERS))
    monkeypatch.setattr(described_tables, "NUMBERS", registry.NUMBERS)
    fields = {name: registry.DESCRIBED[name] for name in OURS}
    monkeypatch.setattr(registry, "DESCRIBED", fields)
    monkeypatch.setattr(described_tables, "DESCRIBED", fields)
    for name in ("mine", "ren"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("cells_here")
def test_the_recipe_of_the_docs_puts_printed_numbers_beside_mine(world: World, tmp_path: Path) -> None:
    for file, text in re.findall(r'```\w+ title="([\w.]+)"\n(.*?)```', PAGE, re.DOTALL):
        (tmp_path / file).write_text(text)
    tasks = {"sst2": {"text": {"source": world.fit, "held_out": world.test}}}
    study_file(world, tmp_path, name="mine", tasks=tasks, report=["my_errors", "my_sizes"])
    (run, report) = (line.split()[2:] for line in PAGE.splitlines() if line.startswith("python study.py"))
    study(run)
    tables = tmp_path / "runs" / "mine" / "report" / "tables"
    errors = pd.read_csv(tables / "my_errors.csv").set_index("method")
    assert errors.loc["linear", "paper_test"] == 0.41
    assert errors["paper_test"].notna().sum() == 1
    assert "Paper: our report of last year: the same models, 400 texts." in (tables / "my_errors.md").read_text()
    assert set(pd.read_csv(tables / "my_sizes.csv")["method"]) >= {"linear", "mlp"}
    (tables / "my_errors.csv").unlink()
    study(report)
    assert (tables / "my_errors.csv").is_file()
    assert registry.usual() == ["my_errors", "my_sizes", *(name for name in OURS if name != "errors")]


@pytest.mark.usefixtures("cells_here")
@pytest.mark.slow
def test_a_finished_study_that_names_a_papers_table_is_read_with_and_without_its_file(
    world: World, tmp_path: Path
) -> None:
    study(["run", study_file(world, tmp_path)])
    folder = tmp_path / "runs" / "small"
    written = yaml.safe_load((folder / "study.yaml").read_text()) | {"report": ["ren_table_4"]}
    (folder / "study.yaml").write_text(yaml.safe_dump(written))
    study(["collect", str(folder)])
    study(["report", str(folder)])
    missing = json.loads((folder / "report" / "missing.json").read_text())
    assert "`--imports FILE.py`" in missing["ren_table_4"]
    with pytest.raises(UserError, match=r"got ren_table_4\..*`--imports FILE\.py`"):
        study(["retry", str(folder)])
    study(["report", str(folder), "--imports", str(ROOT / "papers" / "ren2023" / "ren.py")])
    assert (folder / "report" / "tables" / "ren_table_4.csv").is_file()
    assert json.loads((folder / "report" / "missing.json").read_text()) == {}


@pytest.mark.usefixtures("cells_here")
def test_the_recipe_of_contributing_adds_a_table_of_a_paper(world: World, tmp_path: Path) -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in ("ren.py", "tables.yaml", "numbers.yaml"):
        text = (ROOT / "papers" / "ren2023" / name).read_text(encoding="utf-8")
        added = re.findall(rf"```\w+\n(# papers/ren2023/{name}\n.*?)```", contributing, re.DOTALL)
        text, register, end = text.rpartition("register(__name__)")
        (tmp_path / name).write_text("\n\n".join([text, *added, register + end]))
    options = {"model": {"aligners": {"procrustes": "Procrustes"}}, "data": {"sites": [1]}}
    file = study_file(world, tmp_path, fit={"options": options}, report=["ren_rotations"])
    study(["run", file, "--imports", "ren.py"])
    made = pd.read_csv(tmp_path / "runs" / "small" / "report" / "tables" / "ren_rotations.csv")
    assert list(made["task"]) == ["t"]


def test_a_study_file_cannot_name_a_file_of_tables(world: World, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("raise SystemError('was run')")
    with pytest.raises(UserError, match="on the command line alone"):
        study(["run", study_file(world, tmp_path, imports=["silent.py"])])


@pytest.mark.parametrize(
    ("tables", "numbers", "said"),
    [
        ("my_errors: {like: erors}", "{}", r"got 'erors'\. Did you mean errors"),
        ("my_errors: {like: errors, titel: Mine}", "{}", r"`my_errors` out of .*got titel\. Did you mean title"),
        ("my_errors: {from: errors, title: Mine}", "{}", "`my_errors` to have caption"),
        ("my_errors: {like: errors}", "my_errors: {source: me}", "`my_errors` to have `setting`"),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    tables: str, numbers: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tables.yaml").write_text(tables)
    (tmp_path / "numbers.yaml").write_text(numbers)
    (tmp_path / "mine.py").write_text(
        "from aligners.reports.study.registry import register\nerrors = print\nregister(__name__)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=said):
        __import__("mine")


@pytest.mark.slow
def test_the_package_has_its_own_tables_and_the_checkout_those_of_the_papers_in_place_of_them() -> None:
    code = "from aligners.reports.study.registry import usual; print(*usual())"
    for before, first, last in (("", "similarity", "updates"), ("import papers; ", "ren_table_1", "updates")):
        done = subprocess.run([sys.executable, "-c", before + code], cwd=ROOT, capture_output=True, text=True)
        names = done.stdout.split()
        assert (names[0], names[-1]) == (first, last)
        assert ("errors" in names) is not ("ren_table_4" in names)
        assert names == OURS if not before else len(names) == 48
    assert 'study(modules=["papers"])' in (ROOT / "study.py").read_text()
