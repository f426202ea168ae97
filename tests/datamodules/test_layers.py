import logging
from typing import Any

import pytest
import torch
from tests.runs import rank_of
from tests.tiny import tiny_frozen
from tests.world import World, write_texts
from torch import Tensor

from aligners.datamodules.layers import LayerActivations, LayerBatch
from aligners.datamodules.rows.sites import parse_layers
from aligners.datamodules.text.sources import TextSource

POLICIES = ("words", "words_first", "words_mean", "mean", "cls")


@pytest.fixture(scope="module")
def odd_text(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    """Short texts with repeated white space and punctuation."""
    folder = tmp_path_factory.mktemp("odd")
    texts = ["the  film,  is good!", "  not funny", "a 'great' plot...", "was\tit dull?", "good", "sad - but warm !"]
    return TextSource(
        write_texts(folder / "fit.csv", [f"{text} {i}" for text in texts for i in range(5)]),
        held_out=write_texts(folder / "test.csv", texts),
    )


def stream(world: World, models: list[str], **options: Any) -> LayerActivations:
    return LayerActivations(models, **{"text": world.text, "batch_size": 8, "max_length": 60, **options})


def read(data: LayerActivations, **options: Any) -> list[LayerBatch]:
    found = list(data.batches("test", **options))
    data.reader.check.flush()
    return found


def sorted_rows(batches: list[LayerBatch], m: int) -> Tensor:
    """(L, N, d) in the order of text and token."""
    text, token = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("text", "token"))
    assert len(set(zip(text.tolist(), token.tolist(), strict=True))) == len(text)
    return torch.cat([batch.states[m] for batch in batches], 1)[:, (1000 * text + token).argsort()]


@pytest.mark.parametrize("rows", POLICIES)
def test_rows_are_those_of_each_text_alone(world: World, folders: list[str], odd_text: TextSource, rows: str) -> None:
    data = stream(world, folders, rows=rows, text=odd_text, batch_size=2)
    batches = read(data)
    assert [batch.texts.number for batch in batches] == [0, 1, 2]
    texts = data.texts.test["text"][:]
    for m, model in enumerate(data.frozen):
        expected = []
        for text in texts:
            encoded = model.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)  # type: ignore[misc]
            inputs = {name: torch.tensor([encoded[name]]) for name in ("input_ids", "attention_mask")}
            states = torch.stack(model.front(inputs, range(model.depth + 1)))[:, 0]
            real = [s for s, special in enumerate(encoded["special_tokens_mask"]) if not special]
            if rows in ("mean", "cls"):
                expected.append(states[:, real].mean(1) if rows == "mean" else states[:, 0])
                continue
            end = 0
            for word in text.split():
                start = text.index(word, end)
                end = start + len(word)
                own = [s for s in real if start < encoded["offset_mapping"][s][1] <= end]
                picks = {"words": own[-1:], "words_first": own[:1], "words_mean": own}[rows]
                expected.append(states[:, picks].mean(1))
        torch.testing.assert_close(sorted_rows(batches, m), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)
    assert batches[0].states[1].dtype == torch.float32
    assert not batches[0].states[1].is_inference()


def test_ranks_read_whole_batches_of_the_same_rows(world: World, folders: list[str]) -> None:
    data = stream(world, [*folders, folders[0]])
    alone = read(data)
    assert alone[0].states[0] is alone[0].states[3]  # a model that is named twice is read once
    for rank in range(3):
        data.trainer = rank_of(rank, 3)
        for batch, expected in zip(read(data), alone[rank::3], strict=True):
            assert batch.texts.number == expected.texts.number
            assert all(map(torch.equal, (batch.text, batch.token), (expected.text, expected.token)))
            assert all(map(torch.equal, batch.states, expected.states))


def test_words_that_a_model_cuts_are_left_out_and_counted(
    world: World, folders: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    data = stream(world, folders, max_length=20)
    with caplog.at_level(logging.WARNING, "aligners.datamodules.tokens.splits"):
        batches = read(data)
        read(data)
    rows = sum(len(batch.text) for batch in batches)
    words = sum(len(text.split()) for text in data.texts.test["text"][:])
    assert rows < words
    assert data.describe()["words"] == {"test": {"words": words, "used": rows}}
    (said,) = [record.message for record in caplog.records if record.name == "aligners.datamodules.tokens.splits"]
    assert f"{rows} of {words} words of the test texts" in said
    assert "words" not in stream(world, folders[2:], rows="mean").describe()


def test_attention_comes_with_words_to_fold_it_to(world: World, folders: list[str]) -> None:
    data = stream(world, folders, rows="mean", attention=True)
    batch, other = next(data.batches("test")), next(stream(world, folders, rows="mean").batches("test"))
    torch.testing.assert_close(batch.states[0], other.states[0], rtol=1e-5, atol=1e-5)
    assert other.texts.words is other.attention is None
    for model, weights, words, inputs in zip(
        data.frozen, batch.attention or [], batch.texts.words or [], batch.texts.inputs, strict=True
    ):
        texts, length = inputs["input_ids"].shape
        assert [each.shape for each in weights] == [(texts, 2, length, length)] * model.depth
        assert torch.equal(words.amax(1) + 1, batch.texts.word_count)
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(weights[0].sum(-1)[:, 0][real], torch.ones(int(real.sum())))
    with pytest.raises(ValueError, match=r"`attn_implementation` 'eager'.*'sdpa'"):
        stream(world, folders, attention=True, attn_implementation="sdpa")


@pytest.mark.parametrize("attention", [False, True])
def test_a_plan_reads_the_models_and_layers_that_it_names(
    world: World, folders: list[str], attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, data = (stream(world, folders, attention=attention) for _ in range(2))
    data.plan(("test", "fit"), [[[1, 2], [], [0]], [[], [3], []]])
    batch, (expected, *_) = next(data.batches("test")), read(whole)
    assert [tuple(states.shape[::2]) for states in batch.states] == [(2, 16), (0, 24), (1, 16)]
    torch.testing.assert_close(batch.states[0], expected.states[0][[1, 2]])
    torch.testing.assert_close(batch.states[2], expected.states[2][:1])
    if attention:
        assert batch.attention is not None
        assert [len(weights) for weights in batch.attention] == [2, 0, 1]
    for model in (data.frozen[0], data.frozen[2]):
        monkeypatch.setattr(model, "front", None)  # not to be called
        monkeypatch.setattr(model, "attention", None)
    assert [len(states) for states in next(data.batches("fit")).states] == [0, 1, 0]


@pytest.mark.parametrize("attention", [False, True])
def test_another_model_can_be_read_in_the_place_of_one(world: World, folders: list[str], attention: bool) -> None:
    data = stream(world, folders, layers=[1], attention=attention)
    batch = read(data)[0]
    twin = data.frozen[1].untrained(seed=5)
    states = data.reader.read_model(twin, batch, 1)[0]
    assert states.shape == batch.states[1].shape
    assert not torch.allclose(states, batch.states[1])
    again, weights = data.reader.read_model(data.frozen[1], batch, 1)
    torch.testing.assert_close(again, batch.states[1])
    assert len(weights) == (3 if attention else 0)
    said = 'Load it with attn_implementation="eager"' if attention else "between 0 and 0, but got 1"
    with pytest.raises(ValueError, match=said):
        data.reader.read_model(tiny_frozen(layers=0), batch, 1)


def test_states_that_are_not_finite_stop_under_their_name(world: World, folders: list[str]) -> None:
    data = stream(world, folders)
    _ = data.reader
    data.frozen[1].blocks[1].output.dense.weight[3, 3] = torch.inf  # type: ignore[union-attr, index]
    data.frozen[1].name = "broken"
    with pytest.raises(ValueError, match=r"batch 0 holds .* at layer 2 of broken, layer 3 of broken\."):
        read(data)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": "every"}, r"`layers` to be 'all', 'blocks'.*'every'"),
        ({"layers": []}, r"at least one layer and none twice.*\[\]"),
        ({"layers": [1, 1]}, r"none twice.*\[1, 1\]"),
        ({"layers": [2]}, r"`layers` between 0 and 1, but got 2"),
        ({"rows": "tokens"}, r"(?s)`rows` 'tokens'.*tokenizers.*differ.*'words', 'mean' or 'cls'"),
        ({"max_length": 65}, r"`max_length` of at most 64.*65"),
    ],
)
def test_bad_options_are_refused(world: World, folders: list[str], options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        _ = stream(world, folders, **options).reader
    assert parse_layers("all", 3) == [0, 1, 2, 3]
    assert parse_layers("blocks", 3) == [1, 2, 3]
