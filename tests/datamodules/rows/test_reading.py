from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aligners.models import FrozenModel
from datamodules.batches import TextBatch
from datamodules.rows.policies import RowKind, RowPolicy, rows_of_each, select_rows, select_words
from datamodules.rows.reading import Link, PairedBatch, PairReader
from datamodules.rows.sites import parse_sites
from tests.tiny import SPECIAL, TEXTS, tiny_frozen, tokenised

SITES = [(0, 0), (2, 1), (2, 3)]  # X's site 2 is paired twice
POLICIES: list[tuple[RowPolicy, bool]] = [
    *(("tokens", True), ("tokens", False), ("mean", True), ("mean", False)),
    *(("cls", True), ("words", True), ("words_first", False), ("words_mean", True)),
]


@pytest.fixture(scope="module")
def models() -> tuple[FrozenModel, FrozenModel]:
    return tiny_frozen(seed=0), tiny_frozen(seed=1, width=24)


def batch(texts: tuple[str, ...] = TEXTS, side: str = "right") -> TextBatch:
    inputs = tokenised(texts, side)
    special = inputs["input_ids"] < len(SPECIAL)
    words, counts = pairs_of_tokens(special)
    return TextBatch((inputs, inputs), (special, special), torch.arange(len(texts)) + 10, None, (words, words), counts)


def pairs_of_tokens(special: Tensor) -> tuple[Tensor, Tensor]:
    """Every two tokens make a word, and the one after them belongs to none."""
    words, counts = torch.full_like(special, -1, dtype=torch.int64), []
    for of_text, marks in zip(words, special, strict=True):
        places = (~marks).nonzero()[:, 0].tolist()
        numbers = [i // 3 if i % 3 < 2 else -1 for i in range(len(places))]
        of_text[places] = torch.tensor(numbers)
        counts.append(max(numbers, default=-1) + 1)
    return words, torch.tensor(counts)


def linked(sites: list[tuple[int, int]]) -> list[Link]:
    return [Link(0, 1, i, j) for i, j in sites]


def read(
    models: tuple[FrozenModel, FrozenModel], texts: TextBatch, policy: RowPolicy, special: bool = True
) -> PairedBatch:
    reader = PairReader(models, linked(SITES), RowKind(policy, special))
    return reader.read(reader.prepare(texts))


def expected_rows(states: Tensor, texts: TextBatch, policy: RowPolicy, special: bool) -> Tensor:
    """Text by text, from the definition."""
    rows = []
    for text, states_of_text in enumerate(states):
        real = texts.inputs_x["attention_mask"][text].bool()
        counts = real if special else real & ~texts.special[0][text]
        chosen = states_of_text[counts]
        if policy.startswith("words"):
            assert texts.words is not None
            numbers = texts.words[0][text].tolist()
            for word in range(max(numbers) + 1):
                own = [state for state, number in zip(states_of_text, numbers, strict=True) if number == word]
                rows.append({"words": own[-1], "words_first": own[0], "words_mean": sum(own) / len(own)}[policy])
        elif policy == "tokens":
            rows += list(chosen)
        else:
            rows.append(chosen.mean(0) if policy == "mean" else states_of_text[real][0])
    return torch.stack(rows)


@pytest.mark.parametrize(("policy", "special"), POLICIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_are_those_of_the_definition(
    models: tuple[FrozenModel, FrozenModel], policy: RowPolicy, special: bool, side: str
) -> None:
    texts = batch(side=side)
    paired = read(models, texts, policy, special)
    for place, (i, j) in enumerate(SITES):
        for rows, model, site in ((paired.x, models[0], i), (paired.y, models[1], j)):
            states = model.front(texts.inputs_x, [site])[0]
            torch.testing.assert_close(rows[place], expected_rows(states, texts, policy, special))
    assert paired.x.dtype == paired.y.dtype == torch.float32
    assert not paired.x.is_inference()  # they must be able to enter a graph


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_know_where_they_came_from(models: tuple[FrozenModel, FrozenModel], side: str) -> None:
    texts = batch(side=side)
    paired = read(models, texts, "tokens")
    ids = texts.inputs_x["input_ids"].flatten()[paired.rows.index]
    assert torch.equal(ids, texts.inputs_x["input_ids"][texts.inputs_x["attention_mask"].bool()])
    means = read(models, texts, "mean")
    assert torch.equal(means.text, texts.text)
    assert (means.rows.place == 0).all()
    for policy in ("words", "words_first", "words_mean"):
        words = read(models, texts, policy)  # type: ignore[arg-type]
        assert texts.word_count is not None
        assert words.text.tolist() == [10 + i for i, count in enumerate(texts.word_count) for _ in range(count)]
        assert words.rows.place.tolist() == [word for count in texts.word_count for word in range(count)]
    lengths = texts.inputs_x["attention_mask"].sum(1)
    assert paired.rows.place.tolist() == [place for length in lengths for place in range(length)]
    first = read(models, texts, "cls")
    assert (texts.inputs_x["input_ids"].flatten()[first.rows.index] == SPECIAL.index("<s>")).all()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("special", [True, False])
def test_rows_go_back_to_where_they_were(side: str, special: bool) -> None:
    texts = batch(side=side)
    mask = texts.inputs_x["attention_mask"]
    rows = select_rows(mask, texts.special[0], "tokens", special)
    states = torch.randn(*mask.shape, 4)
    out = torch.empty(len(rows), 4)
    rows.gather(states, out)
    assert torch.equal(rows.scatter(out, states), states)
    blank = rows.scatter(out, torch.zeros_like(states))
    counts = mask.bool() if special else mask.bool() & ~texts.special[0]
    assert torch.equal(blank[counts], states[counts])
    assert (blank[~counts] == 0).all()
    half = torch.empty(len(rows), 4, dtype=torch.float64)
    rows.gather(states, half)
    assert torch.equal(half, out.double())


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
    texts = replace(batch(), words=None, word_count=None)
    with pytest.raises(ValueError, match=r"`rows` 'words_mean'.*`words=True`"):
        rows_of_each(texts, RowKind("words_mean"))


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
        ([1, 123], r"holds 123.*3 and 3 blocks.*wrote 2:3 in a list: YAML.*`sites` '1, 2:3'"),
        ([], "at least one"),
        ([1, "1:1"], "none twice"),
    ],
)
def test_other_sites_are_refused(written: str | list[int | str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_sites(written, 3, 3)


def test_equal_layers_need_equal_depths() -> None:
    with pytest.raises(ValueError, match=r"X has 3 blocks and Y has 6.*'1:2, 2:4'"):
        parse_sites("all", 3, 6)
    assert parse_sites(["1:2", "3:6"], 3, 6) == [(1, 2), (3, 6)]


def test_a_reader_refuses_what_its_models_do_not_have(models: tuple[FrozenModel, FrozenModel]) -> None:
    with pytest.raises(ValueError, match=r"`sites` between 0 and 3, but got 4.*L = 3"):
        PairReader(models, linked([(1, 1), (2, 4)]), RowKind("tokens"))
    with pytest.raises(ValueError, match=r"`sites` between 0 and 3, but got -1"):
        PairReader(models, linked([(-1, 1)]), RowKind("tokens"))
    with pytest.raises(ValueError, match=r"`rows`.*tokens, mean, cls, words.*'sentences'"):
        PairReader(models, linked(SITES), RowKind("sentences"))


@pytest.mark.parametrize("broken", ["x", "y"])
def test_states_that_are_not_finite_stop_under_their_name(broken: str) -> None:
    models = {"x": tiny_frozen(seed=0), "y": tiny_frozen(seed=1)}
    reader = PairReader([models["x"], models["y"]], linked(SITES), RowKind("tokens"))
    reader.read(reader.prepare(batch()))
    reader.check.flush()
    models[broken].name = "broken"
    models[broken].blocks[1].output.dense.weight[3, 3] = torch.inf  # type: ignore[union-attr, index]
    reader.read(reader.prepare(batch()))
    site, sound = (2, 0) if broken == "x" else (3, 1)
    with pytest.raises(ValueError, match=rf"batch 1 .*site {site} of {broken.upper()} \(broken\)") as error:
        reader.read(reader.prepare(batch()))  # a batch late, so that no device has to be waited for
    assert f"site {sound} of" not in str(error.value)
    again = PairReader([models["x"], models["y"]], linked(SITES), RowKind("tokens"))
    again.read(again.prepare(batch()))
    with pytest.raises(ValueError, match=r"batch 0 "):  # the last batch has none after it
        again.check.flush()
    again.check.flush()
