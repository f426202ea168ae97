"""Benchmarks at sizes at which their times mean nothing, but their comparisons do."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.harness import Figures, interleaved, markdown, ratio
from benchmarks.known_cases import CASES, MEASURES, averaged

from benchmarks import first_step, products, random_classifier, similarity, stitching

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
EVERY = {name: pair for group in CASES.values() for name, pair in group.items()}
HEAVY = ["datasets", "lightning", "wandb", "torchmetrics"]
# Says what `aligners` alone imports, then runs scripts where only torch, transformers and matplotlib are installed.
ALONE = f"""
import json, runpy, sys, aligners
aligners.INN
print(*{{name.partition('.')[0] for name in sys.modules}})
sys.modules.update(dict.fromkeys({HEAVY}))
import aligners.models.loading.load_models, aligners.maps.inn
import aligners.datamodules.batches, aligners.datamodules.rows.read_rows
for sys.argv in json.loads(sys.argv[1]):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_the_package_loads_torch_and_scripts_run_from_anywhere_with_no_more(tmp_path: Path) -> None:
    small = "--width 64 --layers 2 --batch 2 --tokens 8 --rounds 1 --threads 1 --device cpu --json forward.json"
    few = "--seeds 1 --threads 1 --json cases.json --figure cases.png --bias-figure bias.png"
    runs = [[str(SCRIPTS / "stitched_forward.py"), *small.split()], [str(SCRIPTS / "known_cases.py"), *few.split()]]
    command = [sys.executable, "-c", ALONE, json.dumps(runs)]
    own = os.environ | {"PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=own, check=True, capture_output=True, text=True)
    package, said = done.stdout.split("\n", 1)
    assert {"aligners", "torch"} < set(package.split())
    other = {"scipy", "pandas", "matplotlib", "transformers", "safetensors"}
    assert not set(package.split()) & {*HEAVY, *other}
    figures = json.loads((tmp_path / "forward.json").read_text())["figures"]
    assert figures["head + tail / full forward"]["bar"] == 1.15
    found = json.loads((tmp_path / "cases.json").read_text())
    assert list(found["known_cases"]) == list(MEASURES)
    assert found["known_cases"]["cca"]["24 rows"] is None
    assert found["refused"]["cca, 24 rows"] in said
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["bias.png", "cases.png"]


# ---------------------------------------------------------------------- the harness


def test_alternatives_take_turns_and_ratios_are_taken_within_rounds() -> None:
    order: list[str] = []
    alternatives = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = interleaved(alternatives, rounds=3, device="cpu", warmup=0)
    assert "".join(order) == "abcbcacab"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert ratio({"a": [2.0, 20.0, 3.0], "b": [1.0, 10.0, 1.0]}, "a", "b") == 2.0


def test_figures_say_whether_a_bar_is_met(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figures = Figures("cpu")
    figures.add("cost", 1.2, bar=1.15)
    figures.add("speed", 1.2, bar=1.15, sense=">=")
    cost, speed = capsys.readouterr().out.splitlines()
    assert cost.endswith("<= 1.15: MISSED")
    assert speed.endswith(">= 1.15: met")
    figures.write(tmp_path / "results" / "figures.json")
    written = json.loads((tmp_path / "results" / "figures.json").read_text())
    assert written["figures"]["cost"] == {"value": 1.2, "bar": 1.15, "sense": "<="}
    assert written["machine"]["device"] == "cpu"
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["figures.json"]


def test_what_is_committed_is_a_table_of_the_figures() -> None:
    figures = {
        "cost": {"value": 1.23456789, "bar": 1.15, "sense": "<="},
        "rows": {"value": 400, "bar": None, "sense": "<="},
    }
    about = {"device": "cpu", "cores": 2}
    page = markdown("store", "python benchmarks/store.py", {"machine": about, "figures": figures}).splitlines()
    assert page[:3] == ["# store", "", "Command: `python benchmarks/store.py`. Machine: device cpu, cores 2."]
    assert page[-2:] == ["| cost | 1.2346 | <= 1.15, missed |", "| rows | 400 |  |"]
    parts = {"bank": {"status": "done", "figures": figures}, "ranks": {"status": "begun, and cut off"}}
    page = markdown("on_gpu", "python -m benchmarks.on_gpu", {"machine": about, "parts": parts}).splitlines()
    assert [line for line in page if line.startswith("##")] == ["## bank", "## ranks"]
    assert page.count("| cost | 1.2346 | <= 1.15, missed |") == 1


def test_a_page_names_packages_and_says_what_was_missed_or_skipped() -> None:
    about = {"device": "GPU", "packages": {"numpy": "2.5", "flash-attn": None}, "capability": [9, 0]}
    figures = {"cost": {"value": 1.2, "bar": 1.15, "sense": "<="}}
    figures |= {"gain": {"value": 2.0, "bar": 2.0, "sense": ">="}, "rows": {"value": 9.0, "bar": None, "sense": "<="}}
    done = {"status": "done", "figures": figures, "missed": ["cost"]}
    skipped = {"status": "skipped", "why": "it takes 2 GPUs", "figures": {}, "missed": []}
    page = markdown("on_gpu", "command", {"machine": about, "parts": {"bank": done, "ranks": skipped}})
    assert "Machine: device GPU, packages (numpy 2.5), capability 9.0.\n" in page
    assert "| cost | 1.2 | <= 1.15, missed |\n| gain | 2 | >= 2 |\n| rows | 9 |  |\n" in page
    assert page.endswith("## ranks\n\nSkipped: it takes 2 GPUs.\n")


# ---------------------------------------------------------------------- known cases


def test_what_is_one_by_counting_is_refused_with_its_reason() -> None:
    table, refused = averaged(MEASURES, {"24 rows": EVERY["24 rows"]}, 1)
    without = [measure for measure, line in table.items() if line["24 rows"] is None]
    assert without == ["cca", "svcca", "pwcca", "r2", "mixedsim"]
    assert list(refused) == [f"{measure}, 24 rows" for measure in without]
    assert "23 correlations would be 1 whatever the data" in refused["cca, 24 rows"]


# ---------------------------------------------------------------------- random classifiers


def test_groups_of_random_heads_are_summed_up_as_seeds(tmp_path: Path) -> None:
    figures, heads = Figures("cpu"), torch.tensor([10.0, 90.0] * 50)
    random_classifier.add(figures, "Y", heads, ceiling=88.0)
    figures.write(tmp_path / "figures.json")
    found = {
        name: figure["value"] for name, figure in json.loads((tmp_path / "figures.json").read_text())["figures"].items()
    }
    assert found["Y: % of heads near the ceiling"] == found["Y: % of heads near its mirror"] == 50
    assert found["Y: mean of 5, over seeds"] == found["Y: mean of 20, over seeds"] == 50
    assert found["Y: mean of 5, sd over seeds"] == pytest.approx(8 * (20 / 19) ** 0.5)  # 42 and 58, ten times each
    assert found["Y: mean of 20, sd over seeds"] == 0
    assert [found[f"Y: {end} of 20, over seeds"] for end in ("least", "largest")] == [10, 90]


# ---------------------------------------------------------------------- comparisons


def figures_of(benchmark: Any, options: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a benchmark writes."""
    written = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *options.split(), "--json", str(written)])
    benchmark.main()
    return json.loads(written.read_text())["figures"]


def test_both_sides_of_every_comparison_of_similarities_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = "--layers 2 --width 16 --batch 64 --rows 300 --rounds 1 --threads 1 --device cpu --parts minibatch pairs"
    figures = figures_of(similarity, small, monkeypatch, tmp_path)
    differences = {name: figure for name, figure in figures.items() if "difference" in name}
    assert len(differences) >= 2
    for name, figure in differences.items():
        assert figure["value"] <= figure["bar"], name
    capsys.readouterr()
    similarity.stream(layers=2, width=8, rows=3000)
    assert float(capsys.readouterr().out) > 10  # its peak memory


def in_this_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Instead of `subprocess.run`: saves importing everything twice."""
    said, given = io.StringIO(), sys.argv
    sys.argv = command[1:]
    try:
        with redirect_stdout(said):
            stitching.main()
    finally:
        sys.argv = given
    return subprocess.CompletedProcess(command, 0, said.getvalue())


def test_both_ways_of_stitching_find_the_same_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stitching, "subprocess", SimpleNamespace(run=in_this_process))
    small = "--layers 2 --width 64 --batch 4 --tokens 8 --rounds 1 --threads 1 --device cpu"
    figures = figures_of(stitching, small, monkeypatch, tmp_path)
    differences = [figure for name, figure in figures.items() if "difference" in name]
    assert len(differences) == 2
    assert all(figure["value"] <= figure["bar"] == 1e-5 for figure in differences)
    assert {name: figure["bar"] for name, figure in figures.items() if figure["sense"] == ">="} == {
        "plain hooks / stitched, one step": 1.5,
        "one after another / bank": 1.3,
    }
    assert figures["peak memory, stitched, MB"]["value"] > 10
    expected = [torch.tensor([1.0, -4.0]), torch.tensor([1e-3])]
    for other, found in (([1.0, -4.0], [1.1e-3]), 0.1), (([2.0, -4.0], [1e-3]), 0.25):
        gradients = [torch.tensor(part) for part in other]
        assert stitching.largest_difference(gradients, expected) == pytest.approx(found)


@pytest.mark.parametrize(
    ("exact", "coarse", "expected", "missed"),
    [
        ([0.2, 0.1], [0.3, 0.3], {"seeds": 2.0, "tf32 / float32": 2.0}, False),
        ([0.2, 0.1], [0.3, 0.4], {"seeds": 2.0, "tf32 / float32": 7 / 3}, True),
        ([-0.02, -0.01], [-0.01, -0.01], {"seeds differ by": 0.01, "tf32 − float32": 0.005}, False),
        ([-0.02, 0.01], [0.03, 0.03], {"seeds differ by": 0.03, "tf32 − float32": 0.035}, True),
    ],
)
def test_a_precision_is_judged_by_what_another_seed_changes(
    exact: list[float], coarse: list[float], expected: dict[str, float], missed: bool
) -> None:
    figures = Figures("cpu")
    products.compare(figures, "penalty", exact, coarse)
    found = {name.removeprefix("penalty: "): figure["value"] for name, figure in figures.figures.items()}
    assert found == pytest.approx(expected)
    assert bool(figures.missed) == missed


def test_seconds_to_the_first_step_are_by_step_and_of_both_checkouts() -> None:
    def run(*walls: float) -> dict[str, tuple[float, float]]:
        return {step: (wall, wall / 2) for step, wall in zip(first_step.STEPS, walls, strict=True)}

    figures = Figures("cpu")
    before = [run(4, 6, 9, 11, 14, 15)]
    first_step.add(figures, [run(3, 4, 6, 7, 9, 10), run(2, 4, 8, 9, 11, 12)], before, bare=[(6, 4), (8, 5), (1, 0.5)])
    found = {name: figure["value"] for name, figure in figures.figures.items()}
    assert found["imports, seconds"] == 2.5
    assert found["models, seconds"] == 3
    assert found["models, seconds of processors"] == 1.5
    assert found["before: models, seconds"] == 3
    assert found["until after the first step, seconds of processors"] == 5.5
    assert found["before: until after the first step, seconds of processors"] == 7.5
    assert found["until after the first step, seconds"] == 11
    assert found["bare imports, seconds"] == 6
    assert found["bare imports, seconds of processors"] == 4
    assert found["first step / bare imports, of processors"] == 5.5 / 4


def test_bare_imports_are_of_a_process_of_its_own_that_may_write_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    busy = "import sys, time; assert not sys.dont_write_bytecode\nwhile time.process_time() < 0.2: pass"
    monkeypatch.setattr(first_step, "BARE", busy)
    wall, processors = first_step.timed_bare(1)
    assert min(wall, processors) > 0.19
