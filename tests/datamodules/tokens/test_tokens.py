"""Tokens: which word each belongs to, sequences that are packed, and the bytes of what was not cut."""

import logging
import math
import re
from collections import Counter
from itertools import chain
from typing import Any

import datasets
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.datamodules.tokens.splitters import SPLITTERS, byte_level, crossing, metaspace, word_piece
from tests.runs import activations, made_again
from tests.tiny import tiny_tokenizer
from tests.world import World
from transformers import PreTrainedTokenizerFast

from aligners.datamodules.pairings import pair_states
from aligners.datamodules.tokens.splits import bytes_per_token, end_of_text, pack
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.datamodules.tokens.tokenising import number_words, tokenise

TOKENIZERS = {name: make() for name, make in SPLITTERS.items()}
ALPHABET = "abfgilotTé'.,!  \t\n\u00a0\u2003\u0301\u200b漢😀\x00"
texts = st.text(ALPHABET, max_size=25).filter(lambda text: bool(text.strip()))


def words_of_pieces(tokenizer: PreTrainedTokenizerFast, parts: tuple[str, ...], limit: int | None) -> list[list[int]]:
    """Piece by piece, character by character: the words that each touches, none for special tokens."""
    options: dict[str, Any] = {} if limit is None else {"truncation": True, "max_length": limit}
    encoded = tokenizer(*parts, return_offsets_mapping=True, verbose=False, **options)
    spans = [[match.span() for match in re.finditer(r"\S+", part)] for part in parts]
    touched = []
    for (start, end), part in zip(encoded["offset_mapping"], encoded.sequence_ids(), strict=True):
        before = sum(len(span) for span in spans[: part or 0])
        own = [] if part is None else spans[part]
        hits = [i for i, (a, b) in enumerate(own) if any(a <= place < b for place in range(start, end))]
        touched.append([before + i for i in hits])
    return touched


def expected(tokenizer: PreTrainedTokenizerFast, parts: tuple[str, ...], limit: int) -> list[int]:
    """The definition: the word of each piece, unless a piece of that word was cut or reaches into another word."""
    kept, whole = words_of_pieces(tokenizer, parts, limit), words_of_pieces(tokenizer, parts, None)
    has, needs = (Counter(hits[0] for hits in pieces if len(hits) == 1) for pieces in (kept, whole))
    broken = {word for hits in whole if len(hits) > 1 for word in hits}
    fine = {word for word in has if has[word] == needs[word]} - broken
    return [hits[0] if len(hits) == 1 and hits[0] in fine else -1 for hits in kept]


@pytest.mark.parametrize("name", SPLITTERS)
@given(first=texts, second=st.none() | texts, limit=st.integers(5, 12))
@example(first="  the  film, is\tgood!\n", second=None, limit=60)
@example(first="the film", second="of the good", limit=60)
@settings(max_examples=25, deadline=None)
def test_pieces_belong_to_the_words_of_the_definition(name: str, first: str, second: str | None, limit: int) -> None:
    tokenizer = TOKENIZERS[name]
    parts = (first,) if second is None else (first, second)
    other = ("good film",) * len(parts)  # words of another text of the batch must not run into these
    split = {column: [a, b] for column, a, b in zip(("text", "text_pair"), other, parts, strict=False)}
    kept = tokenizer(*split.values(), truncation=True, max_length=limit).encodings
    whole = tokenizer(*split.values(), verbose=False).encodings
    numbers, counts = number_words([other, parts], kept, whole)
    assert numbers == [expected(tokenizer, other, limit), expected(tokenizer, parts, limit)]
    assert counts == [2 * len(parts), sum(len(part.split()) for part in parts)]


def test_a_piece_of_no_characters_belongs_to_no_word() -> None:
    class Encoding:
        offsets, sequence_ids = [(0, 2), (2, 2), (2, 4), (4, 4), (4, 5), (5, 5), (5, 9)], [0] * 7

        def __len__(self) -> int:
            return 7

    one = [Encoding()]
    assert number_words([("good film",)], one, one) == ([[0, -1, 0, -1, -1, -1, 1]], [2])  # type: ignore[arg-type]


def tokenised(text: list[str], tokenizers: list[PreTrainedTokenizerFast], limit: int = 60) -> TokenisedTexts:
    split = datasets.Dataset.from_dict({"text": text, "id": list(range(len(text)))})
    return TokenisedTexts([tokenise(split, one, limit, words=True) for one in tokenizers], tokenizers)


def pieces(data: TokenisedTexts, tokenizers: list[PreTrainedTokenizerFast], rows: list[int]) -> list[list[list[str]]]:
    """For each model and text of a batch the pieces of each common word, joined."""
    batch = data[rows]
    assert batch.words is not None
    assert batch.word_count is not None
    found = []
    for inputs, words, tokenizer in zip(batch.inputs, batch.words, tokenizers, strict=True):
        assert words.shape == inputs["input_ids"].shape
        assert (words[inputs["attention_mask"] == 0] == -1).all()
        of_texts = []
        for ids, numbers, count in zip(inputs["input_ids"], words, batch.word_count, strict=True):
            tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
            joined = [""] * int(count)
            for token, number in zip(tokens, numbers.tolist(), strict=True):
                if number >= 0:
                    joined[number] += token.removeprefix("##").strip("Ġ▁")
            of_texts.append(joined)
        found.append(of_texts)
    return found


SENTENCES = ["the  film,  is good!", "good", "a film of the film", "got a long goooood tooth"]


def test_words_are_paired_across_tokenizers_and_padding() -> None:
    tokenizers = [word_piece(), byte_level("left"), metaspace(), word_piece("left")]
    data = tokenised(SENTENCES, tokenizers)
    assert (data.words, data.words_used) == (15, 15)
    for found in pieces(data, tokenizers, [2, 0, 3, 1]):
        assert found == [SENTENCES[i].split() for i in (2, 0, 3, 1)]


def test_a_word_that_one_model_cuts_is_a_row_of_none() -> None:
    tokenizers = [word_piece(), byte_level()]
    data = tokenised(SENTENCES, tokenizers, limit=12)
    found = pieces(data, tokenizers, [0, 1, 2, 3])
    assert found[0] == found[1]
    for kept, sentence in zip(found[0], SENTENCES, strict=True):
        assert kept == sentence.split()[: len(kept)]
    assert found[0][0] == ["the", "film,", "is"]
    assert data.words_used == sum(map(len, found[0])) < data.words
    alone = tokenised(SENTENCES, tokenizers[:1], limit=12)
    assert alone.words == data.words
    assert data.words_used < alone.words_used


def test_words_between_are_numbered_anew() -> None:
    tokenizers = [crossing(), word_piece()]
    data = tokenised(["a of the film", "of a"], tokenizers)
    assert pieces(data, tokenizers, [0, 1])[1] == [["a", "film"], ["of", "a"]]
    assert (data.words, data.words_used) == (6, 4)


def test_a_tokenizer_that_does_not_know_places_is_refused() -> None:
    class Slow:
        is_fast = False
        name_or_path = "mine"

    split = datasets.Dataset.from_dict({"text": ["a"], "id": [0]})
    with pytest.raises(ValueError, match=r"(?s)'mine', a Slow.*fast tokenizer"):
        tokenise(split, Slow(), 60, words=True)  # type: ignore[arg-type]


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


@pytest.mark.parametrize(
    ("drop", "limit", "kept"),
    [("right", 60, TEXTS[:2]), ("right", 4, ["the film", "a dull"]), ("left", 4, ["is good", "dull plot"])],
)
def test_bytes_of_what_was_not_cut_over_its_tokens(drop: str, limit: int, kept: list[str]) -> None:
    tokenizer, split = tiny_tokenizer(), split_of(TEXTS[:2])
    tokenizer.truncation_side = drop
    tokens = tokenise(split, tokenizer, limit)  # two special tokens among them
    words = sum(len(text.split()) for text in kept)
    assert bytes_per_token(split, tokens, tokenizer, limit) == sum(map(len, kept)) / words


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
