"""Code that a model's files name: said where it was not run, and run where it is trusted."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.stitches import model_texts
from tests.tiny import tiny_folder, tiny_model, tiny_tokenizer
from tests.world import World
from transformers import dynamic_module_utils

from aligners import api
from aligners.models import load_frozen
from aligners.models.model_identity import code_not_run

CODE = """from transformers import LlamaForCausalLM


class SeesAll(LlamaForCausalLM):
    def __init__(self, config):
        config.is_causal = False
        super().__init__(config)
"""
SAYS = r"Caution: the files of .* name code of their own that was not run: own\.SeesAll for its model, where LlamaForC"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A causal Llama whose own class sees the whole text."""
    made = tiny_folder(tmp_path / "own", "llama", task="causal")
    (made / "own.py").write_text(CODE)
    edit(made / "config.json", auto_map={"AutoModelForCausalLM": "own.SeesAll"})
    return made


def test_code_that_is_not_run_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = load_frozen(folder)
    (caution,) = found.cautions
    assert re.match(SAYS, caution)
    assert caution in caplog.text
    assert found.causal
    caplog.clear()
    (again,) = api.load((found.model, tiny_tokenizer())).cautions
    assert "own.SeesAll for its model" in again
    assert again in caplog.text


def test_it_stands_in_every_report(folder: Path, world: World) -> None:
    data = model_texts(world, models=[world.model_x, str(folder)])
    (caution,) = data.describe()["data_cautions"]
    assert re.match(SAYS, caution)


def test_code_that_is_trusted_is_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    found = load_frozen(folder, trust_remote_code=True)
    assert type(found.model).__name__ == "SeesAll"
    assert (found.cautions, found.causal, found.task) == ([], False, None)


def test_only_what_would_have_been_loaded_counts() -> None:
    model, tokenizer = tiny_model("llama", task="causal"), tiny_tokenizer()
    model.config.auto_map = {"AutoModel": "own.Bare", "AutoModelForSequenceClassification": "own.Classifier"}
    assert code_not_run(model, tokenizer, "m") == []
    bare = tiny_model("llama", n_labels=None)
    bare.config.auto_map = {"AutoModel": "own.Bare", "AutoConfig": "own.Config"}
    (said,) = code_not_run(bare, tokenizer, "m")
    assert "own.Bare for its model, where LlamaModel" in said
    assert "own.Config for its config, where LlamaConfig" in said
    tokenizer.init_kwargs["auto_map"] = {"AutoTokenizer": ["own.Slow", None]}
    (said,) = code_not_run(model, tokenizer, "m")
    assert "own.Slow for its tokenizer" in said
    assert code_not_run(model, None, "m") == []
