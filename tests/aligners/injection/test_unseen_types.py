"""What an injection and a fit say of rows whose types no map was fitted on."""

from functools import partial
from itertools import permutations
from pathlib import Path

import pytest
import torch
from tests.aligners.injection.test_injecting import evaluate as evaluate_anything
from tests.aligners.injection.test_injecting import fit as fit_anything
from tests.aligners.injection.test_injecting import rows_of
from tests.references.maps import fvu
from tests.runs import activations, quiet_trainer
from tests.tiny import WORDS, tokenised
from tests.world import TEST_TEXTS, World, read_texts, sentences, write_texts

from aligners.datamodules.rows.row_types import is_held_out
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import StoredBank
from aligners.injection.injecting import InjectionEvaluation
from aligners.maps.linear import Linear, Procrustes
from aligners.maps.mlp import MLP
from aligners.models.loading.load_models import load_frozen

SHARE = 0.25
HELD = {word for word in WORDS if is_held_out(word, SHARE, 0)}
SITES: list[str | int] = [1, "2:3"]


fit = partial(fit_anything, sites=SITES, held_out_types=SHARE)
evaluate = partial(evaluate_anything, closed_form=(), batch_size=8)


@pytest.fixture(scope="module")
def stored(world: World, tmp_path_factory: pytest.TempPathFactory) -> StoredBank:
    return fit(world, tmp_path_factory.mktemp("stored"), {"linear": Linear, "procrustes": Procrustes})


@pytest.fixture(scope="module")
def plain(world: World, stored: StoredBank) -> InjectionEvaluation:
    return evaluate(world, [stored], held_out_types=SHARE)


def test_seen_and_unseen_rows_are_told_apart(world: World, stored: StoredBank, plain: InjectionEvaluation) -> None:
    """Text by text, without batches or padding, by the words themselves."""
    x, y = load_frozen(world.model_x), load_frozen(world.model_y)
    texts, _ = read_texts(world.test)
    inputs = [tokenised((text,)) for text in texts]
    unseen = torch.tensor([word in HELD for text in texts for word in ["<s>", *text.split(), "</s>"]])
    for place, (i, j) in enumerate(((1, 1), (2, 3))):
        source = torch.cat([x.front(one, [i])[0][0] for one in inputs])
        target = torch.cat([y.front(one, [j])[0][0] for one in inputs]).double().numpy()
        mapped = stored.maps["0_1"]["linear"](torch.stack([source] * 2))[place].double().numpy()
        mean = stored.moments.mean_y[place].numpy()
        row = rows_of(plain, "linear")[place]
        for name, rows in (("fvu_unseen", unseen.numpy()), ("fvu_seen", ~unseen.numpy())):
            assert row[name] == pytest.approx(fvu(mapped[rows], target[rows], mean), rel=1e-4)
            assert row[f"{name}_low"] < row[name] < row[f"{name}_high"]
        assert (row["n_unseen"], row["n_rows"]) == (int(unseen.sum()), len(unseen))
        assert row["fvu_seen"] < row["fvu"] < row["fvu_unseen"]


def test_the_types_of_a_checkpoint_count_whatever_text_is_evaluated(
    world: World, stored: StoredBank, plain: InjectionEvaluation, tmp_path: Path
) -> None:
    other = write_texts(tmp_path / "other.csv", [" ".join(words) for words in permutations(WORDS[:8], 2)])
    text = TextSource(other, held_out=world.test)  # fitting on it would see fewer types
    rows = evaluate(world, [stored], text=text).rows
    assert [row["fvu_unseen"] for row in rows] == [row["fvu_unseen"] for row in plain.rows]


def test_unseen_is_what_none_of_several_checkpoints_has_seen(world: World, stored: StoredBank, tmp_path: Path) -> None:
    everything = fit(world, tmp_path, {"all": Linear}, held_out_types=0.0)
    row = rows_of(evaluate(world, [stored, everything]), "linear")[0]
    assert (row["n_unseen"], row["fvu_unseen"], row["fvu_unseen_low"]) == (0, None, None)
    assert row["fvu_seen"] == pytest.approx(row["fvu"])


@pytest.mark.slow
def test_where_types_are_not_known_nothing_is_said_of_them(world: World, stored: StoredBank, tmp_path: Path) -> None:
    means, words = (fit(world, tmp_path / rows, {"linear": Linear}, rows=rows) for rows in ("mean", "words"))
    for checkpoints in ([means], [words], [stored, words]):
        for row in evaluate(world, checkpoints).rows:
            known = checkpoints == [words] and row["rows"] == "words"  # the rows that it was fitted on
            for name in ("fvu_seen", "fvu_unseen", "n_unseen"):
                assert (row[name] is not None) == known


def test_another_source_is_measured_without_the_texts_that_maps_were_fitted_on(
    world: World, stored: StoredBank, plain: InjectionEvaluation, tmp_path: Path
) -> None:
    fresh = [" ".join(words) for words in permutations(WORDS[8:12], 3)]
    known = activations(world).texts.fit["text"][:5]
    other = write_texts(tmp_path / "other.csv", [*fresh, *(text.upper() for text in known)], [7] * (len(fresh) + 5))
    rest = write_texts(tmp_path / "rest.csv", [" ".join(two) for two in permutations(WORDS[:9], 2)])
    split = TextSource(rest, held_out=other)
    module = evaluate(world, [stored], other=split)
    assert module.meta["other_text"]["dropped_as_fitted_on"] == 5
    only = evaluate(world, [stored], text=TextSource(world.fit, held_out=write_texts(tmp_path / "fresh.csv", fresh)))
    for row, alone in zip(module.rows, only.rows, strict=True):
        assert row["n_texts_other"] == len(fresh)
        assert (row["n_texts"], alone["n_texts_other"], alone["fvu_other"]) == (TEST_TEXTS, None, None)
        for end in ("", "_low", "_high") if row["site_x"] is not None else ():
            assert row[f"fvu_other{end}"] == pytest.approx(alone[f"fvu{end}"], rel=1e-3), row["method"]
    for name in ("fvu", "fvu_unseen", "accuracy", "cosine"):
        assert [row[name] for row in module.rows] == pytest.approx([row[name] for row in plain.rows], nan_ok=True)
    again = write_texts(tmp_path / "again.csv", known)
    with pytest.raises(ValueError, match=r"maps were fitted on all 5 held-out texts"):
        evaluate(world, [stored], other=TextSource(split.source, held_out=again))


def test_validation_watches_unseen_types_beside_the_criterion(world: World) -> None:
    module = Alignment({"linear": Linear, "mlp": partial(MLP, skip=False)})
    data = activations(world, sites=SITES, held_out_types=SHARE)
    quiet_trainer(max_epochs=1).fit(module, datamodule=data)
    logged = module.trainer.callback_metrics
    batches = [data.reader.read(data.reader.prepare(texts)) for texts in data.loader("validation")]
    x, y = (torch.cat([getattr(batch, name) for batch in batches], 1) for name in "xy")
    unseen = torch.cat([batch.rows.unseen for batch in batches])  # type: ignore[misc]
    assert module.moments is not None
    for fitted in module.fits():
        mapped, target = fitted.aligner(x)[0, unseen].detach().double(), y[0, unseen].double()
        expected = fvu(mapped.numpy(), target.numpy(), module.moments.mean_y[0].numpy())
        assert logged[f"validation/{fitted.name}/1-1/fvu_unseen"] == pytest.approx(expected, rel=1e-4)
        assert f"train/{fitted.name}/1-1/fvu_unseen" not in logged  # no such rows there
    assert torch.equal(module.criteria()["0_1.mlp"], module.validation_figures[module.trained()[0]]["fvu"])


def test_maps_are_not_measured_on_texts_that_they_were_fitted_on(
    world: World, stored: StoredBank, tmp_path: Path
) -> None:
    texts = activations(world).texts
    known = [*texts.fit["text"][:5], *texts.validation["text"][:4]]  # those of validation chose the best step
    mixed = TextSource(world.test, held_out=write_texts(tmp_path / "mixed.csv", [*known, *sentences(6)]))
    module = evaluate(world, [stored], text=mixed)
    assert {row["n_texts"] for row in module.rows} == {6}
    assert module.meta["text"]["left_out"] == {"texts": 9, "of": 15, "fitted_on_them": {str(stored.path): 9}}


def test_errors_on_fitting_texts_are_of_their_rows_without_held_out_types(
    world: World, stored: StoredBank, plain: InjectionEvaluation
) -> None:
    data = activations(world, sites=SITES, held_out_types=SHARE, batch_size=8)
    module = evaluate(world, [stored], closed_form=("linear",), fitting=True, held_out_types=SHARE)
    found, held_out = rows_of(module, "linear"), rows_of(plain, "linear")
    assert [row["fvu"] for row in found] == [row["fvu"] for row in held_out]
    assert held_out[0]["mse_fit"] is None
    batches = list(data.paired("fit", only=len(data.split("test"))))
    x, y = (torch.cat([getattr(batch, side) for batch in batches], 1) for side in "xy")
    with torch.no_grad():
        squares = (stored.maps["0_1"]["linear"](x) - y).double().square()
    total = (y - stored.moments.mean_y[:, None]).square()  # type: ignore[union-attr]
    for s, row in enumerate(found):
        assert row["mse_fit"] == pytest.approx(float(squares[s].mean()), rel=1e-6)
        assert row["fvu_fit"] == pytest.approx(float(squares[s].sum() / total[s].sum()), rel=1e-6)
        assert row["relative_error_fit"] == pytest.approx(row["fvu_fit"] ** 0.5)
