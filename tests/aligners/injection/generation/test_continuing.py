import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.shell import options
from tests.tiny import WORDS, tiny_folder, tiny_frozen
from tests.world import World
from torch import Tensor

from aligners.cli.table import evaluate
from aligners.injection.generation.continuing import Added, Continuing, continuations, figures, generate
from aligners.models import FrozenModel

PROMPTS = torch.tensor([[0, 5, 9], [0, 20, 7], [0, 8, 30]])


@pytest.fixture(scope="module")
def model() -> FrozenModel:
    frozen = tiny_frozen("llama", task="causal")
    frozen.model.generation_config.eos_token_id = None
    return frozen


def write(model: FrozenModel, changing: Added | None = None) -> Tensor:
    return generate(model, PROMPTS, changing, new_tokens=5)


def test_figures_are_what_a_plain_model_says(model: FrozenModel) -> None:
    written = write(model)
    tokens = written.clone()
    tokens[0, 2:], tokens[1, 2:] = tokens[0, 1], -1
    losses: list[float] = []
    for prompt, row, n in zip(PROMPTS, tokens, (5, 2, 5), strict=True):
        ids = torch.cat([prompt, row[:n]])[None]
        logits = model.model(input_ids=ids).logits[0, 2:-1].log_softmax(-1)
        losses += (-logits.gather(1, row[:n, None])[:, 0]).tolist()
    own, other = (figures(model, PROMPTS, written, found, 0) for found in (written, tokens))
    assert other["perplexity"] == pytest.approx(float(torch.tensor(losses).mean().exp()), rel=1e-5)
    same = int((tokens[0] == written[0]).sum())
    assert other["agreement"] == pytest.approx((same + 2 + 5) / 15)  # what a shorter text lacks is not equal
    assert (own["agreement"], own["n_prompts"]) == (1, 3)
    assert own["perplexity_low"] <= own["perplexity"] <= own["perplexity_high"]


def test_ways_are_compared_with_the_first(model: FrozenModel) -> None:
    ways: list[Any] = [({"way": n}, model, added) for n, added in enumerate((None, Added(2, 100 * torch.ones(16))))]
    tables = continuations(PROMPTS, Continuing(3, 3, 5), 0, ways)
    own, steered = tables["generation"]
    assert own["agreement"] == 1
    assert steered["agreement"] < 1
    assert [row["prompt"] for row in tables["samples"] if row["way"] == 1] == [
        f"<s> {' '.join(WORDS[n - 4] for n in row[1:])}" for row in PROMPTS
    ]


def inject(world: World, models: list[str], run: Path, **changes: Any) -> dict[str, Any]:
    usual = {
        "data__model_x": models[0], "data__model_y": models[1], "data__text__source": world.fit, "data__sites": [1, 2],
        "data__text__held_out": world.test, "data__max_length": 20, "trainer__accelerator": "cpu",
        "trainer__logger": False, "run": str(run), "closed_form": ["linear"], "generate": 4,
    }  # fmt: skip
    evaluate(["inject", *options(**usual | changes)])
    found: dict[str, Any] = json.loads((run / "report.json").read_text())
    return found


def test_a_model_put_into_itself_writes_what_it_writes(
    world: World, causal: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = inject(world, [causal[0], causal[0]], tmp_path / "run")
    rows = report["generation"]
    assert [(row["method"], row["site_y"]) for row in rows] == [
        ("native_y", None), ("native_x", None), ("identity", 1), ("identity", 2), ("linear", 1), ("linear", 2),
    ]  # fmt: skip
    assert {row["agreement"] for row in rows[:4]} == {1.0}
    assert len({row["perplexity"] for row in rows[:4]}) == 1
    assert {row["n_prompts"] for row in rows} == {4}
    assert len(report["samples"]) == 3 * len(rows)
    assert any("was given the first tokens of 4 held-out texts" in line for line in report["findings"])
    said = capsys.readouterr().out
    assert "goes on from: <s>" in said
    assert (tmp_path / "run" / "generation.csv").is_file()


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("bert", {}, "Expected a causal language model"),
        ("openai-gpt", {}, "Expected a model with a cache"),
        ("gpt2", {"generate": -1}, "generate"),
        ("gpt2", {"data__max_length": 8}, "more than `prompt_tokens` 8 tokens to continue"),
        ("gpt2", {"new_tokens": 62}, "at most 64 tokens in all"),
    ],
)
def test_bad_input_is_refused_before_anything_is_fitted(
    kind: str, changes: dict[str, Any], said: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tiny_folder(tmp_path / "model", kind, task="classification" if kind == "bert" else "causal"))
    with pytest.raises(ValueError, match=said):
        inject(world, [folder, folder], tmp_path / "run", **changes)
    assert not (tmp_path / "run" / "aligners.safetensors").exists()
