"""States and injection by name, folder or loaded model say what the runs say."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.datamodules.tokens.splitters import byte_level, splitter_folder
from tests.tiny import TEXTS, tiny_model, tiny_tokenizer
from tests.world import World
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from aligners.api import Identity, Linear, inject, load, states
from aligners.errors import UserError
from aligners.models.model import FrozenModel

LABELS = [1, 0, 1, 0, 1]


def test_states_are_those_of_the_model(world: World) -> None:
    frozen = load(world.model_x)
    inputs = frozen.tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    expected = frozen.front(inputs, [2])[0][inputs["attention_mask"].bool()]
    torch.testing.assert_close(states(frozen, TEXTS, 2, batch_size=2), expected)
    loaded = AutoModelForSequenceClassification.from_pretrained(world.model_x)
    pair = loaded, AutoTokenizer.from_pretrained(world.model_x)
    torch.testing.assert_close(states(pair, TEXTS, 2, rows="mean")[2], expected[-3 - 13 - 4 : -3 - 13].mean(0))


def test_states_at_several_sites_are_those_at_each(world: World) -> None:
    several = states(world.model_x, TEXTS, [2, 0])
    for found, site in zip(several, (2, 0), strict=True):
        assert torch.equal(found, states(world.model_x, TEXTS, site))


def test_models_of_other_tokenizers_are_read_word_by_word(world: World, tmp_path: Path) -> None:
    other = splitter_folder(tmp_path, byte_level())
    alone = [states(model, TEXTS, 1, rows="words") for model in (world.model_x, other)]
    special = [flag for text in TEXTS for flag in (True, *[False] * len(text.split()), True)]
    assert torch.equal(alone[0], states(world.model_x, TEXTS, 1)[~torch.tensor(special)])  # its tokens are whole words
    x, y = states([world.model_x, other], TEXTS, 1, rows="words")
    torch.testing.assert_close(x, alone[0])
    torch.testing.assert_close(y, alone[1])
    x, y = states([world.model_x, other], TEXTS, [0, 1], rows="words", max_length=9)
    assert x.shape == y.shape
    assert 5 < x.shape[1] < len(states(world.model_x, TEXTS, 1, rows="words", max_length=9))  # others are cut in Y
    same = states([world.model_x, world.model_x], TEXTS, 1)
    assert torch.equal(same[0], same[1])
    with pytest.raises(ValueError, match="have different tokenizers"):
        states([world.model_x, other], TEXTS, 1)


def test_a_models_own_states_change_nothing(world: World) -> None:
    found = inject(world.model_x, world.model_x, lambda rows: rows, TEXTS, site=1, labels=LABELS, batch_size=2)
    assert (found.penalty, found.agreement, found.n) == (0, 1, 5)
    assert found.accuracy == found.native_accuracy
    frozen = load(world.model_x)
    logits = frozen.logits(frozen.tokenizer(list(TEXTS), padding=True, return_tensors="pt"))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(LABELS))
    assert found.loss == pytest.approx(float(loss), abs=1e-6)


def test_without_labels_only_the_agreement_is_known(world: World) -> None:
    read: list[torch.Tensor] = []
    found = inject(world.model_x, world.model_y, lambda rows: read.append(rows) or 0 * rows, TEXTS, site=(1, 2))
    torch.testing.assert_close(torch.cat(read), states(world.model_x, TEXTS, 1))
    assert found[:5] == (None,) * 5
    assert 0 <= found.agreement <= 1


@pytest.mark.parametrize("family", ["causal", "masked"])
def test_a_language_model_is_asked_for_tokens(family: str, request: pytest.FixtureRequest) -> None:
    model_x, model_y = (load(name) for name in request.getfixturevalue(family))
    x, y = (states(model, TEXTS * 20, 1) for model in (model_x, model_y))
    found = [inject(model_x, model_y, each.fit(x, y), TEXTS, site=1) for each in (Identity(), Linear())]
    assert found[0].n == found[1].n > 0
    assert found[0].loss - found[0].native_loss == found[0].penalty != 0
    assert found[1].agreement > found[0].agreement


def test_what_cannot_be_injected_is_refused(world: World, causal: list[str]) -> None:
    def same(rows: torch.Tensor) -> torch.Tensor:
        return rows

    for said, arguments, options in (
        ("`site` between 0 and 3", (world.model_x, world.model_y, same, TEXTS), {"site": 9}),
        ("a single string", (world.model_x, world.model_y, same, TEXTS[0]), {"site": 1}),
        ("for each of 5 texts", (world.model_x, world.model_y, same, TEXTS), {"site": 1, "labels": [1]}),
        ("rows of shape", (world.model_x, world.model_y, lambda rows: rows[:, :2], TEXTS), {"site": 1}),
        ("it predicts tokens", (causal[0], causal[1], same, TEXTS), {"site": 1, "labels": LABELS}),
        ("its tokenizer beside it", (load(world.model_x).model, world.model_y, same, TEXTS), {"site": 1}),
    ):
        with pytest.raises(ValueError, match=said):
            inject(*arguments, **options)
    with (
        patch.object(FrozenModel, "self_test", side_effect=UserError("differ")),
        pytest.raises(UserError, match="differ"),
    ):
        inject(world.model_x, world.model_y, same, TEXTS, site=1)
    with pytest.raises(ValueError, match="tokens, mean, cls, words"):
        states(world.model_x, TEXTS, 1, rows="sentences")


def wordless(seed: int = 0) -> FrozenModel:
    """A classifier whose tokenizer puts nothing around a text: an empty one has no token."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return load((tiny_model("gpt2", seed=seed), tokenizer))


@pytest.mark.parametrize("rows", ["cls", "mean", "last", "tokens"])
def test_a_text_without_tokens_is_refused(rows: str) -> None:
    model, says = wordless(), "every text to have a token that counts as a row, but text number 1 of the batch has none"
    with pytest.raises(ValueError, match=says):
        states(model, ["film", ""], 1, rows=rows)
    with pytest.raises(ValueError, match=says):
        inject(model, model, lambda rows: rows, ["film", ""], site=1)


def test_states_that_are_not_finite_are_an_error_as_for_injection() -> None:
    model = load((tiny_model("bert"), tiny_tokenizer()))
    model.blocks[1].register_forward_hook(lambda block, args, output: output * float("nan"))
    assert states(model, TEXTS, [0, 1]).isfinite().all()
    with pytest.raises(RuntimeError, match="BertForSequenceClassification gives non-finite states at site 2"):
        states(model, TEXTS, [1, 2])
    with pytest.raises(RuntimeError, match="BertForSequenceClassification gives non-finite logits"):
        inject(model, model, lambda rows: rows, TEXTS, site=1)


def test_a_model_of_another_library_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a model of `transformers`, but got a Linear of torch: .* or its name"):
        load((torch.nn.Linear(2, 2), tiny_tokenizer()))  # type: ignore[arg-type]


class _Bridge:
    """Holds what a TransformerBridge of TransformerLens 4 holds."""

    def __init__(self, *, processed: bool) -> None:
        self.original_model = tiny_model("gpt2", seed=3)
        self.tokenizer = tiny_tokenizer()
        self.compatibility_mode = processed


def test_a_bridge_of_transformer_lens_is_read_through_its_model(caplog: pytest.LogCaptureFixture) -> None:
    bridge = _Bridge(processed=False)
    frozen = load(bridge)  # type: ignore[arg-type]
    assert torch.equal(states(frozen, TEXTS, 1), states((bridge.original_model, bridge.tokenizer), TEXTS, 1))
    assert frozen.cautions == []
    (caution,) = load(_Bridge(processed=True)).cautions  # type: ignore[arg-type]
    assert "are processed by TransformerLens" in caution
    assert caution in caplog.text


def test_a_model_without_one_of_transformers_says_what_to_load() -> None:
    with pytest.raises(ValueError, match="load it as a TransformerBridge"):
        load(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
