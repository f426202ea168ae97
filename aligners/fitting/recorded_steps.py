"""Gradients of a step that are recorded as a CUDA graph once and replayed, for each of a few numbers of rows.

On a GPU the forward and backward passes of one INN launch some thousands of kernels, which takes the host several times
as long as the GPU needs to compute them. A replay launches all of them at once. It repeats the same kernels at the same
addresses, so batches are filled up to one of a few numbers of rows, and losses leave out what only fills them up.

What may be recorded is checked in every step, and what a replay gives is compared with the same gradients computed
anew, once for each number of rows.

Reference: "CUDA Graphs" in "CUDA semantics", https://docs.pytorch.org/docs/stable/notes/cuda.html
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from aligners.fitting.fits import Fit
from aligners.maps.base import Aligner
from aligners.maps.matrices import ProductPrecision, products_in

logger = logging.getLogger(__name__)

Work = Callable[[], None]
Recorder = Callable[[Work], Work]  # what replays the work that it is given

FEWEST_ROWS = 64
RECORDED_AT = 2  # meeting of a number of rows; the first may be the only one
MOST_GRAPHS = 24
# Sites × rows × width × width, beyond which the kernels of an INN take a GPU longer than the host, however coarse its
# products: 19 sites of width 768 on 768 rows.
MOST_WORK = 2**33
WARM_UP = 3  # runs before a capture, in which libraries choose their kernels and take their memory
# By how much a replay may differ, relative to the norm of a gradient: float32, and coarser products.
ROUNDING = {"float32": 1e-3}
COARSE = 5e-2
SMALL = 1e-2  # share of the whole gradient's norm below which that of a parameter is mostly rounding


def filled_up(rows: int) -> int:
    """The number of rows that a batch is filled up to, at least `rows`.

    Multiples of 64 up to 1,024, then of 128 up to 2,048, of 256 up to 4,096 and so on: at most 63 rows or an eighth
    more, whichever is larger, and eight numbers from a power of two to the next.
    """
    doublings = (rows - 1).bit_length()
    step = max(FEWEST_ROWS, 2**doublings // 16)
    return -(-rows // step) * step


def recorded_steps(
    module: pl.LightningModule, fits: Sequence[Fit], products: ProductPrecision
) -> "RecordedSteps | None":
    """What records the steps of a run; None: they cannot be.

    Args:
        module: of the run, attached to its Trainer.
        fits: what is trained.
        products: precision of matrix products.
    """
    recorder = recorder_for(module.device)
    if recorder is None or not fits or not _is_plain(module):
        return None
    if not all(counts_real_rows(fit.aligner) for fit in fits):
        return None
    return RecordedSteps(fits, products, recorder)


def recorder_for(device: torch.device) -> Recorder | None:
    """What records work on a device; None: nothing does."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return CudaRecorder(device)


def _is_plain(module: pl.LightningModule) -> bool:
    """Whether nothing beside this process and its losses takes part in a backward pass."""
    trainer = module.trainer
    if type(trainer.strategy) is not SingleDeviceStrategy:
        return False
    if type(trainer.precision_plugin) is not Precision:
        return False
    if is_overridden("backward", module):
        return False
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for watching in (module, *callbacks):
        for name in ("on_before_backward", "on_after_backward"):
            if is_overridden(name, watching):
                return False
    return True


def counts_real_rows(aligner: Aligner) -> bool:
    """Whether a loss can leave rows out: it has an argument `real`, and is that of the class itself or of one of ours.

    What a user's class inherits from ours may know nothing of a method that it overrides.
    """
    kind = type(aligner)
    if "real" not in signature(kind.loss).parameters:
        return False
    return kind.__module__.startswith("aligners.") or "loss" in vars(kind)


class CudaRecorder:
    """Records work as CUDA graphs that share one pool of memory, so no two of them may run at the same time.

    What one of them leaves in its tensors holds until any of them is replayed.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Record work and return what replays it. It runs a few times before, never while it is recorded.

        Raises:
            RuntimeError: the work waits for the GPU, or does something else that no graph can hold.
        """
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        try:
            self._warm_up(work)
            current.wait_stream(self.stream)
            with torch.cuda.graph(
                graph,
                pool=self.pool,
                stream=self.stream,
                capture_error_mode="thread_local",  # others may read batches meanwhile
            ):
                work()
        except BaseException:
            graph.reset()
            raise
        finally:
            # a capture that fails leaves its own stream as the current one
            torch.cuda.set_stream(current)
        return graph.replay

    def _warm_up(self, work: Work) -> None:
        """Run the work beside the main stream, and raise if it waits for the GPU, before a capture fails of it."""
        before = torch.cuda.get_sync_debug_mode()
        with torch.cuda.stream(self.stream):
            work()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(WARM_UP - 1):
                    work()
            finally:
                torch.cuda.set_sync_debug_mode(before)


class _Batch:
    """Rows at addresses that stay: x and y (S, N, d), which of them are real (N,), and the losses (F, S) on them."""

    losses: Tensor

    def __init__(self, x: Tensor, y: Tensor) -> None:
        rows = filled_up(x.shape[1])
        self.x = x.new_empty(x.shape[0], rows, x.shape[2])
        self.y = y.new_empty(y.shape[0], rows, y.shape[2])
        self.real = torch.empty(rows, device=x.device)

    def fill(self, x: Tensor, y: Tensor) -> None:
        """Take rows, and fill up with the first of them, on which a map is as finite as on a real one."""
        count = x.shape[1]
        for whole, part in ((self.x, x), (self.y, y)):
            whole[:, :count] = part
            whole[:, count:] = part[:, :1]
        self.real[:count] = 1
        self.real[count:] = 0


class RecordedSteps:
    """Computes the gradients of a step on filled-up batches, by a replay where such a batch was met before.

    After anything that a recording does not allow, or a replay that differs from what it repeats, no step is computed
    here any more. A warning says why, once.

    Args:
        fits: the aligners, whose losses take `real`.
        products: precision of matrix products.
        recorder: records work, and returns what replays it.

    Attributes:
        replayed: number of steps that were replays.
        failure: why no step is computed here any more; empty: they are.
    """

    def __init__(
        self, fits: Sequence[Fit], products: ProductPrecision, recorder: Recorder
    ) -> None:
        self.fits = fits
        self.products = products
        self.recorder = recorder
        self.replayed = 0
        self.failure = ""
        self._met: Counter[tuple[Any, ...]] = Counter()
        self._recorded: dict[tuple[Any, ...], tuple[_Batch, Work]] = {}
        self._gradients: list[Tensor] = []  # from the first step that is computed here
        self._state: list[Any] = []  # in the first step

    def step(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Set the gradients of all parameters that are trained.

        Args:
            x: the rows, (S, N, d_x).
            y: their partners, (S, N, d_y).

        Returns:
            The losses (F, S) of all fits; None: nothing was computed or set.
        """
        work = x.numel() * y.shape[2]
        if self.failure or not 0 < work <= MOST_WORK:
            return None
        self.failure = self._what_forbids()
        losses = None
        if not self.failure:
            self._make_gradients()
            losses = self._try(x, y)
        if losses is None:
            self._give_up()
            return None
        for parameter, gradient in zip(
            self._parameters(), self._gradients, strict=True
        ):
            parameter.grad = gradient
        return losses

    def _try(self, x: Tensor, y: Tensor) -> Tensor | None:
        """Compute losses and gradients; None: they are not to be trusted, and `failure` says why."""
        try:
            batch, run = self._ready(x, y)
        except Exception as error:  # of any kind: a loss may be somebody else's
            # the end of a capture that failed raises as well
            first = error.__context__ or error
            self.failure = f"{type(first).__name__}: {first}"
        if self.failure:
            return None
        batch.fill(x, y)
        run()
        return batch.losses.clone()

    def _ready(self, x: Tensor, y: Tensor) -> tuple[_Batch, Work]:
        """A batch for these rows, and what computes its losses and gradients; compared where either is new."""
        key = (filled_up(x.shape[1]), x.shape[::2], y.shape[::2], x.dtype, y.dtype)
        if key in self._recorded:
            self.replayed += 1
            return self._recorded[key]
        self._met[key] += 1
        met = self._met[key]
        batch = _Batch(x, y)
        batch.fill(x, y)
        run: Work = partial(self._compute, batch)
        if met == RECORDED_AT and len(self._recorded) < MOST_GRAPHS:
            run = self.recorder(run)
            self._recorded[key] = batch, run
        if met <= RECORDED_AT and not self._agrees(batch, run, x, y):
            self.failure = (
                "what was computed differs from the same step on its rows alone"
            )
        return batch, run

    def _make_gradients(self) -> None:
        """Take the memory of all gradients, once."""
        if self._gradients:
            return
        for parameter in self._parameters():
            gradient = torch.empty_like(parameter)
            self._gradients.append(gradient)

    def _compute(self, batch: _Batch) -> None:
        """Compute losses and gradients, the latter into tensors that stay: all that is recorded."""
        losses, gradients = self._differentiate(batch.x, batch.y, batch.real)
        batch.losses = losses
        for kept, gradient in zip(self._gradients, gradients, strict=True):
            kept.copy_(gradient)

    def _differentiate(
        self, x: Tensor, y: Tensor, *real: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The losses (F, S), and the gradients of their sum."""
        each = []
        with products_in(self.products):
            for fit in self.fits:
                loss: Callable[..., Tensor] = fit.aligner.loss
                each.append(loss(*fit.orient(x, y), *real))
            losses = torch.stack(each)
            gradients = torch.autograd.grad(losses.sum(), self._parameters())
        return losses.detach(), gradients

    def _agrees(self, batch: _Batch, run: Work, x: Tensor, y: Tensor) -> bool:
        """Whether the first half of a batch, filled up, has the losses and gradients that it has alone."""
        half = -(-x.shape[1] // 2)
        losses, gradients = self._differentiate(x[:, :half], y[:, :half])
        batch.fill(x[:, :half], y[:, :half])
        run()
        tolerance = ROUNDING.get(self.products, COARSE)
        if not differ_little([batch.losses], [losses], tolerance):
            return False
        return differ_little(self._gradients, gradients, tolerance)

    def _parameters(self) -> list[Tensor]:
        found: list[Tensor] = []
        for fit in self.fits:
            for parameter in fit.aligner.parameters():
                if parameter.requires_grad:
                    found.append(parameter)
        return found

    def _what_forbids(self) -> str:
        """Why a step must not be computed here; empty: it may."""
        if torch_modules._has_any_global_hook():
            return "there are hooks on all modules"
        state: list[Any] = []
        for fit in self.fits:
            for module in fit.aligner.modules():
                if _has_hooks(module):
                    return f"there are hooks on {fit.name}"
                state += _state_of(module)
        if not self._state:
            self._state = state
        if state != self._state:
            return "parameters or buffers are not where they were, or train no longer"
        return ""

    def _give_up(self) -> None:
        """Free what was recorded, and say why."""
        self._recorded.clear()
        self._gradients.clear()
        logger.warning(
            f"Steps are no longer replayed as CUDA graphs, and take longer: {self.failure}"
        )


def _has_hooks(module: nn.Module) -> bool:
    if module._forward_pre_hooks or module._forward_hooks:
        return True
    if module._backward_pre_hooks or module._backward_hooks:
        return True
    for parameter in module.parameters(recurse=False):
        after: Any = parameter._post_accumulate_grad_hooks
        if parameter._backward_hooks or after:
            return True
    return False


def _state_of(module: nn.Module) -> list[Any]:
    """What has to be the same in all steps: the mode, and what trains, by its address."""
    state: list[Any] = [module.training]
    for parameter in module.parameters(recurse=False):
        state += [parameter.data_ptr(), parameter.requires_grad]
    for buffer in module.buffers(recurse=False):
        state.append(buffer.data_ptr())
    return state


def differ_little(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> bool:
    """Tell whether tensors agree up to rounding, where the expected ones are finite.

    Args:
        found: as computed in another way.
        expected: of the same shapes.
        tolerance: largest norm of a difference, relative to that of its tensor, or to `SMALL` times that of all if it
            is larger.
    """
    differences = []
    norms = []
    for other, tensor in zip(found, expected, strict=True):
        finite = tensor.isfinite()
        difference = torch.where(finite, other - tensor, 0.0)
        differences.append(difference.norm())
        norms.append(torch.where(finite, tensor, 0.0).norm())
    norm = torch.stack(norms)
    limit = tolerance * norm.clamp(min=SMALL * norm.norm())
    return bool((torch.stack(differences) <= limit).all())
