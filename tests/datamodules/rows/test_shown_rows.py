"""What rows read: joined they are the text, whatever the tokenizer, for tokens, words and whole texts."""

import datasets
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.shown_rows import ShownRows, shown_rows, token_string
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.datamodules.tokens.tokenising import tokenise
from aligners.models.tokenizers import byte_pairs, word_pieces

TEXTS = ["the cat sat on the mat", "a caterpillar, unmatched", "naïve café ☕ ok\nnext </script>"]
TOKENIZERS = {
    "bytes": byte_pairs(TEXTS * 3, 300, 64),
    "pieces": word_pieces([text.replace(" ", "  ") for text in TEXTS], 120, 64),
}


def table() -> datasets.Dataset:
    return datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})


def shown(rows: str, tokenizer: PreTrainedTokenizerBase, special_tokens: bool = False) -> ShownRows:
    tokens = tokenise(table(), tokenizer, 64, words=rows == "words")
    data = TokenisedTexts([tokens], [tokenizer])
    return shown_rows(RowKind(rows, special_tokens), data, table(), tokenizer)


def joined(found: ShownRows, text: int) -> str:
    return "".join(found.strings[number] for number in found.of(text))


@pytest.mark.parametrize("text", [0, 1])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_joined_tokens_are_the_text(name: str, text: int) -> None:
    read = joined(shown("tokens", TOKENIZERS[name]), text).strip()
    if name == "pieces":
        read = read.replace(" ,", ",")
    assert read == TEXTS[text]


def test_bytes_that_are_no_character_read_as_a_mark() -> None:
    read = joined(shown("tokens", TOKENIZERS["bytes"]), 2)
    assert read.replace("�", "").startswith("na")
    assert "\nnext </script>" in read
    assert token_string("Ġ", TOKENIZERS["bytes"]) == " "


def test_special_tokens_are_named() -> None:
    read = joined(shown("tokens", TOKENIZERS["pieces"], special_tokens=True), 0)
    assert read.split()[0] == "[CLS]"
    assert read.split()[-1] == "[SEP]"


def test_words_and_whole_texts() -> None:
    words = shown("words", TOKENIZERS["pieces"])
    assert joined(words, 0) == " the cat sat on the mat"
    assert words.around(0, 2, 1) == "cat sat on"
    whole = shown("mean", TOKENIZERS["pieces"])
    assert [joined(whole, text) for text in (0, 1)] == TEXTS[:2]
    assert whole.around(1, 0, 8) == TEXTS[1]
    assert whole.at(torch.tensor([2, 0]), torch.tensor([0, 0])).tolist() == [2, 0]


def test_types_of_rows_are_those_of_their_places() -> None:
    words = shown("words", TOKENIZERS["pieces"])
    types = words.at(torch.tensor([0, 1, 0]), torch.tensor([4, 0, 0]))
    assert [words.strings[number] for number in types] == [" the", " a", " the"]


def test_recorded_states_without_texts_have_numbers_and_long_texts_are_cut() -> None:
    tokenizer = TOKENIZERS["pieces"]
    data = TokenisedTexts([tokenise(table(), tokenizer, 64)], [tokenizer])
    found = shown_rows(RowKind("mean"), data, table().remove_columns("text"), tokenizer)
    assert found.strings == ["row 0", "row 1", "row 2"]
    long = datasets.Dataset.from_dict({"text": ["word " * 100] * 3})
    assert len(shown_rows(RowKind("mean"), data, long, tokenizer).strings[0]) == 160
