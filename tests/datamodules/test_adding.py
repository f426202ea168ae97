"""The examples of docs/adding_things.md for a source of text, a row policy and a pairing do what the page says."""

import re
from typing import Any

import torch
from tests.processes import ROOT
from tests.runs import activations
from tests.world import World

from aligners.datamodules.rows.policies import POLICIES
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import SOURCES, TextSource


def run(beginning: str, **names: Any) -> dict[str, Any]:
    """Run the only example of the page that begins so, and return what it has defined."""
    page = (ROOT / "docs" / "adding_things.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if code.startswith(beginning))
    exec(code, names)
    return names


def test_a_source_of_text() -> None:
    run("# a source of text")
    try:
        texts = load_texts(TextSource("numbers"))
    finally:
        del SOURCES["numbers"]
    assert texts.label_names == ["even", "odd"]
    assert len(texts.fit) + len(texts.validation) + len(texts.test) == 500


def test_a_row_policy(world: World) -> None:
    run("# a row policy", torch=torch)
    try:
        data = activations(world, rows="middle", sites=[2])
        (batch, *_) = data.paired("test")
        assert data.describe()["types"] == "rows 'middle' have no types, so that none can be held out"
    finally:
        del POLICIES["middle"]
    inputs = batch.texts.inputs_x
    states = data.reader.model_x.front(inputs, [2])[0]
    middles = inputs["attention_mask"].sum(1) // 2  # padded on the right
    assert torch.equal(batch.x[0], states[torch.arange(len(middles)), middles])
    assert torch.equal(batch.text, batch.texts.text)


def test_a_pairing(world: World) -> None:
    text = TextSource(world.fit, held_out=world.test)
    data = run("# a pairing")["next_block"](world.model_x, text=text, max_length=64, held_out_types=0.0)
    batch = next(data.paired("test"))
    assert [place.name for place in data.reader.places()] == ["1-2", "2-3"]
    assert torch.equal(batch.y[0], batch.x[1])
    assert torch.equal(batch.x[0], next(activations(world, sites=[1], batch_size=32).paired("test")).x[0])
    assert data.config()["model"] == world.model_x
