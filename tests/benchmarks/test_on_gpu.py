"""The run on a GPU, at small sizes on a CPU, also with a CPU that passes for a GPU: all of its Python is executed."""

import json
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.harness import Figures
from benchmarks.on_gpu import __main__ as on_gpu
from benchmarks.on_gpu import commands, ranks, steps
from benchmarks.on_gpu.device import WAITS, Device, Skipped

from aligners.maps.inn import INN

PARTS = [
    *("bank", "steps", "reading", "agreement", "memory", "solving", "tf32", "commands"),
    *("similarity", "store", "attention", "precision", "ranks"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A CPU that passes for a GPU, and what it is asked."""
    asked: list[tuple[Any, ...]] = []
    answers = {
        "synchronize": None, "empty_cache": None, "reset_peak_memory_stats": None, "set_sync_debug_mode": None,
        "get_sync_debug_mode": 0, "memory_allocated": 1_000, "max_memory_allocated": 3_000, "device_count": 1,
        "get_device_name": "NVIDIA H100 80GB HBM3", "get_device_capability": (9, 0), "mem_get_info": (2**36, 2**37),
    }  # fmt: skip

    def answer(name: str, *given: Any) -> Any:
        asked.append((name, *given))
        return answers[name]

    for name in answers:
        monkeypatch.setattr(torch.cuda, name, partial(answer, name))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    for name in ("empty", "zeros"):
        monkeypatch.setattr(torch, name, unpinned(getattr(torch, name)))

    class Passing(Device):
        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.gpu = True

    monkeypatch.setattr(on_gpu, "Device", Passing)
    return asked


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """What makes a tensor, in ordinary memory whatever is asked for."""
    return lambda *shape, pin_memory=False, **options: make(*shape, **options)


def run(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and what is written."""
    long = ["--limit", "1800"]  # the CPU may be busy
    status = on_gpu.main(["--small", "--device", "cpu", "--json", str(folder / "gpu.json"), *long, *options])
    return status, json.loads((folder / "gpu.json").read_text())


def check(status: int, found: dict[str, Any]) -> None:
    """All parts have run, but for that which takes two GPUs, and what is compared agrees."""
    assert list(found["parts"]) == PARTS
    assert {name: part.get("why") for name, part in found["parts"].items() if part["status"] != "done"} == {
        "ranks": "it takes 2 GPUs"
    }
    assert status == 0
    compared = 0
    for name, part in found["parts"].items():
        assert part["figures"] or name == "ranks"
        for what, figure in part["figures"].items():
            if figure["bar"] is not None and any(word in what for word in ("difference", "error", "exact", "waits")):
                assert what not in part["missed"]
                compared += 1
    assert compared > 40


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run(tmp_path)
    check(status, found)
    table = capsys.readouterr().out.rpartition("\npart ")[2]
    assert all(f"\n{name} " in table for name in PARTS)
    assert found["machine"]["device"] == "cpu"
    assert found["machine"]["packages"]["transformers"] == found["machine"]["transformers"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_all_parts_run_on_what_passes_for_a_gpu(tmp_path: Path, asked: list[tuple[Any, ...]]) -> None:
    status, found = run(tmp_path)
    check(status, found)
    assert found["machine"]["memory"] == 2**37
    assert found["parts"]["memory"]["figures"]["taken, GB"]["value"] == pytest.approx(2e-6)
    modes = [mode for name, *mode in asked if name == "set_sync_debug_mode"]
    assert modes == [["warn"], [0]] * (len(modes) // 2)
    # reading and the bare forward pass of three models; closed forms alone and together, the INN's start, and measures
    assert len(modes) == 2 * (6 + 9 + 1)


# ---------------------------------------------------------------------- what goes wrong


def test_a_part_that_fails_hides_no_other_and_is_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.on_gpu import bank, memory

    def fail(*_: Any) -> None:
        raise ArithmeticError("no such number")

    def add_and_fail(figures: Figures, *_: Any) -> None:
        figures.add("so far", 1.0)
        fail()

    monkeypatch.setattr(bank, "run", fail)
    monkeypatch.setattr(memory, "run", add_and_fail)
    status, found = run(tmp_path, "--parts", "bank", "similarity", "memory")
    assert status == 1
    assert [part["status"] for part in found["parts"].values()] == ["failed", "done", "failed"]
    error = found["parts"]["bank"]["error"]
    assert (error["type"], error["message"]) == ("ArithmeticError", "no such number")
    assert "in fail" in "".join(error["traceback"])
    assert list(found["parts"]["memory"]["figures"]) == ["so far"]
    assert "ArithmeticError: no such number" in capsys.readouterr().out.rpartition("\npart ")[2]


def test_a_run_that_is_cut_off_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.on_gpu import store

    def cut(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "run", cut)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--parts", "bank", "store", "ranks")
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: part["status"] for name, part in parts.items()} == {"bank": "done", "store": "begun, and cut off"}


def test_a_missed_bar_is_an_error_but_at_small_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.on_gpu import bank

    monkeypatch.setattr(bank, "run", lambda figures, *_: figures.add("cost", 2.0, bar=1.0))
    options = ["--device", "meta", "--parts", "bank", "--json", str(tmp_path / "gpu.json")]
    assert on_gpu.main([*options, "--small"]) == 0
    assert on_gpu.main(options) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"]["bank"]["missed"] == ["cost"]


def test_a_part_ends_with_its_time_and_none_begins_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.on_gpu import bank

    monkeypatch.setattr(bank, "run", lambda *_: time.sleep(30))
    monkeypatch.setitem(on_gpu.PARTS, "bank", on_gpu.Part(0.1))
    status, found = run(tmp_path, "--parts", "bank", "store", "--limit", "50")
    assert status == 1
    assert found["parts"]["bank"]["error"]["type"] == "TimeoutError"
    assert found["parts"]["store"]["status"] == "skipped"
    assert "it takes some 75 s, and" in found["parts"]["store"]["why"]


def test_parts_without_their_packages_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = on_gpu.find_spec
    monkeypatch.setattr(on_gpu, "find_spec", lambda name: None if name == "lightning" else there(name))
    status, found = run(tmp_path, "--parts", "bank", "memory")
    assert status == 0
    assert found["parts"]["memory"]["why"] == "it needs lightning"
    assert "not installed: lightning" in capsys.readouterr().out.splitlines()[0]


def test_without_a_gpu_it_takes_small_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        on_gpu.main(["--device", "cpu"])
    assert "--small runs all parts on a CPU" in capsys.readouterr().err


# ---------------------------------------------------------------------- steps and commands


def test_steps_that_do_not_fit_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device, figures = Device("cpu"), Figures("cpu")
    monkeypatch.setattr(device, "free", lambda: 700.0)
    monkeypatch.setattr(device, "peak", lambda _: 300)
    monkeypatch.setattr(steps, "SMALL_SIZES", {1: (8,), 2: (16, 8)})
    steps.run(figures, device, small=True)
    assert "2 sites of 16 rows do not fit in the free memory" in capsys.readouterr().out
    assert {name.partition(" rows")[0] for name in figures.figures} == {"1 x 8", "2 x 8"}


def test_what_is_solved_is_set_against_its_products(tmp_path: Path, asked: list[tuple[Any, ...]]) -> None:
    _, found = run(tmp_path, "--parts", "solving")
    part = found["parts"]["solving"]
    figures = part["figures"]
    assert part["status"] == "done"
    assert part["missed"] in ([], ["default measures / products"])
    measures = [name.removesuffix(" / products") for name in figures if name.endswith(" / products")]
    assert {"pwcca", "cca", "rsa", "nuclear norms", "default measures"} <= set(measures)
    parts = [figures[f"{name} / products"]["value"] for name in measures]
    assert parts[-1] == pytest.approx(sum(parts[:-1]))
    waits = [name for name in figures if name.endswith(", waits")]
    modes = [mode for name, *mode in asked if name == "set_sync_debug_mode"]
    assert modes == [["warn"], [0]] * len(waits)
    assert len(waits) == 10


def test_a_step_misses_its_bar_by_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = Figures("cpu")
    monkeypatch.setattr(steps, "BARS", {(1, 8): 0.0})
    steps.measure(figures, Device("cpu"), INN(1, 16, 16), 8, 1)
    assert figures.missed == [f"1 x 8 rows, {precision}: a step / its products" for precision in steps.IN]


def test_a_step_is_replayed_as_in_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        recorded.append(work)
        return work

    monkeypatch.setattr(steps, "recorder_for", lambda _: record)
    aligner, (x, y) = INN(1, 16, 16), torch.randn(2, 1, 64, 16)
    run = steps.as_fitted(aligner, x, y, "float32")
    for _ in range(3):
        aligner.zero_grad()
        run()
    assert len(recorded) == 1
    assert all(weight.grad is not None for weight in aligner.parameters())
    monkeypatch.setattr("aligners.fitting.recorded_steps.MOST_WORK", 0)
    aligner.zero_grad()
    run()
    assert all(weight.grad is not None for weight in aligner.parameters())


@pytest.fixture
def watched_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device whose nvidia-smi says what is in use, until it is ended."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 100, 0\necho 600, 50\necho '350, [N/A]'\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    device = Device("cpu")
    device.gpu = True
    monkeypatch.setattr(Device, "uuid", "GPU-1")
    return device


def test_a_command_is_watched_from_its_start_to_its_end(watched_gpu: Device, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\nprint('Reading moments: 2 steps.', flush=True)\ntime.sleep(.5)\nprint('Training: 2')"
    )
    ran = commands.timed([str(script)], watched_gpu)
    assert ran.before == 100 * 2**20
    assert [sample.use for sample in ran.samples] == [0.0, 50.0, None]
    reading, training = (ran.marks[f"until {what}"] for what in ("texts are read", "the first training step"))
    assert 0 < reading <= training - 0.4
    assert training <= ran.seconds
    figures = Figures("cpu")
    commands.add(figures, "fit", ran, announced=300 * 2**20)
    found = {name: figure["value"] for name, figure in figures.figures.items()}
    assert found["fit: memory held / announced"] == pytest.approx(500 / 300)
    assert found["fit: use of the GPU, mean, %"] == 25
    assert found["fit: GPU at 0 %, seconds"] == ran.seconds / 2
    assert figures.missed == ["fit: memory held / announced"]


def test_a_command_that_fails_says_how(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(RuntimeError, match=r"train.py ended with 1:\nno such model"):
        commands.timed([str(script)], Device("cpu"))


def test_what_a_comparison_announces_is_read() -> None:
    assert commands.announced_by("This comparison takes up to 4.61 GB with its models, of 70 GB") == 4.61e9
    assert commands.announced_by("Training: 4 steps.") is None


# ---------------------------------------------------------------------- the device


def test_waiting_for_a_gpu_is_counted_and_the_mode_put_back(asked: list[tuple[Any, ...]]) -> None:
    device = on_gpu.Device("cpu")

    def work() -> None:
        for message in (WAITS, "something else", f"{WAITS} (at Copy.cpp)"):
            warnings.warn(message, stacklevel=1)

    assert device.waits(work) == 2
    asked.clear()
    with pytest.raises(Skipped):
        device.waits(skip)
    assert [call for call in asked if call[0] == "set_sync_debug_mode"] == [
        ("set_sync_debug_mode", "warn"),
        ("set_sync_debug_mode", 0),
    ]


def skip() -> None:
    raise Skipped


def test_a_result_is_named_after_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setattr(on_gpu, "RESULTS", tmp_path)
    from benchmarks.on_gpu import bank

    monkeypatch.setattr(bank, "run", lambda *_: None)
    assert on_gpu.main(["--device", "meta", "--parts", "bank"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["on_gpu-nvidia-h100-80gb-hbm3.json"]


def test_what_ranks_find_is_compared_with_the_moments_of_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "RANKS", 1)
    sizes = (2, 40, 4)
    ranks.work(0, str(tmp_path), "gloo", sizes)
    figures = Figures("cpu")
    ranks.compare(figures, tmp_path, sizes)
    assert len(figures.figures) == 1
    assert not figures.missed
    found = torch.load(tmp_path / "0.pt")
    torch.save([found[0] + 1, *found[1:]], tmp_path / "0.pt")
    ranks.compare(figures, tmp_path, sizes)
    assert figures.missed == ["moments of rank 0, largest relative difference"]
