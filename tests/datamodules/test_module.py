"""What all data modules share: options that checkpoints know, and that a run without the right one says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from datamodules.layers import LayerActivations
from datamodules.model_texts import ModelTexts, labelled_texts, stitched_texts
from datamodules.module import stream_of
from datamodules.pairings import attention_states, pair_states, pairs_states, universe_states
from datamodules.states import States
from tests.runs import made_again

COMMON = "text batch_size max_length seed dtype attn_implementation trust_remote_code recipe cache workers"
OF_PAIRS = "model_x model_y sites revision_x revision_y special_tokens packed"
OF_STATES = "rows special_tokens component held_out_types packed"
KEPT = {  # in checkpoints, whatever becomes of the code
    pair_states: f"{OF_PAIRS} {OF_STATES} labels",
    attention_states: f"{OF_PAIRS} share",
    pairs_states: f"models pairs sites revisions {OF_STATES}",
    universe_states: f"models sites revisions {OF_STATES}",
    LayerActivations: "models layers rows special_tokens packed revisions attention component",
    stitched_texts: "models sites packed masked_share revisions labels component",
    labelled_texts: "models bases revisions labels",
}


@pytest.mark.parametrize("kind", KEPT)
def test_options_are_kept_under_the_names_that_checkpoints_know(kind: Callable[..., Any]) -> None:
    config = kind(seed=3, workers=1, cache=Path("some")).config()
    assert set(config) == {*COMMON.split(), *KEPT[kind].split()}
    assert (config["seed"], config["workers"], config["cache"]) == (3, 1, "some")
    assert made_again(kind, config).config() == config
    with pytest.raises(TypeError, match="sed"):
        kind(sed=3)


def test_a_run_without_what_is_needed_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a data module of the kind States, but got none"):
        stream_of(SimpleNamespace(datamodule=None), States)
    with pytest.raises(ValueError, match=r"of the kind ModelTexts, but got .*States"):
        stream_of(SimpleNamespace(datamodule=pair_states()), ModelTexts)
