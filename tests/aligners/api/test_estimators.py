"""Maps on arrays are estimators as scikit-learn knows them: options, several sites, frames, files."""

import inspect
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.runs import related_rows

from aligners import api, maps
from aligners.api import INN, MLP, ArrayMap, Identity, Linear, Permutation, Procrustes, TrainedMap
from aligners.fitting.saved_bank import StoredBank, load_bank, save_bank
from aligners.maps.linear import Affine
from aligners.similarity.algebra.moments import moments_of

ESTIMATORS = [name for name in maps.__all__ if issubclass(getattr(api, name, int), ArrayMap)]
SHORT = {"INN": {"couplings": 2, "hidden": 4, "steps": 3}, "MLP": {"hidden": [4], "steps": 3}}


def made(name: str) -> ArrayMap:
    return getattr(api, name)(**SHORT.get(name, {}))


def arrays(sites: int, n: int = 60, d_y: int = 4) -> tuple[np.ndarray, np.ndarray]:
    x, y = related_rows(sites, n, 4, d_y)
    return x.numpy(), y.numpy()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_options_are_those_of_the_bank_and_of_training(name: str) -> None:
    of_bank = inspect.signature(getattr(maps, name)).parameters.values()
    expected = {option.name: option.default for option in of_bank if option.kind is option.KEYWORD_ONLY}
    if issubclass(getattr(api, name), TrainedMap):
        expected |= {"steps": 1000, "rows_a_step": 512, "learning_rate": 1e-2, "seed": 0}
    assert getattr(api, name)().get_params() == expected


def test_options_can_be_read_and_set() -> None:
    assert repr(Linear()) == "Linear()"
    assert repr(Linear(ridge=0.1)) == "Linear(ridge=0.1)"
    assert repr(TrainedMap(maps.LowRank, rank=2, steps=5)) == "TrainedMap(LowRank, steps=5, rank=2)"
    x, y = arrays(1)
    weak = Linear().fit(x[0], y[0])
    strong = Linear().fit(x[0], x[0]).set_params(ridge=np.float64(10)).fit(x[0], y[0])
    assert strong.ridge == 10
    assert np.linalg.norm(strong.coef_) < np.linalg.norm(weak.coef_) / 2


@pytest.mark.parametrize("name", ESTIMATORS)
def test_several_sites_are_so_many_maps(name: str) -> None:
    x, y = arrays(2)
    alone = [made(name).fit(x[s], y[s]) for s in range(2)]
    expected = np.stack([alone[s].predict(x[s]) for s in range(2)])
    keys = [3, "last"]
    of_arrays, of_lists = made(name).fit(x, y), made(name).fit(list(x), list(y))
    of_dicts = made(name).fit(dict(zip(keys, x, strict=True)), dict(zip(keys, y, strict=True)))
    np.testing.assert_allclose(of_arrays.predict(x), expected, atol=1e-9)
    assert isinstance(of_lists.predict(list(x)), list)
    found = of_dicts.predict({"last": x[1], 3: x[0]})
    for s, key in enumerate(keys):
        np.testing.assert_allclose(of_lists.predict(list(x))[s], expected[s], atol=1e-9)
        np.testing.assert_allclose(found[key], expected[s], atol=1e-9)
        np.testing.assert_allclose(of_dicts.at(key).predict(x[s]), expected[s], atol=1e-9)
    scores = [alone[s].score(x[s], y[s]) for s in range(2)]
    assert of_arrays.score(x, y) == pytest.approx(scores)
    assert list(of_dicts.score({3: x[0], "last": x[1]}, {"last": y[1], 3: y[0]}).values()) == pytest.approx(scores)


@pytest.mark.parametrize("d_y", [3, 4])
def test_linear_maps_have_coefficients(d_y: int) -> None:
    x, y = arrays(2, d_y=d_y)
    linear = [name for name in ESTIMATORS if issubclass(getattr(maps, name), Affine)]
    more = {"ReducedRank", "SoftMatching", "CCA", "SVCCA", "PWCCA"}
    assert {"Linear", "Ridge", "Procrustes", "Permutation", *more} == set(linear)
    for name in linear:
        found, several = made(name).fit(x[0], y[0]), made(name).fit(x, y)
        assert found.coef_.shape == (d_y, 4)
        np.testing.assert_allclose(x[0] @ found.coef_.T + found.intercept_, found.predict(x[0]), atol=1e-9)
        np.testing.assert_allclose(several.coef_[0], found.coef_, atol=1e-9)
        assert several.intercept_.shape == (2, d_y)
    tensors = [torch.from_numpy(part[0]) for part in (x, y)]
    assert isinstance(Linear().fit(*tensors).coef_, torch.Tensor)
    assert not hasattr(Identity().fit(x[0], x[0]), "coef_")


def test_what_numpy_makes_an_array_of_is_taken() -> None:
    x, y = (part[0] for part in arrays(1))
    frame = pd.DataFrame(x, columns=list("abcd")).assign(d=range(60))
    found = Linear().fit(frame, y[:, 0])
    np.testing.assert_allclose(found.predict(frame.to_numpy().tolist()), found.predict(frame))
    assert isinstance(found.predict(frame), np.ndarray)
    assert (list(found.feature_names_in_), found.n_features_in_) == (list("abcd"), 4)
    with pytest.raises(ValueError, match="with the columns"):
        found.predict(frame[list("bacd")])
    assert not hasattr(found.fit(x, y), "feature_names_in_")
    whole = np.round(x).astype(int)
    np.testing.assert_allclose(Linear().fit(whole, whole).predict(whole), whole, atol=1e-3)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_file_gives_the_same_map(name: str, tmp_path: Path) -> None:
    x, y = arrays(2)
    before = made(name).fit({1: x[0], 2: x[1]}, {1: y[0], 2: y[1]})
    before.save(tmp_path / "map.safetensors")
    for found in (ArrayMap.load(tmp_path / "map.safetensors"), type(before).load(str(tmp_path / "map.safetensors"))):
        assert (type(found), repr(found), found.sites_) == (type(before), repr(before), [1, 2])
        np.testing.assert_array_equal(found.predict(x), before.predict(x))
        assert found.score(x, y) == before.score(x, y)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(before)).predict(x), before.predict(x))
    with pytest.raises(ValueError, match="written from Python"):
        load_bank(tmp_path / "map.safetensors")


def test_a_file_of_one_site_or_of_a_frame_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    x, y = (part[0] for part in arrays(1))
    ArrayMap(maps.Procrustes, scale=True).fit(pd.DataFrame(x, columns=list("abcd")), y).save(tmp_path / "map")
    found = Procrustes.load(tmp_path / "map")
    assert (found.scale, found.sites_, list(found.feature_names_in_)) == (True, None, list("abcd"))
    with pytest.raises(ValueError, match="Call `fit"):
        Linear().save(tmp_path / "map")
    with pytest.raises(ValueError, match="to hold a map of class Linear, but got Procrustes"):
        Linear.load(tmp_path / "map")


@pytest.mark.parametrize("keys", [(np.int64(1), np.int64(2)), ("a/b", None), ((1, 1), (1, 2, 3))])
def test_a_file_has_the_keys_of_the_sites(keys: tuple[Any, Any], tmp_path: Path) -> None:
    x, y = arrays(2)
    rows = dict(zip(keys, x, strict=True))
    before = Linear().fit(rows, dict(zip(keys, y, strict=True)))
    before.save(tmp_path / "map")
    np.testing.assert_array_equal(Linear.load(tmp_path / "map").predict(rows)[keys[1]], before.predict(rows)[keys[1]])


def test_a_file_of_a_run_is_read(tmp_path: Path) -> None:
    x, y = related_rows(2, 60, 4, 4)
    moments = moments_of(x, y)
    banks: dict[str, Any] = {"linear": maps.Linear(2, 4, 4, ridge=0.1), "turned": maps.Procrustes(2, 4, 4)}
    back = maps.Linear(2, 4, 4)
    for bank, of in ((banks["linear"], moments), (banks["turned"], moments), (back, moments.swap())):
        bank.fit(of)
    pairs = {"0_1": [(1, 1), (2, 3)], "1_0": [(1, 1), (3, 2)]}
    path = tmp_path / "aligners.safetensors"
    save_bank(StoredBank("fit", {"0_1": banks, "1_0": {"linear": back}}, pairs, {}, {}, moments), path)
    found = Linear.load(path)
    assert (found.ridge, found.sites_) == (0.1, [1, (2, 3)])
    np.testing.assert_allclose(found.score(x, y), Linear(ridge=0.1).fit(x, y).score(x, y), atol=1e-6)
    torch.testing.assert_close(found.at((2, 3)).predict(x[1].float()), banks["linear"](x.float())[1])
    assert ArrayMap.load(path, "turned").bank.bijective
    assert Linear.load(path, route="1_0").score(y, x) == pytest.approx(Linear().fit(y, x).score(y, x), abs=1e-6)
    for wrong, said in (
        (lambda: ArrayMap.load(path), "linear, turned"),
        (lambda: ArrayMap.load(path, "other"), "linear, turned"),
        (lambda: Permutation.load(path), "Linear, Procr"),
    ):
        with pytest.raises(ValueError, match=said):
            wrong()


def test_a_map_is_read_beside_one_of_a_class_that_is_not_known_here(tmp_path: Path) -> None:
    class Foreign(maps.Linear):
        """Somebody's own."""

    x, y = related_rows(1, 60, 4, 4)
    bank, own = maps.Linear(1, 4, 4), Foreign(1, 4, 4)
    for each in (bank, own):
        each.fit(moments_of(x, y))
    path = tmp_path / "aligners.safetensors"
    stored = StoredBank("fit", {"0_1": {"linear": bank, "own": own}}, {"0_1": [(1, 1)]}, {}, {}, moments_of(x, y))
    save_bank(stored, path)
    maps.Aligner.registry.pop("Foreign", None)
    for found in (ArrayMap.load(path, "linear"), Linear.load(path)):
        np.testing.assert_array_equal(found.at(1).predict(x[0].float()), bank(x.float())[0])
    with pytest.raises(ValueError, match="class 'Foreign'"):
        ArrayMap.load(path, "own")


def test_what_was_trained_is_forgotten_by_the_next_fit() -> None:
    x, y = (part[0] for part in arrays(1))
    fresh, other = MLP(**SHORT["MLP"]).fit(x, y), MLP(**SHORT["MLP"]).fit(y, x).fit(x, y)
    np.testing.assert_array_equal(fresh.predict(x), other.predict(x))
    assert INN(**SHORT["INN"]).fit_transform(x, y).shape == y.shape
