"""Where two models differ at a site: the texts, tokens, types, and the directions of what a map leaves unexplained."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aligners.datamodules.rows.row_types import RowTypes

Row = dict[str, Any]
TOP = 6  # texts, tokens and types in a table
DIRECTIONS, EXAMPLES = 5, 3
LEAST = 1e-3  # smallest share of the residual at which a direction is shown
LETTERS = 160  # characters of a text that are shown
AROUND = 4  # tokens shown on each side of one


class Residuals:
    """What a map leaves unexplained of NEW's rows at one site, row by row.

    Args:
        site: site of NEW.
        rows: (N, d) NEW's row minus the mapped one.
        text: (N,) number of each row's text.
        token: (N,) place of each row in its text.
        texts: all texts, as text.
        types: types of the rows, if they have any.
        joined: makes a text from the names of tokens.
    """

    def __init__(
        self, site: int, rows: Tensor, text: Tensor, token: Tensor, *, texts: Sequence[str], types: RowTypes | None,
        joined: Callable[[list[str]], str],
    ) -> None:  # fmt: skip
        self.site, self.rows, self.text, self.texts, self.joined = (
            site,
            rows.double(),
            text,
            texts,
            joined,
        )
        self.squares = self.rows.square().sum(-1)
        self.total = self.squares.sum().clamp(min=torch.finfo(torch.float64).tiny)
        if types is not None:
            self.names, self.number = types.names, types.at(text, token)
        self.typed = types is not None
        values, vectors = torch.linalg.eigh(self.rows.mT @ self.rows)
        self.shares, self.vectors = (
            values.flip(0)[:DIRECTIONS] / self.total,
            vectors.flip(1)[:, :DIRECTIONS].mT,
        )

    def tables(self) -> dict[str, list[Row]]:
        """Return `texts`, `tokens`, `types` and `directions`, each with the largest share of the residual first."""
        tables = {
            "texts": self._ranked(
                self.text, lambda n: {"text": self._excerpt(n)}, mean=True
            )
        }
        if self.typed:
            each = torch.arange(len(self.rows))
            tables["tokens"] = self._ranked(
                each, lambda n: {"token": self._name(n), "context": self._around(n)}
            )
            tables["types"] = self._ranked(
                self.number, lambda n: {"type": self.names[n]}
            )
        return tables | {"directions": self._directions()}

    def _by(self, owner: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of values by owner, and the number of each owner's rows."""
        size = int(owner.max()) + 1
        return torch.zeros(size, dtype=values.dtype).index_add_(
            0, owner, values
        ), owner.bincount(minlength=size)

    def _ranked(
        self, owner: Tensor, about: Callable[[int], Row], *, mean: bool = False
    ) -> list[Row]:
        """Rank the owners of rows by their share of the residual or, with `mean`, by their rows' mean residual."""
        sums, counts = self._by(owner, self.squares)
        times = sums / counts.clamp(min=1) / (self.total / len(self.rows))
        top = (times if mean else sums).argsort(descending=True)[:TOP].tolist()
        shares = sums / self.total
        return [
            {
                "site": self.site,
                "share": float(shares[n]),
                "times": float(times[n]),
                "rows": int(counts[n]),
            }
            | about(n)
            for n in top
            if counts[n]
        ]

    def _excerpt(self, text: int) -> str:
        whole = " ".join(self.texts[text].split())
        return whole if len(whole) <= LETTERS else f"{whole[: LETTERS - 1]}…"

    def _name(self, row: int) -> str:
        return self.names[int(self.number[row])]

    def _around(self, row: int) -> str:
        near = range(max(0, row - AROUND), min(len(self.text), row + AROUND + 1))
        return self.joined(
            [self._name(n) for n in near if self.text[n] == self.text[row]]
        )

    def _directions(self) -> list[Row]:
        found = []
        for number, (share, direction) in enumerate(
            zip(self.shares.tolist(), self.vectors, strict=True), 1
        ):
            sums, counts = self._by(self.text, (self.rows @ direction).square())
            top = (
                (sums / counts.clamp(min=1))
                .argsort(descending=True)[:EXAMPLES]
                .tolist()
            )
            row = {"site": self.site, "direction": number, "share": share}
            found.append(row | {"texts": " | ".join(self._excerpt(n) for n in top)})
        return [row for row in found if row["share"] >= LEAST]
