import math
from pathlib import Path
from typing import cast

import pytest
import torch
from tests.runs import quiet_trainer
from tests.stitches import LAYERS, evaluate, model_texts, rows_of, train
from tests.tiny import tiny_folder, tokenised
from tests.world import TEST_TEXTS, World, read_texts
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from aligners.datamodules.model_texts import ModelTexts
from aligners.fitting.saved_bank import StoredBank
from aligners.injection.scoring.scores import interval, named
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.models import load_frozen


@pytest.fixture(scope="module")
def stored(world: World) -> StoredBank:
    return train(world).stored()


@pytest.fixture(scope="module")
def measured(world: World, stored: StoredBank) -> StitchingEvaluation:
    return evaluate(world, stored, data={"batch_size": 4})


@pytest.mark.parametrize("task", ["classification", "causal", "packed", "masked"])
def test_a_model_stitched_to_itself_costs_exactly_nothing(
    world: World, causal: list[str], masked: list[str], task: str
) -> None:
    models = {"classification": [world.model_x] * 2, "masked": [masked[0]] * 2}.get(task, [causal[0]] * 2)
    packed = {"packed": True, "max_length": 20} if task == "packed" else {}
    module = evaluate(world, data={"models": models, "sites": "all", "batch_size": 8, **packed})
    rows = rows_of(module, "identity")
    assert [row["site_x"] for row in rows] == list(range(len(rows)))
    assert len(rows) > 2
    for row in rows:
        assert (row["penalty"], row["accuracy_penalty"], row["agreement"]) == (0, 0, 1)
        assert (row["penalty_low"], row["penalty_high"]) == (0, 0)
        assert row["same_model"]


def asked_plainly(data: ModelTexts, kind: str) -> list[tuple[dict[str, Tensor], Tensor]]:
    """What is put into the plain model, and the answers that are asked for at each place, -100 where none is."""
    if kind == "classification":
        return [(texts.inputs_x, cast(Tensor, texts.labels)) for texts in data.loader("test")]
    if kind == "masked":
        prepared, asked = [data.prepare(texts) for texts in data.loader("test")], []
        for batch in prepared:
            answers = torch.full_like(batch.inputs["input_ids"], -100)
            answers.view(-1)[batch.targets.index] = batch.targets.answer
            asked.append((batch.inputs, answers))
        return asked
    alone = [tokenised((text,)) for text in data.texts.test["text"][:]]
    inputs = alone if kind == "causal" else [texts.inputs_x for texts in data.loader("test")]
    return [(each, torch.nn.functional.pad(each["input_ids"][:, 1:], (0, 1), value=-100)) for each in inputs]


PLAIN = {"classification": AutoModelForSequenceClassification, "masked": AutoModelForMaskedLM}


@pytest.mark.parametrize("kind", ["classification", "causal", "packed", "masked"])
def test_a_model_by_itself_is_the_plain_model(world: World, causal: list[str], masked: list[str], kind: str) -> None:
    models = {"classification": [world.model_x, world.model_y], "masked": masked}.get(kind, causal)
    given = {"models": models, "sites": [1], **({"packed": True, "max_length": 20} if kind == "packed" else {})}
    module, data = evaluate(world, data={**given, "batch_size": 7}), model_texts(world, **given)
    plain, losses, right = PLAIN.get(kind, AutoModelForCausalLM).from_pretrained(models[1]), [], []
    for inputs, answers in asked_plainly(data, kind):
        asked = answers.flatten() != -100
        with torch.no_grad():
            logits = plain(**inputs).logits.flatten(0, -2)[asked]
        losses.append(cross_entropy(logits, answers.flatten()[asked], reduction="none"))
        right.append((logits.argmax(-1) == answers.flatten()[asked]).double())
    loss, units = torch.cat(losses).double().mean().item(), len(torch.cat(losses))
    native = rows_of(module, "native", model_x=models[0], model_y=models[1])[0]
    assert native["loss"] == pytest.approx(loss, rel=1e-6)
    assert native["accuracy"] == pytest.approx(torch.cat(right).mean().item())
    assert (native["n_units"], native["penalty"], native["agreement"]) == (units, 0, 1)
    assert (native["fvu"], native["parameters"]) == (None, None)
    unit = "text" if kind == "classification" else "token"
    assert (module.meta["unit"], module.meta["task"]) == (unit, "causal" if kind == "packed" else kind)
    assert native["perplexity"] == (None if unit == "text" else pytest.approx(math.exp(loss), rel=1e-5))
    assert module.meta.get("masked_share") == (0.15 if kind == "masked" else None)
    assert (native["bits_per_byte"] is None) == (kind in ("classification", "masked"))
    if kind == "packed":
        texts = data.texts.test["text"][:]
        tokens = sum(len(text.split()) + 1 for text in texts)  # whole words, and one more at each end
        per_byte = tokens / sum(len(text.encode()) for text in texts)
        assert native["bits_per_byte"] == pytest.approx(loss / math.log(2) * per_byte, rel=1e-6)
        assert (native["n_texts"], units) == (tokens // 20, tokens // 20 * 19)
        assert module.meta["packed"]["test"]["dropped"] == tokens % 20
    else:
        assert native["n_texts"] == TEST_TEXTS


def test_figures_are_those_of_the_stitched_model(
    world: World, measured: StitchingEvaluation, stored: StoredBank
) -> None:
    """Text by text, each alone: front of X, layer, tail of Y."""
    x, y = (load_frozen(name) for name in (world.model_x, world.model_y))
    texts, labels = read_texts(world.test)
    label, inputs = torch.tensor([*map(int, labels)]), [tokenised((text,)) for text in texts]
    own = torch.cat([y.logits(one) for one in inputs])
    for name, place, (i, j) in ((n, s, pair) for n in LAYERS for s, pair in enumerate(stored.pairs["0_1"])):
        layer, mean = stored.maps["0_1"][name], stored.spread["0_1"]["mean"][place]
        with torch.no_grad():
            mapped = [layer(x.front(one, [i])[0].expand(2, -1, -1))[place] for one in inputs]
            answers = torch.cat([y.tail(one, j, rows[None]) for one, rows in zip(inputs, mapped, strict=True)])
        states = torch.cat([y.front(one, [j])[0][0] for one in inputs])
        loss, native = (cross_entropy(logits, label, reduction="none").double() for logits in (answers, own))
        right, own_right = ((logits.argmax(-1) == label).double() for logits in (answers, own))
        squares, total = ((states - other).double().square().sum() for other in (torch.cat(mapped), mean))
        expected = {
            "loss": loss.mean(),
            **named("penalty", interval(loss - native, seed=0)),
            "penalty": (loss - native).mean(),
            **named("accuracy", interval(right, seed=0)),
            "accuracy": right.mean(),
            "accuracy_penalty": (own_right - right).mean(),
            "score_penalty": (own_right - right).mean(),
            "agreement": (answers.argmax(-1) == own.argmax(-1)).double().mean(),
            "fvu": squares / total,
        }
        (row,) = rows_of(measured, name, model_x=world.model_x, model_y=world.model_y, site_x=i, site_y=j)
        for figure, value in expected.items():
            assert row[figure] == pytest.approx(value.item(), rel=1e-4, abs=1e-6), (name, figure)
        assert row["n_texts"] == TEST_TEXTS
        assert row["parameters"] == sum(p.numel() for p in layer.parameters()) / 2
        assert (row["role"], row["fit"], row["overflow"]) == ("method", "task loss", False)


def test_every_route_method_and_site_has_its_row(world: World, measured: StitchingEvaluation) -> None:
    x, y = world.model_x, world.model_y
    places = {(x, y): [(1, 2), (3, 3)], (y, x): [(2, 1), (3, 3)], (x, x): [(1, 1), (3, 3)], (y, y): [(2, 2), (3, 3)]}
    expected = []
    for route, pairs in places.items():
        expected.append((*route, "native", None, None))
        expected += [(*route, method, *pair) for method in ("identity", *LAYERS) for pair in pairs]
    found = [tuple(row[name] for name in ("model_x", "model_y", "method", "site_x", "site_y")) for row in measured.rows]
    assert found == expected
    assert all(row["same_model"] == (row["model_x"] == row["model_y"]) for row in measured.rows)
    assert {row["role"] for row in rows_of(measured, "identity")} == {"floor"}
    assert [model["name"] for model in measured.meta["models"]] == [x, y]
    assert measured.report_tables["curves"]


def test_half_precision_is_close_and_keeps_its_sums(
    world: World, measured: StitchingEvaluation, stored: StoredBank
) -> None:
    half = evaluate(world, stored, trainer=quiet_trainer(precision="bf16-mixed"))
    gaps = [abs(a["loss"] - b["loss"]) for a, b in zip(half.rows, measured.rows, strict=True)]
    assert 1e-4 < max(gaps) < 0.05
    with pytest.raises(ValueError, match=r"`trainer\.precision` 32-true or bf16-mixed, but got bf16-true"):
        evaluate(world, stored, trainer=quiet_trainer(precision="bf16-true"))


def test_unequal_widths_have_no_identity(world: World, tmp_path: Path) -> None:
    wide = {"models": [world.model_x, str(tiny_folder(tmp_path / "wide", seed=2, width=24))], "sites": [1]}
    with pytest.raises(
        ValueError, match=r"Nothing to measure from .*/x → .*/wide: widths 16 and 24 differ.*`train\.py"
    ):
        evaluate(world, data=wide)
    with pytest.raises(ValueError, match=r"Nothing to measure from .*`identity`"):
        evaluate(world, identity=False)
    layers = {"affine": LAYERS["affine"]}
    module = evaluate(world, train(world, layers, trainer={"max_steps": 1}, **wide).stored(), data=wide)
    assert {row["model_x"] for row in rows_of(module, "identity")} == {*wide["models"]}  # each to itself
    assert all(row["same_model"] for row in rows_of(module, "identity"))


def test_sub_layers_can_be_stitched_and_are_not_mistaken_for_the_stream(
    world: World, stored: StoredBank, causal: list[str]
) -> None:
    same_model = {"models": [causal[0]] * 2, "sites": "blocks", "component": "mlp"}
    assert {row["penalty"] for row in rows_of(evaluate(world, data=same_model), "identity")} == {0}
    with pytest.raises(ValueError, match=r"was fitted on `component` 'residual', but .* is 'mlp'"):
        evaluate(world, stored, data={"component": "mlp"})


def test_quantised_weights_can_be_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.models.model.quantisation", lambda config: "bitsandbytes")
    assert rows_of(evaluate(world), "identity")
    with pytest.raises(ValueError, match=r"gradients can pass.*quantised \(bitsandbytes\)"):
        train(world)
