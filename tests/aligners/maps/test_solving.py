from __future__ import annotations

import subprocess
import sys

import torch

from aligners.maps.solving import batch_inverse, batch_log_det, batch_solve
from tests.shell import ROOT

AT_TWO_THREADS = """
import torch
from aligners.maps.affine import Orthogonal
from aligners.maps.inn import INN
from aligners.similarity.algebra.moments import moments_of

torch.set_num_threads(2)
torch.manual_seed(0)
x = torch.randn(2, 600, 256)
y = x @ torch.linalg.qr(torch.randn(256, 256)).Q + 0.1 * x.square()
for aligner in (INN(2, 256, 256, couplings=2, hidden=8), INN(2, 256, 256, couplings=2, hidden=8, mixing="linear"),
                Orthogonal(2, 256, 256)):
    aligner.fit(moments_of(x, y))
    aligner.loss(x, y).sum().backward()
    torch.testing.assert_close(aligner.inverse(aligner(x)), x, rtol=0, atol=1e-2)
    if isinstance(aligner, INN):
        assert aligner.log_det(x).isfinite().all()
print("right")
"""


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


def test_width_256_on_two_threads() -> None:
    """Batched LU fails there in the CPU build of torch 2.13.0: "Parameter 6 was incorrect on entry to SLASWP"."""
    run = subprocess.run([sys.executable, "-c", AT_TWO_THREADS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.stdout.split() == ["right"], run.stderr
    assert "MKL" not in run.stderr
