"""`evaluate.py features` on two language models: its page of latents shows what they fire on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.shell import options
from tests.tiny import tiny_folder
from tests.world import World, read_texts

from aligners.cli.table import evaluate, train

USUAL = {"data__max_length": 60, "trainer__accelerator": "cpu", "trainer__logger": False}
SPARSE = "{sparse: {class_path: SparseAligner, init_args: {latents: 64, active: 4}}}"


@pytest.fixture(scope="module")
def dictionary(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dictionary of two language models, trained for a moment."""
    folder = tmp_path_factory.mktemp("features")
    models = {}
    for seed, side in enumerate("xy"):
        models[f"data__model_{side}"] = str(tiny_folder(folder / side, "gpt2", task="causal", seed=seed))
    texts = {"data__text__source": world.fit, "data__text__held_out": world.test}
    given = {**USUAL, **models, **texts, "data__sites": "1,2", "trainer__max_steps": 30, "run": str(folder / "fit")}
    train(["fit", *options(**given), "--model.aligners", SPARSE])
    return str(folder / "fit" / "aligners.safetensors")


def measured(dictionary: str, run: Path, **changes: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The report, and the data of the page, if there is one."""
    evaluate(["features", *options(**USUAL, checkpoint=dictionary, run=str(run), **changes)])
    report = json.loads((run / "features.json").read_text())
    page = run / "latents.html"
    if not page.is_file():
        return report, None
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return report, json.loads(data)


def test_the_page_shows_the_latents_of_the_report_with_held_out_texts(
    dictionary: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, data = measured(dictionary, tmp_path / "some", data__batch_size=3)
    assert data is not None
    capsys.readouterr()
    evaluate(["show", str(tmp_path / "some"), "--open", "false"])
    assert f"Latents to look through: {tmp_path / 'some' / 'latents.html'}" in capsys.readouterr().out
    (tmp_path / "some" / "latents.html").unlink()
    (tmp_path / "some" / "report.html").unlink()
    evaluate(["show", str(tmp_path / "some"), "--open", "false"])
    assert "latents.html is gone" in capsys.readouterr().out
    assert (tmp_path / "some" / "report.html").is_file()
    rows = {(row["site_x"], row["latent"]): row for row in report["rows"]}
    assert len(data["latents"]) == len(rows) > 20
    held_out, _ = read_texts(world.test)
    every = [" ".join(text.split()) for text in held_out]
    for place, latent, verdict, _, tokens, contexts in data["latents"]:
        row = rows[place + 1, latent]
        assert data["verdicts"][verdict][0].lower() == row["verdict"][0]
        assert contexts
        first = data["strings"][tokens[0][0]].strip()
        assert row["top_tokens"].startswith(first)
        for text, at, code, _ in contexts:
            assert code > 0
            read = [data["strings"][token].strip() for token in data["texts"][text]]
            own = [token for token in read if not token.startswith("<")]
            assert " ".join(own) in every
            assert at < len(read)
        assert len({text for text, *_ in contexts}) == len(contexts) <= 8
    _, again = measured(dictionary, tmp_path / "all", data__batch_size=25)
    assert again is not None
    assert sorted(map(str, again["strings"])) == sorted(map(str, data["strings"]))


def test_no_contexts_no_page(dictionary: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, data = measured(dictionary, tmp_path / "none", contexts=0)
    evaluate(["show", str(tmp_path / "none"), "--open", "false"])
    assert "latents.html" not in capsys.readouterr().out
    assert data is None
    assert report["rows"]
