"""Every format is opened without being read, and what is no states is refused by name."""

import json
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from safetensors.torch import save_file

from aligners.errors import UserError
from aligners.models.recorded import row_arrays
from aligners.models.recorded.files import Opened, column_of, open_states
from aligners.models.recorded.row_arrays import RowArray, Seen
from aligners.models.recorded.source_names import StatesSource, all_recorded, check_command, states_source

HUGE = 1 << 35  # numbers, 128 GiB: more than there is memory


def opened(path: Path, options: str = "") -> Opened:
    return open_states(states_source(f"states:{path}{options}"))


def rows_of(found: Opened) -> torch.Tensor:
    """All rows of all sites, (L, N, d)."""
    every = torch.arange(found.arrays[0].rows)
    return torch.stack([array.take(every) for array in found.arrays])


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(3, 20, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8"])
def test_numpy_arrays_of_one_or_several_sites(tmp_path: Path, states: torch.Tensor, dtype: str) -> None:
    array = (states * 9).numpy().astype(dtype)
    np.save(tmp_path / "all.npy", array)
    np.save(tmp_path / "one.npy", np.asfortranarray(array[1]))
    expected = torch.from_numpy(array.astype("float32"))
    assert torch.equal(rows_of(opened(tmp_path / "all.npy")), expected)
    assert torch.equal(rows_of(opened(tmp_path / "one.npy")), expected[1:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_named_tensors_are_sites_in_natural_order(tmp_path: Path, states: torch.Tensor, dtype: torch.dtype) -> None:
    named = {f"layer.{site + 9}": part.to(dtype).contiguous() for site, part in enumerate(states)}
    save_file({**named, "ids": torch.arange(20)}, tmp_path / "s.safetensors")
    torch.save({**named, "about": "a film"}, tmp_path / "s.pt")
    for name in ("s.safetensors", "s.pt"):
        found = opened(tmp_path / name)
        assert found.sites == ["layer.9", "layer.10", "layer.11"]
        assert torch.equal(rows_of(found), states.to(dtype).float())
    chosen = opened(tmp_path / "s.safetensors", ":column=layer.11+layer.9,key=ids")
    assert torch.equal(rows_of(chosen), states.to(dtype).float()[[2, 0]])
    source = states_source(f"states:{tmp_path}/s.safetensors")
    assert column_of(source, chosen, "ids").tolist() == list(range(20))


def test_tensors_of_nnsight_are_sequences(tmp_path: Path, states: torch.Tensor) -> None:
    torch.save([part.view(5, 4, 4) for part in states], tmp_path / "saved.pt")  # (B, T, d) of each of three blocks
    found = opened(tmp_path / "saved.pt")
    assert torch.equal(rows_of(found), states)
    assert found.sequence is not None
    assert found.sequence.tolist() == [row // 4 for row in range(20)]


def test_cached_activations_of_saelens(tmp_path: Path, states: torch.Tensor) -> None:
    """As `CacheActivationsRunner` makes them: shards of a feature `Array2D` by the name of the hook."""
    hook = "blocks.1.hook_resid_post"
    features = datasets.Features(
        {
            hook: datasets.Array2D(shape=(5, 4), dtype="float32"),
            "token_ids": datasets.Sequence(datasets.Value("int32"), length=5),
        }
    )
    acts = states[0].view(4, 5, 4)
    tokens = torch.arange(20).view(4, 5).int()
    parts = []
    for shard in range(2):
        own = slice(2 * shard, 2 * shard + 2)
        parts.append(datasets.Dataset.from_dict({hook: acts[own], "token_ids": tokens[own]}, features=features))
    datasets.concatenate_datasets(parts).save_to_disk(tmp_path / "acts", num_shards=2)
    found = opened(tmp_path / "acts")
    assert found.sites == [hook]
    assert torch.equal(rows_of(found)[0], states[0])
    assert found.sequence is not None
    assert found.sequence.tolist() == [row // 5 for row in range(20)]
    assert found.tokens is not None
    assert found.tokens.tolist() == list(range(20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_shards_of_dictionary_learning(tmp_path: Path, states: torch.Tensor, dtype: str | None) -> None:
    """As `ActivationCache.collect` writes them, by `np.memmap`; earlier versions say no data type."""
    kind = getattr(torch, dtype or "float32")
    for site, name in enumerate(("layer_2_out", "layer_10_out")):
        folder = tmp_path / name
        folder.mkdir()
        for shard, part in enumerate(states[site].to(kind).split(8)):
            stored = part.view(torch.int16) if kind == torch.bfloat16 else part
            array = np.memmap(folder / f"shard_{shard}.memmap", stored.numpy().dtype, "w+", shape=tuple(part.shape))
            array[:] = stored.numpy()
            array.flush()
            about: dict[str, Any] = {"shape": list(part.shape), **({"dtype": f"torch.{dtype}"} if dtype else {})}
            (folder / f"shard_{shard}.meta").write_text(json.dumps(about))
        (folder / "config.json").write_text(json.dumps({"shard_count": 3, "shuffle_shards": False}))
    torch.save(torch.arange(20), tmp_path / "tokens.pt")
    found = opened(tmp_path)
    assert found.sites == ["layer_2_out", "layer_10_out"]
    assert torch.equal(rows_of(found), states[:2].to(kind).float())
    assert found.of_tokens
    assert column_of(states_source(f"states:{tmp_path}"), found, "tokens").tolist() == list(range(20))
    assert torch.equal(rows_of(opened(tmp_path / "layer_2_out"))[0], states[0].to(kind).float())
    (folder / "config.json").write_text(json.dumps({"shard_count": 3, "shuffle_shards": True}))
    with pytest.raises(UserError, match=r"its shards were shuffled"):
        opened(tmp_path)


def test_lists_of_fixed_and_of_any_size_and_several_files(tmp_path: Path, states: torch.Tensor) -> None:
    flat = pa.array(states[0].flatten().tolist(), pa.float32())
    fixed = pa.FixedSizeListArray.from_arrays(flat, 4)
    free = pa.array(states[1].tolist(), pa.list_(pa.float64()))
    table = pa.table({"b": fixed, "c": free, "id": list(range(20)), "tokens": [[1, 2]] * 20})
    parquet.write_table(table.slice(0, 7), tmp_path / "part-0.parquet", row_group_size=3)
    parquet.write_table(table.slice(7), tmp_path / "part-1.parquet")
    found = opened(tmp_path)
    assert found.sites == ["b", "c"]
    assert torch.equal(rows_of(found), states[:2])
    assert found.columns["id"].tolist() == list(range(20))


def test_rows_of_a_file_larger_than_memory_are_read(tmp_path: Path) -> None:
    """A sparse file: what is written is its end."""
    last = np.arange(64, dtype=np.float32)
    array = np.lib.format.open_memmap(tmp_path / "huge.npy", "w+", np.float32, (HUGE // 64, 64))
    array[-1] = last
    array.flush()
    header = {"a": {"dtype": "F32", "shape": [HUGE // 64, 64], "data_offsets": [0, 4 * HUGE]}}
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    with (tmp_path / "huge.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.seek(4 * HUGE - last.nbytes, 1)
        file.write(last.tobytes())
    for name in ("huge.npy", "huge.safetensors"):
        found = opened(tmp_path / name)
        rows = found.arrays[0].take(torch.tensor([5, HUGE // 64 - 1]))
        assert torch.equal(rows, torch.stack([torch.zeros(64), torch.from_numpy(last)])), name


def test_a_look_at_all_rows_holds_a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(1000, 8)
    whole = Seen.of([RowArray([rows])])
    monkeypatch.setattr(row_arrays, "BLOCK", 80)
    array = RowArray([rows[:333], rows[333:]])
    assert max(len(block) for block in array.blocks()) == 10
    assert Seen.of([array]) == whole
    rows[777, 3] = torch.nan
    assert Seen.of([array]).bad[0].tolist() == [777]
    assert Seen.of([array]).fingerprint != whole.fingerprint


def test_rows_of_several_parts_are_taken_in_the_order_asked_for() -> None:
    rows = torch.randn(100, 3)
    array = RowArray(list(rows.split(9)))
    wanted = torch.tensor([99, 0, 0, 50, 8, 9, 17])
    assert torch.equal(array.take(wanted), rows[wanted])


class Bomb:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    Path("b.npy").write_bytes(pickle.dumps(Bomb()))
    torch.save({"a": Bomb()}, "c.pt")
    for name in ("a.npy", "b.npy", "c.pt"):
        with pytest.raises(UserError):
            opened(tmp_path / name)
    assert not Path("exploded").exists()


def _written(folder: Path) -> None:
    """Files that are no states, or only in part."""
    np.save(folder / "flat.npy", np.zeros(5))
    np.save(folder / "words.npy", np.array(["a", "b"]))
    np.save(folder / "swapped.npy", np.zeros((2, 3), ">f4"))
    np.save(folder / "none.npy", np.zeros((0, 3)))
    np.save(folder / "good.npy", np.zeros((4, 3)))
    np.save(folder / "short.npy", np.zeros(3))
    (folder / "cut.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    (folder / "text.csv").write_text("a,b\n1,2\n")
    (folder / "empty").mkdir()
    save_file({"a": torch.zeros(4, 3), "b": torch.zeros(4, 5)}, folder / "mixed.safetensors")
    save_file({"ids": torch.arange(4)}, folder / "ids.safetensors")
    table = pa.table({"v": [[1.0, 2.0], [3.0]], "w": [[1.0], None], "id": [0, 1]})
    parquet.write_table(table, folder / "ragged.parquet")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flat.npy", r"shape \(N, d\), or \(L, N, d\) of L sites, in .*flat\.npy, but got \(5,\)"),
        ("words.npy", r"Expected numbers in .*words\.npy, but got <U1"),
        ("swapped.npy", r"byte order"),
        ("none.npy", r"Expected states in .*none\.npy, but it has no rows"),
        ("cut.safetensors", r"cut\.safetensors cannot be read as recorded states"),
        ("text.csv", r"ends in \.npy, \.safetensors, .*, or in a folder, but got .*text\.csv"),
        ("empty", r"the folder .*empty to hold \.npy or Parquet files"),
        ("mixed.safetensors", r"4 rows of width 3 of 'a', but 'b' has 4 of 5\. Name those to read, .*:column=a"),
        ("ids.safetensors", r"found none: it has nothing of the kind"),
        ("mixed.safetensors:column=c", r"found no 'c': it has a, b"),
        ("ragged.parquet:column=v", r"vectors of one width in column 'v' .* but they have 1 to 2"),
        ("ragged.parquet:column=w", r"a vector in every row of column 'w' .* but 1 are missing"),
        ("nothing.npy", r"there is no file or folder '.*nothing\.npy'"),
        ("good.npy:colum=v", r"options column, key, group, mask, each once.* but got 'colum=v'"),
        ("good.npy:key=a,key=b", r"each once.* but got 'key=b'"),
    ],
)
def test_what_is_no_states_is_refused(tmp_path: Path, name: str, said: str) -> None:
    _written(tmp_path)
    with pytest.raises(UserError, match=said):
        opened(tmp_path / name)


def test_columns_that_are_not_there_are_refused(tmp_path: Path) -> None:
    _written(tmp_path)
    source = states_source(f"states:{tmp_path}/good.npy:key=short.npy,group=docs")
    found = open_states(source)
    with pytest.raises(UserError, match=r"one value of 'short\.npy' for each of the 4 rows .* but got 3"):
        column_of(source, found, "short.npy")
    with pytest.raises(UserError, match=r"'docs' to be a column of .*good\.npy, or a file .* states: none"):
        column_of(source, found, "docs")


def test_names_of_states() -> None:
    name = "states:.:column=a+b,mask=m"
    assert states_source(name) == StatesSource(name, Path(), "a+b", mask="m")
    assert all_recorded(["states:a", "states:b"])
    assert not all_recorded(["embedded:0"])
    with pytest.raises(UserError, match=r"'states:a' beside the model 'embedded:0'"):
        all_recorded(["states:a", "embedded:0"])
    check_command("compare", ["embedded:0"])
    check_command("fit", ["states:a"])
    with pytest.raises(UserError, match=r"This command \(stitch\) runs models, but states:a is recorded states"):
        check_command("stitch", ["embedded:0", "states:a"])


def test_sequences_beside_shards_are_groups(tmp_path: Path, states: torch.Tensor) -> None:
    """As the fork for crosscoders writes them: the first row of each sequence, and the number of all rows."""
    folder = tmp_path / "layer_2_out"
    folder.mkdir()
    array = np.memmap(folder / "shard_0.memmap", np.float32, "w+", shape=(20, 4))
    array[:] = states[0].numpy()
    array.flush()
    (folder / "shard_0.meta").write_text(json.dumps({"shape": [20, 4], "dtype": "torch.float32"}))
    (folder / "config.json").write_text(json.dumps({"shard_count": 1, "store_sequence_ranges": True}))
    torch.save(torch.tensor([0, 3, 11, 20]), tmp_path / "sequence_ranges.pt")
    for place in (tmp_path, folder):
        found = opened(place)
        assert found.sequence is not None
        assert found.sequence.tolist() == [0] * 3 + [1] * 8 + [2] * 9
        assert not found.of_tokens
    torch.save(torch.tensor([0, 3, 11, 19]), tmp_path / "sequence_ranges.pt")
    with pytest.raises(UserError, match=r"sequences in sequence_ranges\.pt .* its 20 rows, but they have 19"):
        opened(tmp_path)
