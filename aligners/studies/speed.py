"""How fast this machine computes what a study consists of, measured in about a second."""

from __future__ import annotations

import os
import time
from functools import cache

import torch
from torch import nn

__all__ = ["measured_rate"]

SECONDS, TEXTS = 0.8, 10  # of measuring; in a batch
ROOM = 4096  # the widest block that is tried: wider ones are as fast


@cache
def measured_rate(width: int, tokens: int, workers: int, device: str) -> float:
    """FLOP a second of one worker, at the forward passes and training steps of a Transformer's block.

    Args:
        width: of the states.
        tokens: in a text.
        workers: at a time; on a CPU they share its threads.
        device: where they compute.
    """
    width = max(8, min(ROOM, width) // 8 * 8)
    before = torch.get_num_threads()
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    with torch.random.fork_rng():
        block = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True).to(device)
        states = torch.randn(TEXTS, tokens, width, device=device)
    torch.set_num_threads(min(threads, before))
    try:
        _round(block, states)  # what is compiled or allocated once
        rounds, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < SECONDS:
            _round(block, states)
            rounds += 1
    finally:
        torch.set_num_threads(before)
    return rounds * 4 * 2.0 * 12 * width**2 * TEXTS * tokens / passed


def _round(block: nn.Module, states: torch.Tensor) -> None:
    """One pass as of a frozen model, and one with gradients, which takes three times as many operations."""
    with torch.inference_mode():
        block(states)
    block.zero_grad()
    loss = block(states).square().mean()
    loss.backward()
    loss.item()  # a GPU is waited for
