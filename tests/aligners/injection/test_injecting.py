import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from tests.references.maps import cosine, fvu, mse
from tests.runs import activations, quiet_trainer
from tests.tiny import tiny_folder, tiny_tokenizer, tokenised
from tests.world import TEST_TEXTS, World, read_texts, sentences, write_texts
from tokenizers import normalizers
from torch import Tensor

from aligners.api import retrieval
from aligners.callbacks.checkpoint import SaveAligners
from aligners.callbacks.progress_bar import ProgressBar
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.heldout_retrieval import QUERIES
from aligners.fitting.saved_bank import DIRECTIONS, StoredBank, load_bank
from aligners.injection.behaviour import DRAWS
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import CLOSED_FORMS
from aligners.maps.base import Aligner
from aligners.maps.baselines import random_labels
from aligners.maps.inn import INN
from aligners.maps.linear import Identity, Linear, Mean, Ridge
from aligners.maps.mlp import MLP
from aligners.models import FrozenModel
from aligners.models.loading.load_models import load_frozen
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import write
from aligners.reports.runs.injection_report import reading

report = partial(make_report, "injection")

Row = dict[str, Any]
SITES = [0, "2:1", 3]
PAIRS = [(0, 0), (2, 1), (3, 3)]
FLOORS = {"random_classifier": "floor", "random_label": "floor", "constant_label": "floor"}
WHOLE = {"native_x": "ceiling", "native_y": "ceiling", **FLOORS}
SITED = {"identity": "floor", "mean": "floor", "random_embedding": "floor"}


def fit(world: World, folder: Path, aligners: dict[str, Any], epochs: int = 1, **options: Any) -> StoredBank:
    module = Alignment(aligners, both_directions=True, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    trainer = quiet_trainer(max_epochs=epochs, limit_val_batches=0, callbacks=[SaveAligners(folder)])
    trainer.fit(module, datamodule=activations(world, **{"sites": SITES} | options))
    return load_bank(folder / "aligners.safetensors")


@pytest.fixture(scope="module")
def stored(world: World, tmp_path_factory: pytest.TempPathFactory) -> StoredBank:
    aligners = {"linear": Linear, "mlp": partial(MLP, hidden=[8]), "inn": partial(INN, couplings=2, hidden=8)}
    return fit(world, tmp_path_factory.mktemp("stored"), aligners, epochs=2)


def evaluate(
    world: World, stored: list[StoredBank], *, closed_form: Sequence[str] = tuple(CLOSED_FORMS),
    both: bool = False, other: TextSource | None = None, fitting: bool = False, seed: int = 0,
    masked_share: float = 0.15, pooler: bool = False, kl: bool = False, **options: Any,
) -> InjectionEvaluation:  # fmt: skip
    """Inject maps at the sites of their fit, unless other data are asked for."""
    module = InjectionEvaluation(stored, closed_form, both, seed, other, masked_share, fitting, pooler, kl)
    data = activations(world, **{"sites": stored[0].data_config["sites"]} | options)
    quiet_trainer().test(module, datamodule=data, verbose=False)
    return module


@pytest.fixture(scope="module")
def both(world: World, stored: StoredBank) -> InjectionEvaluation:
    return evaluate(world, [stored], both=True, batch_size=8)


def test_every_map_is_scored_by_retrieval_in_both_directions(
    world: World, stored: StoredBank, both: InjectionEvaluation
) -> None:
    batches = list(activations(world, sites=SITES).paired("test"))
    states = [torch.cat([getattr(batch, side) for batch in batches], 1) for side in "xy"]
    bank = stored.maps["0_1"]["inn"]
    assert states[0].shape[1] < QUERIES
    for direction, (source, target), there in (
        ("forward", states, bank), ("backward", states[::-1], bank.inverse)
    ):  # fmt: skip
        mapped = there(source)
        for s, row in enumerate(rows_of(both, "inn", direction)):
            for end, centred in (("_all", False), ("_all_centred", True), ("", False)):
                found = retrieval(mapped[s], target[s], centred=centred)
                for name in ("top1", "top10", "mrr"):
                    assert row[f"{name}{end}"] == pytest.approx(getattr(found, name), abs=1e-6), (name, end)
            assert row["top1_low"] <= row["top1"] <= row["top1_high"]
            assert row["candidates"] == row["candidates_all"] <= row["queries"] == source.shape[1]
    assert {row["top1"] is None for row in rows_of(both, "random_embedding")} == {True}


def rows_of(evaluation: InjectionEvaluation, method: str, direction: str = "forward") -> list[Row]:
    return [row for row in evaluation.rows if row["method"] == method and row["direction"] == direction]


class Directly:
    """The held-out texts one by one, without padding, batches, or anything of `aligners`."""

    def __init__(self, world: World) -> None:
        self.x, self.y = load_frozen(world.model_x), load_frozen(world.model_y)
        texts, labels = read_texts(world.test)
        self.labels, self.inputs = torch.tensor([*map(int, labels)]), [tokenised((text,)) for text in texts]

    def states(self, model: FrozenModel, site: int) -> list[Tensor]:
        """(1, T, d) of each text."""
        return [model.front(one, [site])[0] for one in self.inputs]

    def behaviour(self, logits: list[Tensor], model: FrozenModel) -> dict[str, float]:
        found, native = torch.cat(logits), torch.cat([model.logits(one) for one in self.inputs])
        return {
            "accuracy": (found.argmax(-1) == self.labels).double().mean().item(),
            "loss": torch.nn.functional.cross_entropy(found, self.labels).item(),
            "agreement": (found.argmax(-1) == native.argmax(-1)).double().mean().item(),
        }


@pytest.fixture(scope="module")
def directly(world: World) -> Directly:
    return Directly(world)


def same(row: Row, expected: dict[str, float], tolerance: float = 1e-5) -> None:
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


def test_every_row_has_every_column_and_every_site_every_method(both: InjectionEvaluation) -> None:
    json.dumps({"meta": both.meta, "rows": both.rows}, allow_nan=False)
    for row in both.rows:
        assert list(row) == list(both.rows[0])
        assert row["n_texts"] == TEST_TEXTS
        assert row["n_rows"] == both.rows[0]["n_rows"]
    for direction in ("forward", "backward"):
        for method, role in WHOLE.items():
            (row,) = rows_of(both, method, direction)
            assert (row["role"], row["site_x"], row["fvu"], row["round_trip"]) == (role, None, None, None)
        for method in [*SITED, *CLOSED_FORMS, "mlp", "inn"]:
            found = rows_of(both, method, direction)
            pairs = PAIRS if direction == "forward" else [(j, i) for i, j in PAIRS]
            assert [(row["site_x"], row["site_y"]) for row in found] == pairs, method
            assert {row["role"] for row in found} == {SITED.get(method, "method")}
            for row in found:
                assert row["accuracy_low"] <= row["accuracy"] <= row["accuracy_high"]
                assert row["fvu_low"] <= row["fvu"] <= row["fvu_high"]
                inverse = method in {"identity", *CLOSED_FORMS, "inn"} - {"ridge"}  # the way back is another regression
                assert (row["fvu_inverse"] is not None) == (row["round_trip"] is not None) == inverse, method


def test_a_ridge_that_no_checkpoint_holds_is_the_one_that_a_fit_gives(world: World, stored: StoredBank) -> None:
    solved = evaluate(world, [stored], closed_form=["ridge"], both=True)
    module = Alignment({"ridge": Ridge}, both_directions=True)
    quiet_trainer().fit(module, datamodule=activations(world, sites=SITES))
    for found in module.fits():
        said = solved.meta["methods"][f"{DIRECTIONS[found.route]}.ridge"]
        findings = found.aligner.findings()
        assert {name: said[name] for name in findings} == findings
        assert "validation rows" in said["ridge_chosen_by"]
        panel: Any = next(panel for panel in solved.panels if panel.route.key == found.route)  # type: ignore[union-attr]
        (method,) = (method for method in panel.methods if method.name == "ridge")
        torch.testing.assert_close(method.aligner.weight, found.aligner.weight, atol=1e-5, rtol=1e-4)


def errors_directly(aligner: Aligner, x: Tensor, y: Tensor, means: Sequence[Tensor], site: int) -> Row:
    """Errors of one site from rows (N, d) of source and target, whose means are (S, d), in float64."""

    def of_site(function: Any, rows: Tensor) -> Tensor:
        with torch.no_grad():
            return function(torch.stack([rows] * aligner.sites))[site]

    mapped, target, source = (rows.double().numpy() for rows in (of_site(aligner, x), y, x))
    found = {"mse": mse(mapped, target), "fvu": fvu(mapped, target, means[1][site].numpy())}
    found |= {"l2": float(((mapped - target) ** 2).sum(-1).__pow__(0.5).mean()), "cosine": cosine(mapped, target)}
    found["relative_error"] = found["fvu"] ** 0.5
    if aligner.invertible:
        back = of_site(aligner.inverse, y).double().numpy()
        found["fvu_inverse"] = fvu(back, source, means[0][site].numpy())
    return found


def test_distances_are_those_of_the_maps(both: InjectionEvaluation, stored: StoredBank, directly: Directly) -> None:
    means = stored.moments.mean_x, stored.moments.mean_y
    maps = [(DIRECTIONS[route], name, bank) for route, banks in stored.maps.items() for name, bank in banks.items()]
    assert len(maps) == 5
    for direction, name, aligner in maps:
        way = slice(None, None, 1 if direction == "forward" else -1)
        for site, pair in enumerate(PAIRS):
            states = [directly.states(model, at) for model, at in zip((directly.x, directly.y), pair, strict=True)]
            x, y = (torch.cat([state[0] for state in each]) for each in states[way])
            row = rows_of(both, name, direction)[site]
            same(row, errors_directly(aligner, x, y, means[way], site), 1e-4)
            if aligner.invertible:
                with torch.no_grad():
                    gap = aligner.inverse(aligner(torch.stack([x] * 3)))[site] - x
                trip = (gap.abs().max() / x.abs().max()).item()
                assert row["round_trip"] == pytest.approx(trip, rel=0.9, abs=1e-6)


def test_behaviour_is_that_of_the_tail(both: InjectionEvaluation, stored: StoredBank, directly: Directly) -> None:
    for name in ("linear", "inn"):
        aligner = stored.maps["0_1"][name]
        for site, (i, j) in enumerate(PAIRS):
            with torch.no_grad():
                logits = [
                    directly.y.tail(one, j, aligner(torch.cat([state] * 3))[site][None])
                    for one, state in zip(directly.inputs, directly.states(directly.x, i), strict=True)
                ]
            same(rows_of(both, name)[site], directly.behaviour(logits, directly.y), 1e-4)


def test_through_the_sources_pooler_the_targets_classifier_alone_answers(
    world: World, both: InjectionEvaluation, stored: StoredBank, directly: Directly
) -> None:
    through = evaluate(world, [stored], pooler=True)
    for name in ("linear", "mlp"):
        aligner, (*below, last) = stored.maps["0_1"][name], rows_of(through, name)
        with torch.no_grad():
            pooled = [
                directly.x.model.bert.pooler(aligner(torch.cat([state] * 3))[-1:])
                for state in directly.states(directly.x, 3)
            ]
            answers = torch.cat([directly.y.model.classifier(vector) for vector in pooled]).argmax(-1)
        assert last["accuracy_source_pooler"] == pytest.approx((answers == directly.labels).double().mean().item())
        assert last["accuracy_source_pooler"] != last["accuracy"]
        assert {row["accuracy_source_pooler"] for row in below} == {None}
        for row, without in zip([*below, last], rows_of(both, name), strict=True):
            same(row, {quantity: without[quantity] for quantity in ("accuracy", "loss", "mse")})
    assert {row["accuracy_source_pooler"] for row in both.rows} == {None}


def test_backwards_a_bijection_is_its_own_inverse(both: InjectionEvaluation) -> None:
    for there, back in zip(rows_of(both, "inn"), rows_of(both, "inn", "backward"), strict=True):
        assert back["fit"] == "trained both ways"
        assert (back["model_x"], back["model_y"]) == (there["model_y"], there["model_x"])
        assert there["fvu_inverse"] == pytest.approx(back["fvu"], rel=1e-4)
        assert back["fvu_inverse"] == pytest.approx(there["fvu"], rel=1e-4)
        assert there["fvu"] != pytest.approx(back["fvu"], rel=1e-3)


def test_ceilings_and_floors_are_what_they_say(
    world: World, both: InjectionEvaluation, stored: StoredBank, directly: Directly
) -> None:
    with torch.no_grad():
        native_y = [directly.y.logits(one) for one in directly.inputs]
        native_x = [directly.x.logits(one) for one in directly.inputs]
        fresh = []
        for draw in range(DRAWS["random_classifier"]):
            with directly.y.fresh_head(draw):
                logits = [directly.y.logits(one) for one in directly.inputs]
            fresh.append(directly.behaviour(logits, directly.y))
    same(rows_of(both, "native_y")[0], directly.behaviour(native_y, directly.y))
    same(rows_of(both, "native_x")[0], directly.behaviour(native_x, directly.y))
    (drawn_heads,) = rows_of(both, "random_classifier")
    same(drawn_heads, {name: mean(each[name] for each in fresh) for name in fresh[0]})
    accuracies = [each["accuracy"] for each in fresh]
    same(drawn_heads, {"accuracy_low": min(accuracies), "accuracy_high": max(accuracies)})
    assert min(accuracies) < max(accuracies)
    assert rows_of(both, "native_x", "backward")[0]["accuracy"] == rows_of(both, "native_y")[0]["accuracy"]
    (chance,) = rows_of(both, "random_label")
    drawn = random_labels(TEST_TEXTS, 2, 0)
    most = round(mean(map(int, read_texts(world.fit)[1])))
    assert chance["accuracy"] == pytest.approx((drawn == directly.labels).double().mean().item())
    assert chance["loss"] is None
    (constant,) = rows_of(both, "constant_label")
    assert constant["accuracy"] == pytest.approx(float((directly.labels == most).double().mean()))
    for site, pair in enumerate(PAIRS):
        target = torch.cat([state[0] for state in directly.states(directly.y, pair[1])]).double()
        centre, variance = stored.moments.mean_y[site], stored.moments.yy[site].diagonal().sum() / stored.moments.n
        total = (target - centre).square().sum(-1).mean()
        floors = {name: rows_of(both, name)[site] for name in SITED}
        assert floors["mean"]["fvu"] == pytest.approx(1, rel=1e-5)
        # two independent draws differ by the sum of their variances
        assert floors["random_embedding"]["fvu"] == pytest.approx((1 + variance / total).item(), rel=0.2)
        source = torch.cat([state[0] for state in directly.states(directly.x, pair[0])]).double()
        same(floors["identity"], {"mse": mse(source.numpy(), target.numpy())}, 1e-4)


def test_the_batch_size_changes_nothing(world: World, both: InjectionEvaluation, stored: StoredBank) -> None:
    other = evaluate(world, [stored], both=True, batch_size=64)
    for a, b in zip(both.rows, other.rows, strict=True):
        for name, value in a.items():
            if name == "round_trip" and value is not None:
                assert value == pytest.approx(b[name], rel=0.9, abs=1e-6)
            elif isinstance(value, float) and name not in ("accuracy", "agreement"):
                assert value == pytest.approx(b[name], rel=1e-4), (a["method"], name)
            else:
                assert value == b[name], (a["method"], name)


def losses_of_heads(evaluation: InjectionEvaluation) -> set[float]:
    """That of each random head."""
    panel: Any = evaluation.panels[0]
    losses = panel.whole.compute()["loss"].sum(-1).flatten().tolist()
    return {loss for loss, name in zip(losses, panel.answers, strict=True) if name == "random_classifier"}


def test_the_bar_counts_every_method_of_every_batch(world: World, stored: StoredBank) -> None:
    shown: list[tuple[float, float]] = []

    class Bar(ProgressBar):
        def disable(self) -> None:
            if self._shown is not None:
                shown.append((self._shown.done, self._shown.total))
            super().disable()

    module = InjectionEvaluation([stored], ["linear"], both_directions=True, fitting_errors=True)
    data = activations(world, sites=SITES, batch_size=10)
    trainer = quiet_trainer(callbacks=[Bar()], enable_progress_bar=True)
    trainer.test(module, datamodule=data, verbose=False)
    methods = sum(len(panel.methods) for panel in module.panels)  # type: ignore[misc]
    assert methods > 2 * 3  # floors in both directions, and maps
    assert shown == [(methods * sum(trainer.num_test_batches), methods * sum(trainer.num_test_batches))]  # type: ignore[arg-type]


def test_seeds_move_the_random_floors_alone_and_have_no_head_in_common(
    world: World, both: InjectionEvaluation, stored: StoredBank
) -> None:
    other = evaluate(world, [stored], seed=2, closed_form=(), batch_size=8)
    for b in other.rows:
        (a,) = (a for a in rows_of(both, b["method"]) if (a["site_x"], a["site_y"]) == (b["site_x"], b["site_y"]))
        assert b["seed"] == 2
        moved = any(a[name] != b[name] for name in ("accuracy", "loss", "agreement"))
        assert moved == b["method"].startswith("random"), b["method"]
    assert len(losses_of_heads(both) | losses_of_heads(other)) == 2 * DRAWS["random_classifier"]


def test_several_checkpoints_stand_side_by_side(world: World, stored: StoredBank, tmp_path: Path) -> None:
    named = {"linear": partial(Linear, ridge=10.0), "identity": Identity, "mean": Mean}
    second = fit(world, tmp_path, named, rows="mean")
    evaluation = evaluate(world, [stored, second], closed_form=())
    about = evaluation.meta["methods"]
    assert about["forward.linear"]["fitted_on"] == "tokens"
    assert about["forward.linear_2"]["fitted_on"] == "mean"
    assert about["forward.linear_2"]["checkpoint"].endswith("aligners.safetensors")
    assert rows_of(evaluation, "linear_2")[0]["fvu"] > rows_of(evaluation, "linear")[0]["fvu"]
    assert not rows_of(evaluation, "procrustes")
    names = [(row["rows"], row["method"], row["site_x"]) for row in evaluation.rows]
    assert len(set(names)) == len(names)  # also where an aligner bears a floor's name


@pytest.mark.parametrize(("kind", "given"), [("mean", "tokens"), ("words", "words")])
def test_errors_are_measured_on_the_rows_of_the_fit_and_states_injected_beside(
    world: World, directly: Directly, tmp_path: Path, kind: str, given: str
) -> None:
    """Whatever rows the data module says."""
    stored = fit(world, tmp_path, {"linear": Linear}, rows=kind, sites=[1, 3])
    rows = evaluate(world, [stored], rows=given, sites=[1, 3]).rows
    assert {row["rows"] for row in rows} == {kind, "tokens"}
    assert list(rows[0]) == list(rows[-1])
    for row in rows:
        assert (row["accuracy"] is None) == (row["agreement"] is None) == (row["rows"] != "tokens")
    means = stored.moments.mean_x, stored.moments.mean_y
    for site, at in enumerate((1, 3)):
        x, y = (
            torch.cat([_row(states[0], kind) for states in directly.states(model, at)])
            for model in (directly.x, directly.y)
        )
        found = {row["method"]: row for row in rows if row["rows"] == kind and row["site_x"] == at}
        same(found["linear"], errors_directly(stored.maps["0_1"]["linear"], x, y, means, site), 1e-4)
        assert found["linear"]["n_rows"] == len(x)
        assert found["linear"]["fvu_low"] <= found["linear"]["fvu"] <= found["linear"]["fvu_high"]
        assert found["mean"]["fvu"] == pytest.approx(1, rel=0.2)  # held-out rows vary about another mean
        assert {found[name]["fitted_on"] for name in (*SITED, *CLOSED_FORMS)} == {kind}
    assert f"x → {world.model_y}, rows: {kind}: mapped states were compared" in reading(rows)


def _row(states: Tensor, kind: str) -> Tensor:
    """The rows of a text of whole words, [CLS] and [SEP] around them: (T, d) -> (N, d)."""
    return states.mean(0, keepdim=True) if kind == "mean" else states[1:-1]


@pytest.mark.slow
def test_without_a_head_or_labels_the_errors_are_the_same(
    world: World, stored: StoredBank, both: InjectionEvaluation, tmp_path: Path
) -> None:
    bare = tiny_folder(tmp_path / "y", seed=1, n_labels=None)
    multi = tiny_folder(tmp_path / "multi", seed=1, problem_type="multi_label_classification")
    headless, several = copy.deepcopy(stored), copy.deepcopy(stored)
    headless.data["models"]["y"]["fingerprint"] = load_frozen(str(bare)).fingerprint
    several.data["models"]["y"]["fingerprint"] = load_frozen(str(multi)).fingerprint
    plain = [tmp_path / "fit.csv", tmp_path / "test.csv"]
    for path, labelled in zip(plain, (world.fit, world.test), strict=True):
        path.write_text("\n".join(["text", *read_texts(labelled)[0]]))
    unlabelled = TextSource(str(plain[0]), held_out=str(plain[1]))
    no_labels, no_head = f"the texts of {str(plain[0])!r} have no labels", f"{bare} has no classification head and none"
    for checkpoint, options, why, figures in (
        (headless, {"model_y": str(bare)}, {"forward": no_head}, ["penalty.png", "fvu.png", "accuracy.png"]),
        (several, {"model_y": str(multi)}, {"forward": f"{multi} answers 2 questions of yes or no at once"}, None),
        (stored, {"text": unlabelled}, {"forward": no_labels, "backward": no_labels}, ["fvu.png"]),
    ):
        found = evaluate(world, [checkpoint], both=True, **options)
        assert list(found.meta["not_injected"]) == list(why)
        for direction, reason in why.items():
            assert found.meta["not_injected"][direction].startswith(reason)
            rows = [row for row in found.rows if row["direction"] == direction]
            expected = [row for row in both.rows if row["direction"] == direction and row["site_x"] is not None]
            for a, b in zip(rows, expected, strict=True):
                assert a["accuracy"] is a["loss"] is a["agreement"] is None
                same(a, {name: b[name] for name in ("mse", "l2", "fvu", "cosine") if b[name] is not None}, 1e-4)
        if figures is not None:
            assert [path.name for path in write(report({}, found.rows), tmp_path / str(len(why)))] == figures
        assert "The closest map" in reading(found.rows)


def test_models_of_different_tokenizers_have_errors_only(world: World, tmp_path: Path) -> None:
    other = tiny_folder(tmp_path / "other", seed=1)
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("i", "o")  # other tokens of the same words
    tokenizer.save_pretrained(other)
    stored = fit(world, tmp_path, {"linear": Linear}, rows="words", model_y=str(other), sites=[2])
    found = evaluate(world, [stored], rows="words", model_y=str(other), sites=[2])
    assert {row["rows"] for row in found.rows} == {"words"}
    assert "tokenizers of" in found.meta["not_injected"]["forward"]


def test_what_cannot_be_evaluated_is_refused(world: World, stored: StoredBank, tmp_path: Path) -> None:
    three = tmp_path / "three.csv"
    write_texts(three, sentences(280)[200:], [i % 3 for i in range(80)])  # none that was fitted on
    for options, says in (
        ({"text": TextSource(str(three))}, r"labels 0\.\.1.*three\.csv' have labels 0\.\.2"),
        ({"model_x": world.model_y}, r"aligners\.safetensors was fitted on other models: X was .*/x .*and is .*/y "),
        ({"sites": [1, 3]}, r"site pairs \[\(0, 0\), \(2, 1\), \(3, 3\)\].*`data\.sites`"),
    ):
        with pytest.raises(ValueError, match=says):
            evaluate(world, [stored], **options)
    with pytest.raises(ValueError, match=r"`trainer\.precision` 32-true, but got bf16-mixed"):
        quiet_trainer(precision="bf16-mixed").test(InjectionEvaluation([stored]), datamodule=activations(world))


def test_a_model_that_cannot_be_injected_into_is_not_measured(
    world: World, stored: StoredBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    tail = FrozenModel.tail
    monkeypatch.setattr(
        FrozenModel, "tail", lambda self, inputs, site, states, *rest: tail(self, inputs, site, states * 1.001, *rest)
    )
    with pytest.raises(RuntimeError, match=r"site 0 of .*/y changes its logits"):
        evaluate(world, [stored])
