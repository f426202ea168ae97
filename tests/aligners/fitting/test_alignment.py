import csv
import json
import math
import re
from functools import partial, wraps
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tests.references.maps import fvu, ridge_regression
from tests.runs import activations, quiet_trainer
from tests.world import World
from torch import Tensor

from aligners.api import retrieval
from aligners.callbacks.best import BestPerSite
from aligners.callbacks.fit_summary import FitSummary
from aligners.datamodules.rows.read_rows import PairedBatch
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.splits import Split
from aligners.fitting.alignment import Alignment
from aligners.fitting.training_status import few_rows, outcomes
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear, Mean, Procrustes, Ridge
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import moments_of

TRAINED = {
    "mlp": partial(MLP, hidden=[8], skip=False),
    "inn": partial(INN, couplings=2, hidden=8),
    "inn_one_way": partial(INN, couplings=2, hidden=8, mixing="none", start="identity", both_ways=False),
}
SITES = [0, "1:2", 3]
FAST = {"optimizer": partial(torch.optim.AdamW, lr=1e-2)}


def split_rows(world: World, split: Split, batches: int | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The rows of a split, in the order of epoch 0, or of its first batches: (S, N, d) in float64."""
    data = activations(world, **options)
    texts = islice(data.loader(split, shuffle=split == "fit"), batches)
    found = [data.reader.read(data.reader.prepare(batch)) for batch in texts]
    return torch.cat([batch.x for batch in found], 1).double(), torch.cat([batch.y for batch in found], 1).double()


def fit(world: World, aligners: dict[str, Any], *, epochs: int = 1, callbacks: Any = None, **options: Any) -> Alignment:
    """Fit on the tiny world; options of `Alignment` by its names, the rest are the data module's."""
    names = ("both_directions", "optimizer", "schedule", "warmup", "gradient_clip", "seed")
    module = Alignment(aligners, **{name: options.pop(name) for name in names if name in options})
    data = activations(world, **{"sites": SITES} | options)
    quiet_trainer(max_epochs=epochs, callbacks=callbacks, log_every_n_steps=5).fit(module, datamodule=data)
    return module


@pytest.fixture(scope="module")
def bank(world: World) -> Alignment:
    """Three sites, every trained aligner, clipped hard, and closed forms beside them."""
    return fit(world, TRAINED | {"linear": Linear}, epochs=3, gradient_clip=0.05, **FAST)


def test_closed_forms_are_solved_in_one_pass_in_both_directions_and_reported(
    world: World, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    aligners = {"linear": Linear, "procrustes": Procrustes, "mean": Mean, "identity": Identity, "ridge": Ridge}
    module = fit(world, aligners, both_directions=True)
    assert "fitting rows for" not in caplog.text
    (x, y), (x_out, y_out) = (split_rows(world, split, sites=SITES) for split in ("fit", "validation"))
    assert module.moments is not None
    assert module.moments.n == x.shape[1]
    torch.testing.assert_close(module.moments.xy, moments_of(x, y).xy, rtol=1e-4, atol=1e-4)
    both_ways = [(name, "1_0") for name in ("linear", "mean", "ridge")]  # a bijection is its own way back
    assert [(f.name, f.route) for f in module.fits()] == [(name, "0_1") for name in aligners] + both_ways
    for f in module.fits():
        (a, b), (a_out, b_out) = f.orient(x, y), f.orient(x_out, y_out)
        if f.name == "linear":
            for site in range(3):
                weight, bias = ridge_regression(a[site].numpy(), b[site].numpy(), 1e-6)
                expected = fvu(a_out[site].numpy() @ weight + bias, b_out[site].numpy(), b[site].mean(0).numpy())
                assert module.validation_figures[f]["fvu"][site].item() == pytest.approx(expected, rel=1e-4)
        if f.name == "ridge":
            ours = Ridge(3, 16, 16).double()
            ours.fit(moments_of(a, b), moments_of(a_out, b_out))
            torch.testing.assert_close(f.aligner.weight, ours.weight.float(), atol=1e-5, rtol=1e-4)
            assert f.aligner.findings() == ours.findings()
            assert ours.findings()["ridge_chosen_by"] == f"{x_out.shape[1]} validation rows"
            assert ours.ridge[1] > 1e-6
    trainer = quiet_trainer(callbacks=[FitSummary(tmp_path)])
    trainer.validate(module, datamodule=activations(world, sites=SITES), verbose=False)
    columns = itemgetter("method", "model_x", "model_y", "site_x", "site_y", "fvu")
    rows = json.loads((tmp_path / "summary.json").read_text())["rows"]
    solved = {f.name for f in module.fits() if f.aligner.closed_form}
    assert {row["method"] for row in rows if row["fit"] == "closed form"} == solved
    assert list(map(columns, rows)) == [
        (f.name, *f.orient(world.model_x, world.model_y), *f.orient(*site), pytest.approx(fvu))
        for f in module.fits()
        for site, fvu in zip(module.sites, module.validation_figures[f]["fvu"].tolist(), strict=True)
    ]
    sites = [(*f.orient(x_out[s], y_out[s]), f, s) for f in module.fits() for s in range(len(SITES))]
    for (source, target, f, s), row in zip(sites, rows, strict=True):
        mapped = f.aligner(source.float().expand(len(SITES), -1, -1))[s]
        assert row["top1_all"] == pytest.approx(retrieval(mapped, target).top1, abs=1e-6)
        assert row["mrr_centred"] == pytest.approx(retrieval(mapped, target, centred=True).mrr, abs=1e-6)


def test_few_rows_for_the_dimensions_are_a_caution(world: World, caplog: pytest.LogCaptureFixture) -> None:
    few = TextSource(world.fit, held_out=world.test, max_texts=120)
    module = fit(world, {"linear": Linear}, rows="mean", text=few)
    assert f"{int(module.moments.n)} fitting rows for 16 dimensions" in caplog.text  # type: ignore[union-attr]
    assert few_rows(module.moments) == [caplog.records[-1].message]  # type: ignore[arg-type]
    wide = moments_of(torch.randn(1, 2292, 3), torch.randn(1, 2292, 3))._replace(mean_y=torch.zeros(1, 768))
    assert "explain 34% of the variance of independent data" in few_rows(wide)[0]
    assert "or give 7,681 rows or more" in few_rows(wide)[0]
    assert few_rows(wide._replace(n=torch.tensor(7681.0))) == []


def test_training_leads_somewhere_and_is_watched(world: World, bank: Alignment) -> None:
    x, y = split_rows(world, "validation", sites=SITES)
    for f in bank.trained():
        figures = bank.validation_figures[f]
        torch.manual_seed(0)  # where it did start
        start = f.aligner.__class__(3, 16, 16, **f.aligner.options())
        assert bank.moments is not None
        start.fit(bank.moments)
        assert (f.aligner.loss(x.float(), y.float()) < start.loss(x.float(), y.float())).all()
        assert figures["round_trip"].isnan().all() == (not f.aligner.bijective)
        for s, site in enumerate(("0-0", "1-2", "3-3")):
            logged = bank.trainer.callback_metrics
            assert logged[f"validation/{f.name}/{site}/fvu"].item() == pytest.approx(figures["fvu"][s].item())
            assert logged[f"train/{f.name}/{site}/mse"] > 0
            assert logged[f"step/{f.name}/{site}/loss"] > 0


def test_a_bank_gives_each_site_what_it_would_get_alone(world: World, bank: Alignment) -> None:
    alone = fit(world, TRAINED | {"linear": Linear}, epochs=3, gradient_clip=0.05, sites=["1:2"], **FAST)
    for f, single in zip(bank.fits(), alone.fits(), strict=True):
        for name, value in single.aligner.state_dict().items():
            torch.testing.assert_close(f.aligner.state_dict()[name][1:2], value, rtol=1e-3, atol=1e-4, msg=name)


def test_an_aligner_is_the_same_whatever_else_is_in_the_run_and_again(world: World, bank: Alignment) -> None:
    torch.manual_seed(7)  # the run's own seed decides, not the global one
    alone = fit(world, {"inn": TRAINED["inn"]}, epochs=3, gradient_clip=0.05, **FAST).fits()[0].aligner.state_dict()
    together = bank.banks_of("0_1")["inn"].state_dict()
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    starts = [Alignment({"inn": TRAINED["inn"]}, seed=seed) for seed in (0, 1)]
    for module in starts:
        module.build(3, 16, 16)
    one, other = (module.state_dict() for module in starts)
    assert any(not torch.equal(one[name], other[name]) for name in one if "hidden" in name)


def test_frozen_models_stay_frozen_and_out_of_checkpoints(world: World, tmp_path: Path) -> None:
    module, data, modes = Alignment(TRAINED), activations(world, sites=SITES), list[bool]()
    models = [data.reader.model_x, data.reader.model_y]

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            assert pl_module.training
            for model in models:
                modes.extend(part.training for part in model.model.modules())
                modes.extend(weight.requires_grad for weight in model.model.parameters())

    before = [model.fingerprint for model in models]
    trainer = quiet_trainer(max_epochs=1, callbacks=[Watch()])
    trainer.fit(module, datamodule=data)
    assert modes
    assert not any(modes)
    for model, fingerprint in zip(models, before, strict=True):
        del model.fingerprint  # computed anew
        assert model.fingerprint == fingerprint
    trainer.save_checkpoint(tmp_path / "some.ckpt")
    state = torch.load(tmp_path / "some.ckpt", weights_only=True)["state_dict"]
    assert {name.split(".")[0] for name in state} == {"maps"}
    assert sum(value.numel() for value in state.values()) == sum(
        value.numel() for f in module.fits() for value in f.aligner.state_dict().values()
    )


@pytest.mark.parametrize(
    ("limits", "steps", "validated"),
    [
        ({"max_epochs": 2}, 10, [0, 5, 10]),
        ({"max_epochs": 9, "max_steps": 12}, 12, [0, 5, 10, 12]),  # what the last steps reached counts
        ({"max_epochs": -1, "max_steps": 12}, 12, [0, 5, 10, 12]),
        ({"max_epochs": 4, "check_val_every_n_epoch": 2}, 20, [0, 10, 20]),
        ({"max_epochs": -1}, None, []),  # as long as its rows
    ],
)
def test_schedule_covers_the_steps_that_train_and_the_start_is_validated_once(
    world: World, limits: dict[str, int], steps: int | None, validated: list[int]
) -> None:
    rates, norms, found = list[float](), list[Tensor](), list[int]()

    class Watching(Alignment):
        def training_step(self, batch: PairedBatch, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
            super().training_step(batch, batch_idx)
            norms.append(torch.cat([p.grad.flatten() for p in self.parameters() if p.grad is not None]).norm())

        def on_validation_epoch_end(self) -> None:
            super().on_validation_epoch_end()
            found.append(self.global_step)

    options: dict[str, Any] = {"schedule": "linear", "warmup": 0.0, "rows": 2000, "gradient_clip": 1e-3}
    module = Watching({"mlp": TRAINED["mlp"]}, optimizer=partial(torch.optim.AdamW, lr=3e-3), **options)
    trainer = quiet_trainer(**limits, limit_train_batches=5)
    trainer.fit(module, datamodule=activations(world, sites=[1]))
    if steps is None:
        steps = math.ceil(2000 / (int(module.moments.n) / 5))  # type: ignore[union-attr]
        validated = [*range(0, steps, 5), steps]
    assert len(rates) == trainer.global_step == steps
    assert rates == pytest.approx([3e-3 * (1 - step / steps) for step in range(steps)])
    assert found == validated
    torch.testing.assert_close(torch.stack(norms), torch.full((steps,), 1e-3))


@pytest.mark.parametrize(
    ("method", "batches", "said"),
    [
        ("setup", {}, r"batch 0.*site 1 of X.*site 3 of X"),
        ("training_step", {"limit_train_batches": 2, "limit_val_batches": 0}, r"batch 3.*site 1 of X"),  # after moments
        ("validation_step", {"limit_train_batches": 1, "limit_val_batches": 1}, r"batch 2.*site 1 of X"),
    ],
)
def test_states_of_no_meaning_stop_the_run_in_the_last_batch_too(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, batches: dict[str, int], said: str
) -> None:
    """X breaks at the end of the first call of a method; the batch after is the last one of its pass."""
    data, real = activations(world, sites=SITES), getattr(Alignment, method)

    @wraps(real)
    def spoiling(*given: Any, **options: Any) -> None:
        real(*given, **options)
        data.reader.model_x.blocks[0].output.dense.weight[0, 0] = torch.nan  # type: ignore[union-attr, index]

    monkeypatch.setattr(Alignment, method, spoiling)
    aligners: dict[str, Any] = {"mlp": TRAINED["mlp"]} if method == "training_step" else {"linear": Linear}
    with pytest.raises(ValueError, match=rf"(?s)finite states.*{said}"):
        quiet_trainer(max_epochs=1, **batches).fit(Alignment(aligners), datamodule=data)


class Breaks(MLP):
    """Its loss is multiplied at each site once it was computed some times; whatever it was, none is left then."""

    def __init__(self, *sizes: int, factors: list[float], after: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.factors, self.left = torch.tensor(factors), after

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.left -= 1
        return super().loss(x, y) * (self.factors if self.left < 0 else 1)


EXPLODES = partial(Breaks, factors=[1, 1e4, 1], after=5, hidden=[8], skip=False)
AT_ONCE = partial(Breaks, factors=[1, math.nan, 1], after=0, hidden=[8], skip=False)


def test_a_site_that_diverges_is_set_back_and_the_others_go_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
    options = {"epochs": 2, "callbacks": [BestPerSite()], **FAST}
    sound = fit(world, {"mlp": TRAINED["mlp"], "inn": TRAINED["inn"]}, **options)
    assert sound.training_record["0_1.mlp"]["diverged_step"] == [0, 0, 0]
    for broken, step in ((EXPLODES, 6), (AT_ONCE, 1)):
        caplog.clear()
        options["callbacks"] = [BestPerSite()]
        module = fit(world, {"mlp": broken, "inn": TRAINED["inn"]}, **options)
        said = r"mlp \(forward\) diverged at site pair 1-2 at step \d+ \(set back to step \d+\).*0\.01"
        assert len(re.findall(said, caplog.text)) == 1
        ours, theirs = module.state_dict(), sound.state_dict()
        for name, value in ours.items():
            sites = [0, 2] if ".mlp." in name else [0, 1, 2]
            assert torch.equal(value[sites], theirs[name][sites]), name
            assert value.isfinite().all(), name
        record = module.training_record["0_1.mlp"]
        assert record["diverged_step"] == [0, step, 0]
        assert record["best_step"][1] == 0  # the only validation before


def test_what_is_logged_is_of_its_step_and_of_what_still_trains(world: World, tmp_path: Path) -> None:
    """Every 4 steps as every step: no value is written twice, nor that of a site that no longer trains."""
    found = {}
    for often in (1, 4):
        module = Alignment({"linear": Linear, "mlp": EXPLODES}, seed=0)
        logger = CSVLogger(tmp_path, name=str(often), version="")
        trainer = quiet_trainer(max_epochs=2, log_every_n_steps=often, callbacks=[BestPerSite()], logger=logger)
        trainer.fit(module, datamodule=activations(world, sites=SITES))
        with (tmp_path / str(often) / "metrics.csv").open() as file:
            found[often] = list(csv.DictReader(file))

    def logged(often: int, name: str) -> dict[int, float]:
        return {int(r["step"]): float(r[name]) for r in found[often] if r.get(name) and r[name] != "nan"}

    diverged = module.training_record["0_1.mlp"]["diverged_step"][1]
    for site in ("0-0", "1-2"):
        every, some = (logged(often, f"step/mlp/{site}/loss") for often in (1, 4))
        assert some == {step: loss for step, loss in every.items() if (step + 1) % 4 == 0 or step == 21}  # the last
    assert max(logged(1, "step/mlp/0-0/loss")) > diverged > max(logged(1, "step/mlp/1-2/loss"))
    assert len(logged(1, "validation/mlp/0-0/fvu")) > len(logged(1, "validation/mlp/1-2/fvu"))
    assert len(logged(1, "validation/linear/0-0/fvu")) == 1
    assert {fit.name for _, fit in module._errors} == {"mlp"}  # nor are closed forms measured twice


def test_a_run_in_which_every_site_diverges_ends(world: World) -> None:
    lost = partial(Breaks, factors=[math.nan, math.nan], after=0, hidden=[8])
    module = fit(world, {"mlp": lost}, epochs=9, callbacks=[BestPerSite()], sites=[1, 2])
    assert module.trainer.current_epoch < 3
    assert module.training_record["0_1.mlp"]["best_step"] == [0, 0]


def test_what_did_not_learn_is_called_its_start(world: World, caplog: pytest.LogCaptureFixture) -> None:
    module = fit(
        world, {"inn": TRAINED["inn"]}, epochs=2, callbacks=[BestPerSite()],
        optimizer=partial(torch.optim.AdamW, lr=0.3), gradient_clip=0.0, warmup=0.0,
    )  # fmt: skip
    assert re.search(r"inn \(forward\) learned nothing.*untrained start \(.*learning rate is 0.3", caplog.text)
    bank = module.banks_of("0_1")["inn"]
    start = INN(3, 16, 16, couplings=2, hidden=8)
    assert module.moments is not None
    start.fit(module.moments)
    untrained = [s for s, step in enumerate(module.training_record["0_1.inn"]["best_step"]) if step == 0]
    x, _ = split_rows(world, "validation", sites=SITES)
    torch.testing.assert_close(bank(x.float())[untrained], start(x.float())[untrained])
    assert module.training_record["0_1.inn"]["start"] == bank.start_names()


def test_a_start_with_nothing_left_to_learn_is_not_called_untrained(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    module = Alignment({"inn": TRAINED["inn"]}, seed=0)
    data = activations(world, model_y=world.model_x, sites=[1])  # a model and itself
    quiet_trainer(max_epochs=1, callbacks=[BestPerSite()]).fit(module, datamodule=data)
    record = module.training_record["0_1.inn"]
    assert (record["best_step"], record["exact"]) == ([0], [True])
    assert outcomes(record, 1) == ["trained"]
    assert "learned nothing" not in caplog.text


def test_moments_are_of_as_many_batches_as_an_epoch_has(world: World) -> None:
    for limit, batches in ((3, 3), (0.5, 5)):
        module = Alignment({"linear": Linear})
        quiet_trainer(limit_train_batches=limit).fit(module, datamodule=activations(world, sites=[1]))
        x, y = split_rows(world, "fit", batches, sites=[1])
        assert module.moments is not None
        assert module.moments.n == x.shape[1]
        torch.testing.assert_close(module.moments.xy, moments_of(x, y).xy, rtol=1e-4, atol=1e-4)


def test_aligners_stay_in_full_precision(world: World) -> None:
    with pytest.raises(ValueError, match=r"`trainer\.precision` 32-true, but got bf16-mixed.*`data\.dtype`"):
        quiet_trainer(precision="bf16-mixed").fit(Alignment(), datamodule=activations(world))


def test_a_backward_map_trains_as_that_of_the_turned_pair(world: World) -> None:
    mlp, turned = {"mlp": TRAINED["mlp"]}, {"model_x": world.model_y, "model_y": world.model_x}
    backward = fit(world, mlp, both_directions=True, **FAST).banks_of("1_0")["mlp"].state_dict()
    forward = fit(world, mlp, sites=[0, "2:1", 3], **turned, **FAST).banks_of("0_1")["mlp"].state_dict()
    for name, value in forward.items():
        torch.testing.assert_close(backward[name], value, rtol=1e-3, atol=1e-4)
