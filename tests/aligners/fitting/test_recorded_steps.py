"""Recorded steps, with a recorder that does the work again where a GPU's would replay it."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from tests.contracts.test_aligners import CASES, ROWS, gradient_trained, ready, rows
from tests.runs import activations, quiet_trainer
from tests.world import World
from torch import Tensor, nn

from aligners.fitting import recorded_steps
from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import Fit
from aligners.fitting.recorded_steps import CudaRecorder, RecordedSteps, counts_real_rows, filled_up
from aligners.fitting.saved_bank import BACKWARD, FORWARD
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.maps.mlp import MLP

Work = Callable[[], None]
MAPS = {"inn": partial(INN, couplings=2, hidden=8), "mlp": partial(MLP, hidden=[8]), "linear": Linear}


class Again:
    """Runs the work before and whenever it is replayed.

    Args:
        spoil: what is done to the work's results after it.
    """

    def __init__(self, spoil: Work = lambda: None) -> None:
        self.recorded = 0
        self.spoil = spoil

    def __call__(self, work: Work) -> Work:
        self.recorded += 1
        work()

        def replay() -> None:
            work()
            self.spoil()

        return replay


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Again:
    """Every fit of a test records its steps."""
    again = Again()
    monkeypatch.setattr(recorded_steps, "recorder_for", lambda device: again)
    return again


def alone(fits: list[Fit], x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Losses (F, S) and gradients, by a backward pass over nothing but these rows."""
    for fit in fits:
        fit.aligner.zero_grad()
    losses = torch.stack([fit.aligner.loss(*fit.orient(x, y)) for fit in fits])
    losses.sum().backward()
    return losses.detach(), gradients(fits)


def gradients(fits: list[Fit]) -> list[Tensor]:
    found = []
    for fit in fits:
        for parameter in fit.aligner.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
    return found


def test_little_is_filled_up_and_numbers_are_few() -> None:
    assert [filled_up(rows) for rows in (1, 64, 65, 512, 513, 1025, 2049)] == [64, 64, 128, 512, 576, 1152, 2304]
    for count in range(1, 5000):
        filled = filled_up(count)
        assert 0 <= filled - count < max(64, count / 8)
        assert filled_up(filled) == filled
    assert len({filled_up(count) for count in range(1, 1025)}) == 16
    assert len({filled_up(count) for count in range(1025, 4097)}) == 16


@gradient_trained
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_step_has_the_gradients_of_its_rows_alone(case: str, dtype: torch.dtype) -> None:
    aligner = ready(case).to(dtype)
    if not counts_real_rows(aligner):
        assert CASES[case][0] in ("ThroughSpace", "SharedPart", "SparseAligner")
        return
    fits = [Fit("map", FORWARD, aligner), Fit("back", BACKWARD, ready(case).to(dtype))]
    recorder = Again()
    steps = RecordedSteps(fits, "float32", recorder)
    x, y = (part.to(dtype) for part in rows())
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5}[dtype]
    for count in (ROWS, 70, 64, 96, 40, 1, 65, 64):  # buckets of 128 and 64
        expected, wanted = alone(fits, x[:, :count], y[:, :count])
        for fit in fits:
            fit.aligner.zero_grad()
        losses = steps.step(x[:, :count], y[:, :count])
        assert losses is not None
        torch.testing.assert_close(losses, expected, rtol=tolerance, atol=0)
        whole = torch.stack([want.norm() for want in wanted]).norm()
        for gradient, want in zip(gradients(fits), wanted, strict=True):
            assert (gradient - want).norm() <= tolerance * (want.norm() + 1e-2 * whole)
    assert (recorder.recorded, steps.replayed, steps.failure) == (2, 4, "")


def test_numbers_of_rows_that_are_met_once_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_steps, "MOST_GRAPHS", 2)
    recorder = Again()
    steps = RecordedSteps([Fit("map", FORWARD, ready("inn"))], "float32", recorder)
    x, y = (torch.cat([part] * 3, 1) for part in rows())
    for count in (60, 100, 180):
        assert steps.step(x[:, :count], y[:, :count]) is not None
    assert recorder.recorded == 0
    for count in (180, 100, 60, 50, 110, 190, 60):
        assert steps.step(x[:, :count], y[:, :count]) is not None
    assert (recorder.recorded, steps.replayed) == (2, 2)  # two are as many as there may be
    assert steps.step(x[:, :0], y[:, :0]) is None
    monkeypatch.setattr(recorded_steps, "MOST_WORK", x.shape[0] * 60 * 6 * 6)  # more would keep a GPU busy anyway
    assert steps.step(x[:, :60], y[:, :60]) is not None
    assert steps.step(x[:, :61], y[:, :61]) is None
    assert steps.failure == ""


def fit(world: World, *, graphs: bool = True, epochs: int = 2, ckpt: Path | None = None, **trainer: Any) -> Alignment:
    options: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=1e-2), "graphs": graphs}
    module = Alignment(trainer.pop("aligners", MAPS), trainer.pop("both_directions", True), **options)
    run = quiet_trainer(max_epochs=epochs, **trainer)
    run.fit(module, datamodule=activations(world, sites=[0, 2]), ckpt_path=ckpt)
    return module


def largest_difference(one: Alignment, other: Alignment) -> float:
    largest = 0.0
    for (name, found), expected in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        difference = (found.double() - expected.double()).abs().max().item()
        assert difference == difference, name
        largest = max(largest, difference)
    return largest


def seen(monkeypatch: pytest.MonkeyPatch) -> list[RecordedSteps]:
    """What records the steps of the runs of a test."""
    made: list[RecordedSteps] = []
    start = RecordedSteps.__init__

    def init(self: RecordedSteps, *args: Any) -> None:
        start(self, *args)
        made.append(self)

    monkeypatch.setattr(RecordedSteps, "__init__", init)
    return made


def test_a_fit_of_recorded_steps_gives_the_same_maps(
    world: World, recorder: Again, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = seen(monkeypatch)
    module, plain = fit(world), fit(world, graphs=False)
    (steps,) = made
    assert recorder.recorded > 0
    assert steps.replayed > module.global_step / 2
    assert "CUDA graphs" not in caplog.text
    assert module.recorded is None  # its memory is free
    assert largest_difference(module, plain) < 1e-4


def test_on_a_cpu_nothing_is_recorded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = seen(monkeypatch)
    module, plain = fit(world), fit(world, graphs=False)
    assert made == []
    assert largest_difference(module, plain) == 0


def test_a_resumed_run_ends_with_the_same_bits(world: World, recorder: Again, tmp_path: Path) -> None:
    whole = fit(world, epochs=2)
    kept = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    fit(world, epochs=1, callbacks=[kept])
    recorded = recorder.recorded
    resumed = fit(world, epochs=2, ckpt=tmp_path / "last.ckpt")
    assert recorder.recorded > recorded
    assert largest_difference(whole, resumed) == 0


def raises(work: Work) -> Work:
    raise RuntimeError("operation not permitted")


@pytest.mark.parametrize("spoilt", ["recording", "losses", "gradients"])
def test_what_cannot_be_recorded_is_computed(
    spoilt: str, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = seen(monkeypatch)

    def spoil() -> None:
        (steps,) = made
        if spoilt == "gradients":
            steps._gradients[3].mul_(1.01)

    recorder: Any = Again(spoil)
    if spoilt == "recording":
        recorder = raises
    if spoilt == "losses":

        def recorder(work: partial[None]) -> Work:
            def replay() -> None:
                work()
                work.args[0].losses += 0.1

            return replay

    monkeypatch.setattr(recorded_steps, "recorder_for", lambda device: recorder)
    with caplog.at_level(logging.WARNING):
        module = fit(world)
    plain = fit(world, graphs=False)
    (steps,) = made
    assert steps.replayed == 0
    (said,) = [record.message for record in caplog.records if "CUDA graphs" in record.message]
    reason = {"recording": "RuntimeError: operation not permitted"}.get(spoilt, "differs from the same step")
    assert reason in said
    assert largest_difference(module, plain) < 1e-4


def test_a_loss_that_fills_up_with_other_rows_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    steps = RecordedSteps([Fit("map", FORWARD, Leaks(3, 6, 6))], "float32", Again())
    assert steps.step(*[part[:, :64].float() for part in rows()]) is None  # nothing to fill up, yet it is seen
    assert "differs" in caplog.text
    assert steps.step(*[part[:, :64].float() for part in rows()]) is None
    assert len(caplog.records) == 1


class Leaks(MLP, registered=False):
    """Normalises over all rows, those too that only fill up."""

    def _mapped(self, x: Tensor) -> Tensor:
        return super()._mapped(x - x.mean(1, keepdim=True))


class Knows(Leaks, registered=False):
    """Says that it takes `real`."""

    def loss(self, x: Tensor, y: Tensor, real: Tensor | None = None) -> Tensor:
        return super().loss(x, y, real)


def test_classes_of_users_say_themselves_what_they_can() -> None:
    assert counts_real_rows(MLP(1, 4, 4))
    assert not counts_real_rows(Leaks(1, 4, 4))
    assert counts_real_rows(Knows(1, 4, 4))


def hook_module(aligner: nn.Module) -> Any:
    return next(aligner.children()).register_forward_hook(lambda *_: None)


def hook_parameter(aligner: nn.Module) -> Any:
    return next(aligner.parameters()).register_hook(lambda gradient: gradient)


def hook_all(aligner: nn.Module) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda *_: None)


def hook_accumulated(aligner: nn.Module) -> Any:
    return next(aligner.parameters()).register_post_accumulate_grad_hook(lambda _: None)


def freeze(aligner: nn.Module) -> None:
    next(aligner.parameters()).requires_grad_(False)


def move(aligner: nn.Module) -> None:
    parameter = next(aligner.parameters())
    parameter.data = parameter.data.clone()


def move_buffer(aligner: nn.Module) -> None:
    scaling: Any = aligner.get_submodule("scaling")
    scaling.mean_x = scaling.mean_x.clone()


def evaluate(aligner: nn.Module) -> None:
    aligner.eval()


CHANGES = [hook_module, hook_parameter, hook_all, hook_accumulated, freeze, move, move_buffer, evaluate]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_ends_the_replays(change: Callable[[nn.Module], Any], caplog: pytest.LogCaptureFixture) -> None:
    aligner = ready("inn")
    steps = RecordedSteps([Fit("map", FORWARD, aligner)], "float32", Again())
    for _ in range(3):
        assert steps.step(*rows()) is not None
    assert steps.replayed == 1
    handle = change(aligner)
    assert steps.step(*rows()) is None
    assert steps.failure in caplog.text
    if handle is not None:
        handle.remove()
    assert steps.step(*rows()) is None


class Watches(pl.Callback):
    """Sees gradients before they are clipped."""

    def __init__(self) -> None:
        self.steps = 0

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps += 1


def test_callbacks_of_the_backward_pass_are_called(world: World, recorder: Again) -> None:
    watches = Watches()
    module = fit(world, callbacks=[watches], epochs=1)
    assert watches.steps == module.global_step
    assert recorder.recorded == 0


def test_a_site_that_is_lost_does_not_end_the_replays() -> None:
    fits = [Fit("map", FORWARD, ready("inn"))]
    steps = RecordedSteps(fits, "float32", Again())
    x, y = rows()
    x[1] = torch.nan
    for _ in range(3):
        losses = steps.step(x, y)
        assert losses is not None
    assert losses.isfinite().tolist() == [[True, False, True]]
    assert (steps.replayed, steps.failure) == (1, "")
    for gradient in gradients(fits):
        assert gradient[[0, 2]].isfinite().all()


class Gpu:
    """What CUDA does while work is recorded, in its order; there is a GPU in no test."""

    def __init__(self, broken: int | None = None) -> None:
        self.log: list[str] = []
        self.current = "main"
        self.debug = 0
        self.runs = 0
        self.broken = broken  # the run of the work that fails

    def work(self) -> None:
        self.runs += 1
        self.log.append(f"work on {self.current}, {self.debug}")
        if self.runs == self.broken:
            raise RuntimeError("waits for the GPU")

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gpu = self

        class Stream:
            device = torch.device("cuda")

            def __init__(self, name: Any) -> None:
                self.name = name if isinstance(name, str) else "side"

            def wait_stream(self, other: Any) -> None:
                gpu.log.append(f"{self.name} waits for {other.name}")

        class Stays:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> None:
                self.before = gpu.current
                gpu.current = self.stream.name

            def __exit__(self, *_: object) -> None:
                gpu.current = self.before

        class Captures(Stays):
            def __init__(self, graph: Any, *, pool: str, stream: Any, capture_error_mode: str) -> None:
                super().__init__(stream)
                gpu.log.append(f"{graph.name} in {pool}, {capture_error_mode}")

            def __exit__(self, *error: object) -> None:
                if error[0] is not None:
                    raise RuntimeError("capture failed")  # before the stream is left, as torch does
                super().__exit__()

        class Graph:
            name = "graph"

            def replay(self) -> None:
                gpu.log.append("replay")

            def reset(self) -> None:
                gpu.log.append("reset")

        def set_debug(mode: Any) -> None:
            gpu.debug = mode

        def set_stream(stream: Any) -> None:
            gpu.current = stream.name

        stands_for = {
            "Stream": Stream, "stream": Stays, "graph": Captures, "CUDAGraph": Graph, "set_stream": set_stream,
            "graph_pool_handle": lambda: "pool", "current_stream": lambda device: Stream(gpu.current),
            "get_sync_debug_mode": lambda: gpu.debug, "set_sync_debug_mode": set_debug,
        }  # fmt: skip
        for name, each in stands_for.items():
            monkeypatch.setattr(torch.cuda, name, each)


def test_work_is_warmed_up_and_captured_on_a_stream_beside_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu()
    gpu.stand_in(monkeypatch)
    CudaRecorder(torch.device("cuda"))(gpu.work)()
    assert gpu.log == [
        "side waits for main", "work on side, 0", *["work on side, error"] * 2, "main waits for side",
        "graph in pool, thread_local", "work on side, 0", "replay",
    ]  # fmt: skip
    assert (gpu.current, gpu.debug) == ("main", 0)


@pytest.mark.parametrize("broken", [1, 2, 4])
def test_a_recording_that_fails_leaves_streams_as_they_were(broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(broken)
    gpu.stand_in(monkeypatch)
    with pytest.raises(RuntimeError) as raised:
        CudaRecorder(torch.device("cuda"))(gpu.work)
    assert "waits for the GPU" in str(raised.value.__context__ or raised.value)
    assert (gpu.log[-1], gpu.current, gpu.debug) == ("reset", "main", 0)
