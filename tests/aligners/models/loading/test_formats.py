"""GGUF files, shards, folders and revisions of repositories."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from huggingface_hub import constants
from tests.tiny import TEXTS, tiny_folder, tiny_frozen, tiny_model, tokenised
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.errors import UserError
from aligners.models import load_frozen
from aligners.models.loading.adapters import located
from aligners.models.loading.known import KnownModels, SleepingModel
from aligners.models.tokenizers import byte_pairs

WIDTH = 64  # rows of blocks have 32 values
NAMES = {  # of llama's weights in a GGUF file
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def packed(name: str, weight: torch.Tensor, heads: dict[str, int]) -> tuple[str, torch.Tensor]:
    """The name of a weight in a GGUF file, and its values in the order of llama.cpp."""
    of = name.removesuffix(".weight")
    if of in WHOLE:
        return WHOLE[of], weight
    number, place = of.removeprefix("model.layers.").split(".", 1)
    if place in heads:
        weight = weight.reshape(heads[place], 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return f"blk.{number}.{NAMES[place]}", weight


def write_gguf(path: Path, kind: Kind = Kind.F32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Write a tiny llama, and return it with the weights that are in the file, and its tokenizer."""
    tokenizer = byte_pairs(list(TEXTS), 300, 64)
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = tiny_model(
        "llama", width=WIDTH, task="causal", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **ends
    )
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(tokenizer))
    writer.add_tokenizer_model("gpt2")
    numbered = {number: token for token, number in tokenizer.get_vocab().items()}
    writer.add_token_list([numbered[i] for i in range(len(tokenizer))])
    writer.add_token_types([3 if i == tokenizer.eos_token_id else 1 for i in range(len(tokenizer))])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(tokenizer.eos_token_id)
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        short, values = packed(name, weight, heads)
        used = kind if "mlp" in name else Kind.F32
        blocks = gguf.quantize(values.numpy(), used)
        weight.copy_(torch.from_numpy(gguf.dequantize(blocks, used)).view_as(weight) if "mlp" in name else weight)
        writer.add_tensor(f"{short}.weight", blocks, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, tokenizer


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_a_gguf_file_is_unpacked_into_a_language_model_with_its_tokenizer(kind: Kind, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    model, tokenizer = write_gguf(path, kind)
    frozen = load_frozen(path)
    assert (frozen.task, frozen.depth, frozen.dtype, frozen.quantised) == ("causal", 3, torch.float32, None)
    read = frozen.tokenizer(list(TEXTS), padding=True, return_tensors="pt")
    assert read["input_ids"].tolist() == tokenizer(list(TEXTS), padding=True)["input_ids"]
    inputs = {name: read[name] for name in ("input_ids", "attention_mask")}
    frozen.self_test(inputs)
    with torch.no_grad():
        expected = model(**inputs).logits
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(frozen.logits(inputs)[real], expected[real], rtol=1e-5, atol=1e-5)
    assert load_frozen(path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_gguf_file_is_known_by_itself(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    write_gguf(tmp_path / "other.gguf", Kind.Q8_0)
    known = KnownModels(tmp_path / "known")
    first = load_frozen(tmp_path / "tiny.gguf", known=known)
    known.save()
    again = load_frozen(tmp_path / "tiny.gguf", known=known)
    assert (type(again), again.fingerprint) == (SleepingModel, first.fingerprint)
    assert torch.equal(again.logits(tokenised()), first.logits(tokenised()))
    assert type(load_frozen(tmp_path / "other.gguf", known=known)) is not SleepingModel


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.999])
def test_a_truncated_gguf_file_is_called_one(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(UserError, match=r"The GGUF file .*tiny\.gguf' is incomplete or damaged, or is none") as found:
        load_frozen(path)
    assert "JSON" not in str(found.value)


def test_a_folder_of_gguf_files_says_which_there_are(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"no config\.json.*Name one of its files: .*a\.gguf, .*b\.gguf\.$"):
        load_frozen(tmp_path)
    with pytest.raises(UserError, match=r"c\.gguf.*OSError"):
        load_frozen(tmp_path / "c.gguf")
    with pytest.raises(UserError, match=r"a\.gguf' is incomplete"):
        load_frozen(tmp_path / "a.gguf")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_needs_packages(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.errors.find_spec", lambda name: None if name == package else True)
    with pytest.raises(UserError, match=rf"GGUF file .*tiny.gguf' needs the package {package},.*'aligners\[formats\]'"):
        load_frozen(tmp_path / "tiny.gguf")


def test_names_are_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "one" / "model").mkdir(parents=True)
    for name, place, inside in (
        ("gpt2", "gpt2", {}),
        ("owner/name", "owner/name", {}),
        ("owner/name/step/10", "owner/name", {"subfolder": "step/10"}),
        ("owner/name/a.gguf", "owner/name", {"gguf_file": "a.gguf"}),
        ("owner/name/sub/a.gguf", "owner/name", {"gguf_file": "sub/a.gguf"}),
        ("runs/one/model", "runs/one/model", {}),
        ("./gone/one/two", "./gone/one/two", {}),
        ("/gone/one/two/a.gguf", "/gone/one/two", {"gguf_file": "a.gguf"}),
        ("a.gguf", ".", {"gguf_file": "a.gguf"}),
    ):
        assert located(name, {"revision": "r"}) == (place, {"revision": "r", **inside})
        of_name = "refs/pr/1" if place.startswith(("gpt2", "owner")) else "r"
        if of_name != "r":
            name += f"@{of_name}"
        assert located(name, {"revision": "r"}) == (place, {"revision": of_name, **inside})
    (tmp_path / "a@b").mkdir()
    assert located("a@b", {"revision": None}) == ("a@b", {"revision": None})


def test_shards_are_read(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    whole = load_frozen(folder)
    tiny_model("bert").save_pretrained(folder, max_shard_size="10KB")
    (folder / "model.safetensors").unlink()
    assert (folder / "model.safetensors.index.json").is_file()
    frozen = load_frozen(folder)
    frozen.self_test(tokenised())
    assert frozen.fingerprint == whole.fingerprint
    next(folder.glob("model-00002-of-*")).unlink()
    with pytest.raises(UserError, match=r"cannot be loaded.*missing, damaged or incomplete"):
        load_frozen(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with a repository of two revisions: another model at `main`, and folders at `old`."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--owner--name"
    for commit, (ref, seed) in {"a" * 40: ("main", 0), "b" * 40: ("old", 1)}.items():
        tiny_folder(place / "snapshots" / commit, seed=seed)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / ref).write_text(commit)
    tiny_folder(place / "snapshots" / ("a" * 40) / "steps" / "10", seed=2)
    write_gguf(place / "snapshots" / ("a" * 40) / "tiny.gguf")
    return place


def test_revisions_folders_and_files_of_a_repository_are_read(hub: Path) -> None:
    expected = {
        ("owner/name", None): 0, ("owner/name", "main"): 0, ("owner/name", "old"): 1, ("owner/name", "b" * 40): 1,
        ("owner/name/steps/10", None): 2, ("owner/name/steps/10", "main"): 2,
    }  # fmt: skip
    known = KnownModels(hub / "known")
    for (name, revision), seed in expected.items():
        frozen = load_frozen(name, revision=revision, known=known)
        frozen.self_test(tokenised())
        saved = {"name": name, "revision": revision, "fingerprint": tiny_frozen(seed=seed).fingerprint}
        assert {key: frozen.identity()[key] for key in saved} == saved
        known.save()
        assert isinstance(load_frozen(name, revision=revision, known=known), SleepingModel)
    assert load_frozen("owner/name@old").fingerprint == tiny_frozen(seed=1).fingerprint
    assert load_frozen("owner/name/steps/10@main").fingerprint == tiny_frozen(seed=2).fingerprint
    assert load_frozen("owner/name/tiny.gguf").task == "causal"
    for name, revision in (("owner/name", "new"), ("owner/name/steps/11", None), ("owner/name/steps/10", "old")):
        with pytest.raises(UserError, match=rf"reached, but got '{name}'"):
            load_frozen(name, revision=revision)
    shutil.rmtree(hub / "snapshots" / ("b" * 40))
    assert load_frozen("owner/name").fingerprint == tiny_frozen().fingerprint
