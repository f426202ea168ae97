from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from aligners.maps.sparse.crosscoder import PENALTY_RISE, REMEMBERED, Crosscoder
from aligners.maps.sparse.selection import least_kept, least_kept_of_gaussians

Array = NDArray[np.float64]
SITES, ROWS, LATENTS, ACTIVE = 2, 40, 24, 3
WIDTHS = {1: [6], 2: [6, 5], 3: [6, 5, 4]}

every_number = pytest.mark.parametrize("models", [1, 2, 3])


def states(models: int, rows: int = ROWS, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(SITES, rows, width, generator=draw, dtype=torch.float64) for width in WIDTHS[models]]


def made(models: int, **options: Any) -> Crosscoder:
    """One whose weights are no longer those of the start."""
    options = {"active": ACTIVE} | options
    torch.manual_seed(0)
    crosscoder = Crosscoder(SITES, WIDTHS[models], LATENTS, **options).double()
    with torch.no_grad():
        for weight in crosscoder.parameters():
            weight += 0.3 * torch.randn(weight.shape, dtype=torch.float64)
    return crosscoder


def weights(crosscoder: Crosscoder, site: int) -> dict[str, list[Array]]:
    """Of one site, with zeros where latents are another model's own."""
    found: dict[str, list[Array]] = {"encoders": [], "decoders": [], "shifts": []}
    for name, parts in found.items():
        for part in getattr(crosscoder, name):
            parts.append(part[site].detach().numpy().copy())
    own = crosscoder.own_latents
    for model in range(len(crosscoder.widths)):
        for other in range(len(crosscoder.widths)):
            if other != model:
                found["encoders"][model][:, other * own : (other + 1) * own] = 0
                found["decoders"][model][other * own : (other + 1) * own] = 0
    return found


def plain(crosscoder: Crosscoder, given: list[Tensor], site: int) -> tuple[Array, Array, dict[str, list[Array]]]:
    """Positive codes (N, m) and sizes of latents (m,), one number at a time."""
    of = weights(crosscoder, site)
    codes = np.zeros((given[0].shape[1], LATENTS))
    for n in range(len(codes)):
        for j in range(LATENTS):
            total = crosscoder.bias[site, 0, j].item()
            for x, encoder in zip(given, of["encoders"], strict=True):
                total += x[site, n].numpy() @ encoder[:, j]
            codes[n, j] = max(total, 0.0)
    sizes = sum(np.sqrt((decoder**2).mean(1)) for decoder in of["decoders"])
    return codes, np.asarray(sizes), of


def left(codes: Array, given: list[Tensor], of: dict[str, list[Array]], site: int) -> list[Array]:
    rest = []
    for x, decoder, shift in zip(given, of["decoders"], of["shifts"], strict=True):
        rest.append(x[site].numpy() - codes @ decoder - shift)
    return rest


@every_number
@pytest.mark.parametrize("own", [0.0, 0.25])
def test_codes_and_the_loss_are_those_of_a_plain_implementation(models: int, own: float) -> None:
    if models == 1 and own:
        return
    crosscoder, given = made(models, own=own), states(models)
    crosscoder.threshold.copy_(torch.tensor([0.4, 0.7])[:, None, None])
    codes, loss = crosscoder.codes(given), crosscoder.loss(given)
    decoded = crosscoder.decode(codes)
    for site in range(SITES):
        positive, sizes, of = plain(crosscoder, given, site)
        above = positive * (positive * sizes > crosscoder.threshold[site].item())
        assert 0 < (above > 0).mean() < 0.5
        np.testing.assert_allclose(codes[site].detach(), above, atol=1e-12)
        for x, again, rest in zip(given, decoded, left(above, given, of, site), strict=True):
            np.testing.assert_allclose(again[site].detach(), x[site].numpy() - rest, atol=1e-12)

        ordered = np.sort((positive * sizes).ravel())
        kept = positive * (positive * sizes >= ordered[-ROWS * ACTIVE])
        assert (kept > 0).sum() == ROWS * ACTIVE
        fvu = sum((rest**2).mean() for rest in left(kept, given, of, site))
        np.testing.assert_allclose(loss[site].item(), fvu)


def test_the_loss_of_l1_is_that_of_a_plain_implementation_and_its_penalty_rises() -> None:
    crosscoder, given = made(2, selection="l1", penalty=0.2), states(2)
    for step in (0, PENALTY_RISE // 2 - 1, 3 * PENALTY_RISE):
        crosscoder.steps.fill_(step)
        loss = crosscoder.loss(given)
        risen = min(1.0, (step + 1) / PENALTY_RISE)
        for site in range(SITES):
            positive, sizes, of = plain(crosscoder, given, site)
            fvu = sum((rest**2).mean() for rest in left(positive, given, of, site))
            penalty = 0.2 * risen * (positive * sizes).sum(1).mean()
            np.testing.assert_allclose(loss[site].item(), fvu + penalty)
    assert torch.equal(crosscoder.codes(given), crosscoder.positive(given))


@every_number
def test_dead_latents_are_fitted_to_what_the_others_leave(models: int) -> None:
    crosscoder, given = made(models, dead_after=100, auxiliary=0.5), states(models)
    without = crosscoder.eval().loss(given).detach()
    dead = [[1, 4, 7, 9, 20], [3]]
    for site, latents in enumerate(dead):
        crosscoder.since[site, latents] = 100 + site
    loss = crosscoder.loss(given)
    for site, latents in enumerate(dead):
        positive, sizes, of = plain(crosscoder, given, site)
        ordered = np.sort((positive * sizes).ravel())
        codes = positive * (positive * sizes >= ordered[-ROWS * ACTIVE])
        revived = np.zeros_like(codes)
        for n in range(ROWS):
            largest = sorted(latents, key=lambda j: -positive[n, j])[:3]  # half of the largest width
            revived[n, largest] = positive[n, largest]
        expected = without[site].item()
        for rest, decoder in zip(left(codes, given, of, site), of["decoders"], strict=True):
            expected += 0.5 * ((rest - revived @ decoder) ** 2).mean() / (rest**2).mean()
        np.testing.assert_allclose(loss[site].item(), expected)

    loss.sum().backward()
    gradient = crosscoder.bias.grad
    assert gradient is not None
    firing = crosscoder.codes(given).detach().amax(1) > 0
    assert (gradient[0, 0, dead[0]] != 0).all()
    assert firing.any()


def test_rows_since_a_latent_fired_are_counted_in_training_alone() -> None:
    crosscoder, given = made(2), states(2)
    crosscoder.eval().loss(given)
    assert not crosscoder.since.any()
    crosscoder.train()
    crosscoder.loss(given)
    crosscoder.loss(given)
    positive = crosscoder.positive(given)
    sizes = positive * crosscoder.norms()
    fired = (sizes >= least_kept(sizes, ACTIVE)).any(1)
    assert fired.any()
    assert not fired.all()
    assert torch.equal(crosscoder.since, torch.where(fired, 0, 2 * ROWS))
    assert crosscoder.steps.tolist() == [2, 2]


@pytest.mark.parametrize("options", [{}, {"selection": "l1"}, {"own": 0.25}])
def test_the_code_of_a_row_does_not_depend_on_its_batch_nor_on_other_sites(options: dict[str, Any]) -> None:
    crosscoder = made(2, **options).eval()
    given = states(2, 64)
    for _ in range(3):
        crosscoder.settle(given)
    codes = crosscoder.codes(given)
    torch.testing.assert_close(crosscoder.codes([x[:, 8:16] for x in given]), codes[:, 8:16])
    changed = [x.clone() for x in given]
    for x in changed:
        x[1] = torch.nan
    assert torch.equal(crosscoder.codes(changed)[0], codes[0])
    assert torch.equal(crosscoder.loss(changed)[0], crosscoder.loss(given)[0])


def test_the_threshold_keeps_as_many_latents_as_are_wanted_with_the_weights_that_are_there() -> None:
    crosscoder, given = made(2), states(2, 64)
    crosscoder.settle(given)
    sizes = (crosscoder.positive(given) * crosscoder.norms()).detach()
    for site in range(SITES):
        ordered = np.sort(sizes[site].numpy().ravel())
        assert crosscoder.threshold[site].item() == ordered[-64 * ACTIVE]
    first = crosscoder.threshold.clone()
    with torch.no_grad():
        for decoder in crosscoder.decoders:
            decoder *= 3
    for _ in range(20 * REMEMBERED):
        crosscoder.settle(given)
    torch.testing.assert_close(crosscoder.threshold, 3 * first)


def test_directions_are_drawn_as_states_are_distributed_with_a_threshold_for_gaussians() -> None:
    draw = torch.Generator().manual_seed(1)
    mixing = torch.randn(1, 3, 11, generator=draw, dtype=torch.float64)  # of rank 3
    rows = torch.randn(1, 20_000, 3, generator=draw, dtype=torch.float64) @ mixing
    torch.manual_seed(0)
    crosscoder = Crosscoder(1, [6, 5], 200, active=9).double()
    crosscoder.start(rows.mT @ rows / 20_000)
    joint = torch.cat(list(crosscoder.decoders), 2)[0]
    assert torch.linalg.matrix_rank(joint, rtol=1e-6) == 3
    both = torch.cat([joint, mixing[0]])
    assert torch.linalg.matrix_rank(both, rtol=1e-6) == 3
    torch.testing.assert_close(joint.norm(dim=1), joint.norm(dim=1)[:1].expand(200))
    codes = crosscoder.codes(list(rows.split([6, 5], 2)))
    assert (codes > 0).double().sum(2).mean().item() == pytest.approx(9, rel=0.03)


def test_a_threshold_for_gaussians_is_zero_where_too_few_latents_are_positive() -> None:
    mean = torch.full((1, 1, 8), -50.0)
    assert least_kept_of_gaussians(mean, torch.ones(1, 1, 8), 3).abs().item() < 1e-6


@pytest.mark.parametrize("models", [2, 3])
def test_what_is_a_models_own_stays_exactly_zero_for_the_others(models: int) -> None:
    crosscoder, given = made(models, own=0.25, dead_after=80), states(models)
    optimizer = torch.optim.AdamW(crosscoder.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        crosscoder.loss(given).sum().backward()
        optimizer.step()
    for model in range(models):
        own = torch.arange(6 * model, 6 * model + 6)
        for other in range(models):
            is_zero = not crosscoder.decoder(other)[:, own].any() and not crosscoder.encoder(other)[..., own].any()
            assert is_zero == (other != model)
        changed = list(given)
        changed[model] = torch.randn_like(given[model])
        elsewhere = [j for j in range(6 * models) if j not in own]
        before, after = (crosscoder.positive(x)[..., elsewhere] for x in (given, changed))
        assert torch.equal(before, after)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Crosscoder, 1, [4, 4], 8, active=9), r"`active`.*at most 8.*got 9"),
        (partial(Crosscoder, 1, [4, 4], 8, active=0), "`active`.*at least 1.*got 0"),
        (partial(Crosscoder, 1, [4, 4], 0), "`latents`.*at least 1.*got 0"),
        (partial(Crosscoder, 1, [4, 4], own=0.6), r"`own`.*at most 0\.5.*got 0\.6"),
        (partial(Crosscoder, 1, [4], own=0.1), r"`own`.*at most 0.*got 0\.1"),
        (partial(Crosscoder, 1, [4, 4], own=-0.1), "`own`.*at least 0"),
        (partial(Crosscoder, 1, [4, 4], penalty=0.1), r"`penalty` with the selection 'l1' alone, but got 0\.1"),
        (partial(Crosscoder, 1, [4, 4], selection="l1", penalty=-1.0), "`penalty`.*at least 0"),
        (partial(Crosscoder, 1, [4, 4], selection="top_k"), "`selection`.*batch_topk, l1.*'top_k'"),
        (partial(Crosscoder, 1, [4, 4], auxiliary=-1.0), "`auxiliary`.*at least 0"),
        (partial(Crosscoder, 1, [4, 4], dead_after=0), "`dead_after`.*at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("own", [0.0, 0.25])
def test_a_step_waits_for_no_number_of_a_gpu(own: float) -> None:
    crosscoder = made(2, own=own, auxiliary=0.5).to("meta")  # whose tensors have no numbers to read
    given = [x.to("meta") for x in states(2)]
    crosscoder.loss(given).sum().backward()
    crosscoder.settle(given)
    with pytest.raises(RuntimeError, match="item"):
        crosscoder.since.sum().item()


def test_dead_latents_are_fitted_alike_where_their_number_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr("aligners.maps.sparse.crosscoder.most_of", lambda dead: LATENTS)
        crosscoder, given = made(2, dead_after=100, auxiliary=0.5).eval(), states(2)
        crosscoder.since[0, [1, 4, 7, 9, 20]] = 100
        loss = crosscoder.loss(given)
        loss.sum().backward()
        results.append([loss, *(weight.grad for weight in crosscoder.parameters())])
    for known, unknown in zip(*results, strict=True):
        torch.testing.assert_close(known, unknown)


def test_equal_rows_and_a_lost_site_leave_the_others_codes_alone() -> None:
    crosscoder, given = made(2), states(2)
    same = [x[:, :1].expand(-1, ROWS, -1).clone() for x in given]
    loss = crosscoder.loss(same)
    torch.testing.assert_close(loss, crosscoder.loss([x[:, :1] for x in given]))
    for x in same:
        x[0] = torch.nan
    lost = crosscoder.loss(same)
    assert lost.isnan().tolist() == [True, False]
    assert lost[1] == loss[1]
