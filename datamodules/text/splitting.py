"""A keyed hash of the text decides which split it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from datamodules.text.sources import TextSource

__all__ = ["plain_text", "split_of", "split_shares", "text_key"]


def plain_text(parts: Sequence[str | None]) -> bytes:
    """Join a text of one or two parts, regardless of case and white space."""
    return "\x1f".join(" ".join((part or "").casefold().split()) for part in parts).encode()


def text_key(parts: Sequence[str | None], seed: int) -> int:
    """Hash a text to [0, 2^128), regardless of case and white space."""
    secret = seed.to_bytes(8, "little", signed=True)
    return int.from_bytes(blake2b(plain_text(parts), key=secret, digest_size=16).digest(), "big")


def split_shares(source: TextSource, *, draw_test: bool) -> dict[str, float]:
    """The share of the texts for each split, without `test` where there is an official one."""
    test = {"test": source.test_share} if draw_test else {}
    fit = 1 - source.validation_share - sum(test.values())
    return {"fit": fit, "validation": source.validation_share, **test}


def split_of(key: int, shares: dict[str, float]) -> str:
    """The split of a text with this key."""
    place, test = key / 2**128, shares.get("test", 0.0)
    return "test" if place < test else "validation" if place < test + shares["validation"] else "fit"
