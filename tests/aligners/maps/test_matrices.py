import re
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.processes import PROCESSES, ROOT
from tests.runs import activations, quiet_trainer
from tests.world import World

from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import ALIGNMENT
from aligners.maps import couplings
from aligners.maps.inn import INN
from aligners.maps.matrices import (
    ProductPrecision,
    Products,
    batch_inverse,
    batch_log_det,
    batch_solve,
    precision_of,
    products_in,
    triangular_inverse,
)
from aligners.maps.mlp import MLP


def matrices() -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_inverses_solutions_determinants_and_gradients_of_a_bank() -> None:
    bank = matrices()
    torch.testing.assert_close(batch_inverse(bank) @ bank, torch.eye(5).double().expand_as(bank))
    right = torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(bank @ batch_solve(bank, right), right.expand(2, 3, 5, 2))
    torch.testing.assert_close(batch_log_det(bank), torch.linalg.det(bank).abs().log())
    bank.requires_grad_()
    assert torch.autograd.gradcheck(batch_inverse, bank)
    assert torch.autograd.gradcheck(batch_log_det, bank)


def at_two_threads() -> None:
    """In a process."""
    torch.set_num_threads(2)
    bank = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0), requires_grad=True)
    right = batch_solve(bank, torch.eye(256))
    torch.testing.assert_close(right @ bank, torch.eye(256).expand(2, -1, -1), rtol=0, atol=1e-2)
    torch.testing.assert_close(batch_inverse(bank), right, rtol=1e-2, atol=1e-2)
    (right.sum() + batch_log_det(bank).sum()).backward()
    assert bank.grad.isfinite().all()  # type: ignore[union-attr]


@pytest.mark.slow
def test_width_256_on_two_threads() -> None:
    """Batched LU fails or hangs there in the CPU build of torch 2.13.0, with "Parameter 6 was incorrect"."""
    process = PROCESSES.Process(target=at_two_threads)
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0
    unsafe = re.compile(r"linalg\.(solve|inv|slogdet|det|lu\w*)\(|\.(logdet|lu)\(")
    others = [file for file in (ROOT / "aligners").rglob("*.py") if file.stem != "matrices"]
    assert [file for file in others if unsafe.search(file.read_text())] == []


def test_tf32_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with products_in("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(RuntimeError, match="shapes"), products_in("tf32"):
        torch.ones(2, 2) @ torch.ones(3, 3)
    assert torch.get_float32_matmul_precision() == before


def test_an_unknown_precision_is_refused() -> None:
    for products in ("half", "bfloat16"):
        with pytest.raises(ValueError, match=rf"`products`.*auto, float32, tf32.*'{products}'"):
            Alignment(products=products)  # type: ignore[arg-type]


def test_auto_is_tf32_where_a_gpu_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    expected: dict[tuple[int, int], ProductPrecision] = {(7, 5): "float32", (8, 0): "tf32", (9, 0): "tf32"}
    for capability, precision in expected.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert precision_of("auto", cuda) == precision
        assert precision_of("float32", cuda) == "float32"
        assert precision_of("auto", cpu) == "float32"
    monkeypatch.setattr(torch.version, "cuda", None)
    assert precision_of("auto", cuda) == "float32"  # of another maker


def test_tf32_without_it_is_refused_before_anything_is_read(world: World) -> None:
    module = Alignment({"mlp": partial(MLP, hidden=[4])}, products="tf32")
    with pytest.raises(ValueError, match="`products` tf32, but the device is cpu"):
        quiet_trainer(max_epochs=1).fit(module, datamodule=activations(world, sites=[1]))


def test_a_fit_goes_on_in_the_precision_it_began_in(world: World, tmp_path: Path) -> None:
    def fit(products: Products, steps: int, resumed: Path | None = None) -> Alignment:
        module = Alignment({"mlp": partial(MLP, hidden=[4])}, products=products)
        trainer = quiet_trainer(max_steps=steps)
        trainer.fit(module, datamodule=activations(world, sites=[1]), ckpt_path=resumed)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module

    fit("auto", 1)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert checkpoint[ALIGNMENT]["options"]["products"] == "float32"
    checkpoint[ALIGNMENT]["options"]["products"] = "tf32"  # as on a GPU
    torch.save(checkpoint, tmp_path / "tf32.ckpt")
    assert fit("auto", 2, tmp_path / "tf32.ckpt").precision == "tf32"
    with pytest.raises(ValueError, match=r'`model.products` was "tf32" and is "float32"'):
        fit("float32", 3, tmp_path / "tf32.ckpt")


@pytest.mark.parametrize("width", [1, 5, 63, 64, 65, 130, 384])
def test_inverses_of_triangular_matrices(width: int) -> None:
    lower = torch.randn(2, 3, width, width).tril() * width**-0.5
    lower.diagonal(dim1=-2, dim2=-1).exp_()
    expected = torch.linalg.inv(lower[0, 0].double())
    found = triangular_inverse(lower)
    assert found.shape == lower.shape
    assert float((found[0, 0] - expected).norm() / expected.norm()) < 1e-5
    assert torch.equal(triangular_inverse(lower[0, :1])[0], triangular_inverse(lower[0])[0])
    upper_part = found.triu(1)
    assert float(upper_part.abs().max()) == 0


@pytest.mark.parametrize("width", [6, 65])
def test_training_by_products_is_training_by_solves(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    aligner = INN(2, width, width, couplings=3)
    for parameter in aligner.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    x, y = torch.randn(2, 2, 50, width)
    found = []
    for by_products in (False, True):
        monkeypatch.setattr(couplings, "by_products", lambda x, way=by_products: way)
        aligner.zero_grad()
        loss = aligner.loss(x, y)
        loss.sum().backward()
        found.append((loss.detach(), [parameter.grad for parameter in aligner.parameters()]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-5, atol=0)
    for gradient, expected in zip(found[1][1], found[0][1], strict=True):
        assert gradient is not None
        assert expected is not None
        assert float((gradient - expected).norm()) <= 1e-4 * float(expected.norm())
