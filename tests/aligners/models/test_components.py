"""What attention and feed-forward sub-layers add to the residual stream: read, replaced, and what it means."""

from typing import Any

import pytest
import torch
from tests.kinds import AFTER
from tests.tiny import ARCHITECTURES, CLASSIFIERS, LANGUAGE_HEADS, VARIED, tiny_frozen, tiny_model, tokenised
from torch import Tensor, nn

from aligners.models import FrozenModel
from aligners.models.architectures import Architecture, SubLayer, architecture_of

SITES = range(1, 4)
COMPONENTS = ("attention", "mlp")

FORMS = [
    *((name, {}, AFTER.get(name)) for name in ARCHITECTURES),
    ("opt", {"do_layer_norm_before": False}, ("self_attn_layer_norm", "final_layer_norm")),
    ("gpt_neox", {"use_parallel_residual": False}, None),
    ("t5", {"feed_forward_proj": "gated-gelu"}, None),
]


@pytest.mark.parametrize(("architecture", "settings", "norms"), FORMS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_the_sub_layers_make_up_the_stream(
    architecture: str, settings: dict[str, Any], norms: tuple[str, str] | None, side: str
) -> None:
    frozen, inputs = tiny_frozen(architecture, **settings), tokenised(side=side)
    stream, added = frozen.front(inputs, range(4)), [frozen.front(inputs, SITES, c) for c in COMPONENTS]
    real = inputs["attention_mask"].bool()
    for block, x, y, a, m in zip(frozen.blocks, stream[:-1], stream[1:], *added, strict=True):
        first, second = [block.get_submodule(path) for path in norms] if norms else [nn.Identity()] * 2
        torch.testing.assert_close(second(first(x + a) + m)[real], y[real], atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
@pytest.mark.parametrize(("component", "side"), [("attention", "right"), ("mlp", "left")])
def test_injecting_what_was_read_changes_nothing(architecture: str, component: str, side: str) -> None:
    frozen, inputs = tiny_frozen(architecture), tokenised(side=side)
    frozen.self_test(inputs, component)
    native = frozen.logits(inputs)
    for site, states in zip(SITES, frozen.front(inputs, SITES, component), strict=True):
        states.requires_grad_()
        changed = frozen.tail(inputs, site, states.roll(1, 0) + 1, component)
        as_stream = frozen.tail(inputs, site, states)  # there it is something else
        assert not torch.allclose(changed, native, atol=1e-3)
        assert not torch.allclose(as_stream, native, atol=1e-3)
        (gradient,) = torch.autograd.grad(changed.square().sum(), states)
        assert gradient.isfinite().all()
        assert gradient.abs().sum() > 0


@pytest.mark.parametrize(("architecture", "task"), LANGUAGE_HEADS)
def test_language_models_pass_the_self_test(architecture: str, task: str) -> None:
    frozen = tiny_frozen(architecture, task=task)
    low = FrozenModel(tiny_model(architecture, task=task).bfloat16(), name="low")
    for component in ("residual", *COMPONENTS):
        frozen.self_test(tokenised(side="left"), component)
        low.self_test(tokenised(), component)


# Where a plain hook finds the whole sub-layer, beside the last map that the table names.
WHOLE = {
    "albert": ("albert_layers.0.attention.dense", "albert_layers.0.ffn_output"),
    "distilbert": ("attention", "ffn"),
    "modernbert": ("attn", "mlp"),
    "mpnet": ("attention.attn", "output.dense"),
    "opt": ("self_attn", "fc2"),
    "t5": ("layer.0.SelfAttention", "layer.1.DenseReluDense"),
    "xlnet": (None, "ff.layer_2"),  # its attention ends in no module of its own
    "gpt_neox": ("attention", "mlp"),
    **dict.fromkeys(("gemma2", "gemma3_text"), ("post_attention_layernorm", "post_feedforward_layernorm")),
    **dict.fromkeys(("gpt2", "openai-gpt"), ("attn", "mlp")),
    **dict.fromkeys(("llama", "mistral", "phi", "qwen2", "qwen3"), ("self_attn", "mlp")),
    **dict.fromkeys(
        ("bert", "deberta-v2", "electra", "roberta", "xlm-roberta"), ("attention.output.dense", "output.dense")
    ),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reading_is_what_a_plain_hook_sees(architecture: str) -> None:
    """The state before the residual is added, as Brown et al. 2023 (C.2) read their BERTs, is that of `mlp`."""
    frozen, plain = tiny_frozen(architecture), tiny_frozen(architecture)
    inputs = tokenised(side=frozen.architecture.padding)
    for component, path in zip(COMPONENTS, WHOLE[architecture], strict=True):
        seen: list[Tensor] = []
        for block in dict.fromkeys(plain.blocks) if path else ():
            block.get_submodule(path).register_forward_hook(
                lambda part, args, output, seen=seen: seen.append(output if isinstance(output, Tensor) else output[0])
            )
        with torch.no_grad():
            plain.model.base_model.get_submodule(plain.architecture.trunk)(**inputs)
        states = frozen.front(inputs, SITES, component) if path else []
        for found, wanted in zip(states, seen, strict=True):
            turned = wanted.transpose(0, 1) if frozen.architecture.sequence_first else wanted
            assert torch.equal(found, turned.reshape(found.shape))


@pytest.mark.parametrize("architecture", VARIED)
def test_nothing_above_the_deepest_is_run(architecture: str) -> None:
    frozen, inputs, seen = tiny_frozen(architecture), tokenised(), list[nn.Module]()
    for block in set(frozen.blocks):
        block.register_forward_pre_hook(lambda block, args: seen.append(block))
    for component in COMPONENTS:
        expected = frozen.front(inputs, SITES, component)
        for site in SITES:
            seen.clear()
            found = frozen.front(inputs, [site, 1, site], component)
            assert seen == list(frozen.blocks[:site])
            assert torch.equal(found[0], expected[site - 1])
            assert torch.equal(found[1], expected[0])
            assert found[0] is found[2]
            seen.clear()
            frozen.tail(inputs, site, expected[site - 1], component)
            assert seen == list(frozen.blocks)


def test_attention_is_read_before_the_feed_forward_layer_is_run() -> None:
    frozen, inputs = tiny_frozen("llama"), tokenised()
    ran: list[int] = []
    for number, block in enumerate(frozen.blocks, start=1):
        block.mlp.register_forward_pre_hook(lambda part, args, number=number: ran.append(number))
    frozen.front(inputs, [2], "attention")
    assert ran == [1]


def test_self_test_names_the_sub_layer_where_it_fails() -> None:
    frozen, kept = tiny_frozen(), []
    frozen.blocks[0].output.dense.register_forward_hook(lambda part, args, output: kept.append(1))

    def noise(block: nn.Module, args: object, output: Tensor) -> Tensor:
        return output + len(kept)  # another answer at every run

    frozen.blocks[1].register_forward_hook(noise)
    with pytest.raises(RuntimeError, match=r"at the attention of block 1 of tiny-bert changes its logits by"):
        frozen.self_test(tokenised(), "attention")


def test_sub_layers_that_there_are_not_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen, inputs = tiny_frozen(), tokenised()
    states = frozen.front(inputs, [1], "mlp")[0]
    for site in (0, 4):
        with pytest.raises(ValueError, match=rf"`sites` between 1 and 3, but got {site}.*l is what the mlp of block l"):
            frozen.front(inputs, [site], "mlp")
        with pytest.raises(ValueError, match="`site` between 1 and 3"):
            frozen.tail(inputs, site, states, "mlp")
    with pytest.raises(ValueError, match="`component` to be residual, attention or mlp, but got 'head'"):
        frozen.front(inputs, [1], "head")
    other = Architecture("encoder.layer", attention=architecture_of("gpt2").attention)
    monkeypatch.setattr("aligners.models.architectures._ARCHITECTURES", {"bert": other})
    with pytest.raises(ValueError, match=r"known for 'bert' models, but got 'mlp'.*mlp=SubLayer\('path.from.block'\)"):
        tiny_frozen().front(inputs, [1], "mlp")
    with pytest.raises(ValueError, match=r"`path` 'attn.c_proj' of every block, but not every BertLayer has one"):
        tiny_frozen().front(tokenised(), [1], "attention")


@pytest.mark.parametrize(
    ("architecture", "setting", "value", "component", "message"),
    [
        ("albert", "inner_group_num", 2, "attention", "'albert' model with inner_group_num = 2.*to 1"),
        ("bert", "chunk_size_feed_forward", 7, "mlp", "'mlp' of a 'bert' model with chunk_size.* = 7.*to 0"),
    ],
)
def test_a_sub_layer_that_a_block_runs_in_parts_is_refused(
    architecture: str, setting: str, value: int, component: str, message: str
) -> None:
    frozen = tiny_frozen(architecture, **{setting: value})
    frozen.self_test(tokenised())
    with pytest.raises(ValueError, match=message):
        frozen.front(tokenised(), [1], component)


def test_a_module_may_answer_with_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Architecture("layers", causal=True, attention=SubLayer("self_attn"))
    expected = tiny_frozen("llama").front(tokenised(), SITES, "attention")
    monkeypatch.setattr("aligners.models.architectures._ARCHITECTURES", {"llama": other})
    frozen = tiny_frozen("llama")
    frozen.self_test(tokenised(), "attention")
    for found, wanted in zip(frozen.front(tokenised(), SITES, "attention"), expected, strict=True):
        assert torch.equal(found, wanted)
