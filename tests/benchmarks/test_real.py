"""What makes and runs real models, on tiny ones."""

import json
import shlex
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.real import models, run
from benchmarks.real.known_truths import permute_bert, rotate_llama
from tests.tiny import tiny_model, tokenised
from transformers import BertModel


def test_a_permuted_bert_has_the_same_states_in_another_order() -> None:
    inputs = tokenised()
    model = tiny_model("bert", n_labels=None)
    model.pooler = None
    before = model(**inputs, output_hidden_states=True).hidden_states
    order = torch.randperm(model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    permute_bert(model, order)
    for old, new in zip(before, model(**inputs, output_hidden_states=True).hidden_states, strict=True):
        torch.testing.assert_close(new, old[..., order])


def test_a_rotated_llama_has_rotated_states_and_the_same_logits() -> None:
    inputs = {name: value for name, value in tokenised().items() if name != "token_type_ids"}
    model = tiny_model("llama", task="causal").double()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones in a new model, which would fold into anything
                weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(len(name)))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    before = model(**inputs, output_hidden_states=True)
    width = model.config.hidden_size
    turn = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    rotate_llama(model, turn)
    after = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=1e-4)  # norms are computed in float32
    for old, new in zip(before.hidden_states[:-1], after.hidden_states[:-1], strict=True):  # the last is after a norm
        torch.testing.assert_close(new, old @ turn, rtol=0, atol=1e-4)


def test_a_bert_is_found_in_a_graph_whose_matrices_have_no_names() -> None:
    model = tiny_model("bert", n_labels=None)
    model.pooler = None
    weights, nodes = dict(model.state_dict()), []
    for name in [name for name in weights if name.endswith("weight") and name[:-6] + "bias" in weights]:
        if weights[name].ndim == 2:
            number = f"val_{len(nodes)}"
            weights[number] = weights.pop(name).T
            nodes.append(SimpleNamespace(op_type="MatMul", input=["states", number], output=[f"{number}_product"]))
            added = [name[:-6] + "bias", f"{number}_product"]
            nodes.append(SimpleNamespace(op_type="Add", input=added, output=[f"{number}_sum"]))
    found = models.rebuilt_bert(model.config, weights, nodes)
    assert isinstance(found, BertModel)
    torch.testing.assert_close(found.eval()(**tokenised())[0], model(**tokenised())[0], rtol=0, atol=0)


def test_data_of_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "HASHES", tmp_path.with_suffix(".sha256"))
    models.HASHES.write_text(f"{sha256(b'right').hexdigest()}  dev.tsv\n")
    models.write(tmp_path, {"dev.tsv": b"right"})
    models.check(tmp_path)
    models.write(tmp_path, {"dev.tsv": b"wrong"})
    with pytest.raises(ValueError, match=r"Expected dev\.tsv of SHA-256"):
        models.check(tmp_path)


def test_a_command_runs_once_and_leaves_what_it_took_and_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "measure.py"
    script.write_text(
        "import json, sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[-1]); folder.mkdir()\n"
        "print('Training: step 2 of 4, about 1.5 min left')\n"
        "print('This takes 2.5 GB.\\nTraining: step 4 of 4, about 0.0 min left')\n"
        "rows = [{'method': 'inn', 'fvu': 0.123456789}, {'method': 'mlp', 'fvu': 1.0}]\n"
        "report = {'meta': {}, 'findings': ['It holds.'], 'rows': rows, 'codes': [{'bits': 2.0, 'more': None}]}\n"
        "(folder / 'summary.json').write_text(json.dumps(report))\n"
        "sys.exit('no' in sys.argv)\n"
    )
    about = {"columns": ["method", "fvu", "absent"], "where": {"method": ["inn"]}, "tables": ["codes"]}
    typed = shlex.quote(str(script))
    commands = {"good": {"command": typed, **about}, "bad": {"command": f"{typed} no", **about}}
    monkeypatch.setattr(run, "TABLE", {"common": {}, "commands": commands})
    assert run.run("good", tmp_path, 1)
    assert not run.run("bad", tmp_path, 1)
    script.write_text("raise SystemExit(1)")
    assert run.run("good", tmp_path, 1)  # it has finished, and is not run again
    assert run.found("bad", tmp_path) is None
    found = run.found("good", tmp_path)
    assert found is not None
    assert found["rows"] == [{"method": "inn", "fvu": 0.12346}]
    assert found["findings"] == ["It holds."]
    assert found["codes"] == [{"bits": 2.0}]
    assert found["estimates"] == [["Training, 4 steps", 90, 0]]
    assert found["said of memory"] == ["This takes 2.5 GB."]
    assert json.loads((tmp_path / "runs" / "good" / run.TOOK).read_text())["threads"] == 1
