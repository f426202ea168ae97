import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from aligners.fitting.bank import StoredBank
from aligners.injection.scoring.scores import bootstrap_interval
from aligners.injection.stitching.measuring import StitchingEvaluation
from tests.runs import quiet_trainer
from tests.stitches import LAYERS, evaluate, model_texts, rows_of, train
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World

FIGURES = ("loss", "penalty", "accuracy", "agreement", "fvu", "perplexity", "bits_per_byte")


@pytest.fixture(scope="module")
def stored(world: World) -> StoredBank:
    return train(world).stored()


@pytest.fixture(scope="module")
def measured(world: World, stored: StoredBank) -> StitchingEvaluation:
    return evaluate(world, stored, data={"batch_size": 4})


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], rel: float = 1e-6) -> None:
    """Equal rows up to what adding up in another order leaves."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name, value in b.items():
            if isinstance(value, float):
                assert a[name] == pytest.approx(value, rel=rel, abs=rel), (b["method"], name)
            else:
                assert a[name] == value, (b["method"], name)


# ---------------------------------------------------------------------- identity, into the model itself


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


# ---------------------------------------------------------------------- the target by itself


def plain_losses(model: Any, batches: list[dict[str, Tensor]], answers: list[Tensor]) -> Tensor:
    """Cross-entropy of every answer that is asked for, by the plain model."""
    found = []
    for inputs, answer in zip(batches, answers, strict=True):
        with torch.no_grad():
            logits = model(**inputs).logits
        losses = cross_entropy(logits.flatten(0, -2), answer.flatten(), reduction="none", ignore_index=-100)
        found.append(losses[answer.flatten() != -100])
    return torch.cat(found).double()


def test_a_classifier_by_itself_is_the_plain_model(world: World, measured: StitchingEvaluation) -> None:
    data = model_texts(world)
    batches = list(data.loader("test"))
    plain = AutoModelForSequenceClassification.from_pretrained(world.model_y)
    losses = plain_losses(plain, [b.inputs_x for b in batches], [b.labels for b in batches])
    native = rows_of(measured, "native", model_x=world.model_x, model_y=world.model_y)[0]
    assert native["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert native["n_units"] == native["n_texts"] == TEST_TEXTS
    assert (native["penalty"], native["agreement"]) == (0, 1)
    assert (native["perplexity"], native["bits_per_byte"], native["fvu"], native["parameters"]) == (None,) * 4
    right = sum(int((plain(**b.inputs_x).logits.argmax(-1) == b.labels).sum()) for b in batches)
    assert native["accuracy"] == pytest.approx(right / TEST_TEXTS)


def test_packed_perplexity_is_that_of_transformers_own_loss(world: World, causal: list[str]) -> None:
    module = evaluate(world, data={"models": causal, "sites": [1], "packed": True, "max_length": 20})
    data = model_texts(world, models=causal, sites=[1], packed=True, max_length=20)
    texts = [batch.inputs_x["input_ids"] for batch in data.loader("test")]
    plain = AutoModelForCausalLM.from_pretrained(causal[1])
    with torch.no_grad():
        losses = [float(plain(input_ids=ids, labels=ids).loss) for ids in texts]
    count = sum(len(ids) for ids in texts)
    loss = sum(each * len(ids) for each, ids in zip(losses, texts, strict=True)) / count
    native = rows_of(module, "native", model_x=causal[0], model_y=causal[1])[0]
    assert native["loss"] == pytest.approx(loss, rel=1e-6)
    assert native["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert (native["n_texts"], native["n_units"]) == (count, count * 19)
    raw = data.texts.test["text"][:]
    tokens = sum(len(text.split()) + 1 for text in raw)  # whole words, and one more at each end
    size = sum(len(text.encode()) for text in raw)
    assert native["bits_per_byte"] == pytest.approx(loss / math.log(2) * tokens / size, rel=1e-6)
    assert module.meta["packed"]["test"]["dropped"] == tokens - 20 * count
    assert (module.meta["task"], module.meta["unit"]) == ("causal", "token")


def test_padded_text_of_a_causal_model_is_that_of_each_text_alone(world: World, causal: list[str]) -> None:
    module = evaluate(world, data={"models": causal, "sites": [1], "batch_size": 7})
    data = model_texts(world, models=causal, sites=[1])
    plain = AutoModelForCausalLM.from_pretrained(causal[1])
    losses, units = 0.0, 0
    for text in data.texts.test["text"][:]:
        ids = data.frozen[1].tokenizer(text, return_tensors="pt")["input_ids"]  # type: ignore[misc]
        with torch.no_grad():
            losses += float(plain(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        units += ids.shape[1] - 1
    native = rows_of(module, "native", model_y=causal[1])[0]
    assert native["loss"] == pytest.approx(losses / units, rel=1e-6)
    assert native["n_units"] == units


def test_a_masked_model_by_itself_is_the_plain_model(world: World, masked: list[str]) -> None:
    module = evaluate(world, data={"models": masked, "sites": [1], "batch_size": 7})
    data = model_texts(world, models=masked, sites=[1])
    prepared = [data.prepare(texts) for texts in data.loader("test")]
    answers = []
    for batch in prepared:
        wanted = torch.full_like(batch.inputs["input_ids"], -100).flatten()
        wanted[batch.targets.index] = batch.targets.answer
        answers.append(wanted)
    plain = AutoModelForMaskedLM.from_pretrained(masked[1])
    losses = plain_losses(plain, [batch.inputs for batch in prepared], answers)
    native = rows_of(module, "native", model_y=masked[1])[0]
    assert native["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert native["n_units"] == len(losses)
    assert native["perplexity"] == pytest.approx(math.exp(losses.mean().item()), rel=1e-5)
    assert native["bits_per_byte"] is None
    assert module.meta["masked_share"] == 0.15


# ---------------------------------------------------------------------- stitched


def test_figures_are_those_of_the_stitched_model(
    world: World, measured: StitchingEvaluation, stored: StoredBank
) -> None:
    """Text by text, each alone: front of X, layer, tail of Y."""
    data = model_texts(world)
    x, y = data.frozen
    labels = data.split("test").labels
    assert labels is not None
    texts = [dict(data.frozen[0].tokenizer(text, return_tensors="pt")) for text in data.texts.test["text"][:]]  # type: ignore[misc]
    texts = [{name: one[name] for name in ("input_ids", "attention_mask")} for one in texts]
    for name, place, (i, j) in ((n, s, pair) for n in LAYERS for s, pair in enumerate(stored.pairs["0_1"])):
        layer, losses, native, right, agree, squares, total = stored.maps["0_1"][name], [], [], [], [], 0.0, 0.0
        mean = stored.spread["0_1"]["mean"][place]
        for one, label in zip(texts, labels, strict=True):
            with torch.no_grad():
                mapped = layer(x.front(one, [i])[0].expand(2, -1, -1))[place]
                answer, own = y.tail(one, j, mapped[None])[0], y.logits(one)[0]
            losses.append(float(cross_entropy(answer, label)))
            native.append(float(cross_entropy(own, label)))
            right.append(float(answer.argmax() == label))
            agree.append(float(answer.argmax() == own.argmax()))
            states = y.front(one, [j])[0][0]
            squares += float((mapped - states).double().square().sum())
            total += float((states - mean).double().square().sum())
        (row,) = rows_of(measured, name, model_x=world.model_x, model_y=world.model_y, site_x=i, site_y=j)
        gap = torch.tensor(losses).double() - torch.tensor(native).double()
        low, high = bootstrap_interval(gap, seed=0)
        expected = {
            "loss": sum(losses) / TEST_TEXTS,
            "penalty": float(gap.mean()),
            "penalty_low": float(low),
            "penalty_high": float(high),
            "accuracy": sum(right) / TEST_TEXTS,
            "agreement": sum(agree) / TEST_TEXTS,
            "fvu": squares / total,
        }
        for figure, value in expected.items():
            assert row[figure] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, figure)
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


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_the_batch_size_changes_nothing(world: World, causal: list[str], masked: list[str], task: str) -> None:
    models = {"causal": causal, "masked": masked}[task]
    layers = {"norm": LAYERS["affine_norm"]}
    trained = train(world, layers, models=models, sites=["1:2"], trainer={"max_steps": 1}).stored()
    data = {"models": models, "sites": ["1:2"]}
    small = evaluate(world, trained, data={**data, "batch_size": 3})
    large = evaluate(world, trained, data={**data, "batch_size": 64})
    same(large.rows, small.rows)


def test_half_precision_is_close_and_keeps_its_sums(world: World, stored: StoredBank) -> None:
    half = evaluate(world, stored, trainer=quiet_trainer(precision="bf16-mixed"))
    full = evaluate(world, stored)
    for a, b in zip(half.rows, full.rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=0.05)
    assert [row["loss"] for row in half.rows] != [row["loss"] for row in full.rows]
    with pytest.raises(ValueError, match=r"`trainer\.precision` 32-true or bf16-mixed, but got bf16-true"):
        evaluate(world, stored, trainer=quiet_trainer(precision="bf16-true"))


# ---------------------------------------------------------------------- what is measured


def test_unequal_widths_have_no_identity(world: World, tmp_path: Path) -> None:
    wide = str(tiny_folder(tmp_path / "wide", seed=2, width=24))
    with pytest.raises(
        ValueError, match=r"Nothing to measure from .*/x → .*/wide: widths 16 and 24 differ.*`train\.py"
    ):
        evaluate(world, data={"models": [world.model_x, wide], "sites": [1]})
    trained = train(world, models=[world.model_x, wide], sites=[1], trainer={"max_steps": 1}).stored()
    module = evaluate(world, trained, data={"models": [world.model_x, wide], "sites": [1]})
    assert {row["model_x"] for row in rows_of(module, "identity")} == {world.model_x, wide}  # each to itself
    assert all(row["same_model"] for row in rows_of(module, "identity"))


def test_identity_turned_off_without_anything_else_leaves_nothing(world: World) -> None:
    with pytest.raises(ValueError, match=r"Nothing to measure from .*`identity`"):
        evaluate(world, identity=False)


def test_sub_layers_can_be_stitched_and_are_not_mistaken_for_the_stream(
    world: World, stored: StoredBank, causal: list[str]
) -> None:
    same_model = {"models": [causal[0]] * 2, "sites": "blocks", "component": "mlp"}
    assert {row["penalty"] for row in rows_of(evaluate(world, data=same_model), "identity")} == {0}
    with pytest.raises(ValueError, match=r"was fitted on `component` 'residual', but .* is 'mlp'"):
        evaluate(world, stored, data={"component": "mlp"})


def test_quantised_weights_can_be_measured(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.models.model._quantisation", lambda model: "bitsandbytes")
    assert rows_of(evaluate(world), "identity")
    with pytest.raises(ValueError, match=r"gradients can pass.*quantised \(bitsandbytes\)"):
        train(world)
