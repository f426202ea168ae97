import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy.special import rel_entr
from tests.aligners.injection.test_injecting import evaluate, fit
from tests.aligners.reports.made import printed
from tests.shell import options as shell_options
from tests.stitches import evaluate as stitch
from tests.stitches import rows_of
from tests.tiny import WORDS, tiny_tokenizer, tokenised
from tests.world import TEST_TEXTS, World, read_texts, sentences, write_texts

from aligners.cli.table import evaluate as evaluate_command
from aligners.datamodules.task_targets import mask_tokens
from aligners.fitting.saved_bank import load_bank
from aligners.injection.injecting import InjectionEvaluation
from aligners.maps.inn import INN
from aligners.maps.linear import Linear
from aligners.models.loading.load_models import load_frozen
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import write
from aligners.reports.runs.injection_report import report

SITES = ["1:2", 2]
SPECIAL_TOKENS = {"<s>", "</s>"}
MAPS: dict[str, Any] = {"linear": Linear, "inn": partial(INN, couplings=2, hidden=8)}
BEHAVIOUR = (
    "loss", "penalty", "penalty_low", "penalty_high", "accuracy", "accuracy_low", "accuracy_penalty", "perplexity",
    "bits_per_byte", "agreement",
)  # fmt: skip


def measure(
    world: World, models: list[str], folder: Path, masked_share: float = 0.15, **options: Any
) -> InjectionEvaluation:
    """Fit on some texts and inject, in both directions."""
    named = {"model_x": models[0], "model_y": models[1], "sites": SITES, **options}
    stored = fit(world, folder, MAPS, **named)
    return evaluate(world, [stored], closed_form=["procrustes"], both=True, masked_share=masked_share, **named)


@pytest.mark.parametrize("kind", ["causal", "packed", "masked"])
def test_injection_costs_a_language_model_what_stitching_says(
    world: World, causal: list[str], masked: list[str], tmp_path: Path, kind: str
) -> None:
    models = masked if kind == "masked" else causal
    options: dict[str, Any] = {"packed": {"packed": True, "max_length": 20}, "masked": {"masked_share": 0.5}}
    own = options.get(kind, {})
    module = measure(world, models, tmp_path, batch_size=8, **own)
    assert module.meta["not_injected"] == {}
    assert (module.meta["task"], module.meta["unit"]) == ("masked" if kind == "masked" else "causal", "token")
    assert module.meta["masked_share"] == own.get("masked_share")
    data = {"models": models, "sites": SITES, "batch_size": 5, **own}
    stitched = stitch(world, None, tmp_path / "aligners.safetensors", "different", data=data)
    for direction, source, target in (("forward", *models), ("backward", *models[::-1])):
        mine = [row for row in module.rows if row["direction"] == direction]
        for name, other in (("native_y", "native"), ("identity", "identity"), ("linear", "linear"), ("inn", "inn")):
            if (direction, name) == ("backward", "inn"):
                continue  # stitching has no inverses
            found = [row for row in mine if row["method"] == name]
            expected = rows_of(stitched, other, model_x=source, model_y=target)
            assert found
            for a, b in zip(found, expected, strict=True):
                assert (a["site_x"], a["site_y"], a["n_units"]) == (b["site_x"], b["site_y"], b["n_units"])
                for column in BEHAVIOUR:
                    close = None if b[column] is None else pytest.approx(b[column], rel=1e-6, abs=1e-6)
                    assert a[column] == close, (name, column)


def test_the_floor_of_a_language_model_is_how_often_tokens_come_and_reports_say_what_injection_costs(
    world: World, causal: list[str], tmp_path: Path
) -> None:
    known = tiny_tokenizer().get_vocab()
    last = max(WORDS, key=known.__getitem__)  # no fitting text has it, so its count is 0
    texts = [text for text in sentences(200)[TEST_TEXTS:] if last not in text.split()]
    world = world._replace(fit=write_texts(tmp_path / "fit.csv", texts))
    module = measure(world, causal, tmp_path / "fit")
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
    made = report(module.meta, module.rows)
    assert {"penalty", "fvu", "accuracy"} <= set(made.figures)
    for sentence in ("nats a token with its own states", "as they are raise the loss by"):
        assert sentence in " ".join(made.sentences)
    for draw in made.figures.values():
        draw()


def divergences(world: World, names: list[str], place: int, linear: Any, *, causal: bool) -> list[torch.Tensor]:
    """KL(own ‖ injected) of each held-out text at a site pair, (U,) float64: one by one, of probabilities."""
    x, y = map(load_frozen, names)
    site_x, site_y = [(1, 2), (2, 2)][place]
    found = []
    for text in read_texts(world.test)[0]:
        one = tokenised((text,))
        (rows,) = x.front(one, [site_x])
        with torch.no_grad():
            mapped = linear(rows[0].expand(2, -1, -1))[place]
            logits = y.model(**one).logits, y.tail(one, site_y, mapped[None])
        own, put = (part.double().softmax(-1) for part in logits)
        if causal:  # nothing follows the last token
            own, put = own[:, :-1], put[:, :-1]
        found.append(torch.tensor(rel_entr(own.numpy(), put.numpy()).sum(-1)).flatten())
    return found


@pytest.mark.parametrize("kind", ["causal", "classifier"])
def test_the_divergence_from_a_models_own_answers(world: World, causal: list[str], tmp_path: Path, kind: str) -> None:
    names = causal if kind == "causal" else [world.model_x, world.model_y]
    options: dict[str, Any] = {"model_x": names[0], "model_y": names[1], "sites": SITES}
    stored = fit(world, tmp_path, {"linear": Linear}, **options)
    asked = partial(evaluate, world, [stored], closed_form=[], **options)
    without = asked(batch_size=5)
    module = asked(batch_size=5, kl=True)
    rows = [row for row in module.rows if row["method"] == "linear"]
    for place, row in enumerate(rows):
        each = divergences(world, names, place, stored.maps["0_1"]["linear"], causal=kind == "causal")
        mean = torch.cat(each).mean().item()
        assert mean > 1e-4
        assert row["kl"] == pytest.approx(mean, rel=1e-4)
        of_texts = torch.stack([part.mean() for part in each])
        spread = (of_texts.std() / len(each) ** 0.5).item()
        assert row["kl_low"] < row["kl"] < row["kl_high"]
        assert row["kl_high"] - row["kl_low"] == pytest.approx(3.92 * spread, rel=0.3)
    for before, after in zip(without.rows, module.rows, strict=True):
        assert before["kl"] is None
        assert after["site_x"] is not None or after["kl"] is None
        kept = {name: value for name, value in after.items() if not name.startswith("kl")}
        assert kept == {name: value for name, value in before.items() if not name.startswith("kl")}
    in_one = asked(batch_size=64, kl=True)
    for before, after in zip(module.rows, in_one.rows, strict=True):
        assert after["kl"] == (None if before["kl"] is None else pytest.approx(before["kl"], rel=1e-4, abs=1e-9))
    for made, shown in ((module, 1), (without, 0)):
        written = make_report("injection", made.meta, made.rows)
        write(replace(written, figures={}), tmp_path)
        assert (tmp_path / "report.md").read_text().count("KL(own ‖ injected), nats") == 1
        assert ("KL, nats" in printed(written.screen)) == bool(shown)


def first(output: Any) -> torch.Tensor:
    """The states in what a block returns."""
    return output if torch.is_tensor(output) else output[0]


def read_at(model: Any, site: int, inputs: Any) -> torch.Tensor:
    """A BERT's states after a block, (1, T, d), through a hook."""
    read: list[torch.Tensor] = []
    hook = model.bert.encoder.layer[site - 1].register_forward_hook(lambda *given: read.append(first(given[-1])))
    model(**inputs)
    hook.remove()
    return read[0]


def logits_with(model: Any, site: int, states: torch.Tensor, inputs: Any) -> torch.Tensor:
    """A BERT's logits where a block returns `states` in place of its own, through a hook."""

    def put(_: Any, __: Any, output: Any) -> Any:
        return states if torch.is_tensor(output) else (states, *output[1:])

    hook = model.bert.encoder.layer[site - 1].register_forward_hook(put)
    logits = model(**inputs).logits
    hook.remove()
    return logits


@torch.no_grad()
def masked_divergences(names: list[str], texts: list[str], sites: tuple[int, int], there: Any) -> list[np.ndarray]:
    """KL(own ‖ injected) at each masked token of each text, in nats: float64, text by text, through hooks alone."""
    x, y = (transformers.AutoModelForMaskedLM.from_pretrained(name).double().eval() for name in names)
    tokenizer = transformers.AutoTokenizer.from_pretrained(names[1])
    found = []
    for number, text in enumerate(texts):
        plain = tokenizer([text], return_tensors="pt")
        special = torch.tensor([[token in SPECIAL_TOKENS for token in plain.tokens(0)]])
        kept = {"input_ids": plain["input_ids"], "attention_mask": plain["attention_mask"]}
        inputs, answers = mask_tokens(kept, special, torch.tensor([number]), tokenizer, 0.5, 0, 0)
        mapped = there(read_at(x, sites[0], inputs))
        asked = answers != -100
        own = y(**inputs).logits[asked].softmax(-1)
        put = logits_with(y, sites[1], mapped, inputs)[asked].softmax(-1)
        found.append(rel_entr(own.numpy(), put.numpy()).sum(-1))
    return found


def test_the_divergence_of_masked_tokens_is_that_of_hooks_in_float64(
    world: World, masked: list[str], tmp_path: Path
) -> None:
    options = {
        "data__model_x": masked[0], "data__model_y": masked[1], "data__text__source": world.fit,
        "data__text__held_out": world.test, "data__max_length": 60, "data__sites": SITES, "data__batch_size": 6,
        "masked_share": 0.5, "closed_form": ["linear"], "kl": True, "trainer__accelerator": "cpu",
        "trainer__logger": False, "trainer__enable_progress_bar": False,
    }  # fmt: skip
    evaluate_command(["inject", *shell_options(**options), "--run", str(tmp_path / "run")])
    rows = json.loads((tmp_path / "run" / "report.json").read_text())["rows"]
    fitted = load_bank(tmp_path / "run" / "aligners.safetensors").maps["0_1"]["linear"].double()
    texts = read_texts(world.test)[0]
    for place, sites in enumerate([(1, 2), (2, 2)]):
        for method in ("identity", "linear"):

            def there(states: torch.Tensor, method: str = method, place: int = place) -> torch.Tensor:
                if method == "identity":
                    return states
                return fitted(states[0].expand(2, -1, -1))[place][None]

            each = masked_divergences(masked, texts, sites, there)
            (row,) = (row for row in rows if row["method"] == method and (row["site_x"], row["site_y"]) == sites)
            assert row["n_units"] == sum(map(len, each))
            mean = np.concatenate(each).mean()
            assert mean > 1e-4
            assert row["kl"] == pytest.approx(mean, rel=1e-4)
            assert row["kl_low"] < row["kl"] < row["kl_high"]
            # the ratio's standard error by linearisation, as texts have unequal numbers of masked tokens
            residuals = np.array([part.sum() - mean * len(part) for part in each])
            error = np.sqrt(residuals.var(ddof=1) * len(each)) / row["n_units"]
            assert row["kl_high"] - row["kl_low"] == pytest.approx(3.92 * error, rel=0.3)


def test_a_models_own_states_have_no_divergence(world: World, causal: list[str], tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_x": causal[1], "model_y": causal[1], "sites": [1, 2]}
    module = evaluate(world, [fit(world, tmp_path, {"linear": Linear}, **options)], kl=True, closed_form=[], **options)
    kept = [row for row in module.rows if row["method"] == "identity"]
    assert [row["kl"] for row in kept] == [0, 0]
    assert {row["kl_high"] for row in kept} == {0}


def test_a_model_that_sees_what_is_asked_is_not_injected(world: World, causal: list[str], tmp_path: Path) -> None:
    module = measure(world, [world.model_x, causal[1]], tmp_path)
    assert "sees the whole text" in module.meta["not_injected"]["forward"]
    assert "backward" not in module.meta["not_injected"]  # a classifier of whole texts may be told by a causal model
