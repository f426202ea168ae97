"""`evaluate.py features`: verdicts on planted states, the same in memory, at any batch size and on two ranks."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligners.injection.latents.planted_pair import PLAN, SHRUNK, knowing, recorded, stored
from tests.ranks import two_ranks
from tests.runs import quiet_trainer

from aligners.cli.table import evaluate
from aligners.fitting.saved_bank import FORWARD, StoredBank, save_bank
from aligners.injection.latents.control_banks import check_control, check_seed
from aligners.injection.latents.latent_evaluation import LatentEvaluation
from aligners.injection.latents.stored_dictionary import dictionary_of
from aligners.maps.linear import Linear
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.latents.examination import Examination, Spaces, examine
from aligners.similarity.latents.planted import plant
from aligners.similarity.latents.verdicts import SHARED, VERDICTS

QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def bank(folder: Path) -> StoredBank:
    bank = stored(recorded(folder), knowing(plant(PLAN, 0)), folder / "aligners.safetensors")
    save_bank(bank, bank.path)
    return bank


def evaluated(
    bank: StoredBank, folder: Path, batch_size: int = 16, spaces: Spaces = "apart", **settings: Any
) -> LatentEvaluation:
    evaluation = LatentEvaluation(bank, spaces=spaces, units=500)
    data = recorded(folder, batch_size=batch_size)
    quiet_trainer(**settings).test(evaluation, datamodule=data, verbose=False)
    return evaluation


def assert_alike(found: Examination, expected: Examination) -> None:
    for one, other in ((found.parts, expected.parts), (found.permuted, expected.permuted)):
        torch.testing.assert_close(one.own, other.own, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.other, other.other, rtol=1e-5, atol=1e-6)
        assert torch.equal(one.fired, other.fired)
        assert torch.equal(one.owner, other.owner)


@pytest.fixture(scope="module")
def whole(bank: StoredBank, folder: Path) -> LatentEvaluation:
    return evaluated(bank, folder)


def test_what_is_streamed_is_what_is_examined_in_memory(
    bank: StoredBank, whole: LatentEvaluation, folder: Path
) -> None:
    data = recorded(folder)
    data.setup("test")
    batches = list(data.paired("test"))
    text = torch.cat([batch.text for batch in batches])
    order = text.argsort(stable=True)
    x, y = (torch.cat([getattr(batch, name) for batch in batches], 1)[:, order] for name in "xy")
    _, aligner = dictionary_of(bank)
    codes = aligner.codes(x, y)
    found = examine(aligner.paired(), codes, x, y, text[order], variances=aligner.variances())
    assert_alike(whole.found, found)


def test_batches_and_ranks_do_not_matter(
    bank: StoredBank, whole: LatentEvaluation, folder: Path, tmp_path: Path
) -> None:
    for batch_size in (8, 64):
        other = evaluated(bank, folder, batch_size)
        assert_alike(other.found, whole.found)
        assert torch.equal(other.judged.verdict, whole.judged.verdict)
    for found, verdict, rows in two_ranks(partial(as_rank, bank=bank, folder=folder), tmp_path, meet=False):
        assert_alike(found, whole.found)
        assert torch.equal(verdict, whole.judged.verdict)
        assert [row["latent"] for row in rows] == [row["latent"] for row in whole.rows]
        for row, expected in zip(rows, whole.rows, strict=True):
            assert row["variance_y"] == pytest.approx(expected["variance_y"], rel=1e-6)
            assert row["fired"] == pytest.approx(expected["fired"], rel=1e-9)


def as_rank(rank: int, bank: StoredBank, folder: Path) -> tuple[Examination, torch.Tensor, list[dict[str, Any]]]:
    settings = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    evaluation = evaluated(bank, folder, **settings)
    return evaluation.found, evaluation.judged.verdict, evaluation.rows


def test_rows_say_what_is_planted(whole: LatentEvaluation) -> None:
    """Every own latent that is found is one; shrunk ones, which norms call Y's, are shared."""
    owner = plant(PLAN, 0).owner
    verdict = whole.judged.verdict[0]
    own = verdict < SHARED
    assert torch.equal(verdict[own], owner[own])
    assert own[owner >= 0].double().mean() >= 0.9
    assert (verdict[owner < 0] == SHARED).double().mean() >= 0.9
    assert (verdict[:SHRUNK] == SHARED).all()
    (site,) = whole.report_tables["sites"]
    assert site["own_by_norm"] == int((owner >= 0).sum()) + SHRUNK
    assert site["own_by_norm_alone"] >= SHRUNK
    assert site["fvu_x"] < 0.1
    assert site["live"] == len(whole.rows) == len(owner)
    for row in whole.rows:
        assert row["verdict"] == VERDICTS[int(verdict[row["latent"]])]
        assert row["nu_error_low"] <= row["nu_error_high"]


def test_the_command_reports_controls_and_seeds(bank: StoredBank, folder: Path, tmp_path: Path) -> None:
    """Two models that share all: a control; and the same dictionary in another order: another seed."""
    same = PLAN._replace(shared=110, scaled=0, own_x=0, own_y=0)
    control = stored(recorded(tmp_path, same, 1), knowing(plant(same, 1)), tmp_path / "same.safetensors")
    save_bank(control, control.path)
    aligner = knowing(plant(PLAN, 0))
    with torch.no_grad():
        for decoder in aligner.crosscoder.decoders:
            decoder.copy_(decoder.flip(1))
    other = replace(bank, maps={FORWARD: {"sparse": aligner}}, path=tmp_path / "seed.safetensors")
    save_bank(other, other.path)
    run = tmp_path / "run"
    evaluate(
        [
            "features",
            f"--checkpoint={bank.path}",
            f"--same=[{control.path}]",
            f"--other_seeds=[{other.path}]",
            *QUIET,
            f"--run={run}",
        ]
    )
    content = json.loads((run / "features.json").read_text())
    assert content["meta"]["controls"] == [str(control.path)]
    assert 0 < content["meta"]["error_rate"] <= 0.1
    assert {row["seeds"] for row in content["rows"]} == {1}
    assert "by the controls the same rule makes about" in content["findings"][0]
    assert (run / "features.png").is_file()


def test_few_latents_are_not_ranked_and_the_report_says_so(tmp_path: Path) -> None:
    few = PLAN._replace(shared=40, scaled=0, own_x=8, own_y=8)
    bank = stored(recorded(tmp_path, few, 2), knowing(plant(few, 2)), tmp_path / "few.safetensors")
    evaluation = LatentEvaluation(bank, contexts=0, effects=0)
    quiet_trainer().test(evaluation, datamodule=recorded(tmp_path, few, 2), verbose=False)
    (caution,) = evaluation.meta["cautions"]
    assert "Fewer than 99 latents fire" in caution
    owner = plant(few, 2).owner
    own = evaluation.judged.verdict[0] < SHARED
    assert torch.equal(evaluation.judged.verdict[0][own], owner[own])
    assert own[owner >= 0].double().mean() >= 0.9


# ---------------------------------------------------------------------- bad input


def test_files_that_cannot_be_measured_are_refused(bank: StoredBank, folder: Path) -> None:
    linear = replace(bank, maps={FORWARD: {"linear": Linear(1, 224, 256)}})
    with pytest.raises(ValueError, match=r"a sparse dictionary of both models .* holds linear.*--config sparse"):
        dictionary_of(linear)
    _, aligner = dictionary_of(bank)
    two = replace(bank, maps={FORWARD: {"a": aligner, "b": aligner}})
    with pytest.raises(ValueError, match=r"Expected one dictionary, but .* holds a, b. Choose one with `dictionary`"):
        dictionary_of(two)
    assert dictionary_of(two, "b")[0] == "b"
    with pytest.raises(ValueError, match=r"`dictionary` to be one of a, b"):
        dictionary_of(two, "c")
    for name, value in {"rows": "mean", "special_tokens": False}.items():
        other = replace(bank, data={**bank.data, name: value})
        with pytest.raises(ValueError, match=f"was trained with `data.{name}`"):
            evaluated(other, folder)
    models = {**bank.data["models"], "x": {"name": "another", "fingerprint": "0"}}
    with pytest.raises(ValueError, match=r"was fitted on other models"):
        evaluated(replace(bank, data={**bank.data, "models": models}), folder)


def test_controls_that_say_nothing_are_refused(bank: StoredBank) -> None:
    itself = {**bank.data, "models": dict.fromkeys("xy", bank.data["models"]["x"])}
    with pytest.raises(ValueError, match=r"differ by chance alone, .* with itself. Frozen models have no dropout"):
        check_control(replace(bank, data=itself))
    few = replace(bank, maps={FORWARD: {"sparse": SparseAligner(1, 224, 256, latents=50, active=4)}})
    with pytest.raises(ValueError, match=r"at least 99 latents, .* has 50"):
        check_control(few)
    check_control(bank)
    _, aligner = dictionary_of(bank)
    with pytest.raises(ValueError, match=r"other seeds in `other_seeds`, but that of .* is the one that is measured"):
        check_seed(bank, bank, aligner)


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    plan = PLAN._replace(texts=12)
    few = stored(recorded(tmp_path, plan), knowing(plant(plan, 0)), tmp_path / "few.safetensors")
    with pytest.raises(ValueError, match=r"at least 10 held-out texts, half to fit on and half to measure, but got"):
        evaluated(few, tmp_path)


def test_a_command_without_a_checkpoint_says_which(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`checkpoint` to name a file .* `train.py fit --config sparse` makes one"):
        evaluate(["features", *QUIET, f"--run={tmp_path / 'run'}"])
