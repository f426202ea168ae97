"""Embedding models read as sentence-transformers reads them: against that package, and against plain NumPy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tests.tiny import TEXTS, tiny_folder
from transformers import AutoModel, AutoTokenizer

from aligners.errors import UserError
from aligners.models.sentence_pipeline import OLD_MODES, POOLINGS, SentencePipeline

WIDTH = 16
PROMPTS = {"query": "good film ", "passage": "the story "}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def pipeline(
    folder: Path,
    modes: Any = "mean",
    *,
    architecture: str = "bert",
    dense: int | None = None,
    activation: str = "torch.nn.modules.activation.Tanh",
    normalised: bool = False,
    include_prompt: bool = True,
    old: bool = False,
    residual: bool = False,
    **length: Any,
) -> Path:
    """A pipeline of a tiny random model, in the files of the package's versions before 6 or from 6 on."""
    tiny_folder(folder, architecture, n_labels=None)
    listed = [modes] if isinstance(modes, str) else list(modes)
    pooling: dict[str, Any] = {"include_prompt": include_prompt}
    if old:
        pooling |= {"word_embedding_dimension": WIDTH, **{key: mode in listed for key, mode in OLD_MODES.items()}}
    else:
        pooling |= {"embedding_dimension": WIDTH, "pooling_mode": modes}
    kinds = ["Transformer", "Pooling"]
    write(folder / "1_Pooling" / "config.json", pooling)
    width = WIDTH * len(listed)
    if dense is not None:
        kinds.append("Dense")
        about = {"in_features": width, "out_features": dense, "bias": True, "activation_function": activation}
        write(folder / "2_Dense" / "config.json", about | {"use_residual": residual})
        draw = torch.Generator().manual_seed(1)
        tensors = {"linear.weight": (dense, width), "linear.bias": (dense,)}
        if residual and dense != width:
            tensors["residual.weight"] = (dense, width)
        drawn = {name: torch.randn(*shape, generator=draw) for name, shape in tensors.items()}
        save_file(drawn, folder / "2_Dense" / "model.safetensors")
    if normalised:
        kinds.append("Normalize")
        write(folder / f"{len(kinds) - 1}_Normalize" / "config.json", {})
    modules = []
    for place, kind in enumerate(kinds):
        path = f"{place}_{kind}" if place else ""
        modules.append({"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"})
    write(folder / "modules.json", modules)
    write(folder / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False} | length)
    return folder


def pooled(states: np.ndarray, mode: str) -> np.ndarray:
    """The vector of one text's states (T, d), by the words of the package's documentation."""
    if mode == "cls":
        return states[0]
    if mode == "lasttoken":
        return states[-1]
    if mode == "max":
        return states.max(0)
    if mode == "mean":
        return states.mean(0)
    if mode == "mean_sqrt_len_tokens":
        return states.sum(0) / np.sqrt(len(states))
    return np.average(states, axis=0, weights=np.arange(1, len(states) + 1))


def alone(folder: Path, text: str, most: int = 20) -> np.ndarray:
    """The last states of one text, read without padding, (T, d) float64."""
    model = AutoModel.from_pretrained(folder).eval()
    inputs = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", truncation=True, max_length=most)
    with torch.no_grad():
        return model(**inputs)[0][0].double().numpy()


@pytest.mark.parametrize("mode", POOLINGS)
@pytest.mark.parametrize("old", [True, False])
def test_pools_as_plain_numpy(tmp_path: Path, mode: str, old: bool) -> None:
    folder = pipeline(tmp_path / "model", mode, old=old)
    found = SentencePipeline(str(folder)).encode(TEXTS, batch_size=2)
    expected = np.stack([pooled(alone(folder, text), mode) for text in TEXTS])
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_dense_activation_residual_and_length(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "model", ["cls", "mean"], dense=8, normalised=True, residual=True)
    found = SentencePipeline(str(folder)).encode(TEXTS)
    layer = load_file(folder / "2_Dense" / "model.safetensors")
    for row, text in zip(found, TEXTS, strict=True):
        states = alone(folder, text)
        x = np.concatenate([pooled(states, "cls"), pooled(states, "mean")])
        y = np.tanh(layer["linear.weight"] @ x + layer["linear.bias"]) + layer["residual.weight"] @ x
        np.testing.assert_allclose(row, y / np.linalg.norm(y), atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    **{mode: {"modes": mode} for mode in POOLINGS},
    "two modes, dense": {"modes": ["cls", "max"], "dense": 8},
    "no activation": {"dense": 8, "activation": "torch.nn.modules.linear.Identity", "normalised": True},
    "residual": {"dense": WIDTH, "residual": True},
    "old files": {"modes": ["mean", "cls"], "old": True, "normalised": True},
    "prompt left out": {"include_prompt": False},
    "prompt left out, weighted": {"modes": "weightedmean", "include_prompt": False},
    "cut": {"max_seq_length": 6},
    "decoder": {"modes": "lasttoken", "architecture": "gpt2"},
    "mpnet": {"architecture": "mpnet", "normalised": True},
}


@pytest.mark.parametrize("name", CASES)
def test_vectors_are_those_of_the_package(tmp_path: Path, name: str) -> None:
    package = pytest.importorskip("sentence_transformers")
    folder = pipeline(tmp_path / "model", **CASES[name])
    theirs = package.SentenceTransformer(str(folder), device="cpu")
    ours = SentencePipeline(str(folder))
    texts = [*TEXTS, "  good   film", "good " * 50]
    assert ours.max_tokens == theirs.max_seq_length
    np.testing.assert_allclose(ours.encode(texts, batch_size=3), theirs.encode(texts), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.encode(texts, "query"), theirs.encode_query(texts), atol=1e-5)
    # `encode_document` of version 6 never gets to "passage", as its own default for "document" stands before it
    expected = theirs.encode(texts, prompt_name="passage")
    np.testing.assert_allclose(ours.encode(texts, "document"), expected, atol=1e-5)


def test_a_model_without_modules_is_pooled_by_the_mean_and_says_so(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "model", "bert", n_labels=None)
    read = SentencePipeline(str(folder))
    assert "mean over tokens" in read.assumed[0]
    expected = np.stack([pooled(alone(folder, text, 60), "mean") for text in TEXTS])
    np.testing.assert_allclose(read.encode(TEXTS), expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["bert", "gpt2", "roberta"])
@pytest.mark.parametrize("mode", ["lasttoken", "weightedmean"])
def test_neither_batches_nor_order_change_vectors(tmp_path: Path, architecture: str, mode: str) -> None:
    read = SentencePipeline(str(pipeline(tmp_path / "model", mode, architecture=architecture)))
    one = read.encode(TEXTS, batch_size=1)
    np.testing.assert_allclose(read.encode(TEXTS, batch_size=5), one, atol=1e-5)
    np.testing.assert_allclose(read.encode(TEXTS[::-1])[::-1], one, atol=1e-5)


def test_roles_have_the_prompts_of_the_model_or_those_given(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "model")
    read = SentencePipeline(str(folder))
    assert (read.prompt("query"), read.prompt("document"), read.prompt(None)) == ("good film ", "the story ", "")
    text = "dull plot"
    np.testing.assert_allclose(read.encode([text], "query"), read.encode([f"good film {text}"]), atol=1e-5)
    other = SentencePipeline(str(folder), prompts={"query": "", "document": "warm "})
    np.testing.assert_allclose(other.encode([text], "query"), read.encode([text]), atol=1e-5)
    np.testing.assert_allclose(other.encode([text], "document"), read.encode([f"warm {text}"]), atol=1e-5)


def test_narrower_vectors_are_the_first_numbers(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "model", normalised=True)
    whole, cut = SentencePipeline(str(folder)), SentencePipeline(str(folder), width=5)
    assert (whole.normalised, cut.normalised, cut.width) == (True, False, 5)
    np.testing.assert_array_equal(cut.encode(TEXTS), whole.encode(TEXTS)[:, :5])
    with pytest.raises(UserError, match="`width` of at most 16"):
        SentencePipeline(str(folder), width=17)


def test_lower_case_and_length(tmp_path: Path) -> None:
    folder = pipeline(tmp_path / "model", do_lower_case=True, max_seq_length=4)
    read = SentencePipeline(str(folder))
    np.testing.assert_array_equal(read.encode(["The FILM"]), read.encode(["the film"]))
    np.testing.assert_array_equal(read.encode(["the film is good"]), read.encode(["the film"]))
    assert SentencePipeline(str(folder), max_tokens=3).max_tokens == 3
    assert SentencePipeline(str(folder), max_tokens=30).max_tokens == 4


def broken(folder: Path, what: str) -> None:
    if what == "kind":
        modules = json.loads((folder / "modules.json").read_text())
        modules[1]["type"] = "sentence_transformers.models.LSTM"
        write(folder / "modules.json", modules)
    elif what == "json":
        (folder / "1_Pooling" / "config.json").write_text("{")
    elif what == "mode":
        write(folder / "1_Pooling" / "config.json", {"pooling_mode": "median"})
    elif what == "pickle":
        (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    elif what == "shape":
        save_file({"linear.weight": torch.ones(3, 3)}, folder / "2_Dense" / "model.safetensors")
    elif what == "activation":
        about = {"in_features": WIDTH, "out_features": 8, "activation_function": "os.system"}
        write(folder / "2_Dense" / "config.json", about)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("kind", "but got LSTM"),
        ("json", "Pooling of .* cannot be read|config.json of .* cannot be read"),
        ("mode", "`pooling_mode` out of"),
        ("pickle", "only safetensors are read"),
        ("shape", "Dense of .* cannot be read"),
        ("activation", "`activation_function` to be one of"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, what: str, message: str) -> None:
    folder = pipeline(tmp_path / "model", dense=8)
    broken(folder, what)
    with pytest.raises(UserError, match=message):
        SentencePipeline(str(folder))


def test_no_texts_and_unknown_roles(tmp_path: Path) -> None:
    read = SentencePipeline(str(pipeline(tmp_path / "model")))
    with pytest.raises(UserError, match="`texts` to be at least 1"):
        read.encode([])
    with pytest.raises(UserError, match="`role`"):
        read.encode(["good"], "answer")
