from __future__ import annotations

from typing import Any

import pytest
import torch

from aligners.fitting.alignment import Alignment
from aligners.maps.linear import Linear
from aligners.reports.finished import make_report
from datamodules.pairings import attention_states
from datamodules.states import States
from datamodules.text.sources import TextSource
from tests.runs import quiet_trainer
from tests.world import World


def attention(world: World, **options: Any) -> States:
    text = TextSource(world.fit, held_out=world.test)
    given = {"model_x": world.model_x, "model_y": world.model_y, "sites": "1,2:3", "batch_size": 16, "max_length": 64}
    return attention_states(text=text, **{**given, **options})


def test_rows_are_what_each_head_gives_to_a_pair_of_tokens(world: World) -> None:
    data = attention(world, share=1.0, batch_size=4)
    batch = next(data.paired("fit"))
    model_x, model_y = data.frozen
    assert batch.x.shape[::2] == (2, model_x.heads)
    assert batch.y.shape[::2] == (2, model_y.heads)
    place = 0
    for text, mask in enumerate(batch.texts.inputs_x["attention_mask"]):
        alone = {name: values[text : text + 1, mask.bool()] for name, values in batch.texts.inputs_x.items()}
        with torch.no_grad():
            wanted = [model_x.attention(alone)[0][0], model_y.attention(alone)[0][2]]
        count = int(mask.sum()) ** 2
        for found, weights in zip((batch.x[0], batch.y[1]), wanted, strict=True):
            torch.testing.assert_close(found[place : place + count], weights[0].movedim(0, -1).flatten(0, 1))
        place += count
    assert place == batch.x.shape[1]


def test_the_rows_that_are_drawn_do_not_depend_on_the_batches(world: World) -> None:
    found = []
    for size in (3, 16):
        data = attention(world, share=0.3, batch_size=size)
        rows: dict[int, list[torch.Tensor]] = {}
        for batch in data.paired("test"):
            for text, row in zip(batch.text.tolist(), batch.x[0], strict=True):
                rows.setdefault(text, []).append(row)
        found.append({text: torch.stack(each) for text, each in rows.items()})
    assert found[0].keys() == found[1].keys()
    for text, each in found[0].items():
        torch.testing.assert_close(each, found[1][text])
    every = sum(batch.x.shape[1] for batch in attention(world, share=1.0).paired("test"))
    assert 0.2 < sum(map(len, found[0].values())) / every < 0.4


def test_maps_are_fitted_and_measured_on_held_out_texts(world: World) -> None:
    data, module = attention(world), Alignment({"linear": Linear})
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    assert [(row["site_x"], row["site_y"]) for row in module.rows] == [(1, 1), (2, 3)]
    assert all(0 < row["fvu"] < 2 and 0 < row["mse"] < 1 and row["mse_fit"] > 0 for row in module.rows)
    assert make_report("attention", module.meta, module.rows).name == "attention"


def test_what_has_no_attention_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match=r"Expected `share` to be above 0 and at most 1, but got 0"):
        attention(world, share=0)
    with pytest.raises(ValueError, match=r"Expected `sites` of blocks, from 1 on"):
        attention(world, sites="all").check_models()
