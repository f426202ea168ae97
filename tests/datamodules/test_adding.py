"""The examples of docs/how_it_works.md for a source of text and a row policy: each does what the page says."""

from __future__ import annotations

import re
from typing import Any

import torch

from datamodules.rows.policies import POLICIES
from datamodules.text.loading import load_texts
from datamodules.text.sources import SOURCES, TextSource
from tests.runs import activations
from tests.shell import ROOT
from tests.world import World


def run(beginning: str, **names: Any) -> None:
    """Run the only example of the page that begins so."""
    page = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if code.startswith(beginning))
    exec(code, names)


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
        data = activations(world, rows="last", sites=[2])
        (batch, *_) = data.paired("test")
        assert data.describe()["types"] == "rows 'last' have none, and none are held out"
    finally:
        del POLICIES["last"]
    inputs = batch.texts.inputs_x
    states = data.reader.model_x.front(inputs, [2])[0]
    ends = inputs["attention_mask"].sum(1) - 1
    assert torch.equal(batch.x[0], states[torch.arange(len(ends)), ends])
    assert torch.equal(batch.text, batch.texts.text)
