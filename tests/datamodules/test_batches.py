import gc
import logging
import weakref
from itertools import chain

import datasets
import numpy as np
import pytest
import torch
from tests.datamodules.tokens.splitters import word_piece
from tests.runs import quiet_trainer
from tests.tiny import WORDS, tiny_tokenizer

from aligners.datamodules.batches import LengthBatches, limited
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.datamodules.tokens.tokenising import same_tokenizer, tokenise


def make_split(n: int = 12, *, pair: bool = False, labels: bool = True) -> datasets.Dataset:
    draw = np.random.default_rng(0)
    text = [" ".join(draw.choice(WORDS[:5], size=draw.integers(1, 9))) for _ in range(n)]
    columns = {"text": text, "id": list(range(n))}
    if pair:
        columns["text_pair"] = text[::-1]
    if labels:
        columns["label"] = [i % 3 for i in range(n)]
    return datasets.Dataset.from_dict(columns)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pair", [False, True])
def test_batch_is_what_the_tokenizer_makes_of_the_texts(side: str, pair: bool) -> None:
    tokenizer, split = word_piece(side), make_split(pair=pair)
    texts = TokenisedTexts([tokenise(split, tokenizer, 12)], [tokenizer])
    rows = [7, 0, 11, 3]
    batch = texts[rows]
    chosen = split.select(rows)
    expected = tokenizer(
        list(chosen["text"]),
        list(chosen["text_pair"]) if pair else None,
        padding=True,
        truncation=True,
        max_length=12,
        return_tensors="pt",
        return_special_tokens_mask=True,
    )
    special = expected.pop("special_tokens_mask").bool()
    assert set(batch.inputs_x) == set(expected)
    for name, value in expected.items():
        assert batch.inputs_x[name].dtype == torch.int64
        torch.testing.assert_close(batch.inputs_x[name], value)
    torch.testing.assert_close(batch.special[0], special)
    assert batch.text.tolist() == rows
    assert batch.labels is not None
    assert batch.labels.tolist() == list(chosen["label"])


def test_one_tokenizer_shares_its_inputs_and_moving_keeps_that() -> None:
    tokenizer, split = tiny_tokenizer(), make_split(labels=False)
    tokens = tokenise(split, tokenizer, 12, words=True)
    batch = TokenisedTexts([tokens] * 3, [tokenizer] * 3)[[0, 1]]
    for one in (batch, batch.to("cpu"), batch.to("meta")):
        assert all(len(part) == 3 and part[1] is part[0] for part in (one.inputs, one.special, one.words or ()))
        assert one.labels is None
    assert batch.to("meta").inputs_x["input_ids"].device.type == "meta"
    plain = TokenisedTexts([tokenise(split, tokenizer, 12)], [tokenizer])
    assert plain.words is plain.words_used is plain[[0]].words is plain[[0]].word_count is None
    torch.testing.assert_close(plain[[0, 1]].inputs_x, batch.inputs_x)


def test_two_tokenizers_read_the_same_texts() -> None:
    x, y, split = tiny_tokenizer(), word_piece("left"), make_split()
    tokens = [tokenise(split, x, 12), tokenise(split, y, 5)]
    batch = TokenisedTexts(tokens, [x, y])[[2, 5]]
    for inputs, table in zip(batch.inputs, tokens, strict=True):
        for ids, mask, row in zip(inputs["input_ids"], inputs["attention_mask"], [2, 5], strict=True):
            assert ids[mask.bool()].tolist() == table[row]["input_ids"]
    mixed = TokenisedTexts([*tokens, tokens[0]], [x, y, x])[[2, 5]]
    assert mixed.inputs[0] is mixed.inputs[2] is not mixed.inputs[1]
    torch.testing.assert_close(mixed.inputs[1], batch.inputs[1])


def test_same_tokenizer() -> None:
    one, other = word_piece(), word_piece()
    other(["a b c", "a"], padding=True, truncation=True, max_length=4)  # leaves its mark on the tokenizer
    assert same_tokenizer(one, other)
    assert not same_tokenizer(one, word_piece("left"))
    assert not same_tokenizer(one, tiny_tokenizer())
    other.backend_tokenizer.post_processor = None
    assert not same_tokenizer(one, other)


def test_cut_texts_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    split = datasets.Dataset.from_dict({"text": ["a b c d e", "a", "a b c"], "id": [0, 1, 2]})
    with caplog.at_level(logging.WARNING):
        tokens = tokenise(split, tiny_tokenizer(), 5)
    assert list(tokens["length"]) == [5, 3, 5]
    assert len(caplog.records) == 1
    assert "2 of 3 texts reach 5 tokens" in caplog.text


def test_without_a_padding_token_the_mask_says_what_is_padding() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenise(make_split(), tokenizer, 12)
    padded = TokenisedTexts([tokens], [tokenizer])[[0, 1, 2]]
    tokenizer.pad_token = None
    bare = TokenisedTexts([tokens], [tokenizer])[[0, 1, 2]]
    mask = padded.inputs_x["attention_mask"]
    assert not mask.all()
    torch.testing.assert_close(bare.inputs_x, {**padded.inputs_x, "input_ids": padded.inputs_x["input_ids"] * mask})
    assert torch.equal(bare.special[0], padded.special[0])


LENGTHS = np.random.default_rng(0).integers(3, 60, size=1003)
every_order = pytest.mark.parametrize("shuffle", [True, False])
every_world = pytest.mark.parametrize("world", [1, 2, 3])


def of_ranks(n: int, size: int, world: int, **options: bool) -> list[LengthBatches]:
    return [LengthBatches(LENGTHS[:n], size, seed=1, rank=rank, world=world, **options) for rank in range(world)]


@every_order
@every_world
@pytest.mark.parametrize(("n", "size"), [(1003, 16), (3, 3), (17, 16), (7, 3), (64, 8)])
def test_ranks_read_every_text_once_in_the_batches_of_one(shuffle: bool, world: int, n: int, size: int) -> None:
    (alone,) = map(list, of_ranks(n, size, 1, shuffle=shuffle))
    ranks = [list(sampler) for sampler in of_ranks(n, size, world, shuffle=shuffle)]
    assert all(batch for batches in ranks for batch in batches)
    together = [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)]
    assert sorted(chain(*together)) == list(range(n))
    if size >= 2 * world - 1:
        assert together == [sorted(batch) for batch in alone]
        assert max(map(len, alone)) <= size


@every_order
@every_world
@pytest.mark.parametrize(("n", "size"), [(1003, 16), (64, 8), (3, 1)])
def test_whole_batches_and_their_numbers_are_the_same_for_any_ranks(
    shuffle: bool, world: int, n: int, size: int
) -> None:
    (all_of_them,) = of_ranks(n, size, 1, shuffle=shuffle, whole=True)
    alone = {batch.number: batch for batch in all_of_them}
    samplers = of_ranks(n, size, world, shuffle=shuffle, whole=True)
    ranks = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(batches) for batches in ranks]
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    assert {batch.number: batch for batch in chain(*ranks)} == alone
    assert sorted(alone) == list(range(samplers[0].count))
    assert sorted(chain(*alone.values())) == list(range(n))
    assert max(map(len, alone.values())) <= size


def test_skipping_leaves_out_the_first_batches_once_and_parts_have_the_number_of_their_batch() -> None:
    for rank in (0, 1):
        sampler = LengthBatches(LENGTHS, 16, shuffle=True, rank=rank, world=2)
        batches = list(sampler)
        sampler.skip(3)
        assert len(sampler) == len(batches)
        skipped = list(sampler)
        assert (skipped, list(sampler)) == (batches[3:], batches)
        assert [batch.number for batch in skipped] == list(range(3, sampler.count))
        whole = LengthBatches(LENGTHS, 16, shuffle=True, whole=True, rank=rank, world=2)
        whole.skip(3)
        assert [batch.number for batch in whole] == list(range(6 + rank, whole.count, 2))


def test_shuffling_follows_seed_and_epoch() -> None:
    def read(seed: int, epoch: int) -> list[list[int]]:
        sampler = LengthBatches(LENGTHS, 16, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert read(0, 1) == read(0, 1) not in (read(0, 2), read(1, 1))


@every_order
def test_texts_of_a_batch_are_of_similar_length(shuffle: bool) -> None:
    batches = list(LengthBatches(LENGTHS, 16, shuffle=shuffle))
    padded = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
    assert padded < 1.05 * LENGTHS.sum()
    longest = [LENGTHS[batch].max() for batch in batches]
    assert (longest == sorted(longest, reverse=True)) is not shuffle


@pytest.mark.parametrize(("texts", "size", "whole"), [(1, 4, False), (4, 1, False), (4, 4, True)])
def test_too_few_for_the_ranks_is_refused(texts: int, size: int, whole: bool) -> None:
    says = rf"{'whole batch' if whole else 'text of every batch'} for each of the 2 ranks.*{texts} texts.* of {size}"
    with pytest.raises(ValueError, match=says):
        LengthBatches([5] * texts, size, shuffle=False, whole=whole, world=2)


@pytest.mark.parametrize(("limit", "count"), [(1.0, 10), (0.35, 3), (4, 4), (40, 10)])
def test_a_limit_is_a_number_of_batches_or_a_share(limit: float, count: int) -> None:
    assert limited(10, quiet_trainer(limit_train_batches=limit), "train") == count
    with pytest.raises(ValueError, match=r"`trainer\.limit_test_batches` to leave at least one of 10 .*got 0\.001"):
        limited(10, quiet_trainer(limit_test_batches=0.001), "test")


def test_a_batch_goes_when_nobody_holds_it() -> None:
    """Not when Python looks for cycles, which it may do after an hour."""
    tokenizer = tiny_tokenizer()
    batch = TokenisedTexts([tokenise(make_split(), tokenizer, 12)], [tokenizer])[[0, 1]]
    gc.disable()
    try:
        moved = batch.to("meta")
        left = weakref.ref(moved.text)
        del moved
        assert left() is None
    finally:
        gc.enable()


def test_what_a_resumed_fit_sets_is_still_lightnings() -> None:
    """`go_on_after_last_batch` sets counters of Lightning's, one of them private."""
    loop = quiet_trainer().fit_loop
    assert loop.epoch_loop._batches_that_stepped == 0
    tracker = {"ready", "started", "processed", "completed"}
    for progress in (loop.epoch_progress, loop.epoch_loop.batch_progress):
        assert tracker <= set(vars(progress.total)) & set(vars(progress.current))
    assert hasattr(loop.epoch_loop.batch_progress, "is_last_batch")
    assert loop.epoch_loop.val_loop.batch_progress is not None
