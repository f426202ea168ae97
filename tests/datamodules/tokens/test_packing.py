import logging
import math
from itertools import chain
from typing import Any

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from datamodules.pairings import pair_states
from datamodules.tokens.splits import bytes_per_token, end_of_text, pack
from datamodules.tokens.tokenised import tokenise
from tests.datamodules.tokens.splitters import byte_level, word_piece
from tests.runs import activations, made_again
from tests.tiny import tiny_tokenizer
from tests.world import World

TEXTS = ["the film is good", "a dull plot", "not funny", "this very long scene feels cold", "good"]
END = 2  # </s>


def split_of(texts: list[str], **columns: list[Any]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": texts, "id": list(range(len(texts))), **columns})


def plain_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[int]:
    return [i for text in texts for i in [*tokenizer(text, add_special_tokens=False)["input_ids"], END]]


@pytest.mark.parametrize("length", [2, 7, 21])
def test_sequences_are_the_documents_end_to_end(length: int) -> None:
    tokenizer = tiny_tokenizer()
    expected = plain_ids(tokenizer, TEXTS)
    table, packed = pack(split_of(TEXTS, label=[0] * 5), tokenizer, length)
    assert len(expected) == packed["tokens"] == 21
    assert list(chain(*table["input_ids"][:])) == expected[: 21 - packed["dropped"]]
    assert all(len(row["input_ids"]) == len(row["special_tokens_mask"]) == row["length"] == length for row in table)
    ids, marks = (torch.tensor(table[name][:]) for name in ("input_ids", "special_tokens_mask"))
    assert torch.equal(marks == 1, ids == END)
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


def test_a_packed_stream_reads_full_sequences(world: World) -> None:
    stream = activations(world, packed=True, max_length=16, model_y=world.model_x)
    texts = list(stream.texts.test["text"])
    expected = plain_ids(tiny_tokenizer(), texts)
    count = len(expected) // 16
    batches = list(stream.paired("test"))
    assert all(batch.texts.inputs_x["attention_mask"].all() for batch in batches)
    order, ids = (
        torch.cat([part(batch.texts) for batch in batches])
        for part in (lambda texts: texts.text, lambda texts: texts.inputs_x["input_ids"])
    )
    assert ids[order.argsort()].flatten().tolist() == expected[: 16 * count]
    assert stream.split("test").labels is None
    assert sum(batch.x.shape[1] for batch in batches) == 16 * count
    assert stream.bytes_per_token("test") == sum(map(len, texts)) / len(expected)
    said = stream.describe()["packed"]["test"]
    assert (said["dropped"], said["sequences"]) == (len(expected) % 16, count)
    again = made_again(pair_states, stream.config())
    assert (again.packed, again.describe()["packed"]) == (True, {})


def test_a_stream_that_is_not_packed_counts_bytes_of_what_it_reads(world: World) -> None:
    stream = activations(world, max_length=8)
    texts = [text.split()[:6] for text in stream.texts.test["text"]]
    expected = sum(len(" ".join(words)) for words in texts) / sum(map(len, texts))
    assert math.isclose(stream.bytes_per_token("test"), expected)
    assert "packed" not in stream.describe()


def test_packed_sequences_of_two_tokenizers_are_refused(world: World, folders: list[str]) -> None:
    stream = activations(world, packed=True, rows="mean", model_y=folders[1], max_length=16)
    with pytest.raises(ValueError, match=r"`packed`.*tokenizers.*differ"):
        stream.split("test")
