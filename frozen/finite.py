"""Non-finite values stop a run, without a synchronisation for every batch."""

from __future__ import annotations

from torch import Tensor

__all__ = ["FiniteCheck"]


class FiniteCheck:
    """Looks at values a batch late, when the device has long finished with them.

    Asking a device for a value waits for it. The flags of one batch are therefore read when the next batch
    comes, or at `flush`: a non-finite value is reported one batch later at most, under its own name.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, list[str], str, int]] = []

    def watch(self, values: Tensor, names: list[str], what: str, batch: int) -> None:
        """Queue values whose leading axis is named by `names`; raises for those queued before.

        Args:
            values: (S, ...) floating point.
            names: S names, such as "site 3".
            what: what the values are, for the message.
            batch: the number of the batch that they belong to.

        Raises:
            ValueError: an earlier batch held NaN or infinity.
        """
        if self._pending and self._pending[0][3] != batch:
            self.flush()
        self._pending.append((_finite(values), names, what, batch))

    def flush(self) -> None:
        """Look at what is still queued."""
        pending, self._pending = self._pending, []
        for entry in pending:
            _refuse(*entry)


def _finite(values: Tensor) -> Tensor:
    # A sum is finite only if every term is: one pass and no boolean copy of the states.
    return values.detach().float().reshape(len(values), -1).sum(1).isfinite()


def _refuse(finite: Tensor, names: list[str], what: str, batch: int) -> None:
    bad = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]
    if bad:
        raise ValueError(
            f"Expected finite {what}, but batch {batch} holds NaN or infinity at {', '.join(dict.fromkeys(bad))}. "
            "Look at the texts of that batch, use float32 instead of a half precision, or lower the learning rate."
        )
