import logging
import math
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from datamodules.layers import LayerActivations
from datamodules.pairings import pair_states
from datamodules.states import States
from datamodules.text.sources import TextSource
from datamodules.tokens.splits import bytes_per_token, end_of_text, pack
from datamodules.tokens.tokenised import tokenise
from tests.datamodules.tokens.splitters import byte_level, splitter_folder, word_piece
from tests.runs import activations, made_again
from tests.tiny import tiny_tokenizer
from tests.world import World, sentences

TEXTS = ["the film is good", "a dull plot", "not funny", "this very long scene feels cold", "good"]
END = 2  # </s>
SHORT = "embedded-gpt:0:max_length=32"


def split_of(texts: list[str], **columns: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts, "id": list(range(len(texts))), **columns})


def plain_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[int]:
    return [i for text in texts for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]]


@pytest.mark.parametrize("length", [2, 3, 7, 21])
def test_sequences_are_the_documents_end_to_end(length: int) -> None:
    tokenizer = tiny_tokenizer()
    expected = plain_ids(tokenizer, TEXTS)
    table, packed = pack(split_of(TEXTS, label=[0] * 5), tokenizer, length)
    assert len(expected) == packed["tokens"] == 21
    assert packed["dropped"] == 21 % length
    assert list(chain(*table["input_ids"][:])) == expected[: 21 - packed["dropped"]]
    assert all(len(row["input_ids"]) == len(row["special_tokens_mask"]) == row["length"] == length for row in table)
    marks = torch.tensor(table["special_tokens_mask"][:]).flatten()
    assert (marks == (torch.tensor(table["input_ids"][:]).flatten() == END)).all()
    assert table["id"][:] == list(range(21 // length))
    assert set(table.column_names) == {"input_ids", "special_tokens_mask", "length", "id"}


def test_long_texts_are_whole_and_their_bytes_are_counted() -> None:
    tokenizer = byte_level()
    texts = ["the film, naïve and good " * 20, "日本語"]
    table, packed = pack(split_of(texts), tokenizer, 16)
    expected = plain_ids(tokenizer, texts)
    assert list(chain(*table["input_ids"][:])) == expected[: 16 * len(table)]
    assert packed == {
        "sequences": len(expected) // 16, "documents": 2, "tokens": len(expected),
        "bytes": len("".join(texts).encode()), "dropped": len(expected) % 16, "end_of_text": "</s>",
    }  # fmt: skip


def test_documents_are_tokenised_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = datasets.Dataset.from_dict({"text": [f"{text} film" for text in TEXTS]})
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "packing"
    folder.mkdir(parents=True, exist_ok=True)
    texts.to_parquet(folder / "texts.parquet")
    texts = datasets.load_dataset("parquet", data_files=str(folder / "texts.parquet"), split="train")
    first, packed = pack(texts, tiny_tokenizer(), 8)
    monkeypatch.setattr("datamodules.tokens.splits._whole_texts", None)
    again, (_, longer) = pack(texts, tiny_tokenizer(), 8)[0], pack(texts, tiny_tokenizer(), 13)
    assert again["input_ids"][:] == first["input_ids"][:]
    assert longer["tokens"] == packed["tokens"]


def test_end_of_text_is_eos_else_sep() -> None:
    tokenizer = tiny_tokenizer()
    assert end_of_text(tokenizer) == ("</s>", 2)  # sep: there is no eos
    tokenizer.eos_token = "<s>"
    assert end_of_text(tokenizer) == ("<s>", 0)
    tokenizer.eos_token = tokenizer.sep_token = None
    with pytest.raises(ValueError, match=r"`packed`.*neither an eos nor a sep token"):
        end_of_text(tokenizer)


def test_what_cannot_be_packed_is_refused_and_what_is_dropped_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pack(split_of(TEXTS), tiny_tokenizer(), 8, name="fit")
    [said] = caplog.messages
    assert "5 fit texts are packed, '</s>' after each, into 2 sequences of 8 tokens; the last 5 of 21" in said
    with pytest.raises(ValueError, match=r"sentence pairs.*`text_columns`"):
        pack(split_of(TEXTS, text_pair=TEXTS), tiny_tokenizer(), 8)
    with pytest.raises(ValueError, match=r"at least 22 tokens.*`max_length`.*test texts.*5 texts have 21"):
        pack(split_of(TEXTS), tiny_tokenizer(), 22, name="test")


# ---------------------------------------------------------------------- bytes of texts that are not packed


def test_bytes_of_whole_texts_over_their_tokens() -> None:
    tokenizer = tiny_tokenizer()
    split = split_of(TEXTS)
    tokens = tokenise(split, tokenizer, 60)
    words = sum(len(text.split()) for text in TEXTS)
    assert bytes_per_token(split, tokens, tokenizer, 60) == sum(map(len, TEXTS)) / words


@pytest.mark.parametrize("drop", ["right", "left"])
def test_bytes_that_were_cut_do_not_count(drop: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.truncation_side = drop
    split = split_of(["the film is good", "a bad plot"])
    tokens = tokenise(split, tokenizer, 4)  # two words and two special tokens
    kept = ["the film", "a bad"] if drop == "right" else ["is good", "bad plot"]
    assert bytes_per_token(split, tokens, tokenizer, 4) == sum(map(len, kept)) / 4


def test_bytes_of_cut_pairs_are_those_of_both_parts() -> None:
    tokenizer = word_piece()
    split = split_of(["go go go", "the"], text_pair=["film the", "é"])
    tokens = tokenise(split, tokenizer, 7)  # <s> go go </s> film the </s>
    assert bytes_per_token(split, tokens, tokenizer, 7) == (len("go go" + "film the" + "the") + len("é".encode())) / 6


# ---------------------------------------------------------------------- as an option of a stream


@pytest.fixture
def packed_stream(world: World) -> States:
    return activations(world, packed=True, max_length=16, model_y=world.model_x)


def test_a_packed_stream_reads_full_sequences(packed_stream: States) -> None:
    data = packed_stream.split("test")
    texts = list(packed_stream.texts.test["text"])
    expected = plain_ids(tiny_tokenizer(), texts)
    assert len(data) == len(expected) // 16
    assert data.labels is None
    batches = list(packed_stream.paired("test"))
    assert all(batch.texts.inputs_x["attention_mask"].all() for batch in batches)
    ids = {int(i): row for batch in batches for i, row in zip(batch.texts.text, batch.texts.inputs_x["input_ids"],
                                                              strict=True)}  # fmt: skip
    assert torch.cat([ids[i] for i in range(len(data))]).tolist() == expected[: 16 * len(data)]
    assert sum(batch.x.shape[1] for batch in batches) == 16 * len(data)
    assert packed_stream.bytes_per_token("test") == sum(map(len, texts)) / len(expected)
    said = packed_stream.describe()["packed"]["test"]
    assert (said["dropped"], said["sequences"]) == (len(expected) % 16, len(expected) // 16)
    again = made_again(pair_states, packed_stream.config())
    assert (again.packed, again.describe()["packed"]) == (True, {})


def test_a_stream_that_is_not_packed_counts_bytes_of_what_it_reads(world: World) -> None:
    stream = activations(world, max_length=8)
    texts = [text.split()[:6] for text in stream.texts.test["text"]]
    expected = sum(len(" ".join(words)) for words in texts) / sum(map(len, texts))
    assert math.isclose(stream.bytes_per_token("test"), expected)
    assert "packed" not in stream.describe()


def test_embedded_language_models_read_packed_text_without_labels(world: World, tmp_path: Path) -> None:
    size = "vocabulary=270,layers=1,width=8,heads=1,steps=4,batch=4,max_length=32"
    models = {"model_x": f"embedded-gpt:0:{size}", "model_y": f"embedded-gpt:0:activation=solu,{size}"}
    path = tmp_path / "plain.csv"
    path.write_text("\n".join(["text", *sentences(200)]))
    stream = activations(
        world, **models, text=TextSource(str(path)), packed=True, max_length=32, sites="all", cache=tmp_path / "cache"
    )
    stream.prepare_data()
    batch = next(stream.paired("test"))
    assert batch.x.shape == batch.y.shape
    assert batch.texts.inputs_x["input_ids"].shape[1] == 32
    assert not torch.allclose(batch.x, batch.y)


def test_packed_sequences_of_two_tokenizers_are_refused(world: World, tmp_path: Path) -> None:
    other = str(splitter_folder(tmp_path / "other", byte_level()))
    stream = activations(world, packed=True, rows="mean", model_y=other, max_length=16)
    with pytest.raises(ValueError, match=r"`packed`.*tokenizers.*differ"):
        stream.split("test")


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (pair_states, {"rows": "cls"}, r"`packed`.*`rows` 'tokens' or 'mean'.*'cls'"),
        (pair_states, {"rows": "words_mean"}, r"`packed`.*`rows` 'tokens' or 'mean'.*'words_mean'"),
        (LayerActivations, {"rows": "tokens", "attention": True}, r"`attention`.*`packed`"),
        (pair_states, {"model_x": SHORT, "model_y": SHORT, "max_length": 64}, r"`max_length` of at most 32.*gpt.*64"),
    ],
)
def test_what_packed_sequences_do_not_have_is_refused_at_once(
    kind: Any, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        kind(packed=True, cache=tmp_path, **options).prepare_data()
    assert not list(tmp_path.iterdir())
