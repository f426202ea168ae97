from __future__ import annotations

import re

import torch

from aligners.maps.solving import batch_inverse, batch_log_det, batch_solve
from tests.processes import PROCESSES, ROOT


def matrices() -> torch.Tensor:
    return torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_inverses_solutions_and_determinants_of_a_bank() -> None:
    bank = matrices()
    torch.testing.assert_close(batch_inverse(bank) @ bank, torch.eye(5).double().expand_as(bank))
    right = torch.randn(5, 2, dtype=torch.float64)
    torch.testing.assert_close(bank @ batch_solve(bank, right), right.expand(2, 3, 5, 2))
    torch.testing.assert_close(batch_log_det(bank), torch.linalg.det(bank).abs().log())


def test_gradients_are_those_of_finite_differences() -> None:
    bank = matrices().requires_grad_()
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
    others = [
        file for room in ("aligners", "similarity") for file in (ROOT / room).rglob("*.py") if file.stem != "solving"
    ]
    assert [file for file in others if unsafe.search(file.read_text())] == []
