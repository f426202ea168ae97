"""A file of maps without this package: in plain torch it gives the report's loss, and maps leave torch, too."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runs import activations, quiet_trainer, related_rows
from tests.world import World, read_texts
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import save_bank
from aligners.injection.injecting import InjectionEvaluation
from aligners.maps.base import Aligner
from aligners.maps.inn import INN
from aligners.maps.linear import Linear, Procrustes
from aligners.maps.mlp import MLP
from aligners.similarity.algebra.moments import moments_of

KINDS: dict[str, Any] = {
    "linear": Linear,
    "procrustes": Procrustes,
    "mlp": partial(MLP, hidden=[8]),
    "inn": partial(INN, couplings=2, hidden=4),
}


def as_layer(tensors: dict[str, Tensor], place: int) -> nn.Linear:
    """A site's map of the file as a layer of torch: y = (x − mean_x) weight + mean_y."""
    mean_x, mean_y, weight = (tensors[f"maps/0_1/linear/{name}"][place] for name in ("mean_x", "mean_y", "weight"))
    layer = nn.Linear(*weight.shape)
    layer.weight.data = weight.T
    layer.bias.data = (mean_y - mean_x @ weight)[0]
    return layer


@torch.no_grad()
def injected_loss(world: World, layer: nn.Linear, site: int) -> float:
    """Mean loss of Y on the held-out texts with mapped states of X after a block, text by text."""
    tokenizer = AutoTokenizer.from_pretrained(world.model_x)
    model_x, model_y = (
        AutoModelForSequenceClassification.from_pretrained(name).eval() for name in (world.model_x, world.model_y)
    )
    losses = []
    for text, label in zip(*read_texts(world.test), strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        mapped = layer(model_x(**inputs, output_hidden_states=True).hidden_states[site])
        block = model_y.base_model.encoder.layer[site - 1]
        hook = block.register_forward_hook(
            lambda _, __, output, mapped=mapped: (mapped, *output[1:]) if isinstance(output, tuple) else mapped
        )
        losses.append(cross_entropy(model_y(**inputs).logits, torch.tensor([int(label)])))
        hook.remove()
    return float(torch.stack(losses).mean())


def test_a_map_of_a_file_as_a_layer_of_torch_gives_the_loss_of_the_report(world: World, tmp_path: Path) -> None:
    data, module = activations(world, sites=[1, 3]), Alignment({"linear": Linear})
    quiet_trainer().fit(module, datamodule=data)
    save_bank(module.stored(), tmp_path / "aligners.safetensors")
    evaluation = InjectionEvaluation(module, closed_form=())
    quiet_trainer().test(evaluation, datamodule=data, verbose=False)
    tensors = load_file(tmp_path / "aligners.safetensors")
    for place, site in enumerate([1, 3]):
        (row,) = (row for row in evaluation.rows if row["method"] == "linear" and row["site_y"] == site)
        assert injected_loss(world, as_layer(tensors, place), site) == pytest.approx(row["loss"], abs=1e-5)


def fitted(kind: str) -> tuple[Aligner, Tensor]:
    x, y = related_rows(2, 60, 6, 6)
    aligner = KINDS[kind](2, 6, 6)
    aligner.fit(moments_of(x, y))
    return aligner.eval().requires_grad_(False), x.float()


@pytest.mark.parametrize("kind", KINDS)
def test_a_map_is_exported_by_torch(kind: str) -> None:
    aligner, x = fitted(kind)
    rows = {"x": {1: torch.export.Dim("rows", min=2)}}
    exported = torch.export.export(aligner, (x,), dynamic_shapes=rows).module()
    assert torch.allclose(exported(x[:, :7]), aligner(x[:, :7]), atol=1e-6)


@pytest.mark.slow
def test_an_invertible_network_runs_as_onnx() -> None:
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install '.[dev]'")
    reference = pytest.importorskip("onnx.reference")
    aligner, x = fitted("inn")
    rows = {"x": {1: torch.export.Dim("rows", min=2)}}
    with torch.no_grad():
        program = torch.onnx.export(aligner, (x,), dynamo=True, dynamic_shapes=rows, verbose=False)
    written = program.model_proto.SerializeToString()
    (found,) = reference.ReferenceEvaluator(written).run(None, {"x": x[:, :7].numpy()})
    assert torch.allclose(torch.from_numpy(found), aligner(x[:, :7]), atol=1e-5)
