import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shell import options
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World, read_texts

from aligners.api import Direction, Steered, steer, write_artefact
from aligners.cli.table import evaluate
from aligners.injection.generation.continuing import Continuing
from aligners.injection.generation.steering import ALPHAS, LEVELS, SteeringEvaluation


def directions(folder: Path, model: str, *, name: str = "mine", sites: tuple[int, ...] = (1, 2), seed: int = 0) -> Path:
    """A folder of directions."""
    for site in sites:
        vector = torch.randn(16, generator=torch.Generator().manual_seed(seed + site))
        about = {"name": f"{name}-{site}", "model": model, "site": site}
        write_artefact(Direction({"vector": vector}, about), folder / f"{name}-{site}")
    return folder


def run_steer(world: World, model: str, run: Path, **changes: Any) -> dict[str, Any]:
    usual = {
        "data__model": model, "data__text__source": world.fit, "data__text__held_out": world.test,
        "data__max_length": 20, "trainer__accelerator": "cpu", "trainer__logger": False, "run": str(run),
        "words_for": ["good", "great"], "words_against": ["bad"],
    }  # fmt: skip
    evaluate(["steer", *options(**usual | changes)])
    found: dict[str, Any] = json.loads((run / "steering.json").read_text())
    return found


def test_the_command_measures_and_writes(world: World, causal: list[str], tmp_path: Path) -> None:
    mine = directions(tmp_path / "mine", causal[1])
    theirs = directions(tmp_path / "theirs", causal[1], seed=7)
    known = {"artefacts": str(mine), "carried": str(theirs), "probe": str(mine / "mine-2")}
    report = run_steer(world, causal[1], tmp_path / "run", **known, generate=3, new_tokens=4)
    rows, equal = report["rows"], report["equal"]
    assert {(row["role"], row["site"]) for row in rows} == {
        (role, site) for role in ("native", "carried", "random") for site in (1, 2)
    }
    methods, alphas = 1 + 1 + 3, len(set(ALPHAS) - {0})
    assert len(rows) == 2 * methods * alphas
    assert {row["n_texts"] for row in rows} == {TEST_TEXTS}
    assert {(row["effect"], row["kl"]) for row in equal} == {(e, k) for e in ("words", "reading") for k in LEVELS}
    # What Python says of the same texts is the same.
    texts = read_texts(world.test)[0]
    first = Direction({"vector": torch.randn(16, generator=torch.Generator().manual_seed(1))}, {"name": "a", "site": 1})
    words = (["good", "great"], ["bad"])
    again = steer(causal[1], first, texts, words=words, alphas=ALPHAS[:1], random=1, equal_kl=[0.1])
    assert isinstance(again, Steered)
    mine_1 = next(row for row in rows if row["method"] == "mine-1")
    assert again.curve[0]["kl"] == pytest.approx(mine_1["kl"], rel=0.5)  # other texts set the unit
    assert again.curve[0]["role"] == "native"
    written = report["generation"]
    assert [row["method"] for row in written] == [
        "own",
        "mine-1",
        "mine-2",
        "mine-1 (carried)",
        "mine-2 (carried)",
        "random 1",
        "random 1",
    ]
    assert written[0]["agreement"] == 1
    assert all(row["alpha"] > 0 for row in written[1:])
    assert report["findings"][0].startswith(
        "Caution: 1 predicts these texts worse than the frequencies of their tokens"
    )
    assert "Steering 1 by mine-" in report["findings"][0]
    assert (tmp_path / "run" / "steering.png").is_file()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"artefacts": None}, "Expected `artefacts` or `carried` to name a folder with a direction"),
        ({"words_against": []}, "or neither, but got only one"),
        ({"words_for": ["marvellous"]}, "has no token for 'marvellous'"),
        ({"generate": 2, "data__max_length": 8}, "more than `prompt_tokens` 8"),
        ({"generate": 2, "model": "openai-gpt"}, "Expected a model with a cache"),
        ({"model": "bert"}, "Expected a causal language model"),
    ],
)
def test_bad_input_is_refused(
    changes: dict[str, Any], said: str, world: World, causal: list[str], tmp_path: Path
) -> None:
    kind, model = changes.pop("model", None), causal[0]
    if kind is not None:
        model = str(tiny_folder(tmp_path / "model", kind, task="causal" if kind == "openai-gpt" else "classification"))
    given = {"artefacts": str(directions(tmp_path / "mine", model))} | changes
    with pytest.raises(ValueError, match=said):
        run_steer(world, model, tmp_path / "run", **given)


def test_bad_numbers_are_refused_from_python(world: World, causal: list[str]) -> None:
    direction = Direction({"vector": torch.ones(16)}, {"name": "a", "site": 1})
    with pytest.raises(ValueError, match="alphas"):
        steer(causal[0], direction, read_texts(world.test)[0], words=(["good"], ["bad"]), alphas=[0.0])
    with pytest.raises(ValueError, match="random"):
        SteeringEvaluation([direction], Continuing(), random=0)
    with pytest.raises(ValueError, match="equal_kl"):
        SteeringEvaluation([direction], Continuing(), equal_kl=[0.0])
