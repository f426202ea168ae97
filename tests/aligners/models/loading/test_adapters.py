"""Adapters of peft on their bases."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tests.tiny import TEXTS, tiny_folder, tiny_model, tiny_tokenizer, tokenised
from torch import Tensor
from transformers import LlamaForCausalLM

from aligners.datamodules.frozen_models import FrozenModels
from aligners.errors import UserError
from aligners.models import FrozenModel, load_frozen
from aligners.models.classifiers import new_classifier
from aligners.models.loading.known import KnownModels, SleepingModel

LAYERS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"], "bert": ["query", "dense"]}


def put(folder: Path, base: Path, model: Any, config: PeftConfig, seed: int = 5) -> tuple[Path, Tensor | None]:
    """Save a random adapter on a model, and return what the model then answers."""
    torch.manual_seed(seed)
    adapted: PeftModel = get_peft_model(model, config).eval()
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.5 if "lora" in name else 0.3)
    adapted.save_pretrained(folder)
    edit(folder, base_model_name_or_path=str(base))
    with torch.no_grad():
        return folder, getattr(adapted(**tokenised()), "logits", None)


def edit(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def lora(architecture: str, task: str | None, **options: Any) -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=8, target_modules=LAYERS[architecture], task_type=task, **options)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path / "base", "llama", task="causal")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return put(tmp_path / "lora", base, tiny_model("llama", task="causal"), lora("llama", "CAUSAL_LM"))[0]


def within(frozen: FrozenModel, expected: Tensor, tolerance: float) -> None:
    inputs = tokenised()
    frozen.self_test(inputs)
    real = inputs["attention_mask"].bool() if expected.ndim == 3 else slice(None)
    torch.testing.assert_close(frozen.logits(inputs)[real], expected[real], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("merge", [None, True, False])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_an_adapter_of_a_language_model_is_merged_or_not(architecture: str, merge: bool | None, tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", architecture, task="causal")
    model = tiny_model(architecture, task="causal")
    folder, expected = put(tmp_path / "lora", base, model, lora(architecture, "CAUSAL_LM", fan_in_fan_out=None))
    frozen = load_frozen(folder, merge_adapters=merge)
    within(frozen, expected, 1e-4 if merge is not False else 1e-6)
    assert type(frozen.model) is type(model)
    for component in ("attention", "mlp"):
        frozen.self_test(tokenised(), component)
    names = set(frozen.model.state_dict())
    assert any("lora" in name for name in names) == (merge is False)
    assert merge is False or names == set(load_frozen(base).model.state_dict())
    assert (frozen.task, frozen.depth, frozen.name) == ("causal", 3, str(folder))
    assert len(frozen.tokenizer) == len(tiny_tokenizer())  # that of the base
    assert not any("lora" in name for name in frozen.untrained(0).model.state_dict())


@pytest.mark.parametrize("merge", [None, False])
@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_an_adapter_may_bring_a_classification_head(architecture: str, merge: bool | None, tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", architecture, task={"llama": "causal", "bert": "masked"}[architecture])
    model = tiny_model(architecture, n_labels=3)
    folder, expected = put(tmp_path / "lora", base, model, lora(architecture, "SEQ_CLS"))
    if architecture == "bert":  # from the same seed, yet not the same weights: those below the head are the base's
        whole = type(model).from_pretrained(base, num_labels=3)
        folder, expected = put(
            tmp_path / "lora", base, whole, lora(architecture, "SEQ_CLS", modules_to_save=["pooler"])
        )
    frozen = load_frozen(folder, merge_adapters=merge)
    assert (frozen.task, frozen.n_labels, frozen.label_names) == (
        "classification",
        3,
        ["LABEL_0", "LABEL_1", "LABEL_2"],
    )
    if architecture == "bert":
        within(frozen, expected, 1e-4)
    frozen.self_test(tokenised())
    assert not [name for name in frozen.model.state_dict() if "modules_to_save" in name or "original" in name]
    assert load_frozen(folder, merge_adapters=merge).fingerprint == frozen.fingerprint
    with frozen.fresh_head(3):
        assert frozen.logits(tokenised()).shape == (len(TEXTS), 3)


def test_an_adapter_of_features_wants_no_head(tmp_path: Path) -> None:
    base = tiny_folder(tmp_path / "base", "bert", task="masked")
    config = lora("bert", "FEATURE_EXTRACTION")  # on the pooler too, which a bare encoder does not have here
    frozen = load_frozen(put(tmp_path / "lora", base, tiny_model("bert", n_labels=None), config)[0])
    assert (frozen.task, type(frozen.model).__name__) == (None, "BertModel")
    assert not torch.equal(*(each.front(tokenised(), [3])[0] for each in (frozen, load_frozen(base))))


def test_what_an_adapter_is_put_on_decides_its_fingerprint(base: Path, adapter: Path, tmp_path: Path) -> None:
    found = {load_frozen(base).fingerprint}
    for merge in (True, False):
        found.add(load_frozen(adapter, merge_adapters=merge).fingerprint)
    edit(adapter, lora_alpha=4)
    for merge in (True, False):
        found.add(load_frozen(adapter, merge_adapters=merge).fingerprint)
    tiny_folder(base, "llama", task="causal", seed=1)
    for merge in (True, False):
        found.add(load_frozen(adapter, merge_adapters=merge).fingerprint)
    assert len(found) == 7


def test_known_models_look_at_the_files_of_the_adapter_and_of_its_base(
    base: Path, adapter: Path, tmp_path: Path
) -> None:
    known = KnownModels(tmp_path / "known")

    def slept(merge: bool | None = None) -> bool:
        frozen = load_frozen(adapter, known=known, merge_adapters=merge)
        known.save()
        fresh = load_frozen(adapter, merge_adapters=merge)
        assert frozen.fingerprint == fresh.fingerprint
        assert torch.equal(frozen.logits(tokenised()), fresh.logits(tokenised()))
        return isinstance(frozen, SleepingModel)

    assert [slept(), slept(), slept(False), slept(False)] == [False, True, False, True]
    edit(adapter, lora_alpha=4)
    assert not slept()
    file = adapter / "adapter_model.safetensors"
    save_file({name: -weight for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    edit(adapter, lora_alpha=8)
    assert not slept()
    tiny_folder(base, "llama", task="causal", seed=1)
    assert [slept(), slept()] == [False, True]


def test_half_precision_keeps_adapters_apart(adapter: Path) -> None:
    frozen = load_frozen(adapter, dtype="bfloat16")
    assert any("lora" in name for name in frozen.model.state_dict())
    assert {weight.dtype for weight in frozen.model.parameters()} == {torch.bfloat16}
    frozen.self_test(tokenised())


def test_merging_leaves_a_weight_alone_that_another_layer_shares(tmp_path: Path) -> None:
    model = tiny_model("llama", task="causal", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
    folder, expected = put(tmp_path / "lora", tmp_path / "base", model, config)
    file = folder / "adapter_model.safetensors"  # without what today's peft adds for such layers
    save_file({n: w for n, w in load_file(file).items() if "lora" in n}, file, metadata={"format": "pt"})
    frozen = load_frozen(folder)
    within(frozen, expected, 1e-4)
    assert torch.equal(frozen.front(tokenised(), [0])[0], load_frozen(tmp_path / "base").front(tokenised(), [0])[0])
    frozen.model.save_pretrained(tmp_path / "merged")
    within(load_frozen(tmp_path / "merged", tokenizer=False), expected, 1e-4)


def test_models_under_adapters_share_the_weights_of_their_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    other = put(tmp_path / "other", base, tiny_model("llama", task="causal"), lora("llama", "CAUSAL_LM"), 6)[0]
    for names in ([base, adapter, other], [other, adapter, base]):
        named = [(str(name), None) for name in names]
        alone = {name: load_frozen(name, merge_adapters=False).logits(tokenised()) for name, _ in named}
        models = FrozenModels(named, None, lambda: None, 8, merge_adapters=False)  # type: ignore[arg-type,return-value]
        weights = [{w.data_ptr(): w.nbytes for w in frozen.model.parameters()} for frozen in models.loaded]
        together = sum({place: size for one in weights for place, size in one.items()}.values())
        lora_bytes = models.loaded[1].nbytes - load_frozen(base).nbytes
        assert together == load_frozen(base).nbytes + 2 * lora_bytes
        models.place("cpu", {1})
        for (name, _), frozen in zip(named, models.loaded, strict=True):
            frozen.self_test(tokenised())
            assert torch.equal(frozen.logits(tokenised()), alone[name])


def test_a_tokenizer_beside_the_adapter_comes_first(adapter: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(adapter)
    assert load_frozen(adapter).tokenizer.chat_template == "{{ messages }}"


def test_relative_bases_lie_here_or_beside_the_adapter(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_frozen(adapter).fingerprint
    monkeypatch.chdir(tmp_path)
    for name in ("base", "../base", "./base"):
        edit(adapter, base_model_name_or_path=name)
        assert load_frozen(adapter).fingerprint == expected
    for name, says in {
        "../gone": "neither a folder here nor a name on the Hub. Correct base_model",
        None: "but got ''",
        "owner/gone": r"base of the adapter .*'owner/gone', cannot be read.*reached",
        str(adapter.parent / "known"): "neither a folder",
    }.items():
        edit(adapter, base_model_name_or_path=name)
        with pytest.raises(UserError, match=says):
            load_frozen(adapter)


def test_adapters_that_do_not_fit_are_refused(base: Path, adapter: Path, tmp_path: Path) -> None:
    narrow = tiny_folder(tmp_path / "narrow", "llama", task="causal", width=8)
    edit(adapter, base_model_name_or_path=str(narrow))
    with pytest.raises(UserError, match=r"fit its base, .*narrow', but they differ in .*lora.*other weights"):
        load_frozen(adapter)
    edit(adapter, base_model_name_or_path=str(base))
    file = adapter / "adapter_model.safetensors"
    save_file({n: w for n, w in load_file(file).items() if "layers.1" not in n}, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="differ in"):
        load_frozen(adapter)
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    soft, _ = put(tmp_path / "prompt", base, tiny_model("llama", task="causal"), prompt)
    with pytest.raises(UserError, match=r"prompt' cannot be put on"):
        load_frozen(soft)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        load_frozen(adapter)


def test_an_adapter_without_weights_or_with_those_that_could_run_code_is_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(UserError, match=r"cannot be (read|put on).*download or save the adapter again"):
        load_frozen(adapter)
    file.unlink()
    with pytest.raises(UserError, match=r"in adapter_model\.safetensors, but there (are none|is no such file)\."):
        load_frozen(adapter)
    (adapter / "adapter_model.bin").touch()
    with pytest.raises(UserError, match=r"but got adapter_model\.bin only, which is not read"):
        load_frozen(adapter)


def test_a_model_and_an_adapter_in_one_folder_are_refused(base: Path, adapter: Path) -> None:
    (base / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(UserError, match=r"a model or an adapter in .*, but got both"):
        load_frozen(base)


def test_adapters_need_peft(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.errors.find_spec", lambda name: None if name == "peft" else True)
    with pytest.raises(UserError, match=r"adapter .*lora' needs the package peft.*aligners\[formats\]"):
        load_frozen(adapter)


def test_a_classifier_can_be_trained_from_a_merged_adapter(adapter: Path) -> None:
    model, _ = new_classifier(adapter, 2, 0)
    assert not any("lora" in name for name in model.state_dict())
    merged = load_frozen(adapter, merge_adapters=True).model.state_dict()
    body = {name: weight for name, weight in model.state_dict().items() if name.startswith("model.")}
    assert all(torch.equal(weight, merged[name]) for name, weight in body.items())
    assert all(weight.requires_grad for weight in model.parameters())


WITH_TOKENS: dict[str, dict[str, Any]] = {
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "kept beside": {},
}


def with_new_tokens(folder: Path, tied: bool, **options: Any) -> tuple[Path, Tensor]:
    """Save an adapter on a model that was given two more tokens; and what the model answers to a text with them."""
    base = tiny_folder(folder / "base", "llama", task="causal", tie_word_embeddings=tied)
    tokenizer, model = tiny_tokenizer(), LlamaForCausalLM.from_pretrained(base)
    tokenizer.add_tokens(["new", "other"])
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    config = LoraConfig(r=2, **{"target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | options)
    put(folder / "lora", base, model, config)
    tokenizer.save_pretrained(folder / "lora")
    with torch.no_grad():
        return folder / "lora", model(**NEW_TOKENS).logits  # peft has put the adapter into the model itself


NEW_TOKENS = {"input_ids": torch.tensor([[5, 40, 6, 39, 7]])}


@pytest.mark.parametrize("merge", [None, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kept", WITH_TOKENS)
def test_an_adapter_may_bring_embeddings_of_new_tokens(
    tmp_path: Path, kept: str, tied: bool, merge: bool | None
) -> None:
    folder, expected = with_new_tokens(tmp_path, tied, **WITH_TOKENS[kept])
    frozen = load_frozen(folder, merge_adapters=merge)
    assert (frozen.vocabulary, len(frozen.tokenizer)) == (41, 41)
    torch.testing.assert_close(frozen.logits(NEW_TOKENS), expected, rtol=1e-4, atol=1e-4)
    frozen.self_test(NEW_TOKENS)
    assert load_frozen(folder, merge_adapters=merge).fingerprint == frozen.fingerprint


def test_new_tokens_whose_output_embeddings_were_not_kept_are_refused(tmp_path: Path) -> None:
    folder, _ = with_new_tokens(tmp_path, False, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(UserError, match="differ in the output embeddings of its new tokens and 0 other weights"):
        load_frozen(folder)
    folder, expected = with_new_tokens(tmp_path / "tied", True, target_modules=["q_proj", "embed_tokens"])
    torch.testing.assert_close(load_frozen(folder).logits(NEW_TOKENS), expected, rtol=1e-4, atol=1e-4)
