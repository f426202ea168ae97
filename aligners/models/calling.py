"""Calls models of any family with tokenised batches, and stops at non-finite values without synchronising at each."""

import inspect
from collections.abc import Mapping
from itertools import compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aligners.errors import UserError
from aligners.models.architectures import Task, architecture_of
from aligners.models.hooks import trunk_of

MOST_PENDING = 256


class FiniteCheck:
    """Checks values once the device has computed them, and never waits for it before `flush`.

    Asking a device for a value waits for it. The flags of a batch are therefore copied to the host after the batch's
    own work, and read once that copy has ended: a non-finite value is reported a few batches late, under its own name
    and batch. On the CPU that is the next batch.
    """

    def __init__(self) -> None:
        self._pending: list[_Entry] = []

    def watch(self, values: Tensor, names: list[str], what: str, batch: int) -> None:
        """Queue values whose leading axis is named by `names`, and raise for those queued before.

        Args:
            values: (S, ...) floating point.
            names: S names, such as "site 3".
            what: what the values are, for the message.
            batch: the number of the batch that they belong to.

        Raises:
            ValueError: an earlier batch held NaN or infinity.
        """
        while self._pending and self._pending[0].ready(batch):
            self._pending.pop(0).check()
        if len(self._pending) >= MOST_PENDING:
            self.flush()
        # A sum is finite only if every term is: one pass and no boolean copy of the states.
        rows = values.detach().float().reshape(len(values), -1)
        finite = rows.sum(1).isfinite()
        on_host = finite.to("cpu", non_blocking=True)
        copied = None
        if finite.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(finite.device))
        self._pending.append(_Entry(on_host, copied, names, what, batch))

    def flush(self) -> None:
        """Check everything that is still queued."""
        pending, self._pending = self._pending, []
        for entry in pending:
            entry.check()


class _Entry(NamedTuple):
    """Flags that are copied to the host, and what to wait for until they are there."""

    finite: Tensor
    copied: torch.cuda.Event | None
    names: list[str]
    what: str
    batch: int

    def ready(self, batch: int) -> bool:
        """Whether the flags are of an earlier batch, and on the host."""
        if self.batch == batch:
            return False
        return self.copied is None or self.copied.query()

    def check(self) -> None:
        """Raise if a value was not finite."""
        if self.copied is not None:
            self.copied.synchronize()
        bad = dict.fromkeys(compress(self.names, ~self.finite))
        if bad:
            raise UserError(
                f"Expected finite {self.what}, but batch {self.batch} holds NaN or infinity at "
                f"{', '.join(bad)}. Look at the texts of that batch, use float32 instead of a half "
                "precision, or lower the learning rate."
            )


INPUTS = ("input_ids", "attention_mask", "token_type_ids")

# What models cache for a next call, which never comes here.
KEPT = {"use_cache", "use_mems"}


class Layout:
    """Turns a batch so that every text starts at position 0 or ends at the last one, and turns states back.

    It also moves the batch to the model's device, and results back to that of `input_ids`.

    Most models count absolute positions from the start of the row, and their classifiers read the first token
    or the last real one: padding belongs on the right. XLNet's positions are relative and its classifier reads
    the end of the row: padding belongs on the left. On the other side, answers are wrong without an error. Turning the
    rows corrects this for every architecture at once and moves no real token relative to another.

    Args:
        inputs: the batch; without an `attention_mask` nothing counts as padding.
        padding: the side on which the model wants padding.
        device: where the model wants the batch.
    """

    def __init__(
        self,
        inputs: Mapping[str, Tensor],
        padding: Literal["left", "right"],
        device: torch.device,
    ) -> None:
        self._there, self._home = device, inputs["input_ids"].device
        self._rows: Tensor | None = None
        mask = inputs.get("attention_mask")
        if mask is None:
            return
        real = mask.ne(0).int()
        if padding == "right":
            shift = real.argmax(1)
        else:
            shift = -real.flip(1).argmax(1)
        # On the CPU it is cheap to see that there is nothing to do; on a GPU that would wait for the device.
        if mask.device.type != "cpu" or bool(shift.any()):
            columns = torch.arange(mask.shape[1], device=mask.device)
            self._rows = (columns + shift[:, None]).to(device)

    def turn(self, values: Tensor) -> Tensor:
        """(B, T, ...) as the caller has it, on any device -> (B, T, ...) with the padding where the model wants it."""
        values = values.to(self._there)
        if self._rows is None:
            return values
        return _take(values, self._rows % values.shape[1])

    def turn_back(self, values: Tensor) -> Tensor:
        """The inverse of `turn`, on the caller's device."""
        if self._rows is None:
            return self.bring_back(values)
        values = values.to(self._there)
        count = values.shape[1]
        columns = torch.arange(count, device=values.device)
        rows = (2 * columns - self._rows) % count
        return self.bring_back(_take(values, rows))

    def bring_back(self, values: Tensor) -> Tensor:
        """Move what has no token axis, (B, ...), to the caller's device."""
        return values.to(self._home)


class Caller:
    """Calls a model, training or not, with batches that are padded on either side.

    Args:
        model: of a registered family; its mode and its weights are left alone.

    Attributes:
        trunk: the part of it that runs the blocks.
        task: see `FrozenModel`.
        reads_last_token: whether the answer is that of the last token which is not the model's own padding token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.trunk = trunk_of(model)
        architecture = architecture_of(model.config.model_type)
        kind = type(model).__name__
        self.task: Task | None = architecture.task(kind, model.config)
        self.reads_last_token = architecture.causal and self.task == "classification"
        self._padding = architecture.padding
        self._settings = architecture.settings_of(model.config)
        of_trunk = _parameters(self.trunk)
        self._names = set(INPUTS) & of_trunk
        if not architecture.token_types:
            self._names.discard("token_type_ids")
        of_model = _parameters(model)
        if "kwargs" in of_model:  # which it passes on
            of_model |= of_trunk
        self._off = {
            self.trunk: dict.fromkeys(of_trunk & KEPT, False),
            model: dict.fromkeys(of_model & KEPT, False),
        }

    @property
    def device(self) -> torch.device:
        """Where the inputs are taken: the device of the weights, or of the embeddings where they are sharded."""
        embeddings: Any = self.model.get_input_embeddings()
        return embeddings.weight.device

    def layout(self, inputs: Mapping[str, Tensor]) -> Layout:
        """Return the layout that turns this batch as the model needs it, and turns its output back.

        Raises:
            ValueError: an input is unknown.
        """
        if "input_ids" not in inputs or not set(inputs) <= set(INPUTS):
            raise UserError(
                "Expected `inputs` with input_ids and, where there are, attention_mask and token_type_ids, "
                f"but got {', '.join(inputs) or 'nothing'}. Pass these alone, as the tokenizer makes them."
            )
        return Layout(inputs, self._padding, self.device)

    def arguments(
        self, part: nn.Module, inputs: Mapping[str, Tensor], layout: Layout
    ) -> dict[str, Any]:
        """Return the arguments for `part`, the trunk or the whole model."""
        arguments: dict[str, Any] = {}
        for name, value in inputs.items():
            if name in self._names:
                arguments[name] = layout.turn(value)
        if self.reads_last_token and "attention_mask" in arguments:
            # It looks for the last token that is not its own padding token, and batches may be padded with another.
            padding = arguments["attention_mask"] == 0
            ids = arguments["input_ids"]
            own = self._settings.pad_token_id
            arguments["input_ids"] = ids.masked_fill(padding, own)
        return arguments | self._off[part]

    def logits(
        self, inputs: Mapping[str, Tensor], layout: Layout | None = None
    ) -> Tensor:
        """Run the whole model: (B, C), or (B, T, V) for a head that answers every token, in the batch's layout.

        Args:
            inputs: the batch.
            layout: its layout, if already made.

        Raises:
            ValueError: an input is unknown.
        """
        layout = layout or self.layout(inputs)
        arguments = self.arguments(self.model, inputs, layout)
        output: Any = self.model(**arguments, return_dict=True)
        if "start_logits" in output:  # of a head that answers questions
            spans = torch.stack([output.start_logits, output.end_logits], -1)
            return layout.turn_back(spans)
        if self.task == "classification":
            return layout.bring_back(output.logits)
        return layout.turn_back(output.logits)


def _parameters(part: nn.Module) -> set[str]:
    """Return the names of the arguments that a module is called with."""
    return set(inspect.signature(part.forward).parameters)


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """values[b, rows[b, t]] for (B, T, ...) and (B, T)."""
    index = rows.reshape(*rows.shape, *[1] * (values.ndim - 2))
    return values.gather(1, index.expand_as(values))
