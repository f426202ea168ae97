"""What every family of models must hold, at tiny size: for the tests, and for the record (`website/families.py`)."""

from collections.abc import Callable
from inspect import signature
from tempfile import TemporaryDirectory

import torch
from tests.kinds import AFTER, ALIKE, KINDS
from tests.tiny import TEXTS, kind, reference, tiny_frozen, tokenised
from torch import Tensor

from aligners.models import FrozenModel, load_frozen
from aligners.models.architectures import architecture_of
from aligners.models.classifiers import shortened
from aligners.models.hooks import inject

__all__ = ["CHECKS", "NEEDED", "SDPA", "differences", "heads", "passed"]

SITES = range(4)
COMPONENTS = ("attention", "mlp")
SDPA = 1e-4  # most that sdpa may move a state, of the deviation of all states at its site


def heads(family: str) -> list[str]:
    """What the heads of a family answer, out of classification, masked, causal."""
    return [head for head in (KINDS | ALIKE)[family][1] if head]


def _frozen(family: str, head: str | None = None, **options: object) -> FrozenModel:
    """With that head, or its first; a bare one where there is none."""
    first = head or next(iter(heads(family)), None)
    return tiny_frozen(family, **({"n_labels": None} if first is None else {"task": first}), **options)


def _answer(frozen: FrozenModel, inputs: dict[str, Tensor]) -> Tensor:
    """The logits; of a model that has none what its trunk answers."""
    if frozen.task:
        return frozen.logits(inputs)
    with torch.no_grad():
        return frozen._caller.trunk(**inputs).last_hidden_state


def _injected(frozen: FrozenModel, inputs: dict[str, Tensor], site: int, states: Tensor) -> Tensor:
    if frozen.task:
        return frozen.tail(inputs, site, states)
    with inject(frozen.blocks, frozen.architecture, site, states):
        return frozen._caller.trunk(**inputs).last_hidden_state


def _reading(family: str) -> None:
    frozen, inputs = _frozen(family), tokenised(side=_frozen(family).architecture.padding)
    expected, output = reference(_frozen(family), inputs)
    for found, wanted in zip(frozen.front(inputs, SITES), expected, strict=True):
        assert torch.equal(found, wanted)
    assert frozen.task is None or torch.equal(frozen.logits(inputs), output.logits)


def _injection(family: str) -> None:
    for head in heads(family) or [None]:
        frozen = _frozen(family, head)
        assert frozen.architecture.rereads or frozen.task == head
        inputs = tokenised(side="left" if frozen.task else "right")
        other = {**inputs, "input_ids": inputs["input_ids"].where(inputs["attention_mask"] == 0, 9)}
        expected = _answer(frozen, inputs)
        for site, states in enumerate(frozen.front(inputs, SITES)):
            assert torch.equal(_injected(frozen, other, site, states), expected), f"site {site} of {head}"
            states.requires_grad_()
            changed = _injected(frozen, inputs, site, states.roll(1, 0))
            assert not torch.allclose(changed, expected, atol=1e-2)
            (gradient,) = torch.autograd.grad(changed.square().sum(), states)
            assert gradient.isfinite().all()
            assert gradient.abs().sum() > 0


def _padding(family: str) -> None:
    frozen = _frozen(family)
    alone = [frozen.front(tokenised((text,)), SITES) for text in TEXTS]
    for side in ("right", "left"):
        batch = tokenised(side=side)
        real = batch["attention_mask"].bool()
        batch["input_ids"] = batch["input_ids"].where(real, 7)  # the mask says what is padding
        batch["token_type_ids"] = torch.zeros_like(batch["input_ids"])  # which not every family has
        for site, states in enumerate(frozen.front(batch, SITES)):
            for i, text in enumerate(alone):
                torch.testing.assert_close(
                    states[i][real[i]], text[site][0], atol=1e-5 * float(states.std()), rtol=1e-4
                )


def _direction(family: str) -> None:
    """Those before a token see nothing of it in a causal model, and in no other; nothing is cached."""
    frozen, inputs = _frozen(family), tokenised(TEXTS[1:2])
    received: list[object] = []
    (frozen.model if frozen.task else frozen._caller.trunk).register_forward_hook(
        lambda model, args, output: received.append(output)
    )
    _answer(frozen, inputs)
    assert not any(getattr(received[0], name, None) for name in ("past_key_values", "cache_params"))
    changed = {**inputs, "input_ids": inputs["input_ids"].clone()}
    changed["input_ids"][:, 6:] = 9
    (before,), (after,) = frozen.front(inputs, [3]), frozen.front(changed, [3])
    assert torch.allclose(before[:, :6], after[:, :6], atol=1e-5) is frozen.causal
    assert not torch.allclose(before[:, 6:], after[:, 6:], atol=1e-2)
    assert frozen.causal is frozen.architecture.causal  # in its usual settings


def _bfloat16(family: str) -> None:
    low, inputs = FrozenModel(_frozen(family).model.bfloat16(), name="low"), tokenised()
    expected = _answer(low, inputs)
    for site, states in enumerate(low.front(inputs, SITES)):
        assert torch.equal(_injected(low, inputs, site, states), expected)


def _sub_layers(family: str) -> None:
    frozen, inputs = _frozen(family), tokenised()
    paths = [frozen.architecture.sub_layer(each, frozen.config).path.lower() for each in COMPONENTS]
    assert ["att" in path for path in paths] == [True, False]
    stream, added = frozen.front(inputs, SITES), [frozen.front(inputs, range(1, 4), each) for each in COMPONENTS]
    real = inputs["attention_mask"].bool()
    for block, x, y, attention, mlp in zip(frozen.blocks, stream[:-1], stream[1:], *added, strict=True):
        first, second = [block.get_submodule(path) for path in AFTER.get(family, ())] or [torch.nn.Identity()] * 2
        torch.testing.assert_close(second(first(x + attention) + mlp)[real], y[real], atol=2e-5, rtol=1e-5)
    for component in COMPONENTS if frozen.task else ():
        frozen.self_test(inputs, component)


def _loading(family: str) -> None:
    bare = architecture_of(family).bare
    pooling = signature(kind(family, None)).parameters.get("add_pooling_layer")
    assert bool(bare) is (pooling is not None and pooling.default is True)
    with TemporaryDirectory() as folder:
        for head in [*heads(family)[-1:], *([None] if bare or not heads(family) else [])]:
            saved = tiny_frozen(family, **({"n_labels": None} if head is None else {"task": head}))
            saved.model.save_pretrained(folder)
            found = load_frozen(folder, tokenizer=False)
            assert found.task == saved.task
            torch.testing.assert_close(
                *(each.front(tokenised(), [3])[0] for each in (found, saved)), atol=1e-5, rtol=1e-5
            )
    assert not any("pooler" in name for name, _ in found.model.named_parameters())
    assert found.untrained(1).fingerprint != found.fingerprint
    longest = torch.full((1, found.max_length or 64), 9)
    assert found.front({"input_ids": longest}, [3])[0].isfinite().all()


def _eager(family: str) -> FrozenModel:
    frozen = _frozen(family)
    frozen.model.set_attn_implementation("eager")
    chosen = frozen.model.base_model.config._attn_implementation == "eager"
    return frozen if chosen else _frozen(family, attn_implementation="eager")


def _weights(family: str) -> None:
    frozen = _eager(family)
    for weights in frozen.attention(tokenised())[0]:
        rows = weights.transpose(1, 2)[tokenised()["attention_mask"].bool()].sum(-1)
        assert (rows > 0.1).all()
        assert (rows < 1.001).all()  # less where a head may look at nothing


def _truncation(family: str) -> None:
    model = _frozen(family).model
    short, whole = FrozenModel(shortened(model, 2), name="short"), FrozenModel(model, name="whole")
    inputs = tokenised()
    assert torch.equal(short.logits(inputs), whole.tail(inputs, 3, *whole.front(inputs, [2])))


def differences(frozen: FrozenModel, other: FrozenModel, inputs: dict[str, Tensor]) -> list[float]:
    """At each site the largest difference of two models' states of real tokens, over their deviation."""
    real, sites = inputs["attention_mask"].bool(), range(frozen.depth + 1)
    pairs = zip(frozen.front(inputs, sites), other.front(inputs, sites), strict=True)
    return [float((a - b)[real].abs().max() / b[real].std()) for a, b in pairs]


def _sdpa(family: str) -> None:
    eager, fused = _eager(family), _frozen(family)
    assert fused.model.base_model.config._attn_implementation == "sdpa", "not its default"
    for side in ("right", "left"):
        assert max(differences(fused, eager, tokenised(side=side))) < SDPA


# In the order of the record. Each asserts, or raises what a user would see.
CHECKS: dict[str, Callable[[str], None]] = {
    "reading": _reading,  # states and answers are the plain model's, bit for bit
    "injection": _injection,  # of what was read: the same answers bit for bit, with every head, whatever the text
    "padding": _padding,  # a text has the same states alone and in a batch, padded on either side
    "direction": _direction,
    "bfloat16": _bfloat16,  # injection in half precision
    "loading": _loading,  # with and without a head
    "sub-layers": _sub_layers,  # they make up the stream
    "sdpa": _sdpa,  # against eager attention
    "weights": _weights,  # of attention, in every block
    "truncation": _truncation,  # blocks left out, for good
}
NEEDED = ("reading", "injection", "padding", "direction", "bfloat16", "loading")


def passed(family: str) -> list[str]:
    """The checks that a family passes."""
    return [name for name, check in CHECKS.items() if _passes(check, family)]


def _passes(check: Callable[[str], None], family: str) -> bool:
    try:
        check(family)
    except Exception as error:  # whatever a family lacks, the record lacks
        print(f"{family} does not pass {check.__name__[1:]}: {type(error).__name__} {str(error)[:200]}")
        return False
    return True
