from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import activations, quiet_trainer
from tests.stitches import LAYERS, evaluate, model_texts, rows_of, train
from tests.tiny import tiny_folder
from tests.world import World, sentences, write_texts
from torch import Tensor

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import SaveAligners
from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.task_targets import TaskBatch
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import hash_texts
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import load_bank, save_bank
from aligners.injection.behaviour import own_answers
from aligners.injection.stitching.stitching_training import LossWeights, Stitching
from aligners.maps.affine import AffineLayer, LowRank, Orthogonal
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear, Mean
from aligners.maps.mlp import MLP
from aligners.models import FrozenModel

IDENTITY = {"same": partial(AffineLayer, start="identity")}


def penalties(module: Stitching, **where: Any) -> dict[int, list[float]]:
    """Step -> penalties of the points of the learning curves that are so."""
    found: dict[int, list[float]] = {}
    for point in module.curves:
        if all(point[name] == value for name, value in where.items()):
            found.setdefault(point["step"], []).append(point["penalty"])
    return found


@pytest.fixture(scope="module")
def together(world: World) -> Stitching:
    """Both layers along all routes, clipped hard."""
    return train(world, gradient_clip=0.05, trainer={"max_steps": 6, "log_every_n_steps": 2})


def test_a_bank_gives_each_site_what_it_would_get_alone(world: World, together: Stitching) -> None:
    torch.manual_seed(7)  # the run's own seed decides, not the global one
    layers = {"affine_norm": LAYERS["affine_norm"]}
    alone = train(world, layers, gradient_clip=0.05, trainer={"max_steps": 6}, sites=["1:2"], routes="different")
    assert list(alone.maps) == ["0_1", "1_0"]
    for route in alone.maps:
        many = together.maps[route]["affine_norm"].state_dict()  # type: ignore[index]
        for key, value in alone.maps[route]["affine_norm"].state_dict().items():  # type: ignore[index]
            torch.testing.assert_close(many[key][: len(value)], value, rtol=1e-4, atol=1e-5, msg=key)


def test_training_lowers_the_loss_and_is_watched(world: World, together: Stitching) -> None:
    assert together.global_step == 6
    for key, route in {route.key: route for route in together.routes}.items():
        for i, j in route.pairs:
            course = penalties(
                together, model_x=route.source.name, model_y=route.target.name, site_x=i, site_y=j, method="affine_norm"
            )
            assert list(course) == [0, 2, 4, 6]
            assert [len(values) for values in course.values()] == [1] * 4
            logged = together.trainer.callback_metrics[f"validation/{key}/affine_norm/{i}-{j}/penalty"]
            assert logged.item() == pytest.approx(course[6][0], abs=1e-6)
            assert together.trainer.callback_metrics[f"step/{key}/affine_norm/{i}-{j}/loss"] > 0
    lower = [penalties(together, method="affine_norm")[step] for step in (6, 0)]
    assert sum(lower[0]) < sum(lower[1])


def test_the_last_steps_are_validated_whatever_the_interval(world: World) -> None:
    for steps, interval, at in ((5, 2, [0, 2, 4, 5]), (3, 50, [0, 3])):
        module = train(
            world, IDENTITY, routes="forward", trainer={"max_steps": steps, "val_check_interval": interval},
            start_batches=0,
        )  # fmt: skip
        assert list(penalties(module)) == at
        assert module.trainer.global_step == steps


def test_what_is_kept_is_the_best_of_each_site(world: World) -> None:
    """At a rate at which it soon gets worse."""
    rate = {"optimizer": partial(torch.optim.SGD, lr=30.0), "gradient_clip": 0.0, "schedule": "constant", "warmup": 0.0}
    module = train(world, routes="different", trainer={"max_steps": 8, "callbacks": [BestPerSite()]}, **rate)
    course = penalties(module)
    best = [min(values) for values in zip(*course.values(), strict=True)]
    assert best != course[8]
    quiet_trainer().validate(module, datamodule=model_texts(world), verbose=False)
    again = [point["penalty"] for point in module.curves[-len(best) :]]
    assert again == pytest.approx(best, abs=1e-6)


def first_losses(world: World, layers: Any, **given: Any) -> dict[str, Tensor]:
    """The losses of each bank in the first step."""
    found: dict[str, Tensor] = {}

    class Watching(Stitching):
        def _watch(self, losses: Any, batch_idx: int) -> None:
            found.update({f"{route.key}.{name}": loss for (route, name), loss in losses.items()})

    module = Watching(layers, loss=given.pop("loss"), start_batches=2)
    trainer = quiet_trainer(max_steps=1, max_epochs=-1, limit_val_batches=0)
    trainer.fit(module, datamodule=model_texts(world, **given))
    return found


def test_a_loss_is_the_weighted_sum_of_its_parts(world: World) -> None:
    task, distillation, activation, whole = (
        first_losses(world, IDENTITY, loss=weights)
        for weights in (
            LossWeights(),
            LossWeights(0.0, distillation=1.0, temperature=2.0),
            LossWeights(0.0, activation=1.0),
            LossWeights(0.5, distillation=2.0, temperature=2.0, activation=0.1),
        )
    )
    for key, loss in whole.items():
        torch.testing.assert_close(loss, 0.5 * task[key] + 2 * distillation[key] + 0.1 * activation[key])
    for part in (distillation, activation):  # nothing, of what changes nothing
        assert max(part[key].abs().max() for key in ("0_0.same", "1_1.same")) < 1e-6
        assert (part["0_1.same"] > 0.01).all()


def test_the_task_loss_is_the_mean_over_texts(world: World) -> None:
    own: dict[str, Tensor] = {}
    stitched: dict[str, Tensor] = {}

    class Watching(Stitching):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                for model in self.stream.frozen:
                    own[model.name] = own_answers(model, batch).loss.mean()
            super().training_step(batch, batch_idx)

        def _watch(self, losses: Any, batch_idx: int) -> None:
            stitched.update({route.target.name: loss for (route, _), loss in losses.items() if route.same})

    trainer = quiet_trainer(max_steps=1, max_epochs=-1, limit_val_batches=0)
    trainer.fit(Watching(IDENTITY, start_batches=2), datamodule=model_texts(world))
    assert len(stitched) == 2
    for name, losses in stitched.items():  # a model continues where it stopped
        torch.testing.assert_close(losses, own[name].expand_as(losses))


class Constant(AffineLayer):
    """Answers with the mean of what least squares predicts, which is that of Y."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1, keepdim=True).expand(-1, x.shape[1], -1)


def test_the_activation_loss_is_the_fvu_of_the_rows(world: World) -> None:
    """In units of the fitting rows' variance, mean over the rows of the batch."""
    for loss in first_losses(world, {"mean": Constant}, loss=LossWeights(0.0, activation=1.0), batch_size=200).values():
        assert loss.tolist() == pytest.approx([1.0] * len(loss), abs=1e-4)


def test_layers_stay_in_full_precision_while_models_run_in_half(world: World) -> None:
    dtypes: list[torch.dtype] = []

    class Watching(Stitching):
        def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
            assert torch.is_autocast_enabled("cpu")
            super().training_step(batch, batch_idx)
            for layer in self.banks().values():
                dtypes.extend(d for p in layer.parameters() for d in (p.dtype, p.grad.dtype))  # type: ignore[union-attr]

    trainer = quiet_trainer(max_steps=2, max_epochs=-1, precision="bf16-mixed")
    trainer.fit(Watching(LAYERS, start_batches=2), datamodule=model_texts(world))
    assert set(dtypes) == {torch.float32}


@pytest.mark.parametrize("kind", ["classification", "masked", "packed"])
def test_through_the_task_a_random_layer_learns_it(
    world: World, causal: list[str], masked: list[str], kind: str
) -> None:
    models = {"classification": [world.model_x, world.model_y], "masked": masked}.get(kind, causal)
    packed = {"packed": True, "max_length": 20} if kind == "packed" else {}
    random = {"affine": partial(AffineLayer, start="random")}
    steps = {"max_steps": 30, "val_check_interval": 30}
    course = penalties(train(world, random, models=models, sites=["1:2"], routes="forward", trainer=steps, **packed))
    assert all(end < start - 0.01 for start, end in zip(course[0], course[30], strict=True))


@pytest.fixture(scope="module")
def fitted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Maps of all kinds, in both directions."""
    folder = tmp_path_factory.mktemp("fitted")
    trained = {"mlp": partial(MLP, hidden=[8]), "inn": partial(INN, couplings=2, hidden=8)}
    module = Alignment({"linear": Linear, "mean": Mean, "none": Identity, **trained}, both_directions=True)
    trainer = quiet_trainer(max_epochs=1, callbacks=[SaveAligners(folder)])
    trainer.fit(module, datamodule=activations(world, sites=["1:2", 3], max_length=60))
    return folder / "aligners.safetensors"


def test_fitted_maps_are_trained_on_from_where_they_stand(
    world: World, fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelTexts, "leave_out", lambda *_: None)  # the texts are those of the validation
    module = train(world, {}, fitted=fitted, start_batches=0)
    assert {key: list(layers) for key, layers in module.maps.items()} == {  # type: ignore[call-overload]
        "0_1": ["linear_stitched", "mlp_stitched", "inn_stitched"],
        "1_0": ["linear_stitched", "mlp_stitched"],
        "0_0": [],
        "1_1": [],
    }
    as_they_are = evaluate(world, None, fitted, identity=False, routes="different", data={"text": validation(world)})
    for row in as_they_are.rows:
        where = {name: row[name] for name in ("model_x", "model_y", "site_x", "site_y")}
        course = penalties(module, method=f"{row['method']}_stitched", **where)
        if row["method"] in ("native", "none", "mean"):  # of which the latter two have nothing to train
            assert not course
            continue
        assert course[0] == [pytest.approx(row["penalty"], abs=2e-5)], row["method"]
        assert course[4] != course[0]


def validation(world: World) -> TextSource:
    """The validation texts of a run, as held-out texts."""
    path = Path(world.fit).with_name("validation.csv")
    split = model_texts(world).texts.validation
    write_texts(path, split["text"][:], split["label"][:])
    return TextSource(world.fit, held_out=str(path), validation_share=0.3)


def test_layers_that_go_on_from_fitted_maps_have_seen_their_texts(world: World, fitted: Path, tmp_path: Path) -> None:
    others = TextSource(write_texts(tmp_path / "others.csv", sentences(260)[200:]))
    start = tmp_path / "aligners.safetensors"
    save_bank(load_bank(fitted), start)
    module = train(world, {}, fitted=start, routes="forward", text=others, trainer={"max_steps": 1})
    start.unlink()  # hours may have passed
    known = module.stored().fitted
    assert known is not None
    assert known.among(hash_texts(activations(world).texts.fit)).all()
    assert known.among(hash_texts(activations(world, text=others).texts.fit)).all()


def test_fitted_maps_of_something_else_are_refused(world: World, fitted: Path, tmp_path: Path) -> None:
    for given, says in (
        (
            {"models": [world.model_y, world.model_x]},
            r"aligners\.safetensors was fitted on other models: model 0 was .*/x .*and is .*/y",
        ),
        ({"sites": [1, 3]}, r"site pairs \[\(1, 2\), \(3, 3\)\].*gives \[\(1, 1\), \(3, 3\)\].*`data\.sites`"),
        ({"component": "mlp"}, r"aligners\.safetensors was fitted on `component` 'residual'"),
    ):
        with pytest.raises(ValueError, match=says):
            train(world, {}, fitted=fitted, **given)
    with pytest.raises(ValueError, match="no such file"):
        train(world, {}, fitted=tmp_path / "aligners.safetensors")


def test_runs_that_cannot_be_are_refused_before_a_model_runs(
    world: World, causal: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_in_three = write_texts(tmp_path / "two.csv", sentences(150)[80:], [i % 3 for i in range(70)])
    wide = str(tiny_folder(tmp_path / "wide", seed=2, width=24))

    def run(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was run")

    for name in ("front", "tail", "logits"):
        monkeypatch.setattr(FrozenModel, name, run)
    monkeypatch.setattr(FrozenModel, "causal", property(lambda model: model.architecture.causal))  # reads no text
    for given, says in (
        ({"text": TextSource(world.fit, held_out=two_in_three)}, r"labels 0\.\.1.*have labels 0\.\.2"),
        ({"models": [world.model_x, causal[1]], "routes": "forward"}, "`allow_mixed` to true"),
        ({"models": [world.model_x, wide], "layers": IDENTITY}, "identity only between equal widths"),
        ({"models": [world.model_x, wide], "layers": {"o": Orthogonal}}, "equal widths"),
        ({"layers": {"rank": partial(LowRank, rank=17)}}, "`rank` to be at least 1 and at most 16"),
        ({"layers": {"linear": Linear, **LAYERS}}, "`layers` that can be trained, but got one without"),
        ({"trainer": {"max_steps": -1, "max_epochs": 2}}, r"`trainer\.max_steps` to be at least 1, but got -1"),
        ({"trainer": {"max_steps": 0}}, r"`trainer\.max_steps` to be at least 1, but got 0"),
        ({"trainer": {"precision": "64-true"}}, r"`trainer\.precision` 32-true or bf16-mixed, but got 64-true"),
    ):
        with pytest.raises(ValueError, match=says):
            train(world, given.pop("layers", LAYERS), **given)


def test_a_mixed_route_is_trained_when_it_is_asked_for(world: World, causal: list[str]) -> None:
    mixed: dict[str, Any] = {"models": [world.model_x, causal[1]], "routes": "forward", "allow_mixed": True}
    assert [route.key for route in train(world, trainer={"max_steps": 1}, **mixed).routes] == ["0_1"]


def test_too_few_rows_to_start_from_are_refused(world: World, tmp_path: Path) -> None:
    few = TextSource(write_texts(tmp_path / "few.csv", sentences(30)), held_out=world.test, validation_share=0.3)
    with pytest.raises(ValueError, match=r"affine from .*x → .*y expects at least 17 fitting.*but got \d+\. Give more"):
        train(world, {"affine": AffineLayer}, text=few, batch_size=1, start_batches=1)


class Explodes(AffineLayer):
    """Of no meaning at its second site."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([1.0, torch.inf])[:, None, None]


def test_a_loss_of_no_meaning_stops_the_run_under_its_name(world: World) -> None:
    layers = {"bad": Explodes, "good": AffineLayer}
    with pytest.raises(ValueError, match=r"training loss.*batch 0.*bad, .*/x → .*/y, site pair 3-3") as error:
        train(world, layers, routes="forward", trainer={"max_steps": 1, "limit_val_batches": 0})
    assert "good," not in str(error.value)  # as a layer is named in it
    assert "1-2" not in str(error.value)


@pytest.mark.parametrize(("given", "taken"), [({"max_steps": 15, "max_epochs": -1}, 15), ({"max_epochs": 1}, 11)])
def test_the_schedule_covers_the_steps_that_train(world: World, given: dict[str, int], taken: int) -> None:
    rates: list[float] = []

    class Watching(Stitching):
        def training_step(self, batch: TaskBatch, batch_idx: int) -> None:
            rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
            super().training_step(batch, batch_idx)

    module = Watching(LAYERS, "forward", start_batches=1, optimizer=partial(torch.optim.SGD, lr=1.0), warmup=0.0)
    limits = {"max_steps": 2000, **given}
    quiet_trainer(limit_val_batches=0, **limits).fit(module, datamodule=model_texts(world))
    assert rates == pytest.approx([1 - step / taken for step in range(taken)])  # over more than one pass, or one alone
    assert all(a > b for a, b in pairwise(rates))


def test_without_start_batches_nothing_is_read_before_training(world: World) -> None:
    module = train(world, IDENTITY, start_batches=0, routes="forward", trainer={"max_steps": 1})
    assert module.spread == {}
    rows = [row for row in evaluate(world, module.stored()).rows if row["role"] == "method"]
    assert {row["fvu"] for row in rows} == {None}
    course = penalties(module)
    measured = evaluate(world, data={"text": validation(world)}, routes="forward")
    assert course[0] == pytest.approx([row["penalty"] for row in rows_of(measured, "identity")], abs=2e-5)


def test_each_site_is_clipped(world: World) -> None:
    norms: list[Tensor] = []

    class Watching(Stitching):
        def step(self) -> None:
            for layer in self.banks().values():
                squares = [w.grad.flatten(1).square().sum(1) for w in layer.parameters()]  # type: ignore[union-attr]
                norms.append(torch.stack(squares).sum(0).sqrt())
            super().step()

    module = Watching(LAYERS, gradient_clip=0.01, start_batches=2)
    quiet_trainer(max_steps=1, max_epochs=-1, limit_val_batches=0).fit(module, datamodule=model_texts(world))
    assert torch.cat(norms).max() == pytest.approx(0.01, rel=1e-4)
