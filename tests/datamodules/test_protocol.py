"""Each data module has what the LightningModules that use it ask for, and a run without one says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from datamodules.labelled import LabelledTexts
from datamodules.layers import LayerActivations
from datamodules.model_texts import ModelTexts
from datamodules.paired import PairedActivations
from datamodules.protocol import LabelledData, LayerData, PairedData, TaskData, TextData, stream_of

MODULES = {
    PairedActivations: PairedData,
    LayerActivations: LayerData,
    ModelTexts: TaskData,
    LabelledTexts: LabelledData,
}


@pytest.mark.parametrize("kind", MODULES)
def test_each_data_module_keeps_its_contract_and_loads_nothing_to_show_it(kind: type[Any]) -> None:
    data = kind()
    trainer = SimpleNamespace(datamodule=data)
    assert stream_of(trainer, MODULES[kind]) is data
    assert stream_of(trainer, TextData) is data


COMMON = [
    "text",
    "batch_size",
    "max_length",
    "seed",
    "dtype",
    "attn_implementation",
    "trust_remote_code",
    "recipe",
    "cache",
    "workers",
]
KEPT = {  # in checkpoints, whatever becomes of the code
    PairedActivations: "model_x model_y sites rows special_tokens packed revision_x revision_y labels component "
    "held_out_types",
    LayerActivations: "models layers rows special_tokens packed revisions attention component",
    ModelTexts: "models sites packed masked_share revisions labels component",
    LabelledTexts: "models bases revisions labels",
}


@pytest.mark.parametrize("kind", MODULES)
def test_options_are_kept_under_the_names_that_checkpoints_know(kind: type[Any]) -> None:
    config = kind(seed=3, workers=1, cache=Path("some")).config()
    assert set(config) == {*COMMON, *KEPT[kind].split()}
    assert (config["seed"], config["workers"], config["cache"]) == (3, 1, "some")
    assert kind.from_config(config).config() == config
    with pytest.raises(TypeError, match="sed"):
        kind(sed=3)


def test_a_run_without_what_is_needed_is_refused() -> None:
    with pytest.raises(ValueError, match="Expected a data module, but got none"):
        stream_of(SimpleNamespace(datamodule=None), PairedData)
    with pytest.raises(ValueError, match=r"all of `TaskData`, but LabelledTexts has no .*prepare, sites, task\."):
        stream_of(SimpleNamespace(datamodule=LabelledTexts()), TaskData)
