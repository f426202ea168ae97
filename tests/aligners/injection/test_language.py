from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import CLOSED_FORMS
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.reports.runs.injection import report
from tests.aligners.injection.test_injecting import evaluate, fit
from tests.runs import activations, quiet_trainer
from tests.stitches import evaluate as stitch
from tests.stitches import masking_folder, rows_of
from tests.tiny import WORDS, tiny_folder, tiny_tokenizer
from tests.world import TEST_TEXTS, World, sentences, write_texts

SITES = ["1:2", 3]
MAPS: dict[str, Any] = {"linear": Linear, "inn": partial(INN, couplings=2, hidden=8)}
BEHAVIOUR = (
    "loss", "penalty", "penalty_low", "penalty_high", "accuracy", "accuracy_low", "accuracy_penalty", "perplexity",
    "bits_per_byte", "agreement",
)  # fmt: skip


def folders(folder: Path, task: str) -> list[str]:
    if task == "masked":
        return [masking_folder(folder / str(seed), seed=seed) for seed in (0, 1)]
    return [str(tiny_folder(folder / str(seed), "gpt2", seed=seed, task="causal")) for seed in (0, 1)]


def measure(world: World, models: list[str], folder: Path, **options: Any) -> InjectionEvaluation:
    """Fit on some texts and inject, in both directions."""
    named = {"model_x": models[0], "model_y": models[1], "sites": SITES, **options}
    return evaluate(world, [fit(world, folder, MAPS, **named)], closed_form=["procrustes"], both=True, **named)


@pytest.mark.parametrize("task", ["causal", "packed", "masked"])
def test_injection_costs_a_language_model_what_stitching_says(world: World, tmp_path: Path, task: str) -> None:
    models = folders(tmp_path, task)
    packed: dict[str, Any] = {"packed": True, "max_length": 20} if task == "packed" else {}
    module = measure(world, models, tmp_path / "fit", batch_size=8, **packed)
    assert module.meta["not_injected"] == {}
    assert (module.meta["task"], module.meta["unit"]) == ("masked" if task == "masked" else "causal", "token")
    data = {"models": models, "sites": SITES, "batch_size": 5, **packed}
    stitched = stitch(world, None, tmp_path / "fit" / "aligners.ckpt", "different", data=data)
    for direction, source, target in (("forward", *models), ("backward", *models[::-1])):
        mine = [row for row in module.rows if row["direction"] == direction]
        for name, other in (("native_y", "native"), ("identity", "identity"), ("linear", "linear"), ("inn", "inn")):
            if (direction, name) == ("backward", "inn"):
                continue  # stitching has no inverses
            found = [row for row in mine if row["method"] == name]
            expected = rows_of(stitched, other, model_x=source, model_y=target)
            assert len(found) == len(expected) > 0
            for a, b in zip(found, expected, strict=True):
                assert (a["site_x"], a["site_y"], a["n_units"]) == (b["site_x"], b["site_y"], b["n_units"])
                for column in BEHAVIOUR:
                    close = None if b[column] is None else pytest.approx(b[column], rel=1e-6, abs=1e-6)
                    assert a[column] == close, (name, column)


def test_the_floor_of_a_language_model_is_how_often_tokens_come(world: World, tmp_path: Path) -> None:
    models = folders(tmp_path, "causal")
    known = tiny_tokenizer().get_vocab()
    last = max((word for word in WORDS), key=lambda word: known[word])  # no fitting text has it, so its count is 0
    texts = [text for text in sentences(200)[TEST_TEXTS:] if last not in text.split()]
    world = world._replace(fit=write_texts(tmp_path / "fit.csv", texts))
    module = measure(world, models, tmp_path / "fit")
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    vocabulary = data.frozen[1].model.config.vocab_size
    fitted = torch.cat([data.split("fit")[[n]].inputs_x["input_ids"][0] for n in range(len(data.split("fit")))])
    shares = ((fitted.bincount(minlength=vocabulary) + 1).double() / (len(fitted) + vocabulary)).log()
    asked = torch.cat([data.split("test")[[n]].inputs_x["input_ids"][0, 1:] for n in range(TEST_TEXTS)])
    (floor,) = (row for row in module.rows if row["method"] == "unigram" and row["direction"] == "forward")
    assert floor["role"] == "floor"
    assert floor["loss"] == pytest.approx(-shares[asked].mean().item(), rel=1e-5)
    assert floor["accuracy"] == pytest.approx((asked == shares.argmax()).double().mean().item())
    (native,) = (row for row in module.rows if row["method"] == "native_y" and row["direction"] == "forward")
    assert floor["penalty"] == pytest.approx(floor["loss"] - native["loss"])


def test_the_share_of_masked_tokens_is_an_option(world: World, tmp_path: Path) -> None:
    models = folders(tmp_path, "masked")
    stored = fit(world, tmp_path / "fit", {"linear": Linear}, model_x=models[0], model_y=models[1], sites=[3])
    counts = {}
    for share in (0.15, 0.5):
        module = InjectionEvaluation([stored], [], masked_share=share)
        data = activations(world, model_x=models[0], model_y=models[1], sites=[3])
        quiet_trainer().test(module, datamodule=data, verbose=False)
        counts[share] = module.rows[0]["n_units"]
        assert module.meta["masked_share"] == share
    assert counts[0.5] > 2 * counts[0.15]


def test_a_model_that_sees_what_is_asked_is_not_injected(world: World, tmp_path: Path) -> None:
    causal = folders(tmp_path / "causal", "causal")[0]
    module = measure(world, [world.model_x, causal], tmp_path / "fit")
    assert "sees the whole text" in module.meta["not_injected"]["forward"]
    assert "backward" not in module.meta["not_injected"]  # a classifier of whole texts may be told by a causal model


def test_the_report_says_what_injection_costs(world: World, tmp_path: Path) -> None:
    module = measure(world, folders(tmp_path, "causal"), tmp_path / "fit")
    made = report(module.meta, module.rows)
    assert {"penalty", "fvu", "accuracy"} <= set(made.figures)
    said = " ".join(made.sentences)
    assert "nats a token on its own" in said
    assert "as they are cost" in said
    for draw in made.figures.values():
        draw()
    assert set(CLOSED_FORMS) & {row["method"] for row in module.rows} == {"linear", "procrustes"}
