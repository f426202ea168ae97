"""What the report says of the codes of a task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from aligners.probing.bank import Examples
from aligners.probing.edges.probes import edge_bank
from aligners.probing.edges.task import EdgeTask
from aligners.probing.online.codes import OnlineCode, compressions
from aligners.probing.online.sending import by_frequencies, send_labels
from aligners.probing.rows import Row, draws, score_columns
from aligners.probing.training import ProbeTraining

__all__ = ["code_rows", "portion_rows", "send"]


def send(task: EdgeTask, how: ProbeTraining, seed: int, portions: Sequence[float]) -> OnlineCode:
    """Send the labels of a task's fitting sentences with probes of all its arms: see `send_labels`."""

    def fresh(own: int) -> Any:
        return edge_bank(task.arms, task.words, task.labels, own, **task.sizes)

    fitting = Examples(task.words, task.targets)
    return send_labels(fresh, fitting, task.validation(), task.labels, how, seed, portions)


def code_rows(task: EdgeTask, codes: Sequence[OnlineCode]) -> Iterator[Row]:
    """One row for each arm, with the mean of the codelengths over seeds.

    Args:
        task: whose labels were sent.
        codes: one of each seed.
    """
    bits = torch.stack([code.codelength for code in codes])
    by_seed = torch.stack([code.compression for code in codes])
    weights = draws(len(codes[0].units), task.seed)
    whole, resampled = compressions(codes), compressions(codes, weights)
    for a, arm in enumerate(task.arms):
        compression = score_columns("compression", whole[a], resampled[a], by_seed[:, a])
        yield {
            **_about(task, a),
            "bits": float(bits[:, a].mean()),
            "uniform_bits": float(codes[0].uniform.sum()),
            "frequency_bits": by_frequencies(task.targets, task.labels, control=arm.control),
            **{name: float(value) for name, value in compression.items()},
            "n_sentences": len(codes[0].units),
            "n_targets": len(task.targets),
        }


def portion_rows(task: EdgeTask, codes: Sequence[OnlineCode]) -> Iterator[Row]:
    """One row for each arm, seed and portion, with the bits that a target took."""
    for seed, code in enumerate(codes):
        losses = code.losses()
        for a in range(len(task.arms)):
            for end, loss in zip(code.ends, losses[a].tolist(), strict=True):
                yield {**_about(task, a), "seed": seed, "share": end / code.ends[-1], "bits_a_target": loss}


def _about(task: EdgeTask, a: int) -> Row:
    arm = task.arms[a]
    return {"task": task.name, "source": arm.source, "site": arm.layer, "control": arm.control}
