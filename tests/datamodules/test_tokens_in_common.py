"""Models whose texts have the same tokens are compared token by token, however their tokenizers pad."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import activations
from tests.world import World, read_texts, sentences, write_texts
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from aligners import api
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.tokenising import describe_tokenizer, same_tokenizer, same_tokens
from aligners.errors import UserError


def padded_left(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.padding_side = "left"


def padded_otherwise(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.pad_token = tokenizer.sep_token


def one_more(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_tokens(["unheardof"])


def padded_with_one_more(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.add_special_tokens({"pad_token": "[more]"})


CHANGES: list[Callable[[PreTrainedTokenizerBase], None]] = [
    padded_left,
    padded_otherwise,
    one_more,
    padded_with_one_more,
]


def changed(world: World, folder: Path, change: Callable[[Any], object]) -> str:
    """The second model of the world, its tokenizer changed."""
    shutil.copytree(world.model_y, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    change(tokenizer)
    tokenizer.save_pretrained(folder)
    (folder / "checksums.json").unlink(missing_ok=True)
    return str(folder)


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_tokens_are_paired(world: World, tmp_path: Path, change: Callable[[Any], None]) -> None:
    other = changed(world, tmp_path / "y", change)
    plain, data = activations(world, sites=[1]), activations(world, model_y=other, sites=[1])
    assert data.split("test").alike
    for expected, found in zip(plain.paired("test"), data.paired("test"), strict=True):
        assert torch.equal(found.x, expected.x)
        torch.testing.assert_close(found.y, expected.y)


@pytest.mark.parametrize("change", CHANGES)
def test_and_injected_and_compared_from_python(world: World, tmp_path: Path, change: Callable[[Any], None]) -> None:
    other, (texts, labels) = changed(world, tmp_path / "y", change), read_texts(world.test)
    asked: dict[str, Any] = {"site": 1, "labels": [int(label) for label in labels]}
    plain = api.inject(world.model_x, world.model_y, lambda x: x[:, :16], texts, **asked)
    found = api.inject(world.model_x, other, lambda x: x[:, :16], texts, **asked)
    assert found.loss == pytest.approx(plain.loss, rel=1e-5)
    fate = api.compare(world.model_y, other, texts, maps=(), costs=0)
    assert not fate.meta["not_compared"]


def test_a_text_with_a_token_that_the_model_lacks_is_named(world: World, tmp_path: Path) -> None:
    other = changed(world, tmp_path / "y", one_more)
    texts = [*sentences(60), "a film unheardof", *sentences(60)[::-1]]
    source = TextSource(write_texts(tmp_path / "texts.csv", texts), held_out=world.test)
    data = activations(world, model_x=other, model_y=other, text=source)
    with pytest.raises(
        UserError, match=r"y has embeddings for, but text number \d+ of the fit texts holds 'unheardof'"
    ):
        data.split("fit")
    different = activations(world, model_y=other, text=source)
    with pytest.raises(UserError, match=r"tokenizers of .*x and .*y differ on these texts\. "):
        _ = different.frozen


def test_other_texts_are_looked_at_too(world: World, tmp_path: Path) -> None:
    data = activations(world, model_y=changed(world, tmp_path / "y", one_more))
    assert data.frozen[0].tokenizer is data.frozen[1].tokenizer
    strange = TextSource(write_texts(tmp_path / "other.csv", ["an unheardof film", *sentences(40)]))
    with pytest.raises(UserError, match=r"Expected texts that .*y and the first model turn into the same tokens"):
        data.other_texts(strange)


def test_what_masks_or_cuts_otherwise_is_another_tokenizer(world: World) -> None:
    one, other = (AutoTokenizer.from_pretrained(world.model_x) for _ in range(2))
    assert same_tokens(one, other, [], 64)
    other.truncation_side = "left"
    assert not same_tokens(one, other, [], 64)


@pytest.mark.parametrize("change", [*CHANGES, None])
def test_what_describes_a_tokenizer_is_all_of_it_but_its_last_call(
    world: World, change: Callable[[PreTrainedTokenizerBase], None] | None
) -> None:
    one = AutoTokenizer.from_pretrained(world.model_x)
    other = AutoTokenizer.from_pretrained(world.model_x)
    before = describe_tokenizer(one)
    one(["the film", "a"], padding="max_length", truncation=True, max_length=7)
    inner, outer = json.loads(describe_tokenizer(one))
    whole = json.loads(one.backend_tokenizer.to_str())
    assert whole["padding"] is not None
    assert describe_tokenizer(one) == before == json.dumps([inner, outer], sort_keys=True)
    assert inner == {name: value for name, value in whole.items() if name not in ("padding", "truncation")}
    if change is not None:
        change(other)
    assert same_tokenizer(one, other) == (change is None)
