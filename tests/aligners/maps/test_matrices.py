import re
from functools import partial

import pytest
import torch
from tests.processes import PROCESSES, ROOT
from tests.runs import activations, quiet_trainer, related_rows
from tests.world import World

from aligners.fitting.alignment import Alignment
from aligners.maps.inn import INN
from aligners.maps.matrices import batch_inverse, batch_log_det, batch_solve, products_in
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


def test_half_precision_is_near_and_only_inside() -> None:
    x, y = (part.float() for part in related_rows(2, 50, 6, 6))
    aligner = INN(2, 6, 6, couplings=2, hidden=8)
    for layer in aligner.couplings:
        torch.nn.init.normal_(layer.conditioner.last.weight, std=0.3)
    exact = aligner.loss(x, y)
    with products_in("bfloat16"):
        near = aligner.loss(x, y)
    assert torch.equal(aligner.loss(x, y), exact)
    assert not torch.equal(near, exact)
    torch.testing.assert_close(near, exact, rtol=0.05, atol=0)
    assert near.dtype == torch.float32


def test_tf32_is_put_back() -> None:
    before = torch.get_float32_matmul_precision()
    with products_in("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    with pytest.raises(RuntimeError, match="shapes"), products_in("tf32"):
        torch.ones(2, 2) @ torch.ones(3, 3)
    assert torch.get_float32_matmul_precision() == before


def test_a_fit_in_half_precision_ends_near_one_in_full(world: World) -> None:
    found = {}
    for products in ("float32", "bfloat16"):
        optimizer = partial(torch.optim.AdamW, lr=1e-2)
        module = Alignment({"mlp": partial(MLP, hidden=[16], skip=False)}, optimizer=optimizer, products=products)  # type: ignore[arg-type]
        quiet_trainer(max_epochs=1).fit(module, datamodule=activations(world, sites=[1, 2]))
        found[products] = module.validation_figures[module.fits()[0]]["fvu"]
    assert not torch.equal(found["float32"], found["bfloat16"])
    torch.testing.assert_close(found["bfloat16"], found["float32"], rtol=0.05, atol=0)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`products`.*float32, tf32, bfloat16.*'half'"):
        Alignment(products="half")  # type: ignore[arg-type]
