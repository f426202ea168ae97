"""Models on other devices than their inputs, and blocks on several.

There may be one device only where the tests run. Two things stand for the others. Real hooks of accelerate around real
weights on the CPU show that nothing changes in what is computed. Tensors without values on devices that are only named
show that everything arrives where it is used: torch computes their shapes, and refuses to mix devices as ever.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from tests.tiny import CLASSIFIERS, VARIED, tiny_folder, tiny_frozen, tiny_model, tiny_tokenizer, tokenised
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BitsAndBytesConfig, PreTrainedModel

from aligners.models import FrozenModel, load_frozen
from aligners.models.hooks import blocks_of, inject

SITES = range(4)
FIRST, SECOND, ELSEWHERE = "lazy:0", "lazy:1", "lazy:2"  # a device type that every build of torch can name


def device_map(model: PreTrainedModel, later: str = "cpu") -> dict[str, str]:
    """Every block by itself, those from the second on `later`; all else on the CPU."""
    blocks = blocks_of(model)
    paths = {name: blocks.order.index([*blocks.listed].index(part)) for name, part in model.named_modules()
             if any(part is block for block in blocks.listed)}  # fmt: skip
    found: dict[str, str] = {}

    def cover(name: str, part: nn.Module) -> None:
        if name in paths:
            found[name] = later if paths[name] else "cpu"
        elif not name or any(path.startswith(f"{name}.") for path in paths):
            for child, inner in part.named_children():
                cover(f"{name}.{child}".lstrip("."), inner)
            found.update({f"{name}.{weight}": "cpu" for weight, _ in part.named_parameters(recurse=False)})
        else:
            found[name] = "cpu"

    cover("", model)
    return found


def sharded(architecture: str, **options: Any) -> FrozenModel:
    model = tiny_model(architecture, **options)
    keys = model._skip_keys_device_placement
    dispatch_model(model, device_map(model), skip_keys=keys, force_hooks=True)
    return FrozenModel(model, tiny_tokenizer(), name=f"tiny-{architecture}")


@pytest.mark.filterwarnings("ignore:The following device_map keys")
@pytest.mark.parametrize("architecture", VARIED)
def test_hooks_of_accelerate_change_nothing(architecture: str) -> None:
    parted, whole, inputs = sharded(architecture), tiny_frozen(architecture), tokenised(side="left")
    assert (parted.sharded, whole.sharded) == (True, False)
    with pytest.raises(ValueError, match=rf"one device to move to `device` cpu, but got tiny-{architecture}.*keeps"):
        parted.to("cpu")
    for component in ("residual", "attention", "mlp"):
        parted.self_test(inputs, component)
    assert torch.equal(parted.logits(inputs), whole.logits(inputs))
    for found, wanted in zip(parted.front(inputs, SITES), whole.front(inputs, SITES), strict=True):
        assert torch.equal(found, wanted)
    assert parted.fingerprint == whole.fingerprint


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_fresh_weights_and_attention_of_a_sharded_model(architecture: str) -> None:
    parted, whole, inputs = sharded(architecture), tiny_frozen(architecture), tokenised()
    native = parted.logits(inputs)
    with parted.fresh_head(1), whole.fresh_head(1):
        assert torch.equal(parted.logits(inputs), whole.logits(inputs))
        assert not torch.equal(parted.logits(inputs), native)
    assert torch.equal(parted.logits(inputs), native)
    twin, other = parted.untrained(3), whole.untrained(3)
    assert twin.sharded
    assert twin.fingerprint == other.fingerprint != parted.fingerprint
    assert torch.equal(twin.front(inputs, [2])[0], other.front(inputs, [2])[0])
    for model in (parted, whole):
        model.model.set_attn_implementation("eager")
    for found, wanted in zip(parted.attention(inputs)[0], whole.attention(inputs)[0], strict=True):
        assert torch.equal(found, wanted)


@contextmanager
def pretended(frozen: FrozenModel, later: str = SECOND, first: str = FIRST) -> Iterator[dict[str, Tensor]]:
    """Within it, blocks from the second on are on `later`, all else is on `first`, and the inputs are elsewhere."""
    moved = {id(part) for block in set(frozen.blocks[1:]) - {frozen.blocks[0]} for part in block.modules()}
    mode = FakeTensorMode()
    pretend: dict[int, Tensor] = {}  # a weight that two modules share is one
    for part in frozen.model.modules():
        device = later if id(part) in moved else first
        if "_hf_hook" in vars(part):
            part._hf_hook.execution_device = device
        for held in (part._parameters, part._buffers):
            for name, weight in held.items():
                if weight is not None:
                    without_values = mode.from_tensor(weight.detach())
                    with mode:
                        held[name] = pretend.setdefault(id(weight), without_values.to(device))
    with mode:
        ids = torch.zeros(5, 14, dtype=torch.long, device=ELSEWHERE)
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_pretended_devices_do_not_mix() -> None:
    frozen = tiny_frozen("bert")
    with pretended(frozen) as inputs, pytest.raises(RuntimeError, match="at least two devices, lazy:0 and lazy:1"):
        frozen.front(inputs, [2])


@pytest.mark.filterwarnings("ignore:The following device_map keys")
@pytest.mark.parametrize("architecture", VARIED)
def test_everything_arrives_where_it_is_used(architecture: str) -> None:
    frozen, home = sharded(architecture), torch.device(ELSEWHERE)
    frozen.model.set_attn_implementation("eager")
    ran: list[torch.device] = []
    for block in set(frozen.blocks):
        block.register_forward_hook(
            lambda block, args, output: ran.append((output if isinstance(output, Tensor) else output[0]).device)
        )
    places = [FIRST] * 3 if len(set(frozen.blocks)) == 1 else [FIRST, SECOND, SECOND]
    with pretended(frozen) as inputs:
        assert frozen.device == torch.device(FIRST)
        for component, sites in (("residual", [0, 2]), ("attention", [3]), ("mlp", [2])):
            for site, states in zip(sites, frozen.front(inputs, sites, component), strict=True):
                assert (states.device, states.shape) == (home, (5, 14, 16))
                ran.clear()
                assert frozen.tail(inputs, site, states.to("lazy:3"), component).device == home
                assert ran == [torch.device(place) for place in places[site if component == "residual" else 0 :]]
        weights, states = frozen.attention(inputs, [1])
        assert {tensor.device for tensor in (frozen.logits(inputs), *weights, *states)} == {home}


def test_t5_encoder_hands_its_position_bias_to_another_device() -> None:
    frozen = sharded("t5", n_labels=None)
    with pretended(frozen) as inputs:
        for site, states in enumerate(frozen.front(inputs, SITES)):
            with inject(frozen.blocks, frozen.architecture, site, states):
                frozen.model(**inputs)


def test_autocast_is_that_of_the_models_device() -> None:
    frozen = tiny_frozen("bert")
    received: list[torch.dtype] = []
    frozen.blocks[1].register_forward_pre_hook(lambda block, args: received.append(args[0].dtype))
    with pretended(frozen, "cpu", "cpu") as inputs:
        states = torch.zeros(5, 14, 16, dtype=torch.bfloat16, device=ELSEWHERE)
        frozen.tail(inputs, 1, states)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            frozen.tail(inputs, 1, states)
    assert received == [torch.float32, torch.bfloat16]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "model")


@pytest.mark.parametrize("placed", ["auto", "cpu", {"": "cpu"}, {"bert": "cpu", "classifier": "cpu"}])
def test_a_device_map_is_handed_on(folder: Path, placed: Any) -> None:
    frozen = load_frozen(folder, device_map=placed)
    frozen.self_test(tokenised())
    assert frozen.fingerprint == tiny_frozen().fingerprint


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        ({"bert": "cpu", "classifier": "disk"}, "every weight on a device that computes with it, but got disk"),
        ({"bert": "lazy:0", "classifier": "cpu"}, "got cpu beside lazy"),
        ({"": torch.device("meta")}, "got meta"),
        ({"": "gpu7"}, "`device_map` to name devices such as cpu or cuda:1, but got 'gpu7'"),
        ("automatic", "to name devices such as cpu or cuda:1, but got 'automatic'"),
        ({"": "cuda:99"}, r"got 'cuda:99': it has \d+ CUDA devices"),
        ({"bert": "cpu"}, "a place for every weight, but got none for classifier.weight"),
        (
            {"": "lazy:0", "bert.encoder.layer.1.output": "lazy:1"},
            r"splits block 2: attention.self.query.weight is on lazy:0, output.dense.weight on lazy:1",
        ),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused_before_weights_are_read(
    folder: Path, placed: Any, message: str
) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        load_frozen(folder, device_map=placed)


def test_a_device_map_needs_accelerate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.errors.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"`device_map` \('auto'\) needs the package accelerate.*aligners\[sharded\]"):
        load_frozen(folder, device_map="auto")
    load_frozen(folder)


def test_a_split_or_absent_block_is_refused_however_it_came_about() -> None:
    model = tiny_model("bert")
    model.bert.encoder.layer[1].output.to("meta")
    with pytest.raises(ValueError, match=r"got one that leaves bert.encoder.layer.1.output.dense.weight there"):
        FrozenModel(model, name="absent")
    whole = tiny_frozen("bert")
    with pretended(whole):
        weights = whole.model.bert.encoder.layer[1].output.dense._parameters
        weights["bias"] = weights["bias"].to(FIRST)
        with pytest.raises(ValueError, match=r"splits block 2.*output.dense.bias on lazy:0"):
            FrozenModel(whole.model, name="split")


def test_says_how_weights_are_quantised() -> None:
    model = tiny_model("bert")
    assert FrozenModel(model, name="plain").quantised is None
    for config, method in (({"quant_method": "gptq"}, "gptq"), (BitsAndBytesConfig(load_in_4bit=True), "bitsandbytes")):
        model.config.quantization_config = config
        assert FrozenModel(model, name="quantised").quantised == method


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_model_on_gpus_takes_inputs_and_states_of_the_cpu(architecture: str, gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs CUDA devices")
    there, here, inputs = tiny_frozen(architecture), tiny_frozen(architecture), tokenised(side="left")
    if gpus == 1:
        there.to("cuda")
    else:
        model = tiny_model(architecture)
        placed = {name: "cuda:0" if where == "cpu" else where for name, where in device_map(model, "cuda:1").items()}
        dispatch_model(model, placed, skip_keys=model._skip_keys_device_placement)
        there = FrozenModel(model, name="two")
    for component in ("residual", "attention", "mlp"):
        there.self_test(inputs, component)
    torch.testing.assert_close(there.logits(inputs), here.logits(inputs), atol=1e-3, rtol=1e-3)
    states = here.front(inputs, [1])[0].requires_grad_()
    logits = there.tail(inputs, 1, states)
    assert logits.device == torch.device("cpu")
    (gradient,) = torch.autograd.grad(logits.square().sum(), states)
    assert gradient.abs().sum() > 0
    torch.testing.assert_close(logits, here.logits(inputs), atol=1e-3, rtol=1e-3)
