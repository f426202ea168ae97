from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.probing.evaluation import ProbeExperiment
from aligners.probing.training import ProbeTraining
from aligners.reports.publishing import write
from aligners.reports.runs.probing.report import codes_in_words, report
from datamodules.layers import LayerActivations
from datamodules.text.sources import TextSource
from tests.runs import quiet_trainer

Row = dict[str, Any]
SEEDS = 2


@pytest.fixture(scope="module")
def found(masked: list[str], treebank: TextSource) -> ProbeExperiment:
    quick = ProbeTraining(max_epochs=2, batch=16)
    made = ProbeExperiment(
        ["pos", "distance"], seeds=SEEDS, projection=4, hidden=4, training=quick, drawn=0, portions=[0.1, 0.4, 1.0]
    )
    data = LayerActivations([masked[0]], text=treebank, max_length=64, batch_size=32, rows="words")
    quiet_trainer().test(made, datamodule=data, verbose=False)
    made.train_probes()
    return made


def test_labels_are_sent_by_every_edge_probe_and_control(found: ProbeExperiment) -> None:
    rows = found.report_tables["codelengths"]
    sites = {*range(len(found._data.reader.layers[0])), None}
    assert {(row["task"], row["source"], row["site"], row["control"]) for row in rows} == {
        *(("pos", "model", site, control) for site in sites for control in (False, True)),
        *(("pos", "untrained", site, False) for site in sites - {None}),
    }
    words = found.words[0, "fit"].sentences
    assert {row["n_targets"] for row in rows} == {sum(len(each.words) for each in words)}
    for row in rows:
        assert row["compression"] == pytest.approx(row["uniform_bits"] / row["bits"], rel=0.02)  # a mean over seeds
        assert row["compression_low"] <= row["compression"] <= row["compression_high"]
        assert row["compression_seeds_low"] <= row["compression"] <= row["compression_seeds_high"]


def test_the_portions_add_up_to_the_code(found: ProbeExperiment) -> None:
    portions = found.report_tables["portions"]
    assert Counter(row["seed"] for row in portions) == dict.fromkeys(range(SEEDS), len(portions) // SEEDS)
    shares = sorted({row["share"] for row in portions})
    assert shares == pytest.approx([0.1, 0.4, 1.0], abs=0.01)
    first = [row["bits_a_target"] for row in portions if row["share"] == shares[0]]
    torch.testing.assert_close(torch.tensor(first), torch.full((len(first),), torch.tensor(3.0).log2().item()))


def test_the_report_has_the_codes(found: ProbeExperiment, tmp_path: Path) -> None:
    made = report(found.meta, found.rows, **found.report_tables)
    write(made, tmp_path)
    assert (tmp_path / "probing_codes.png").exists()
    assert (tmp_path / "codelengths.csv").exists()
    assert any("pos: labels are compressed most at site" in said for said in made.sentences)


def code(site: int, compression: float, *, control: bool = False) -> Row:
    return {
        "model": "m", "task": "pos", "source": "model", "site": site, "control": control, "compression": compression,
        "uniform_bits": 300.0, "frequency_bits": 200.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([0.5, 0.6, 0.9], "pos: codelengths order the sites as F1 does."),
        (
            [0.5, 0.9, 0.6],
            "pos: sites from best to worst by codelength 2, 1, 0, by F1 1, 2, 0 (rank correlation 0.50).",
        ),
    ],
)
def test_it_is_said_whether_codes_order_sites_as_scores_do(scores: list[float], said: str) -> None:
    codes = [code(site, 1.0 + site) for site in range(3)] + [code(2, 1.1, control=True)]
    rows = [{"model": "m", "task": "pos", "source": "model", "site": site, "score": s} for site, s in enumerate(scores)]
    assert list(codes_in_words(codes, rows)) == [
        "pos: labels are compressed most at site 2, 3.00 times (control task 1.10); a code that knows their "
        "frequencies alone has 1.50.",
        said,
    ]


def test_portions_ascend() -> None:
    with pytest.raises(ValueError, match="`portions`"):
        ProbeExperiment(portions=[0.5, 0.2, 1.0])
