"""Held-out and unseen types of rows, against what plain strings say."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.rows.reading import Plan
from datamodules.rows.types import SeenTypes, is_held_out
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.runs import activations, rank_of
from tests.tiny import SPECIAL, WORDS
from tests.world import World, sentences, write_texts

SHARE = 0.25
HELD = {word for word in WORDS if is_held_out(word, SHARE, 0)}


def prepared(data: States, split: str, **options: Any) -> list[Any]:
    """Every batch of a split, its rows chosen."""
    return [data.reader.prepare(texts) for texts in data.loader(split, **options)]  # type: ignore[arg-type]


def names_of(data: States, split: str) -> list[str]:
    """The token of every row of a split, which is the word, too."""
    tokenizer = data.reader.model_x.tokenizer
    assert tokenizer is not None
    found: list[str] = []
    for ready in prepared(data, split):
        texts, rows = ready.texts, ready.rows[0]
        found += tokenizer.convert_ids_to_tokens(texts.inputs_x["input_ids"].flatten()[rows.index].tolist())
    return found


def test_a_keyed_hash_of_the_name_chooses_types() -> None:
    names = [f"type {number}" for number in range(4000)]
    few, many = ({name for name in names if is_held_out(name, share, 0)} for share in (0.1, 0.3))
    assert few < many  # a larger share holds out these and more
    assert [len(few) / 4000, len(many) / 4000] == pytest.approx([0.1, 0.3], abs=0.03)
    assert {name for name in names if is_held_out(name, 0.1, 1)} != few
    assert not any(is_held_out(name, 0.0, 0) for name in names)
    assert is_held_out("film", 0.25, 0) == ("film" in HELD)
    assert 3 < len(HELD) < 20


@pytest.mark.parametrize(("rows", "special"), [("tokens", True), ("tokens", False), ("words_mean", False)])
def test_rows_of_held_out_types_are_left_out_of_fitting_and_of_nothing_else(
    world: World, rows: str, special: bool
) -> None:
    every = activations(world, rows=rows, special_tokens=special)
    data = activations(world, rows=rows, special_tokens=special, held_out_types=SHARE)
    expected = Counter(name for name in names_of(every, "fit") if name not in HELD)
    assert Counter(names_of(data, "fit")) == expected
    kind = rows.removesuffix("_mean")
    assert data.seen == SeenTypes(kind, frozenset(expected)) == SeenTypes.from_state(data.seen.state())  # type: ignore[arg-type]
    assert (data.describe()["held_out_types"], data.describe()["types"]) == (SHARE, kind)
    assert set(SPECIAL[::2]) <= set(expected) or not special  # <s> and </s>
    for split in ("validation", "test"):
        assert names_of(data, split) == names_of(every, split)


def test_rows_of_unseen_tokens_are_marked(world: World, tmp_path: Path) -> None:
    rare = write_texts(tmp_path / "rare.csv", ["wonderful film", *sentences(30)])  # <unk>, which no fit has seen
    data = activations(world, held_out_types=SHARE, text=TextSource(world.fit, held_out=rare))
    names = names_of(data, "test")
    marked = torch.cat([ready.rows[0].unseen for ready in prepared(data, "test")])
    assert [name for name, mark in zip(names, marked.tolist(), strict=True) if mark] == [
        name for name in names if name in HELD or name == "<unk>"
    ]
    assert all(ready.rows[0].unseen is None for ready in prepared(data, "fit"))
    data.plan(Plan(measured=SeenTypes("tokens", frozenset({"<s>", "film"}))))  # of a map that was fitted elsewhere
    marked = torch.cat([ready.rows[0].unseen for ready in prepared(data, "test")])
    assert marked.tolist() == [name not in ("<s>", "film") for name in names]
    data.plan(Plan(measured=SeenTypes("words", frozenset({"film"}))))  # types that rows of tokens do not have
    assert all(ready.rows[0].unseen is None for ready in prepared(data, "test"))


def test_every_rank_keeps_a_row_in_every_batch(world: World, tmp_path: Path) -> None:
    """Texts of nothing but held-out words, in a row, are not read at all."""
    held, free = sorted(HELD), sorted(set(WORDS) - HELD)
    texts = [f"{a} {b}" for a in held for b in held] + [f"{a} {b}" for a in free[:4] for b in free[:3]]
    source = TextSource(write_texts(tmp_path / "fit.csv", texts), held_out=world.test)
    data = activations(world, text=source, special_tokens=False, held_out_types=SHARE, batch_size=4)
    fit = data.texts.fit["text"][:]
    kept = [number for number, text in enumerate(fit) if not set(text.split()) <= HELD]
    assert len(kept) < len(fit)
    for world_size in (1, 2, 3):
        found = []
        for rank in range(world_size):
            data.trainer = rank_of(rank, world_size)
            found.append(prepared(data, "fit", shuffle=True))
        assert len({len(batches) for batches in found}) == 1
        assert all(len(ready.rows[0]) > 0 for batches in found for ready in batches)
        assert sorted(int(text) for batches in found for ready in batches for text in ready.texts.text) == kept


@pytest.mark.parametrize("rows", ["mean", "cls"])
def test_means_and_first_tokens_have_no_types(world: World, rows: str) -> None:
    data = activations(world, rows=rows, held_out_types=0.5)
    assert data.seen == SeenTypes(None, frozenset())
    assert all(ready.rows[0].unseen is None for ready in prepared(data, "test"))
    assert data.describe()["held_out_types"] == 0
    assert "none are held out" in data.describe()["types"]
    assert sum(len(ready.rows[0]) for ready in prepared(data, "fit")) == len(data.split("fit"))


def test_shares_that_leave_nothing_are_refused(world: World, tmp_path: Path) -> None:
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"`held_out_types` to be at least 0 and below 1, but got {share}"):
            activations(world, held_out_types=share)
    text = TextSource(write_texts(tmp_path / "fit.csv", sorted(HELD)), held_out=world.test, validation_share=0.2)
    data = activations(world, text=text, special_tokens=False, held_out_types=SHARE)
    with pytest.raises(ValueError, match="`held_out_types` to leave rows to fit on"):
        data.loader("fit")
