"""Rows: which positions of which sites are paired, and which types are held out and unseen, as plain strings say."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import activations, rank_of
from tests.tiny import SPECIAL, TEXTS, WORDS, tiny_frozen, tokenised
from tests.world import World, sentences, write_texts
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.policies import RowKind, rows_of_each, select_rows, select_words
from aligners.datamodules.rows.read_rows import Link, PairReader, Plan
from aligners.datamodules.rows.row_types import SeenTypes, is_held_out
from aligners.datamodules.rows.sites import parse_sites
from aligners.datamodules.text.sources import TextSource
from aligners.models import FrozenModel

SITES = [(0, 0), (2, 1), (2, 3)]  # X's site 2 is paired twice
every_side = pytest.mark.parametrize("side", ["left", "right"])


@pytest.fixture(scope="module")
def models() -> list[FrozenModel]:
    return [tiny_frozen(seed=0), tiny_frozen(seed=1, width=24)]


def batch(texts: tuple[str, ...] = TEXTS, side: str = "right") -> TextBatch:
    inputs = tokenised(texts, side)
    special = inputs["input_ids"] < len(SPECIAL)
    return TextBatch((inputs, inputs), (special, special), torch.arange(len(texts)) + 10)


def reader_of(
    models: list[FrozenModel], sites: list[tuple[int, int]], policy: str = "tokens", special: bool = True
) -> PairReader:
    return PairReader(models, [Link(0, 1, i, j) for i, j in sites], RowKind(policy, special))


def expected_rows(states: Tensor, texts: TextBatch, policy: str, special: bool) -> Tensor:
    """Text by text, from the definition."""
    rows: list[Tensor] = []
    for of_text, mask, marks in zip(states, texts.inputs_x["attention_mask"].bool(), texts.special[0], strict=True):
        chosen = of_text[mask if special else mask & ~marks]
        rows += {"tokens": chosen, "mean": [chosen.mean(0)], "cls": of_text[mask][:1], "last": chosen[-1:]}[policy]
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("policy", "special"),
    [(policy, special) for policy in ("tokens", "mean", "last") for special in (True, False)] + [("cls", True)],
)
@every_side
def test_rows_are_those_of_the_definition(models: list[FrozenModel], policy: str, special: bool, side: str) -> None:
    texts, reader = batch(side=side), reader_of(models, SITES, policy, special)
    paired = reader.read(reader.prepare(texts))
    for place, sites in enumerate(SITES):
        for rows, model, site in zip((paired.x, paired.y), models, sites, strict=True):
            states = model.front(texts.inputs_x, [site])[0]
            torch.testing.assert_close(rows[place], expected_rows(states, texts, policy, special))
    assert paired.x.dtype == paired.y.dtype == torch.float32
    assert not paired.x.is_inference()  # they must be able to enter a graph
    mask = texts.inputs_x["attention_mask"].bool()
    counts = (mask if special else mask & ~texts.special[0]).sum(1) if policy == "tokens" else mask.sum(1) ** 0
    assert torch.equal(paired.text, texts.text.repeat_interleave(counts))
    assert paired.rows.place.tolist() == [place for count in counts for place in range(count)]


@every_side
def test_rows_go_back_to_where_they_were(side: str) -> None:
    texts = batch(side=side)
    mask = texts.inputs_x["attention_mask"]
    rows = select_rows(mask, texts.special[0], "tokens", special_tokens=False)
    states = torch.randn(*mask.shape, 4)
    out = torch.empty(len(rows), 4)
    rows.gather(states, out)
    assert torch.equal(rows.scatter(out, states), states)
    blank = rows.scatter(out, torch.zeros_like(states))
    assert torch.equal(blank, states * (mask.bool() & ~texts.special[0])[..., None])


def test_a_text_without_a_token_that_counts_is_named() -> None:
    texts = batch(("good", "the film", "bad"))
    texts.special[0][1] = True
    with pytest.raises(ValueError, match=r"text number 1 of the batch.*count special tokens"):
        select_rows(texts.inputs_x["attention_mask"], texts.special[0], "mean", special_tokens=False)


def test_words_in_any_order_are_rows_in_theirs() -> None:
    words = torch.tensor([[-1, 1, 1, 0, -1, 0], [0, -1, -1, -1, -1, -1], [-1] * 6])
    counts = torch.tensor([2, 1, 0])
    assert select_words(words, counts, "words").index.tolist() == [5, 2, 6]
    first = select_words(words, counts, "words_first")
    assert (first.index.tolist(), first.owner.tolist(), len(first), first.texts) == ([3, 1, 6], [0, 0, 1], 3, 3)
    states, rows = torch.randn(3, 6, 4), select_words(words, counts, "words_mean")
    every, some, kept = torch.empty(3, 4), torch.empty(2, 4), torch.tensor([True, False, True])
    rows.gather(states, every)
    rows.only(kept).gather(states, some)
    expected = [states[0, [3, 5]].mean(0), states[0, [1, 2]].mean(0), states[1, 0]]
    torch.testing.assert_close(every, torch.stack(expected))
    torch.testing.assert_close(some, every[kept])
    with pytest.raises(ValueError, match=r"`rows` 'words_mean'.*`words=True`"):
        rows_of_each(batch(), RowKind("words_mean"))


@pytest.mark.parametrize(
    ("written", "pairs"),
    [
        ("all", [(0, 0), (1, 1), (2, 2), (3, 3)]),
        ("blocks", [(1, 1), (2, 2), (3, 3)]),
        ([3, 1], [(3, 3), (1, 1)]),
        ([1, "2:3"], [(1, 1), (2, 3)]),
        ("1, 2:3", [(1, 1), (2, 3)]),
        ("1 0:3", [(1, 1), (0, 3)]),
    ],
)
def test_sites_as_users_write_them(written: str | list[int | str], pairs: list[tuple[int, int]]) -> None:
    assert parse_sites(written, 3, 3) == pairs


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("every", r"'all', 'blocks'.*'every'.*`sites` '1, 2:3'"),
        (["1:2:3"], "list of layers"),
        (["1.5"], "list of layers"),
        ([":2"], "list of layers"),
        (["2:"], "list of layers"),
        ([], "at least one"),
        ([1, "1:1"], "none twice"),
    ],
)
def test_other_sites_are_refused(written: str | list[int | str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_sites(written, 3, 3)


def test_equal_layers_need_equal_depths() -> None:
    with pytest.raises(ValueError, match=r"last ones are 3 and 6 .*'1:2, 2:3'"):
        parse_sites("all", 3, 6)
    assert parse_sites(["1:2", "3:6"], 3, 6) == [(1, 2), (3, 6)]


def test_a_reader_refuses_what_its_models_do_not_have(models: list[FrozenModel]) -> None:
    for sites in ([(1, 1), (2, 4)], [(-1, 1)]):
        with pytest.raises(ValueError, match=r"`sites` between 0 and 3, but got (4|-1).*L = 3"):
            reader_of(models, sites)
    with pytest.raises(ValueError, match=r"`rows`.*tokens, mean, cls, words.*'sentences'"):
        reader_of(models, SITES, "sentences")


@pytest.mark.parametrize("broken", [0, 1])
def test_states_that_are_not_finite_stop_under_their_name(broken: int) -> None:
    models = [tiny_frozen(seed=0), tiny_frozen(seed=1)]

    def read_on(reader: PairReader) -> None:
        reader.read(reader.prepare(batch()))

    read_on(reader := reader_of(models, SITES))
    reader.check.flush()
    models[broken].name = "broken"
    models[broken].blocks[1].output.dense.weight[3, 3] = torch.inf  # type: ignore[union-attr, index]
    read_on(reader)
    site, sound, side = [(2, 0, "X"), (3, 1, "Y")][broken]
    with pytest.raises(ValueError, match=rf"batch 1 .*site {site} of {side} \(broken\)") as error:
        read_on(reader)  # a batch late, so that no device has to be waited for
    assert f"site {sound} of" not in str(error.value)
    read_on(again := reader_of(models, SITES))
    with pytest.raises(ValueError, match=r"batch 0 "):  # the last batch has none after it
        again.check.flush()
    again.check.flush()


SHARE = 0.25
HELD = {word for word in WORDS if is_held_out(word, SHARE, 0)}


def prepared(data: PairedActivations, split: str, **options: Any) -> list[Any]:
    """Every batch of a split, its rows chosen."""
    return [data.reader.prepare(texts) for texts in data.loader(split, **options)]  # type: ignore[arg-type]


def names_of(data: PairedActivations, split: str) -> list[str]:
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
    assert 3 < len(HELD) < 20


@pytest.mark.parametrize(("rows", "special"), [("tokens", True), ("tokens", False), ("words_mean", False)])
def test_rows_of_held_out_types_are_left_out_of_fitting_and_of_nothing_else(
    world: World, rows: str, special: bool
) -> None:
    options = {"rows": rows, "special_tokens": special, "max_length": 8}  # which cuts words
    every, data = activations(world, **options), activations(world, **options, held_out_types=SHARE)
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
    assert activations(world, held_out_types=0.999).seen.names == set(SPECIAL[::2])  # which are never held out


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
    assert "none can be held out" in data.describe()["types"]
    assert sum(len(ready.rows[0]) for ready in prepared(data, "fit")) == len(data.split("fit"))


def test_shares_that_leave_nothing_are_refused(world: World, tmp_path: Path) -> None:
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"`held_out_types` to be at least 0 and below 1, but got {share}"):
            activations(world, held_out_types=share)
    text = TextSource(write_texts(tmp_path / "fit.csv", sorted(HELD)), held_out=world.test, validation_share=0.2)
    data = activations(world, text=text, special_tokens=False, held_out_types=SHARE)
    with pytest.raises(ValueError, match="`held_out_types` to leave rows to fit on"):
        data.loader("fit")
