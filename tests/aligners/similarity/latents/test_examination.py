"""The examination of a dictionary: its null, which texts it fits on, and that nothing depends on how rows come."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from aligners.similarity.latents.dictionary import PairedDictionary
from aligners.similarity.latents.examination import examine, held_out_rows
from aligners.similarity.latents.other_texts import drawn_order, groups_of, other_rows
from aligners.similarity.latents.verdicts import verdicts

PLACES, LATENTS, TEXTS = 12, 120, 240


def sharing_places_alone(seed: int = 0) -> tuple[PairedDictionary, Tensor, Tensor, Tensor, Tensor]:
    """X's features come at places of their own; of Y's states the place in the text alone decides, and noise."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(PLACES, 4 * PLACES, (TEXTS,), generator=draw)
    text = torch.arange(TEXTS).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(len(text)) - starts[text]
    at_place = (place[:, None] == torch.arange(LATENTS) % PLACES).double()
    strength = torch.randn(len(text), LATENTS, generator=draw).double().exp()
    codes = at_place * strength * (torch.rand(len(text), LATENTS, generator=draw) < 0.6)
    decoder_x, decoder_y = torch.randn(2, LATENTS, 40, generator=draw).double()
    x = codes @ decoder_x + torch.randn(len(text), 40, generator=draw)
    y = at_place @ decoder_y + torch.randn(len(text), 40, generator=draw)
    dictionary = PairedDictionary.of(decoder_x[None], decoder_y[None])
    return dictionary, codes[None], x[None], y[None], text


@pytest.mark.parametrize("seed", range(2))
def test_what_two_models_share_by_place_alone_is_not_shared(seed: int) -> None:
    """With rows of other texts at other places, the null would have nothing of it, and nearly all would be shared."""
    found = examine(*sharing_places_alone(seed))
    assert verdicts(found.parts).counts()["shared"] >= 0.8 * LATENTS
    assert verdicts(found.parts, permuted=[found.permuted]).counts()["shared"] <= 0.03 * LATENTS


def test_each_row_meets_its_place_in_another_text_of_its_group() -> None:
    lengths = torch.tensor([9, 9, 8, 8, 8, 7, 7, 7, 3, 3, 3, 2, 2, 2, 1, 1, 1])
    text = torch.arange(20, 20 + len(lengths)).repeat_interleave(lengths)
    number = text - 20
    starts = lengths.cumsum(0) - lengths
    groups = groups_of(number)
    assert [number[group].unique().tolist() for group in groups] == [list(range(8)), list(range(8, 17))]
    assert torch.equal(torch.cat(groups), torch.arange(len(text)))
    for group, shortest in zip(groups, (7, 1), strict=True):
        rows, partners = (group[each] for each in other_rows(text[group]))
        assert len(rows) == shortest * len(text[group].unique())
        assert (text[rows] != text[partners]).all()
        assert torch.equal(rows - starts[number[rows]], partners - starts[number[partners]])
        assert torch.equal(rows.sort().values, partners.sort().values)
    assert [len(each) for each in other_rows(text[:9])] == [0, 0]
    assert groups_of(text[:0]) == []


def test_neighbours_in_the_drawn_order_are_strangers() -> None:
    texts = torch.arange(400)
    order = drawn_order(texts)
    assert torch.equal(order.sort().values, texts)
    assert torch.equal(drawn_order(texts.flip(0)), order)
    assert sum(abs(a - b) < 8 for a, b in pairwise(order.tolist())) < 40


def test_every_second_text_is_held_out_the_longest_first() -> None:
    lengths = torch.tensor([3, 1, 2, 4, 5, 2, 1])
    number = torch.arange(7).repeat_interleave(lengths)
    rows, place = held_out_rows(number)
    assert number[rows].unique_consecutive().tolist() == [3, 5, 1]
    assert place.tolist() == [0, 0, 0, 0, 1, 1, 2]


def test_the_order_and_the_numbers_of_texts_do_not_matter_but_for_the_null() -> None:
    """Texts numbered otherwise, with the same ones held out, have the same parts."""
    dictionary, codes, x, y, text = sharing_places_alone()
    found = examine(dictionary, codes, x, y, text)
    again = examine(dictionary, codes, x, y, 3 * text + 7)
    for one, other in ((found.parts, again.parts), (found.permuted, again.permuted)):
        torch.testing.assert_close(one.own, other.own)
        torch.testing.assert_close(one.other, other.other)
