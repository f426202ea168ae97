"""Norms, cosines, readings and sums against loops over rows and latents, and what bad input says."""

import numpy as np
import pytest
import torch
from tests.references import latents as reference
from torch import Tensor

from aligners.similarity.latents.dictionary import PairedDictionary, decoder_cosines, relative_norms
from aligners.similarity.latents.other_texts import other_rows
from aligners.similarity.latents.ratios import ratios
from aligners.similarity.latents.readings import FittedReadings, Readings, decoder_readings
from aligners.similarity.latents.unit_sums import LatentSums

SITES, ROWS, LATENTS, WIDTH_X = 2, 24, 5, 6
UNITS = 6
VARIANCES = torch.tensor([4.0, 1.0]), torch.tensor([1.0, 9.0])  # so that each model has latents of its own


def rows_of(width_y: int = WIDTH_X, seed: int = 0) -> tuple[PairedDictionary, Tensor, Tensor, Tensor, Tensor]:
    """A dictionary that fits badly, and codes of which half are 0."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    decoders = normal(SITES, LATENTS, WIDTH_X), normal(SITES, LATENTS, width_y)
    dictionary = PairedDictionary.of(*decoders, normal(SITES, WIDTH_X), normal(SITES, width_y))
    codes = normal(SITES, ROWS, LATENTS).relu()
    x = codes @ decoders[0] + normal(SITES, ROWS, WIDTH_X)
    y = codes @ decoders[1] + normal(SITES, ROWS, width_y)
    unit = torch.arange(UNITS).repeat_interleave(ROWS // UNITS)
    return dictionary, codes, x, y, unit


def summed(
    dictionary: PairedDictionary, readings: Readings, codes: Tensor, x: Tensor, y: Tensor, unit: Tensor
) -> LatentSums:
    sums = LatentSums(dictionary, readings, UNITS)
    for some in torch.arange(ROWS).split(7):
        sums.update(codes[:, some], x[:, some], y[:, some], unit[some])
    return sums


def numpy_site(site: int, *parts: Tensor) -> list[np.ndarray]:
    return [part[site].double().numpy() for part in parts]


def test_norms_are_shares_of_states_of_one_variance() -> None:
    dictionary, *_ = rows_of(width_y=9)
    variance_x, variance_y = torch.tensor([4.0, 1.0]), torch.tensor([9.0, 0.25])
    found = relative_norms(dictionary, variance_x, variance_y)
    for site in range(SITES):
        d_x, d_y = numpy_site(site, *dictionary.decoders)
        for j in range(LATENTS):
            norm_x = np.linalg.norm(d_x[j]) / np.sqrt(float(variance_x[site]))
            norm_y = np.linalg.norm(d_y[j]) / np.sqrt(float(variance_y[site]))
            assert float(found[site, j]) == pytest.approx(norm_y / (norm_x + norm_y), rel=1e-12)
    larger = dictionary._replace(decoder_y=dictionary.decoder_y * 7)
    torch.testing.assert_close(relative_norms(larger, variance_x, variance_y * 49), found)
    with pytest.raises(ValueError, match="`variance_y` to be above 0"):
        relative_norms(dictionary, variance_x, variance_y * 0)


def test_cosines_need_one_space() -> None:
    dictionary, *_ = rows_of()
    found = decoder_cosines(dictionary)
    d_x, d_y = numpy_site(1, *dictionary.decoders)
    expected = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(d_x, d_y, strict=True)]
    np.testing.assert_allclose(found[1], expected, rtol=1e-12)
    other, *_ = rows_of(width_y=9)
    for refuses in (decoder_cosines, decoder_readings):
        with pytest.raises(ValueError, match=r"`decoder_x` has width 6 and `decoder_y` 9.*`FittedReadings`"):
            refuses(other)


@pytest.mark.parametrize("put_back", [True, False])
@pytest.mark.parametrize("owner", [0, 1])
def test_ratios_are_those_of_least_squares(owner: int, put_back: bool) -> None:
    """β^other / β^owner of 2504.02922, each β by least squares on every coordinate."""
    dictionary, codes, x, y, unit = rows_of()
    sums = summed(dictionary, decoder_readings(dictionary), codes, x, y, unit)
    owners = torch.full((SITES, LATENTS), owner)
    found = ratios(sums.parts(owners, put_back=put_back))
    for site in range(SITES):
        f, *states = numpy_site(site, codes, x, y)
        decoders = numpy_site(site, *dictionary.decoders)
        biases = numpy_site(site, dictionary.bias_x, dictionary.bias_y)
        for j in range(LATENTS):
            of_owner = reference.targets(f, decoders[owner], biases[owner], states[owner], j)
            other = 1 - owner
            of_other = reference.targets(f, decoders[other], biases[other], states[other], j, put_back)
            for kind in range(2):
                direction = decoders[owner][j]
                expected = reference.beta(f[:, j], direction, of_other[kind])
                expected /= reference.beta(f[:, j], direction, of_owner[kind])
                own = reference.beta(f[:, j], direction, of_owner[kind])
                if own <= 0:
                    assert found[kind, site, j].isnan()
                else:
                    assert float(found[kind, site, j]) == pytest.approx(expected, rel=1e-9)


def test_fitted_readings_are_slopes_on_other_rows() -> None:
    dictionary, codes, x, y, unit = rows_of(width_y=9)
    fit = FittedReadings(dictionary, *VARIANCES)
    others = rows_of(width_y=9, seed=1)[1:4]
    for some in torch.arange(ROWS).split(10):
        fit.update(*(each[:, some] for each in others))
    readings = fit.compute()
    norm = relative_norms(dictionary, *VARIANCES)
    counted = norm < 1 / 3, norm > 2 / 3
    assert counted[0].any()
    assert counted[1].any()
    assert not (counted[0] | counted[1]).all()
    sums = summed(dictionary, readings, codes, x, y, unit)
    found = sums.compute()[0].sum(2)  # kind, side, site, latent
    for site in range(SITES):
        f_fit, *fit_states = numpy_site(site, *others)
        f, *states = numpy_site(site, codes, x, y)
        for side, decoder in enumerate(numpy_site(site, *dictionary.decoders)):
            bias = numpy_site(site, dictionary.bias_x, dictionary.bias_y)[side]
            variance = float(VARIANCES[side][site])
            counting = counted[side][site].tolist()
            for j in range(LATENTS):
                fitted = reference.targets(f_fit, decoder, bias, fit_states[side], j, counting=counting)
                held_out = reference.targets(f, decoder, bias, states[side], j, counting=counting)
                for kind in range(2):
                    direction, centre = reference.slope(f_fit[:, j], fitted[kind])
                    length = reference.held_out_length(f[:, j], direction, centre, held_out[kind])
                    assert float(found[kind, side, site, j]) == pytest.approx(length / variance, rel=1e-8, abs=1e-9)


def test_fitted_ratios_do_not_depend_on_coordinates() -> None:
    """Y rotated, moved and scaled: its states, decoders and bias alike."""
    draw = torch.Generator().manual_seed(3)
    rotation = torch.linalg.qr(torch.randn(9, 9, generator=draw).double()).Q
    offset = torch.randn(9, generator=draw).double()

    def found(turned: bool) -> Tensor:
        dictionary, codes, x, y, unit = rows_of(width_y=9)
        y = y.double()
        if turned:
            y = 3 * y @ rotation + offset
            decoder_x, decoder_y, bias_x, bias_y = dictionary
            dictionary = PairedDictionary(decoder_x, 3 * decoder_y @ rotation, bias_x, 3 * bias_y @ rotation + offset)
        variance_x = VARIANCES[0]
        variance_y = VARIANCES[1] * (9 if turned else 1)
        fit = FittedReadings(dictionary, variance_x, variance_y)
        fit.update(codes[:, :12], x[:, :12], y[:, :12])
        sums = LatentSums(dictionary, fit.compute(), UNITS)
        sums.update(codes[:, 12:], x[:, 12:], y[:, 12:], unit[12:])
        return ratios(sums.parts(torch.ones(SITES, LATENTS)))

    torch.testing.assert_close(found(True), found(False), rtol=1e-8, atol=1e-9, equal_nan=True)


def test_centred_readings_are_those_of_regressions_with_an_intercept() -> None:
    """On the rows that the means are of, β of least squares with a column of ones, per coordinate of d_j."""
    dictionary, codes, x, y, unit = rows_of()
    fit = FittedReadings(dictionary, *VARIANCES)
    fit.update(codes, x, y)
    sums = summed(dictionary, decoder_readings(dictionary, fit.compute()), codes, x, y, unit)
    found = sums.compute().sum(3)
    f, *states = numpy_site(1, codes, x, y)
    decoders = numpy_site(1, *dictionary.decoders)
    biases = numpy_site(1, dictionary.bias_x, dictionary.bias_y)
    for owner in range(2):
        for side in range(2):
            for j in range(LATENTS):
                of_side = reference.targets(f, decoders[side], biases[side], states[side], j)
                for kind in range(2):
                    slope, _ = reference.slope(f[:, j], of_side[kind])
                    expected = slope @ decoders[owner][j] * f[:, j].var() * ROWS
                    assert float(found[owner, kind, side, 1, j]) == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_batches_and_sites_do_not_matter() -> None:
    dictionary, codes, x, y, unit = rows_of()
    readings = decoder_readings(dictionary)
    whole = LatentSums(dictionary, readings, UNITS)
    whole.update(codes, x, y, unit)
    parts = summed(dictionary, readings, codes, x, y, unit)
    torch.testing.assert_close(parts.compute(), whole.compute(), rtol=1e-12, atol=1e-12)
    second = PairedDictionary(*(part[1:] for part in dictionary))
    alone = LatentSums(second, decoder_readings(second), UNITS)
    alone.update(codes[1:], x[1:], y[1:], unit)
    torch.testing.assert_close(alone.compute()[..., 0, :], whole.compute()[..., 1, :], rtol=1e-12, atol=1e-12)


def test_permuted_targets_are_those_of_other_texts() -> None:
    """The null is the sum of codes with the targets of their partners, loop by loop."""
    dictionary, codes, x, y, unit = rows_of()
    rows, partners = other_rows(unit)
    null = LatentSums(dictionary, decoder_readings(dictionary), UNITS)
    null.update(codes, x, y, unit, (rows, partners))
    found = null.compute().sum(3)  # owner, kind, side, site, latent
    f, *states = numpy_site(0, codes, x, y)
    decoders = numpy_site(0, *dictionary.decoders)
    biases = numpy_site(0, dictionary.bias_x, dictionary.bias_y)
    for owner in range(2):
        for side in range(2):
            for j in range(LATENTS):
                of_side = reference.targets(f, decoders[side], biases[side], states[side], j)
                for kind in range(2):
                    total = 0.0
                    for row, partner in zip(rows.tolist(), partners.tolist(), strict=True):
                        assert unit[row] != unit[partner]
                        total += f[row, j] * (decoders[owner][j] @ of_side[kind][partner])
                    assert float(found[owner, kind, side, 0, j]) == pytest.approx(total, rel=1e-9, abs=1e-9)


BAD = {
    "a negative code": ("codes", lambda t: t - 1, "`codes` to be at least 0, .* but got -1"),
    "codes that are not a number": ("codes", lambda t: t * float("nan"), "`codes` to be finite"),
    "states that are not finite": ("y", lambda t: t / 0, "`y` to be finite"),
    "states of another width": ("x", lambda t: t[:, :, 1:], r"`x` of shape \(2, 24, 6\).*but got \(2, 24, 5\)"),
    "other rows": ("y", lambda t: t[:, 1:], r"`y` of shape \(2, 24, 6\)"),
    "other latents": ("codes", lambda t: t[:, :, 1:], r"`codes` of shape \(2, 24, 5\)"),
    "no rows": ("codes", lambda t: t[:, :0], "at least one row"),
    "a site left out": ("codes", lambda t: t[0], "`codes` of shape .sites, rows, latents"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused_by_name(case: str) -> None:
    dictionary, codes, x, y, unit = rows_of()
    name, spoilt, message = BAD[case]
    given = {"codes": codes, "x": x, "y": y}
    given[name] = spoilt(given[name])
    with pytest.raises(ValueError, match=message):
        LatentSums(dictionary, decoder_readings(dictionary), UNITS).update(**given, unit=unit)
    with pytest.raises(ValueError, match=message):
        FittedReadings(dictionary, *VARIANCES).update(**given)


def test_bad_units_and_silent_dictionaries_are_refused() -> None:
    dictionary, codes, x, y, unit = rows_of()
    readings = decoder_readings(dictionary)
    with pytest.raises(ValueError, match="`units` to be at least 2"):
        LatentSums(dictionary, readings, 1)
    sums = LatentSums(dictionary, readings, UNITS)
    with pytest.raises(ValueError, match="`unit` from 0 to 5, but got 1 to 6"):
        sums.update(codes, x, y, unit + 1)
    with pytest.raises(ValueError, match=r"`unit` of shape \(24,\)"):
        sums.update(codes, x, y, unit[1:])
    codes[1] = 0
    fit = FittedReadings(dictionary, *VARIANCES)
    fit.update(codes, x, y)
    sums.update(codes, x, y, unit)
    for metric in (fit, sums):
        with pytest.raises(ValueError, match=r"no latent fires at site 1 \(1 of 2 sites\)"):
            metric.compute()


def test_bad_dictionaries_are_refused() -> None:
    decoder = torch.ones(1, 3, 4)
    for arguments, message in [
        ((decoder, decoder[0]), "of shape .sites, latents, width"),
        ((decoder, decoder[:, 1:]), "the same sites and latents"),
        ((decoder, decoder, torch.zeros(1, 3)), r"`bias_x` of shape \(1, 4\)"),
        ((decoder, decoder / 0), "`decoder_y` to be finite"),
    ]:
        with pytest.raises(ValueError, match=message):
            PairedDictionary.of(*arguments)
