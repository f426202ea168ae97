"""The examples of docs/adding_things.md for what can be added: each does what the page says."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from tests.processes import ROOT
from tests.rows import paired
from tests.runs import related_rows
from tests.shell import options as flags
from tests.world import TEST_TEXTS, World
from transformers import ArceeConfig, AutoModelForCausalLM

from aligners.cli import table
from aligners.datamodules import pairings
from aligners.datamodules.rows import policies
from aligners.fitting.saved_bank import build_aligner, describe_aligner, load_bank
from aligners.models import architectures
from aligners.models.model import FrozenModel
from aligners.reports import finished_runs
from aligners.reports.publishing import write
from aligners.reports.study import registry
from aligners.reports.study.frames import Frames
from aligners.reports.study.study_report import markdown
from aligners.similarity import catalogue
from aligners.similarity.algebra.grid import grid_moments
from aligners.similarity.algebra.moments import moments_of
from aligners.similarity.functional import cka
from aligners.similarity.functional.cca import SharedMoments

PAGE = (ROOT / "docs" / "adding_things.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def example(beginning: str, page: str = PAGE) -> str:
    """The only example of a page that begins so."""
    (found,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if code.startswith(beginning))
    return found


def add(file: str, folder: Path, monkeypatch: pytest.MonkeyPatch, page: str = PAGE) -> None:
    """Put a page's example for `file` where an import finds it as a part of its package."""
    (folder / Path(file).name).write_text(example(f"# {file}\n", page))
    package = import_module(".".join(Path(file).parent.parts))
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])


def line_of(registry: str) -> str:
    """The page's line of registration in a file."""
    (line,) = re.findall(rf"Its line in `{re.escape(registry)}`[^:]*: `(.*?)`\.", PAGE, re.DOTALL)
    return " ".join(line.split())


def run(beginning: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "example"}
    exec(example(beginning), names)
    return names


def test_a_map() -> None:
    bank = run("# a map")["Scale"](2, 5, 5).double()
    x, _ = related_rows(2, 50, 5, 5)
    bank.fit(moments_of(x, 3 * x + 1))
    torch.testing.assert_close(bank(x), 3 * x + 1)
    assert type(build_aligner(describe_aligner(bank))) is type(bank)


def test_a_measure() -> None:
    run("# a measure")
    x, y = paired(30)
    found = catalogue.catalogue()["covariance"].compute(SharedMoments(grid_moments(x, y)))
    centred = x[1] - x[1].mean(0), y[0] - y[0].mean(0)
    torch.testing.assert_close(found[1, 0], (centred[0].T @ centred[1]).norm() / 30)


def test_a_table_of_a_study(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "CONTENTS", dict(registry.CONTENTS))
    run("# a table of a study")
    rows = {"model_x": ["a", "a"], "model_y": ["b", "b"], "method": ["inn", "inn"], "parameters": [10, 2500]}
    (table,) = registry.make(Frames({"inject": pd.DataFrame(rows)}), ["sizes"]).tables
    assert "| inn | 2,500 |" in markdown(table)


def test_a_model_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "_ARCHITECTURES", dict(architectures._ARCHITECTURES))
    run("# a model family")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ArceeConfig(vocab_size=30, num_key_value_heads=2, pad_token_id=0, **sizes)
    frozen = FrozenModel(AutoModelForCausalLM.from_config(config), name="tiny")
    tokens = torch.randint(1, 30, (3, 7), generator=torch.Generator().manual_seed(0))
    for component in ("residual", "attention", "mlp"):
        frozen.self_test({"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, component)


def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add("aligners/reports/runs/sizes.py", tmp_path, monkeypatch)
    ((kind, about),) = yaml.safe_load(line_of("aligners/reports/kinds.yaml")).items()
    monkeypatch.setitem(finished_runs.KINDS, kind, about)
    rows = [{"method": "linear", "parameters": 16}, {"method": "mlp", "parameters": 64}]
    write(finished_runs.make_report(kind, {}, rows), tmp_path)
    found = json.loads((tmp_path / "sizes.json").read_text())
    assert found == {"meta": {}, "rows": rows, "findings": ["The largest map is mlp."]}


def by_command(name: str, *words: str, **options: Any) -> None:
    """Run a command on tiny models."""
    table.run_script(name, [*words, *flags(trainer__logger=False, trainer__accelerator="cpu", **options)])


def texts_of(world: World) -> dict[str, Any]:
    return {"data__text__source": world.fit, "data__text__held_out": world.test, "data__max_length": 60}


def paste(file: str, module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the example of CONTRIBUTING.md for a file as if it stood at the end of it; what the file then has."""
    before = {*vars(module)}
    code = example(f"# {file}", CONTRIBUTING)
    path = folder / f"pasted_{Path(file).name}"  # from which the options of a function are read
    path.write_text(code)
    names = dict(vars(module))
    exec(compile(code, str(path), "exec"), names)
    for name in names.keys() - before:
        monkeypatch.setattr(module, name, names[name], raising=False)
    return names


def test_a_pairing_and_its_command_of_contributing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paste("datamodules/pairings.py", pairings, tmp_path, monkeypatch)
    add("aligners/cli/train/fit_last.py", tmp_path, monkeypatch, CONTRIBUTING)
    (line,) = re.findall(r'`("fit_last": \(.*?\))`', CONTRIBUTING, re.DOTALL)
    entry = eval(f"{{{' '.join(line.split())}}}")
    monkeypatch.setattr(table, "COMMANDS", {"train": table.COMMANDS["train"] | entry})
    words = ["fit_last", "--model.aligners", "linear", "--run", str(tmp_path / "run")]
    by_command("train", *words, data__model=world.model_x, **texts_of(world))
    sites = load_bank(tmp_path / "run" / "aligners.safetensors").pairs
    assert [(1, 3), (2, 3)] in sites.values(), sites


def test_a_row_policy_of_contributing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = paste("datamodules/rows/policies.py", policies, tmp_path, monkeypatch)
    (line,) = re.findall(r'In `POLICIES` below it, `"special": (\w+)\(\),`', CONTRIBUTING)
    monkeypatch.setitem(policies.POLICIES, "special", module[line]())
    models = {"data__model_x": world.model_x, "data__model_y": world.model_y, "data__special_tokens": True}
    words = ["fit", "--data.rows", "special", "--model.aligners", "linear", "--run", str(tmp_path / "run")]
    by_command("train", *words, data__held_out_types=0.0, **models, **texts_of(world))
    assert (tmp_path / "run" / "aligners.safetensors").is_file()


def test_a_measure_of_contributing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = paste("aligners/similarity/functional/cka.py", cka, tmp_path, monkeypatch)
    monkeypatch.setattr(catalogue, "_FURTHER", {})
    (line,) = re.findall(r"`(Measure\(.*\)),`;", CONTRIBUTING)
    catalogue.register(eval(line, {**vars(catalogue), "covariance": module["covariance"]}))
    words = ["similarity", "--measures", "covariance", "--run", str(tmp_path / "run")]
    by_command("evaluate", *words, data__models=[world.model_x, world.model_y], **texts_of(world))
    assert "covariance" in (tmp_path / "run" / "similarity.json").read_text()


def test_a_command(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add("aligners/cli/evaluate/count.py", tmp_path, monkeypatch)
    entry = eval(f"{{{line_of('aligners/cli/table.py')}}}")
    monkeypatch.setattr(table, "COMMANDS", {"evaluate": table.COMMANDS["evaluate"] | entry})
    texts = ["--data.text.source", world.fit, "--data.text.held_out", world.test, "--data.max_length", "60"]
    table.evaluate(["count", "--data.models", f"[{world.model_x}]", *texts])
    assert capsys.readouterr().out.split()[-1] == str(TEST_TEXTS)
    table.evaluate(["--help"])
    assert "Count the held-out texts." in capsys.readouterr().out
