"""With a store, data modules yield what they yield without, and models whose states are there are not read."""

import os
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.datamodules.test_run_identity import fit
from tests.interrupting import strike
from tests.runs import activations, quiet_trainer, rank_of
from tests.world import TEST_TEXTS, World

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.model_texts import stitched_texts
from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.read_rows import Plan
from aligners.datamodules.store import read_ahead, stored_states, stores
from aligners.datamodules.store.stored_states import Manifest
from aligners.fitting.alignment import Alignment
from aligners.injection.behaviour import read_all
from aligners.injection.routes import Route
from aligners.models.loading import load_models
from aligners.models.loading.known import SleepingModel
from aligners.models.loading.load_models import load_frozen
from aligners.models.model import FrozenModel
from aligners.similarity.similarity_evaluation import SimilarityEvaluation


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many shards, windows, pieces and batches."""
    monkeypatch.setattr(stored_states, "SHARD", 50_000)
    monkeypatch.setattr(read_ahead, "ROWS", 250)
    monkeypatch.setattr(read_ahead, "PIECE", 3_000)
    monkeypatch.setattr(stores, "MOST_TOKENS", 100)


@pytest.mark.parametrize("rows", ["tokens fit", "words test", "words_mean fit", "mean test"])
def test_paired_rows_are_those_of_streaming(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Any
) -> None:
    rows, split = rows.split()
    options = {"rows": rows, "sites": ["1:3", 2, "2:0"], "special_tokens": False, "held_out_types": 0.3}
    options |= {"text": replace(world.text, seed=1), "max_length": 60}
    expected = list(activations(world, **options).paired(split, shuffle=True))
    data = activations(world, **options, store=tmp_path)
    for _ in range(2):
        found = list(data.paired(split, shuffle=True))
        for a, b in zip(found, expected, strict=True):
            assert a.texts.stored
            assert a.x.dtype == torch.float32
            assert torch.equal(a.text, b.text)
            assert torch.equal(a.rows.place, b.rows.place)
            torch.testing.assert_close(a.x, b.x, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(a.y, b.y, rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(FrozenModel, "front", None)  # not to be called


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ["mean", "cls"])
def test_pooled_rows_are_those_of_stored_tokens_to_the_bit(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, stored_as: str
) -> None:
    options = {"rows": rows, "sites": ["1:3", 2, "2:0"], "special_tokens": rows == "cls", "max_length": 60}
    kept = {"store_dtype": stored_as}
    expected = list(activations(world, **options).paired("test", shuffle=True))
    for _ in range(2):
        whole, pooled = (
            list(activations(world, **options, **kept, store=tmp_path / of, store_rows=of).paired("test", shuffle=True))
            for of in ("tokens", "texts")
        )
        for a, b, c in zip(pooled, whole, expected, strict=True):
            assert [each.pooled for batch in (a, b) for each in batch.texts.stored.values()] == [True] * 2 + [False] * 2
            assert torch.equal(a.text, b.text)
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.y, b.y)
            off = 1e-5 if stored_as == "float32" else 2.0**-8
            torch.testing.assert_close(a.x, c.x, rtol=off, atol=off)
        monkeypatch.setattr(FrozenModel, "front", None)  # not to be called
    stores = [Manifest.load(path.parent) for path in (tmp_path / "texts").glob("*/manifest.json")]
    assert [sum(store.rows) for store in stores] == [TEST_TEXTS] * 2
    assert {store.identity.rows for store in stores} == {"cls" if rows == "cls" else "mean, special tokens left out"}


def stores_of(folder: Path) -> dict[str, int]:
    """The stores in a folder, by the rows that they hold."""
    return Counter(Manifest.load(path.parent).identity.rows for path in folder.glob("*/manifest.json"))


def test_pooled_rows_are_found_for_no_other_rows_and_stored_tokens_for_all(world: World, tmp_path: Path) -> None:
    read = partial(activations, world, model_y=world.model_x, sites=[1, 2], store=tmp_path, store_rows="texts")

    def values(**options: Any) -> list[torch.Tensor]:
        return [batch.x for batch in read(**options).paired("test")]

    mean = values(rows="mean")
    for options in ({"rows": "mean", "special_tokens": False}, {"rows": "cls"}, {"rows": "mean"}):
        values(**options)
    assert stores_of(tmp_path) == {"mean": 1, "mean, special tokens left out": 1, "cls": 1}
    values(rows="words")
    assert stores_of(tmp_path)[""] == 1  # of one text there are many
    for store in tmp_path.glob("*/manifest.json"):
        if Manifest.load(store.parent).identity.rows:
            shutil.rmtree(store.parent)
    for found, expected in zip(values(rows="mean"), mean, strict=True):
        assert torch.equal(found, expected)
    assert stores_of(tmp_path) == {"": 1}  # what is there already is read


def test_further_kinds_of_rows_are_read_from_the_models_where_one_row_a_text_is_kept(
    world: World, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"sites": [1, 2], "rows": "mean"}
    tokens = Plan([RowKind("tokens")])

    def batches(**more: Any) -> list[Any]:
        data = activations(world, **options, **more)
        data.plan(tokens)
        return list(data.paired("test"))

    kept = {"store": tmp_path, "store_rows": "texts"}
    for _ in activations(world, **options, **kept).paired("test"):
        pass
    for found, expected in zip(batches(**kept), batches(), strict=True):
        assert not found.texts.stored
        assert torch.equal(found.x, expected.x)
        assert torch.equal(found.others[0].x, expected.others[0].x)
    assert stores_of(tmp_path) == {"mean": 2}
    assert all(found.texts.stored for found in batches(store=tmp_path))  # all tokens are kept now
    assert all(found.texts.stored for found in batches(**kept))


def test_layers_of_models_with_other_tokenizers_are_those_of_streaming(
    world: World, folders: list[str], tmp_path: Path
) -> None:
    models = [*folders[:2], folders[0]]
    given: dict[str, Any] = {"text": world.text, "batch_size": 8, "max_length": 60}
    data = LayerActivations(models, **given, store=tmp_path / "store")
    for a, b in zip(data.batches("test"), LayerActivations(models, **given).batches("test"), strict=True):
        assert (a.texts.number, len(a.texts.stored)) == (b.texts.number, 2)
        assert a.states[0] is a.states[2]
        assert torch.equal(a.token, b.token)
        for found, expected in zip(a.states, b.states, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    twin = data.frozen[1].untrained(seed=5)
    assert not torch.allclose(data.reader.read_model(twin, a, 1)[0], a.states[1])  # is run, not looked up


def test_attention_is_not_kept(world: World, tmp_path: Path) -> None:
    store = tmp_path / "store"
    data = LayerActivations([world.model_x], text=world.text, max_length=60, attention=True, store=store)
    assert not next(data.batches("test")).texts.stored
    assert not store.exists()


def test_a_language_model_is_read_from_the_store_unless_its_texts_are_masked(
    world: World, causal: list[str], masked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {"sites": "1:2", "text": world.text, "max_length": 32, "packed": True}
    data = stitched_texts(causal, **given, store=tmp_path / "store")
    x, y = data.frozen
    batch, plain = (each.prepare(next(iter(each.loader("test")))) for each in (data, stitched_texts(causal, **given)))
    route = Route("0_1", x, y, ((1, 2),))
    expected = read_all([route], plain, targets=True)
    monkeypatch.setattr(FrozenModel, "front", None)  # not to be called
    found = read_all([route], batch, targets=True)
    torch.testing.assert_close(found.sources(route), expected.sources(route), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.targets(route), expected.targets(route), rtol=1e-5, atol=1e-5)
    other = stitched_texts(masked, **given | {"packed": False}, store=tmp_path / "masked")
    assert not next(iter(other.loader("test"))).stored
    assert not (tmp_path / "masked").exists()


@pytest.mark.parametrize(("stored_as", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_a_stored_value_is_the_nearest_of_its_type(world: World, tmp_path: Path, stored_as: str, bits: int) -> None:
    data = activations(world, sites=[2], store=tmp_path, store_dtype=stored_as)
    for found, expected in zip(data.paired("test"), activations(world, sites=[2]).paired("test"), strict=True):
        torch.testing.assert_close(found.x, expected.x, rtol=2.0**-bits + 1e-5, atol=1e-5)
    assert data.describe()["stored_as"] == stored_as
    half = activations(world, sites=[2], dtype=stored_as, store=tmp_path)  # models are stored as they are
    (states, _), *_ = half.test_dataloader()[0].stored
    assert str(states.dtype) == f"torch.{stored_as}"
    assert next(half.paired("test")).x.dtype == torch.float32
    assert "stored_as" not in half.describe()


def test_a_pass_reads_what_is_planned_for_it(world: World, tmp_path: Path) -> None:
    models = [world.model_x, world.model_y]
    data = LayerActivations(models, layers=[0, 1, 3], text=world.text, max_length=60, store=tmp_path)
    data.plan(("test", "test"), [[[1, 3], [0]], [[], [3]]])
    batches = [next(iter(loader)) for loader in data.test_dataloader()]
    stored = [{model.name: rows.sites for model, rows in batch.stored.items()} for batch in batches]
    assert stored == [{models[0]: (1, 3), models[1]: (0,)}, {models[1]: (3,)}]
    assert {site.name for site in tmp_path.glob("*/sites/*")} == {"00", "01", "03"}


def test_models_of_equal_weights_share_a_store(world: World, tmp_path: Path) -> None:
    copy = shutil.copytree(world.model_x, tmp_path / "copy")
    data = activations(world, model_y=str(copy), sites=["1:2"], store=tmp_path / "store")
    for batch in data.paired("test"):
        assert len(batch.texts.stored) == 2
    assert len(list((tmp_path / "store").glob("*/manifest.json"))) == 1


# ---------------------------------------------------------------------- a whole fit


@pytest.mark.slow
def test_a_fit_gives_the_same_with_a_store_and_resumes_in_an_epoch(world: World, tmp_path: Path) -> None:
    fitted = partial(fit, world, batch_size=29, trainer={"max_epochs": 2})
    plain, store, begun = fitted(tmp_path / "plain"), tmp_path / "store", tmp_path / "begun" / "last.ckpt"
    with strike(Alignment, "training_step", 9), pytest.raises(SystemExit):
        fitted(begun.parent, store=store, workers=1)
    resumed = fitted(tmp_path / "ended", begun, store=store)
    whole = fitted(tmp_path / "whole", store=store, workers=1)
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    for a, b in zip(plain.validation_figures.values(), whole.validation_figures.values(), strict=True):
        assert set(a) == set(b) > {"fvu"}
        torch.testing.assert_close(a["fvu"], b["fvu"], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r'`data\.stored_as` was null and is "bfloat16"'):
        fitted(tmp_path / "else", begun, store=store, store_dtype="bfloat16")


def test_ranks_read_their_parts(world: World, tmp_path: Path) -> None:
    def read(rank: int, store: Path | None) -> list[tuple[torch.Tensor, ...]]:
        data = activations(world, sites=[1, 3], store=store)
        data.trainer = rank_of(rank, 2)
        return [(batch.text, batch.x, batch.y) for batch in data.paired("fit", shuffle=True)]

    for rank in range(2):
        for found, expected in zip(read(rank, tmp_path), read(rank, None), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were read."""
    found, read = [], load_models.read_weights

    def counted(name: str, *rest: Any) -> Any:
        found.append(name)
        return read(name, *rest)

    monkeypatch.setattr(load_models, "read_weights", counted)
    return found


def compared(world: World, names: list[str], store: Path) -> SimilarityEvaluation:
    evaluation = SimilarityEvaluation(["cka"])
    data = LayerActivations(names, text=world.text, max_length=60, store=store)
    quiet_trainer().test(evaluation, data, verbose=False)
    return evaluation


def test_a_model_is_read_once_to_write_its_states_and_again_only_where_it_runs(
    world: World, tmp_path: Path, loads: list[str]
) -> None:
    pair = [world.model_x, world.model_y]
    first = compared(world, pair, tmp_path)
    assert sorted(loads) == sorted(pair)
    loads.clear()
    second = compared(world, pair, tmp_path)
    assert not loads
    assert (second.rows, second.meta["models"]) == (first.rows, first.meta["models"])
    for _ in range(2):  # at first the fitting texts are missing: both run
        assert len(list(activations(world, sites=[1], store=tmp_path, max_length=60).paired("fit")))
    assert sorted(loads) == sorted(pair)


def test_a_sleeping_model_is_the_model(world: World, tmp_path: Path, loads: list[str]) -> None:
    known = load_models.KnownModels(tmp_path)
    plain = load_frozen(world.model_x, known=known)
    known.save()
    asleep = load_frozen(world.model_x, known=known)
    assert isinstance(asleep, SleepingModel)
    assert len(loads) == 1
    sizes = ("depth", "last_site", "width", "heads", "nbytes")
    for name in (*sizes, "task", "n_labels", "label_names", "regression", "causal"):
        assert getattr(asleep, name) == getattr(plain, name)
    assert (asleep.identity(), asleep.dtype, asleep.device) == (plain.identity(), plain.dtype, plain.device)
    assert not asleep.to("cpu").awake
    inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]]), "attention_mask": torch.ones(1, 4, dtype=torch.int64)}
    assert torch.equal(asleep.logits(inputs), plain.logits(inputs))
    assert asleep.awake
    assert len(loads) == 2
    assert asleep.untrained(1).fingerprint == plain.untrained(1).fingerprint
    (path,) = (path for path in tmp_path.iterdir() if path.suffix == ".json")
    os.truncate(path, 9)  # what is written down of it is damaged: it is read again
    assert not isinstance(load_frozen(world.model_x, known=known), SleepingModel)


def test_weights_that_were_written_again_are_read_again(world: World, tmp_path: Path, loads: list[str]) -> None:
    copy, known = Path(shutil.copytree(world.model_x, tmp_path / "copy")), load_models.KnownModels(tmp_path / "known")
    before = load_frozen(copy, known=known)
    known.save()
    asleep = load_frozen(copy, known=known)
    weights = load_file(copy / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    again = load_frozen(copy, known=known)
    assert not isinstance(again, SleepingModel)
    assert again.fingerprint != before.fingerprint
    with pytest.raises(ValueError, match="hold others"):  # it was not read in time
        asleep.self_test({})
    assert len(loads) == 3
