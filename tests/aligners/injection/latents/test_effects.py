"""What latents do in models: against hooks and finite differences, and where it is known because it was planted."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ranks import two_ranks
from tests.references import latent_effects as reference
from tests.tiny import tiny_frozen
from tests.world import GOOD, sentences
from torch import Tensor

from aligners.api.model_states import tokenised
from aligners.datamodules.rows.policies import RowKind
from aligners.errors import UserError
from aligners.injection.comparing.read_answers import Asked
from aligners.injection.latents.choosing import choose, first_order
from aligners.injection.latents.effects import LatentEffects, draw_texts, latent_effects
from aligners.injection.latents.read_models import ModelPair
from aligners.injection.scoring.scores import resampled
from aligners.models import FrozenModel
from aligners.similarity.latents.dictionary import PairedDictionary

TEXTS = sentences(24)
LABELS = [int(bool(GOOD & set(text.split()))) for text in TEXTS]
GPT = partial(tiny_frozen, "gpt2", task="causal", tie_word_embeddings=False)
WIDTH, LATENTS = 16, 12
Change = Callable[[Any], object]


def changed(model: FrozenModel, change: Change) -> FrozenModel:
    """A copy that was changed in place."""
    copied = copy.deepcopy(model.model)
    with torch.no_grad():
        change(copied)
    return FrozenModel(copied, model.tokenizer, name="new")


def noise(model: Any, size: float = 0.05) -> None:
    """Every weight off by a share of its size."""
    draw = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.mul_(1 + size * torch.randn(weight.shape, generator=draw))


class RandomCodes:
    """Codes of a random encoder, the same at every site, of which about a fifth are above 0."""

    def __init__(self, latents: int = LATENTS, width: int = WIDTH) -> None:
        draw = np.random.default_rng(1)
        self.encoder = draw.normal(size=(2 * width, latents))
        self.bias = -1.2 * np.linalg.norm(self.encoder, axis=0) * 0.7

    def of_arrays(self, x: Any, y: Any) -> Any:
        both = np.concatenate([x, y], -1)
        both = both / np.linalg.norm(both, axis=-1, keepdims=True) * 6
        return np.maximum(both @ self.encoder + self.bias, 0)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.from_numpy(self.of_arrays(x.double().numpy(), y.double().numpy()))


def random_dictionary(sites: int, size: float = 0.1) -> PairedDictionary:
    """Decoders of both models that differ, with biases."""
    draw = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * size

    decoder_x = normal(sites, LATENTS, WIDTH)
    decoder_y = decoder_x + normal(sites, LATENTS, WIDTH)
    return PairedDictionary.of(decoder_x, decoder_y, normal(sites, WIDTH), normal(sites, WIDTH))


def pair_of(
    x: FrozenModel,
    y: FrozenModel,
    dictionary: PairedDictionary,
    codes: Any,
    sites: list[tuple[int, int]],
    kind: RowKind = RowKind("tokens"),  # noqa: B008  (frozen)
) -> tuple[ModelPair, Any]:
    """The models as they are asked, and the texts tokenised for both."""
    labels = LABELS if x.task == "classification" else None
    texts, _ = tokenised([x, y], TEXTS, labels, 20, words=kind.types == "words")
    asked = Asked(x, y, labelled=labels is not None, seed=0, alike=texts.alike)
    return ModelPair((x, y), sites, dictionary, codes, asked, kind), texts


def measured(*given: Any, **options: Any) -> LatentEffects:
    pair, texts = pair_of(*given)
    options = {"one_space": True, "count": 3, "batch_size": 7} | options
    return latent_effects(pair, texts, range(len(TEXTS)), **options)


def general(site_pairs: tuple[int, ...] = (1, 2)) -> tuple[Any, ...]:
    """Two models that differ everywhere, and a dictionary that knows nothing of them."""
    x = GPT()
    sites = [(site, site) for site in site_pairs]
    return x, changed(x, noise), random_dictionary(len(sites)), RandomCodes(), sites


# ---------------------------------------------------------------------- against hooks


@pytest.fixture(scope="module")
def found() -> LatentEffects:
    return measured(*general())


def referred(place: int) -> tuple[reference.Pair, list[reference.Text]]:
    """The same models and texts for the reference."""
    x, y, dictionary, codes, sites = general()
    arrays = [part[place].numpy() for part in dictionary]
    models = [copy.deepcopy(model.model).double() for model in (x, y)]
    pair = reference.Pair(*models, sites[place][0], *arrays, codes=codes.of_arrays)
    texts = []
    for text in TEXTS:
        ids = x.tokenizer(text, truncation=True, max_length=20, return_tensors="pt")["input_ids"][0]
        texts.append(reference.read(pair, ids))
    return pair, texts


def latents_of(rows: list[Any]) -> list[int]:
    return [row["latent"] for row in rows]


@pytest.mark.parametrize("place", [0, 1])
def test_each_figure_is_that_of_hooks_on_one_text_at_a_time(found: LatentEffects, place: int) -> None:
    pair, texts = referred(place)
    total = sum(reference.divergence(text.own_y, text.own_x) for text in texts)
    units = sum(len(text.own_x) for text in texts)
    assert found.meta == {
        "divergence": pytest.approx(total / units, rel=1e-4),
        "units": units,
        "texts": len(TEXTS),
        "not_carried": None,
    }
    carried = [reference.carried_of_texts(pair, texts, latent) for latent in range(LATENTS)]
    fired = [np.array([(text.codes[:, latent] > 0).sum() for text in texts]) for latent in range(LATENTS)]
    for latent in range(LATENTS):
        expected = carried[latent].sum() / total
        assert float(found.attributed[place, latent]) == pytest.approx(expected, rel=2e-3, abs=2e-4)
        by_row = carried[latent].sum() / fired[latent].sum() if (fired[latent] > 0).sum() >= 5 else np.nan
        assert float(found.by_row[place, latent]) == pytest.approx(by_row, rel=2e-3, abs=1e-4, nan_ok=True)

    rows = [row for row in found.rows if row["place"] == place]
    kinds = [row["chosen"] for row in rows]
    assert kinds[:6] == ["first"] * 3 + ["random"] * 3
    assert set(kinds[6:]) <= {"narrow"}
    narrow = found.by_row[place].nan_to_num(-torch.inf).topk(3).indices.tolist()
    assert [row["latent"] for row in rows[6:]] == [latent for latent in narrow if latent not in latents_of(rows[:6])]
    divergences = np.array([reference.divergence(text.own_y, text.own_x) for text in texts])
    drawn = resampled(len(texts), 0)[1:].numpy()
    for row in rows:
        for name, below in (("attributed", divergences), ("attributed_by_row", fired[row["latent"]])):
            expected = reference.resampled_ratio(carried[row["latent"]], below, drawn)
            given = [row[name + end] for end in ("", "_low", "_high")]
            if name == "attributed_by_row" and (below > 0).sum() < 5:
                assert given == [None] * 3
                continue
            assert given == pytest.approx(expected, rel=5e-3, abs=3e-4), name
    for row in rows:
        latent = row["latent"]
        assert row["fired"] == sum(int((text.codes[:, latent] > 0).sum()) for text in texts)
        expected = reference.recovered(pair, texts, reference.carried_by(pair, [latent]))
        assert row["recovered"] == pytest.approx(expected, abs=1e-4)
        assert row["recovered_low"] <= row["recovered"] <= row["recovered_high"]
        correlation, *shifts = reference.correlation(pair, texts, latent, pair.decoder_y[latent])
        assert row["correlation"] == pytest.approx(correlation, abs=1e-3)
        assert row["correlation_low"] <= row["correlation"] <= row["correlation_high"]
        assert [row["shift_x"], row["shift_y"]] == pytest.approx(shifts, rel=1e-2)


@pytest.mark.parametrize("place", [0, 1])
def test_latents_together_are_that_of_hooks(found: LatentEffects, place: int) -> None:
    pair, texts = referred(place)
    measured = latents_of([row for row in found.rows if row["place"] == place])
    first, random = measured[:3], measured[3:6]
    expected = {
        ("first", count): reference.recovered(pair, texts, reference.carried_by(pair, first[:count]))
        for count in (1, 2, 3)
    }
    every = reference.carried_by(pair, list(range(LATENTS)))
    expected["all", LATENTS] = reference.recovered(pair, texts, every)
    biases = pair.bias_y - pair.bias_x
    expected["reconstruction", LATENTS] = reference.recovered(pair, texts, lambda text: every(text) + biases)
    expected["state", LATENTS] = reference.recovered(pair, texts, lambda text: text.y - text.x)
    rows = {(row["moved"], row["latents"]): row for row in found.cumulative if row["place"] == place}
    assert {key: row["recovered"] for key, row in rows.items()} == pytest.approx(expected, abs=1e-4)
    floors = {key: row["random"] for key, row in rows.items() if key[0] == "first"}
    for (_, count), floor in floors.items():
        carried = reference.recovered(pair, texts, reference.carried_by(pair, random[:count]))
        assert floor == pytest.approx(carried, abs=1e-4)
    assert [row["random"] for key, row in rows.items() if key[0] != "first"] == [None] * 3


def test_the_null_takes_another_direction_out_of_the_same_rows(found: LatentEffects) -> None:
    pair, tokens = pair_of(*general())
    batches = [pair.read(tokens[range(len(TEXTS))])]
    chosen = choose(pair, first_order(pair, batches, slopes=True), 3, 0)[0]
    assert not set(zip(chosen.every.tolist(), chosen.partners.tolist(), strict=True)) & {(j, j) for j in range(LATENTS)}
    models, texts = referred(0)
    norms = np.linalg.norm([models.decoder_x, models.decoder_y], axis=2)
    rows = [row for row in found.rows if row["place"] == 0]
    for row, latent, partner in zip(rows, chosen.every.tolist(), chosen.partners.tolist(), strict=True):
        assert row["latent"] == latent
        direction = models.decoder_y[partner] / norms[1, partner] * norms[:, latent].max()
        correlation = reference.correlation(models, texts, latent, direction)[0]
        assert row["correlation_null"] == pytest.approx(correlation, abs=1e-3)


def same(one: LatentEffects, other: LatentEffects) -> None:
    torch.testing.assert_close(one.attributed, other.attributed, rtol=1e-3, atol=1e-5)
    for mine, theirs in ((one.rows, other.rows), (one.cumulative, other.cumulative)):
        for row, again in zip(mine, theirs, strict=True):
            for name, value in row.items():
                expected = again[name]
                if isinstance(value, float):
                    expected = pytest.approx(expected, rel=1e-3, abs=1e-4)
                assert value == expected, name


@pytest.mark.parametrize("batch_size", [3, 24])
def test_batches_change_nothing(found: LatentEffects, batch_size: int) -> None:
    same(measured(*general(), batch_size=batch_size), found)


def on_a_rank(rank: int) -> LatentEffects:
    return measured(*general())


def test_ranks_change_nothing(found: LatentEffects, tmp_path: Path) -> None:
    for of_rank in two_ranks(on_a_rank, tmp_path):
        same(of_rank, found)


def test_gradients_are_taken_inside_a_test_of_a_trainer(found: LatentEffects) -> None:
    given = general()
    with torch.inference_mode():
        same(measured(*given), found)


# ---------------------------------------------------------------------- planted


def token(word: str, model: FrozenModel) -> int:
    return int(model.tokenizer.convert_tokens_to_ids(word))  # type: ignore[union-attr]


PLANTED = ("film", "the")  # the first moves further


def planted() -> tuple[Any, ...]:
    """Y reads two words as moved along a direction each; a dictionary of site 0 knows both among ten others.

    Latents 3 and 7 are those of the words. The others fire at random: of 0 to 2 the decoders are the same in both
    models, and of the rest they differ by a little that is not in the states.
    """
    x = GPT()
    draw = torch.Generator().manual_seed(3)
    decoder = torch.randn(LATENTS, WIDTH, generator=draw) * 0.3
    decoder_x, decoder_y = decoder.clone(), decoder + 0.004 * torch.randn(LATENTS, WIDTH, generator=draw)
    decoder_y[:3] = decoder[:3]
    decoder_x[[3, 7]] = 0
    decoder_y[3] *= 2
    numbers = [token(word, x) for word in PLANTED]

    def change(model: Any) -> None:
        model.transformer.wte.weight[numbers] += decoder_y[[3, 7]]

    random = RandomCodes()

    def codes(x: Tensor, y: Tensor) -> Tensor:
        found = random(x, y)
        moved = (y - x).double()
        for latent in (3, 7):
            direction = decoder_y[latent].double()
            near = torch.nn.functional.cosine_similarity(moved, direction, dim=-1) > 0.99
            found[..., latent] = near.double()
        return found

    return x, changed(x, change), PairedDictionary.of(decoder_x[None], decoder_y[None]), codes, [(0, 0)]


def test_a_planted_change_is_carried_by_its_latents_and_by_no_other() -> None:
    found = measured(*planted(), count=4)
    first = [row for row in found.rows if row["chosen"] == "first"]
    assert [row["latent"] for row in first[:2]] == [3, 7]
    assert first[0]["recovered"] > first[1]["recovered"] > 0.1
    others = [row["recovered"] for row in found.rows if row["latent"] not in (3, 7)]
    assert np.abs(others).max() < 0.02
    together = {(row["moved"], row["latents"]): row["recovered"] for row in found.cumulative}
    assert together["first", 2] == pytest.approx(1, abs=1e-5)
    assert together["state", LATENTS] == pytest.approx(1, abs=1e-5)
    assert [row["random"] for row in found.cumulative][:3] == pytest.approx([0] * 3, abs=0.02)
    assert found.attributed[0, :3].tolist() == [0] * 3  # what both models have carries nothing
    assert float(found.attributed.nansum()) == pytest.approx(together["all", LATENTS], abs=0.1)
    by_row = found.by_row[0].nan_to_num()  # latent 7 fires in too few texts
    assert int(by_row.argmax()) == 3
    assert found.turned[0, :3].numpy() == pytest.approx(0, abs=1e-12)
    assert found.turned[0, [3, 7]].isnan().all()  # X has nothing there


def test_a_shared_latent_shifts_both_models_alike_and_an_own_one_only_its_model() -> None:
    found = measured(*planted(), count=LATENTS)
    rows = {row["latent"]: row for row in found.rows}
    assert len(rows) == LATENTS
    for latent in (3, 7):
        assert rows[latent]["correlation"] is None
        assert rows[latent]["shift_x"] == 0
        assert rows[latent]["shift_y"] > 1e-3
    shared = [rows[latent]["correlation"] for latent in range(3)]
    nulls = [rows[latent]["correlation_null"] for latent in range(3)]
    assert min(shared) > 0.8
    assert np.abs(nulls).max() < 0.6


def test_a_constant_added_to_every_state_is_one_latent() -> None:
    x = GPT()
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))

    def change(model: Any) -> None:
        model.transformer.h[0].mlp.c_proj.bias += direction

    decoder_y = torch.zeros(1, 2, WIDTH)
    decoder_y[0, 1] = direction
    dictionary = PairedDictionary.of(torch.zeros_like(decoder_y), decoder_y)

    def codes(x: Tensor, y: Tensor) -> Tensor:
        return torch.ones(*x.shape[:2], 2)

    found = measured(x, changed(x, change), dictionary, codes, [(1, 1)], count=1)
    (first,) = (row for row in found.rows if row["chosen"] == "first")
    assert first["latent"] == 1
    assert first["recovered"] == pytest.approx(1, abs=1e-5)


# ---------------------------------------------------------------------- other heads, rows and layouts


def own_words(model: Any) -> None:
    """Words read otherwise; everything behind the embeddings stays."""
    embeddings = model.get_input_embeddings().weight
    embeddings[10:30] = embeddings[10:30].flip(0).clone()


@pytest.mark.parametrize(
    ("family", "task"),
    [("bert", "classification"), ("bert", "masked"), ("gpt2", "classification"), ("mpnet", "masked")],
)
def test_any_head_that_answers_with_probabilities_is_asked(family: str, task: str) -> None:
    untied = {} if task == "classification" else {"tie_word_embeddings": False}
    x = tiny_frozen(family, task=task, **untied)
    x.tokenizer.mask_token = "<unk>"  # type: ignore[union-attr]
    found = measured(x, changed(x, own_words), random_dictionary(1), RandomCodes(), [(0, 0)])
    assert found.cumulative[-1]["recovered"] == pytest.approx(1, abs=1e-4)
    units = found.meta["units"]
    assert units == len(TEXTS) if task == "classification" else len(TEXTS) <= units < sum(map(len, TEXTS))
    alike = measured(x, x, random_dictionary(1), RandomCodes(), [(1, 1)], one_space=False)
    assert alike.meta["divergence"] == 0
    assert alike.cumulative == []


def test_equal_models_carry_nothing_and_their_latents_shift_alike() -> None:
    x = GPT()
    decoder = random_dictionary(1).decoder_x
    found = measured(x, x, PairedDictionary.of(decoder, decoder), RandomCodes(), [(1, 1)])
    assert "same answers" in found.meta["not_carried"]
    for row in found.rows:
        assert row["correlation"] == pytest.approx(1, abs=1e-6)
        assert row["recovered"] is None
        assert row["attributed"] is None


def test_rows_that_are_left_out_keep_their_states() -> None:
    x = GPT()
    y = changed(x, lambda model: model.transformer.wte.weight[0].mul_(-1))  # of <s>
    both = {}
    for special in (True, False):
        given = x, y, random_dictionary(1), RandomCodes(), [(0, 0)], RowKind("tokens", special)
        both[special] = measured(*given).cumulative[-1]["recovered"]
    assert both == {True: pytest.approx(1, abs=1e-4), False: pytest.approx(0, abs=1e-6)}


def test_words_are_rows_of_one_token_each() -> None:
    given = *general()[:2], random_dictionary(1), RandomCodes(), [(1, 1)]
    words = measured(*given, RowKind("words"))
    tokens = measured(*given, RowKind("tokens", False))
    same(words, tokens)


def test_texts_are_drawn_by_a_seed() -> None:
    numbers = range(1, 24, 2)
    assert draw_texts(numbers, 12, 0) == list(numbers)
    drawn = draw_texts(numbers, 5, 0)
    assert len(set(drawn) & set(numbers)) == 5
    assert drawn == sorted(drawn) == draw_texts(numbers, 5, 0) != draw_texts(numbers, 5, 1)


# ---------------------------------------------------------------------- what cannot be


def test_models_in_spaces_of_their_own_are_only_ablated() -> None:
    x, wide = GPT(), GPT(width=24, seed=1)
    draw = torch.Generator().manual_seed(0)
    decoders = [torch.randn(1, LATENTS, width, generator=draw) for width in (16, 24)]
    codes = RandomCodes(width=20)
    found = measured(x, wide, PairedDictionary.of(*decoders), codes, [(1, 1)])
    assert "width 16" in found.meta["not_carried"]
    apart = measured(*general(), one_space=False)
    assert "neither was trained from the other" in apart.meta["not_carried"]
    for each in (found, apart):
        assert each.cumulative == []
        assert each.attributed.isnan().all()
        assert each.by_row.isnan().all()
        assert each.turned.isnan().all()
        assert {row["chosen"] for row in each.rows} == {"first", "random"}
        assert {row["attributed_by_row_low"] for row in each.rows} == {None}
        assert {row["recovered"] for row in each.rows} == {None}
        assert all(-1 <= row["correlation"] <= 1 for row in each.rows)


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (GPT, partial(tiny_frozen, "gpt2"), "answer different questions"),
        (partial(tiny_frozen, n_labels=None), partial(tiny_frozen, n_labels=None), "has no classification head"),
        (partial(tiny_frozen, n_labels=1), partial(tiny_frozen, n_labels=1), "predicts numbers"),
    ],
)
def test_models_that_answer_nothing_comparable_are_refused(x: Any, y: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        measured(x(), y(), random_dictionary(1), RandomCodes(), [(1, 1)])


def test_other_tokenizers_and_means_are_refused() -> None:
    x, y, dictionary, codes, sites = general()
    asked = Asked(x, y, labelled=False, seed=0, alike=False)
    with pytest.raises(UserError, match="their tokenizers differ"):
        ModelPair((x, y), sites, dictionary, codes, asked, RowKind("tokens"))
    with pytest.raises(UserError, match="are means"):
        pair_of(x, y, dictionary, codes, sites, RowKind("mean"))
    with pytest.raises(UserError, match="as many site pairs"):
        pair_of(x, y, dictionary, codes, sites[:1])
    with pytest.raises(UserError, match="`count`"):
        measured(*general(), count=0)
    larger = GPT(vocab_size=60)
    with pytest.raises(UserError, match="Expected heads of one size"):
        measured(x, larger, dictionary, codes, sites)
