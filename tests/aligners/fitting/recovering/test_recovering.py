import re
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.references.maps import fvu, mse
from tests.runs import quiet_trainer, related_rows
from tests.world import World

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.bijection.recovering import random_inns, target_states
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import write
from aligners.similarity.algebra.moments import moments_of


@pytest.fixture(scope="module")
def found(world: World) -> tuple[PairedActivations, Alignment]:
    text = TextSource(world.fit, held_out=world.test)
    places = {"strengths": [0.0, 0.5], "targets": 2, "sites": [1, 3]}
    data = target_states(world.model_x, text=text, batch_size=16, max_length=64, held_out_types=0.0, **places)
    module = Alignment({"linear": Linear, "inn": partial(INN, couplings=2, hidden=8)})
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    return data, module


def test_a_target_is_a_bijection_whose_strength_is_its_distance_from_a_linear_map() -> None:
    x, _ = related_rows(1, 4000, 8, 8)
    x = x.float().repeat(4, 1, 1)
    moments = moments_of(x, x)
    bank = random_inns(moments, [0.0, 0.1, 0.5, 0.5], [0, 0, 0, 1], 4).double()
    y = bank(x.double())
    torch.testing.assert_close(bank.inverse(y), x.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y[0], x[0].double())
    linear = Linear(4, 8, 8).double()
    linear.fit(moments_of(x.double(), y))
    left = (linear(x.double()) - y).square().sum((1, 2)) / (y - y.mean(1, keepdim=True)).square().sum((1, 2))
    assert left[0] < 1e-6 < left[1] < left[2] / 5
    assert not torch.allclose(y[2], y[3])


def test_every_strength_target_and_site_has_its_errors_on_held_out_and_on_fitting_rows(
    found: tuple[PairedActivations, Alignment],
) -> None:
    data, module = found
    assert {row["method"] for row in module.rows} == {"linear", "inn"}
    by = {(r["strength"], r["target_seed"], r["site_x"]): r for r in module.rows if r["method"] == "linear"}
    assert set(by) == {(s, t, i) for s in (0.0, 0.5) for t in (0, 1) for i in (1, 3)}
    assert len(module.rows) == 2 * len(by)
    assert by[0.0, 0, 1]["fvu"] < 1e-6 < by[0.5, 0, 1]["fvu"]
    assert by[0.5, 0, 1]["fvu"] != by[0.5, 1, 1]["fvu"]
    linear, count = module.banks_of("0_1")["linear"], len(data.split("test"))
    for split, end in (("test", ""), ("fit", "_fit")):
        batches = list(data.paired(split, only=count, batch_size=5))
        x, y = (torch.cat([getattr(batch, side) for batch in batches], 1) for side in "xy")
        for s, row in enumerate(by.values()):
            mapped, target = (rows[s].detach().double().numpy() for rows in (linear(x), y))
            mean = module.moments.mean_y[s].numpy()  # type: ignore[union-attr]
            assert row[f"mse{end}"] == pytest.approx(mse(mapped, target), rel=1e-4, abs=1e-10)
            assert row[f"fvu{end}"] == pytest.approx(fvu(mapped, target, mean), rel=1e-4, abs=1e-10)


def test_both_directions_are_places_of_their_own_the_way_back_with_x_and_y_exchanged(world: World) -> None:
    batches = {}
    for direction in ("forward", "backward", "both"):
        text = TextSource(world.fit, held_out=world.test)
        options = {"strengths": [0.0, 0.5], "sites": [1, 3], "direction": direction, "held_out_types": 0.0}
        data = target_states(world.model_x, text=text, batch_size=8, max_length=64, **options)  # type: ignore[arg-type]
        batches[direction] = next(iter(data.paired("test", only=8)))
        ways = [place.about["direction"] for place in data.reader.places()]
        assert ways == ([direction] * 4 if direction != "both" else ["forward"] * 4 + ["backward"] * 4)
        assert len({place.name for place in data.reader.places()}) == len(ways)
    there, back, both = batches.values()
    assert not torch.allclose(there.x[2:], there.y[2:])  # strength .5
    for of_both, first, second in ((both.x, there.x, there.y), (both.y, there.y, there.x)):
        torch.testing.assert_close(of_both, torch.cat([first, second]))
    torch.testing.assert_close((back.x, back.y), (there.y, there.x))


def test_the_report_says_which_map_is_closest(found: tuple[PairedActivations, Alignment], tmp_path: Path) -> None:
    made = make_report("recovery", found[1].meta, found[1].rows)
    assert re.search(r"\(strength 0\) the closest map, (linear|inn), leaves less than 0\.1% of", made.lead)
    assert [path.name for path in write(made, tmp_path)] == ["recover.png"]
