"""Recorded states look their rows up, and say by name what is wrong with them or what they cannot do."""

import inspect
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aligners import api
from aligners.datamodules.frozen_models import FrozenModels
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.module import TextModule
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import attention_states, pair_states, pairs_states, universe_states
from aligners.datamodules.text.recorded_texts import OF_READING
from aligners.datamodules.text.sources import TextSource
from aligners.errors import UserError
from aligners.models.recorded.recorded_states import RecordedRun, RecordedStates
from aligners.models.recorded.row_arrays import Seen
from aligners.reports.sharing.public_names import public_names, renamed

N, D = 60, 4
# What earlier versions took and ignored.
IGNORED: list[tuple[dict[str, object], str]] = [
    ({"max_length": 64}, r"no `max_length` with recorded states, but got 64: .* states:.* Leave it out"),
    ({"dtype": "bfloat16"}, r"no `dtype` with recorded states, but got 'bfloat16'"),
    ({"attn_implementation": "sdpa"}, r"no `attn_implementation` .* 'sdpa'"),
    ({"merge_adapters": False}, r"no `merge_adapters` .* False"),
    ({"device_map": ["auto", None]}, r"no `device_map` .* \['auto', None\]"),
    ({"store": Path("store"), "store_dtype": "float16"}, r"no `store_dtype` .* 'float16'"),
    ({"store": Path("store"), "store_rows": "texts"}, r"no `store_rows` .* 'texts'"),
]


@pytest.fixture
def states() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(2, N, D)).astype(np.float32)


def save(path: Path, states: np.ndarray) -> str:
    np.save(path, states)
    return f"states:{path}"


def recorded(*names: str) -> list[RecordedStates]:
    models = RecordedRun(names).models
    assert all(isinstance(model, RecordedStates) for model in models)
    return models  # type: ignore[return-value]


def test_a_front_looks_up_the_rows_that_are_asked_for(tmp_path: Path, states: np.ndarray) -> None:
    np.save(tmp_path / "mask.npy", np.arange(N) % 2)
    (model,) = recorded(f"{save(tmp_path / 'x.npy', states)}:mask=mask.npy")
    assert (model.depth, model.width, model.vocabulary, model.task) == (1, D, N // 2, None)
    ids = torch.tensor([[3, 0, 7], [2, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    deep, first = model.front({"input_ids": ids, "attention_mask": mask}, [1, 0])
    rows = [7, 1, 15, 5]
    assert torch.equal(deep[mask.bool()], torch.from_numpy(states[1, rows]))
    assert torch.equal(first[mask.bool()], torch.from_numpy(states[0, rows]))
    assert not deep[~mask.bool()].any()


def test_a_name_given_twice_is_one_object_and_columns_of_a_file_are_two(tmp_path: Path, states: np.ndarray) -> None:
    np.savez(tmp_path / "unread.npz", states)
    for site, name in enumerate("ab"):
        np.save(tmp_path / f"{name}.npy", states[site])
    x, again, other = recorded(*(f"states:{tmp_path}:column={name}" for name in "aab"))
    assert x is again
    assert x is not other
    assert x.fingerprint != other.fingerprint


def test_the_fingerprint_is_that_of_the_states(tmp_path: Path, states: np.ndarray) -> None:
    (tmp_path / "folder").mkdir()
    for site, part in enumerate(states):
        np.save(tmp_path / "folder" / f"layer_{site}.npy", part)
    changed = states.copy()
    changed[1, N - 1, 0] += 1e-6
    whole, folder, other, half = recorded(
        save(tmp_path / "x.npy", states),
        f"states:{tmp_path}/folder",
        save(tmp_path / "y.npy", changed),
        save(tmp_path / "h.npy", states.astype(np.float16)),
    )
    assert whole.fingerprint == folder.fingerprint
    assert len({whole.fingerprint, other.fingerprint, half.fingerprint}) == 3


def test_rows_that_are_not_finite_are_named_unless_they_are_left_out(tmp_path: Path, states: np.ndarray) -> None:
    states[1, [5, 9], 0] = np.nan
    states[1, 11, 2] = -np.inf
    name = save(tmp_path / "x.npy", states)
    with pytest.raises(UserError, match=r"3 rows of .*x\.npy hold NaN or infinity at site '1': rows 5, 9, 11 \(c"):
        recorded(name)
    np.save(tmp_path / "mask.npy", ~np.isin(np.arange(N), [5, 9, 11]))
    (model,) = recorded(f"{name}:mask=mask.npy")
    assert model.vocabulary == N - 3
    with np.errstate(over="ignore"):
        large = (np.nan_to_num(states) * 1e5).astype(np.float16)
    with pytest.raises(UserError, match=r"float16 holds numbers up to 65,504: record them in bfloat16 or float32"):
        recorded(save(tmp_path / "h.npy", large))
    double = np.nan_to_num(states, posinf=0, neginf=0).astype(np.float64)
    double[0, 3, 0] = 1e60  # beyond float32
    with pytest.raises(UserError, match=r"at site '0': rows 3 "):
        recorded(save(tmp_path / "d.npy", double))


def test_normalised_rows_against_others_are_a_caution_in_the_report(tmp_path: Path, states: np.ndarray) -> None:
    raw = save(tmp_path / "raw.npy", states)
    unit = states / np.linalg.norm(states, axis=-1, keepdims=True)
    normalised = save(tmp_path / "unit.npy", unit.astype(np.float16))
    again = save(tmp_path / "again.npy", unit)
    (caution,) = pair_states(raw, normalised).describe()["data_cautions"]
    assert caution.startswith(f"Caution: all rows of {normalised} have norm 1, those of {raw} do not")
    assert pair_states(again, normalised).describe()["data_cautions"] == []


def test_keys_of_one_side_are_a_caution_in_the_report(tmp_path: Path, states: np.ndarray) -> None:
    np.save(tmp_path / "all.npy", np.arange(N))
    np.save(tmp_path / "few.npy", np.arange(N)[10:])
    x = f"{save(tmp_path / 'x.npy', states)}:key=all.npy"
    y = f"{save(tmp_path / 'y.npy', states[:, 10:])}:key=few.npy"
    data = pair_states(x, y)
    assert data.describe()["data_cautions"][0].startswith(f"Caution: 10 of the 60 rows of {x} have keys")
    batch = next(iter(data.paired("fit")))
    assert torch.equal(batch.x, batch.y)


def test_the_split_follows_the_names_of_groups(tmp_path: Path, states: np.ndarray) -> None:
    group = np.arange(N) // 3
    np.save(tmp_path / "g.npy", group)
    name = f"{save(tmp_path / 'x.npy', states)}:group=g.npy"
    data = pair_states(name, name, text=TextSource(seed=1, test_share=0.4))
    texts = data.texts
    splits = [set(getattr(texts, split)["text"][:]) for split in ("fit", "validation", "test")]
    assert set.union(*splits) == set(map(str, group))
    assert sum(map(len, splits)) == N // 3
    other = pair_states(name, name, text=TextSource(seed=2, test_share=0.4)).texts
    assert set(other.test["text"][:]) != splits[2]
    fewer = pair_states(name, name, text=TextSource(seed=1, test_share=0.4, max_texts=5)).texts
    assert set(fewer.fit["text"][:]) < splits[0]
    assert len(fewer.fit) == 5


def test_groups_of_names_that_differ_in_case_stay_and_share_a_split(tmp_path: Path, states: np.ndarray) -> None:
    names = [f"{'A' if row % 2 else 'a'} {row // 6}" for row in range(N)]
    (tmp_path / "g.txt").write_text("\n".join(names))
    name = f"{save(tmp_path / 'x.npy', states)}:group=g.txt"
    texts = pair_states(name, name, text=TextSource(test_share=0.3, validation_share=0.3)).texts
    found = [set(getattr(texts, split)["text"][:]) for split in ("fit", "validation", "test")]
    assert set.union(*found) == set(names)
    for split in found:
        assert {text.lower() for text in split} == {text for text in split if text[0] == "a"}


def test_a_long_group_is_never_cut(tmp_path: Path) -> None:
    rows = 400
    longest = rows - 30
    np.save(tmp_path / "g.npy", np.minimum(np.arange(rows), 30))
    name = f"{save(tmp_path / 'x.npy', np.ones((rows, D), np.float32))}:group=g.npy"
    data = pair_states(name, name)
    assert longest > data.max_length
    every = [len(batch.text) for split in ("fit", "validation", "test") for batch in data.paired(split)]  # type: ignore[arg-type]
    assert sum(every) == rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"text": TextSource("imdb")}, r"`text\.source` 'imdb' has no meaning for states:"),
        ({"text": TextSource(label_column="stars")}, r"`text\.label_column` 'stars' has no meaning"),
        ({"component": "mlp"}, r"`component` 'residual' for recorded states, but got 'mlp'"),
        ({"sites": "0:5"}, r"`sites` out of the sites of states:.*, which are 0 \(0\), 1 \(1\), but got 5"),
        ({"packed": True}, r"packed"),
        *IGNORED,
    ],
)
def test_options_of_texts_and_models_are_refused(
    tmp_path: Path, states: np.ndarray, options: dict[str, object], said: str
) -> None:
    name = save(tmp_path / "x.npy", states)
    with pytest.raises(UserError, match=said):
        pair_states(name, name, **options).describe()  # type: ignore[arg-type]


def test_options_that_would_be_ignored_are_refused_and_defaults_are_not(tmp_path: Path, states: np.ndarray) -> None:
    name = save(tmp_path / "x.npy", states)
    for options, said in IGNORED:
        with pytest.raises(UserError, match=said):
            LayerActivations([name, name], **options)  # type: ignore[arg-type]
    for options, said in (
        ({"held_out_types": 0.2}, r"no `held_out_types` .* 0\.2"),
        ({"revision_x": "main"}, r"no `revision` .* 'main'"),
    ):
        with pytest.raises(UserError, match=said):
            pair_states(name, name, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no `held_out_types`"):
        universe_states([name, *(save(tmp_path / f"{k}.npy", states + k) for k in (1, 2))], held_out_types=0.2)
    makers = [inspect.signature(maker) for maker in (TextModule, FrozenModels, PairedActivations)]
    for option, taken in OF_READING.items():
        (default,) = (made.parameters[option].default for made in makers if option in made.parameters
                      and made.parameters[option].default is not inspect.Parameter.empty)  # fmt: skip
        assert taken[0] == default
        for value in taken:
            pair_states(name, name, **{option: value})


def test_what_needs_a_model_is_refused(tmp_path: Path, states: np.ndarray) -> None:
    name = save(tmp_path / "x.npy", states)
    (model,) = recorded(name)
    inputs = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "attention_mask": torch.ones(1, 1)}
    for ask in (
        lambda: model.logits(inputs),
        lambda: model.tail(inputs, 0, torch.zeros(1, 1, D)),
        lambda: model.attention(inputs),
        lambda: model.untrained(0),
        lambda: model.self_test(inputs),
        lambda: model.model,
    ):
        with pytest.raises(UserError, match=r"needs a model that can be run, but states:.* is recorded states"):
            ask()
    with pytest.raises(UserError, match=r"Attention weights are read from models"):
        attention_states(name, name)
    with pytest.raises(UserError, match=r"`attention` is read from models"):
        LayerActivations([name], attention=True)
    with pytest.raises(UserError, match=r"`rows` 'states' are the rows of recorded states, but models are named"):
        pair_states(rows="states")


def test_blocks_are_all_sites(tmp_path: Path, states: np.ndarray) -> None:
    names = [save(tmp_path / f"{number}.npy", states * (number + 1)) for number in range(3)]
    assert pair_states(*names[:2], sites="blocks").reader.sites == [(0, 0), (1, 1)]
    assert len(pairs_states(names).reader.sites) == 6
    assert len(universe_states(names).reader.sites) == 6


def test_unequal_numbers_of_sites_need_naming(tmp_path: Path, states: np.ndarray) -> None:
    x = save(tmp_path / "x.npy", states)
    y = save(tmp_path / "y.npy", states[0])
    with pytest.raises(UserError, match=r"`sites` 'all' pairs equal sites, but the last ones are 1 and 0 "):
        _ = pair_states(x, y).reader
    assert pair_states(x, y, sites="1:0").reader.sites == [(1, 0)]


def test_what_is_shared_names_no_folders_of_this_machine(tmp_path: Path, states: np.ndarray) -> None:
    np.save(tmp_path / "g.npy", np.arange(N) // 3)
    names = [f"{save(tmp_path / f'{side}.npy', states)}:group=g.npy" for side in "xy"]
    public = public_names(names, None)
    assert public == {names[0]: "x.npy", names[1]: "y.npy"}
    described = renamed(pair_states(*names).describe(), public)
    assert str(tmp_path) not in str(described)
    assert described["text"]["source"] == "x.npy, y.npy"


def test_workers_read_as_the_main_process_and_a_store_stays_empty(tmp_path: Path, states: np.ndarray) -> None:
    name = save(tmp_path / "x.npy", states)
    store = tmp_path / "store"
    plain = [batch.x for batch in pair_states(name, name, batch_size=8).paired("fit")]
    other = pair_states(name, name, batch_size=8, workers=1, store=store)
    for one, two in zip(plain, other.paired("fit"), strict=True):
        assert torch.equal(one, two.x)
    assert not list(store.rglob("*.safetensors"))


def test_texts_are_not_read(tmp_path: Path, states: np.ndarray) -> None:
    (model,) = recorded(save(tmp_path / "x.npy", states))
    with pytest.raises(UserError, match=r"Expected groups of recorded rows, but got 'a film'"):
        api.states(model, ["a film"], 0)


def test_unchanged_files_are_read_through_once_where_there_is_a_store(
    tmp_path: Path, states: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    states[1, 5, 0] = np.nan
    np.save(tmp_path / "mask.npy", np.arange(N) != 5)
    file = tmp_path / "x.npy"
    name = f"{save(file, states)}:mask=mask.npy"
    reads, real = [], Seen.of
    monkeypatch.setattr(Seen, "of", lambda arrays: reads.append(1) or real(arrays))
    store = {"store": tmp_path / "store"}

    def fingerprint(name: str, **options: Any) -> str:
        return pair_states(name, name, **options).describe()["models"]["x"]["fingerprint"]

    first = fingerprint(name, **store)
    assert fingerprint(name, **store) == first
    assert len(reads) == 1
    assert fingerprint(name) == first
    assert len(reads) == 2  # without a store
    with pytest.raises(UserError, match=r"1 rows of .* hold NaN .*: rows 5 "):
        fingerprint(name.partition(":mask")[0], **store)  # which is known, too
    assert len(reads) == 2

    assert fingerprint(f"{name},column=1", **store) != first
    content, dates = file.read_bytes(), file.stat()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(file, ns=(dates.st_atime_ns, dates.st_mtime_ns))  # its content's date alone can be set back
    assert fingerprint(name, **store) != first
    assert len(reads) == 4
    for known in (tmp_path / "store" / "models").glob("*.json"):
        known.write_text("{}")
    fingerprint(name, **store)
    assert len(reads) == 5
