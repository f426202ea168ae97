"""The examination of a dictionary: its null, which texts it fits on, and that nothing depends on how rows come."""

from itertools import pairwise

import pytest
import torch
from tests.live_memory import LiveBytes
from torch import Tensor

from aligners.similarity.latents.dictionary import PairedDictionary
from aligners.similarity.latents.examination import (
    Measured,
    Memory,
    Spaces,
    check_memory,
    examine,
    held_out_rows,
    readings_of,
)
from aligners.similarity.latents.other_texts import drawn_order, groups_of, other_rows
from aligners.similarity.latents.readings import FittedReadings
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


def dictionary_of(sites: int, latents: int, d_x: int, d_y: int) -> PairedDictionary:
    draw = torch.Generator().manual_seed(0)
    decoder_x = torch.randn(sites, latents, d_x, generator=draw)
    decoder_y = torch.randn(sites, latents, d_y, generator=draw)
    return PairedDictionary.of(decoder_x, decoder_y)


@pytest.mark.parametrize("spaces", ["one", "apart"])
@pytest.mark.parametrize("units", [2, 120])
def test_memory_is_what_an_examination_takes(spaces: Spaces, units: int) -> None:
    sites, latents, d_y = 2, 3000, 40
    d_x = d_y if spaces == "one" else 70
    dictionary = dictionary_of(sites, latents, d_x, d_y)
    codes = torch.zeros(sites, 6, latents)
    codes[:, torch.arange(6), torch.arange(6)] = torch.arange(1.0, 7)
    x, y = torch.randn(sites, 6, d_x), torch.randn(sites, 6, d_y)
    unit = torch.arange(6) % 2
    ones = torch.ones(sites)
    with LiveBytes() as live:
        fitted = FittedReadings(dictionary, ones, ones)
        fitted.update(codes, x, y)
        readings = readings_of(fitted, spaces)
        fitted.free()
        measured = Measured.empty(dictionary, readings, units)
        measured.update(codes, x, y, unit, unit)
        measured.examined(torch.full((sites, latents), 0.25))
    memory = Memory.of(dictionary, units, spaces)
    given = sum(part.nbytes for part in (*dictionary, codes))  # views of these count as well
    assert 0.9 * memory.most < live.peak <= 1.02 * (memory.most + given)


def test_directions_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary = dictionary_of(1, 20_000, 64, 64)
    needed = 8 * 20_000 * (2 * 256 + 256 + 3 * 64)  # sums twice, directions, and three vectors at work
    monkeypatch.setattr("aligners.similarity.latents.examination.free_memory", lambda device: needed)
    assert check_memory(dictionary, 5, "apart") == needed
    monkeypatch.setattr("aligners.similarity.latents.examination.free_memory", lambda device: needed - 1)
    message = r"20,000 latents at each of 1 sites in 5 `units` .* takes about 154 MB .* fewer `latents` or of fewer"
    with pytest.raises(ValueError, match=message):
        check_memory(dictionary, 5, "apart")


def test_the_units_that_a_refusal_names_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary = dictionary_of(1, 20_000, 64, 64)
    monkeypatch.setattr("aligners.similarity.latents.examination.free_memory", lambda device: 300_000_000)
    with pytest.raises(ValueError, match="`units` to") as refused:
        check_memory(dictionary, 200, "apart")
    most = int(str(refused.value).split("Set `units` to ")[1].split()[0])
    check_memory(dictionary, most, "apart")
    with pytest.raises(ValueError, match="Expected memory"):
        check_memory(dictionary, most + 1, "apart")
