"""What a cell computes, and on what: its options, its models, its texts, and how long it trains on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jsonargparse import Namespace

from aligners.datamodules.module import WITHOUT_GRADIENTS
from aligners.datamodules.rows.policies import most_rows
from aligners.studies.spec import Study
from aligners.studies.study_plan import Size, TextSizes

FLOAT = 4  # bytes


class Training(NamedTuple):
    """How long something is trained.

    Attributes:
        rows: or texts, as often as they are trained on.
        epochs: passes over them, or parts of one.
        steps: of the optimiser.
    """

    rows: float
    epochs: float
    steps: float


@dataclass(frozen=True)
class Load:
    """What a cell computes, and on what.

    Attributes:
        study: to which it belongs.
        parsed: its options as plain values.
        made: the same options, instantiated.
        sizes: of its models.
        pairs: number of pairs of them.
        texts: to fit on, to watch training on, and held out.
    """

    study: Study
    parsed: Namespace
    made: Namespace
    sizes: list[Size]
    pairs: int
    texts: TextSizes

    @property
    def tokens(self) -> int:
        """Mean length of a text."""
        return self.study.assume.tokens

    @property
    def memory(self) -> int:
        """Bytes of the models."""
        return FLOAT * sum(size.weights for size in self.sizes)

    def reading(self, texts: float, sizes: Sequence[Size] | None = None) -> float:
        """FLOP with which models, by default all, read so many texts."""
        return sum(
            size.reading(texts * self.tokens) for size in (self.sizes if sizes is None else sizes)
        )

    def calls(self, texts: float, sizes: Sequence[Size] | None = None) -> float:
        """Calls of a block with a batch, as models, by default all, read so many texts."""
        layers = sum(size.layers for size in (self.sizes if sizes is None else sizes))
        return layers * texts / self.parsed.data.batch_size

    def rows(self, texts: int) -> int:
        """Rows of so many texts."""
        return most_rows(self.parsed.data.get("rows") or "tokens", texts, self.tokens)

    def trained(self, read: float, step: float) -> Training:
        """How long a fit trains, of so many rows in all texts and in a step."""
        trainer: Any = self.parsed.trainer
        limit = trainer.limit_train_batches
        epoch = (
            read
            if limit is None
            else min(read, limit * step)
            if isinstance(limit, int)
            else limit * read
        )
        given = [(trainer.max_epochs, epoch), (trainer.max_steps, step)]
        limits = [times * rows for times, rows in given if times not in (None, -1)]
        rows = (
            min(limits)
            if limits
            else min(self.parsed.model.rows, self.parsed.model.most_steps * step)
        )
        return Training(rows, rows / epoch, rows / step)

    def validated(self, training: Training, before: int = 0) -> float:
        """Texts that training is watched on, as often as they are read: so often before it, then as `trainer` says."""
        trainer: Any = self.parsed.trainer
        limit, interval, every = (
            trainer.limit_val_batches,
            trainer.val_check_interval,
            trainer.check_val_every_n_epoch,
        )
        texts: float = self.texts.validation
        if limit is not None:
            most = limit * WITHOUT_GRADIENTS * self.parsed.data.batch_size
            texts = min(texts, most) if isinstance(limit, int) else limit * texts
        by_steps = isinstance(interval, int)
        times = (
            training.steps // interval
            if by_steps
            else training.epochs // (every or 1) / (interval or 1.0)
        )
        return texts * (before + times)

    def saving(self, training: Training, size: float) -> dict[str, Any]:
        """Its checkpoints, each of so many bytes, as fields of `Cost`."""
        how = self.parsed.get("checkpoint")
        if how is None:
            return {}
        every = how.get("every_n_epochs")
        saves = (training.epochs // every if every else 0.0) + bool(how.get("at_end"))
        return {"saved": size, "saves": saves, "minutes": how.every_n_minutes}
