"""Checkpoints as finished runs wrote them before they wrote safetensors."""

from __future__ import annotations

from typing import Any

from aligners.fitting.storage.bank import StoredBank
from aligners.fitting.storage.describing import describe_aligner
from aligners.fitting.storage.earlier import ALIGNMENT, STITCHING


def earlier_alignment(bank: StoredBank) -> dict[str, Any]:
    """As `train.py fit` wrote it, without what the first version did not keep."""
    directions = {"forward": bank.maps["0_1"], "backward": bank.maps.get("1_0", {})}
    return {
        "state_dict": {
            f"{direction}_maps.{name}.{key}": value
            for direction, maps in directions.items()
            for name, aligner in maps.items()
            for key, value in aligner.state_dict().items()
        },
        ALIGNMENT: {
            "aligners": {
                direction: {name: describe_aligner(aligner) for name, aligner in maps.items()}
                for direction, maps in directions.items()
            },
            "moments": bank.moments._asdict() if bank.moments else {},
            "data": bank.data,
            "data_config": {key: value for key, value in bank.data_config.items() if key != "held_out_types"},
        },
    }


def earlier_stitching(bank: StoredBank) -> dict[str, Any]:
    """As `train.py stitch` wrote it."""
    return {
        "state_dict": {
            f"maps.{route}.{name}.{key}": value
            for route, maps in bank.maps.items()
            for name, layer in maps.items()
            for key, value in layer.state_dict().items()
        },
        STITCHING: {
            "layers": {
                route: {name: describe_aligner(layer) for name, layer in maps.items()}
                for route, maps in bank.maps.items()
            },
            "pairs": {route: [list(pair) for pair in pairs] for route, pairs in bank.pairs.items()},
            **{name: getattr(bank, name) for name in ("spread", "curves", "loss", "data", "data_config")},
        },
    }
