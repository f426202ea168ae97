from __future__ import annotations

import torch

from aligners.similarity.passes.run import FeatureScales


def test_mean_and_deviation_over_batches_far_from_the_origin() -> None:
    rows = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0)).double() + 1000
    scales = FeatureScales(2, 3)
    for part in rows.split([7, 43], 1):
        scales.update(part)
    mean, deviation = scales.compute()
    torch.testing.assert_close(mean, rows.mean(1), rtol=1e-12, atol=0)
    torch.testing.assert_close(deviation, rows.std(1, correction=0), rtol=1e-8, atol=0)


def test_a_constant_feature_stays_constant() -> None:
    rows = torch.randn(2, 50, 3, generator=torch.Generator().manual_seed(0))
    rows[1, :, 2] = 0.1
    scales = FeatureScales(2, 3)
    scales.update(rows)
    mean, deviation = scales.compute()
    assert deviation[1, 2] == 1
    scaled = (rows.double() - mean[:, None]) / deviation[:, None]
    assert scaled[1, :, 2].abs().max() < 1e-7
    torch.testing.assert_close(scaled[0].std(0, correction=0), torch.ones(3).double())
