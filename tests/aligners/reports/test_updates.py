"""What the reports on an update say: of artefacts that were carried, and of what differs between two models."""

from pathlib import Path
from typing import Any

import pytest
from tests.aligners.reports.every import carrying, compared, comparison, migration
from tests.aligners.reports.made import cells

from aligners.reports.finished_runs import make_report
from aligners.reports.names import percentage, quoted
from aligners.reports.page.run_page import write_page
from aligners.reports.publishing import write
from aligners.reports.report import Row


def artefact(name: str, own: float | None, fidelity: float, **more: Any) -> Row:
    """A row of `train.py carry`, whose forecast keeps a share of the score as large as the fidelity."""
    row = dict(carrying(1)["rows"][0]) | {"artefact": name, "own_score": own, "own_score_of": own and "its owner"}
    for side in ("", "stale_"):
        kept = fidelity if not side else fidelity - 0.1
        for end in ("", "_low", "_high"):
            row[f"{side}fidelity{end}"] = kept
            row[f"{side}predicted{end}"] = None if own is None else own * kept
    return row | more


def test_artefacts_that_lose_most_come_first_whatever_their_names() -> None:
    rows = [
        artefact("a", 0.9, 0.999, verdict="carry"),
        artefact("b", None, 0.97, verdict="carry"),
        artefact("c", 0.9, 0.6, verdict="do not use"),
        artefact("d", None, 0.98, verdict="leave as it is", stale_fidelity=1.0),
    ]
    made = make_report("carrying", {}, rows, maps=carrying(1)["maps"])
    lead = made.lead
    assert "Do not use: c (forecast 0.540 [0.540, 0.540] of 0.900, as it is 0.450). Carry: b (agreement 0.970" in lead
    assert lead.index("Do not use: c") < lead.index("b (agreement") < lead.index("a (forecast") < lead.index("Leave as")
    assert [row["artefact"] for row in made.rows] == ["a", "b", "c", "d"]  # files keep their order
    (axis, *_) = made.figures["carrying"]().axes
    assert [label.get_text().split("\n")[0] for label in axis.get_yticklabels()] == ["c", "b", "a", "d"]


@pytest.mark.parametrize("earlier", [False, True])
def test_agreement_is_no_score(earlier: bool) -> None:
    """Of an artefact without a score there is no forecast; earlier versions called its fidelity a prediction."""
    row = artefact("tone", None, 0.986)
    if earlier:
        del row["own_score_of"]
        row |= {f"predicted{end}": 0.986 for end in ("", "_low", "_high")}
    tables = {name: carrying(1)[name] for name in ("scores", "maps")}
    made = make_report("carrying", {}, [row], **tables)
    assert "tone (agreement 0.986 [0.986, 0.986], as it is 0.886)" in made.lead
    assert "forecast" not in made.lead
    assert '`"score": {"metric": "auroc"' in " ".join(made.sentences)
    agreement, score = made.figures["carrying"]().axes
    assert {round(line.get_xdata()[0], 3) for line in agreement.lines[:-1]} >= {0.986, 0.886}
    assert 0.986 not in {round(line.get_xdata()[0], 3) for line in score.lines}


def test_forecasts_stand_beside_what_came_true() -> None:
    rows = [artefact("tone", 0.9, 0.9)]
    tables = {name: carrying(1)[name] for name in ("scores", "maps")}
    made = make_report("carrying", {}, rows, **tables)
    assert "Against labels tone has an AUROC of 0.900 [0.900, 0.900] on the old model, 0.850" in made.lead
    assert "The forecast of the carried score is +0.010 from the true one." in made.sentences


def test_tokens_are_quoted_and_figures_of_a_comparison_have_intervals(tmp_path: Path) -> None:
    tables = comparison(3)
    tables["types"][0]["type"] = "to"
    tables["tokens"] = [one | {"share": share} for one in tables["tokens"] for share in (0.0004, 0.00012)]
    tables["function"][0] |= {"agreement": 0.98, "agreement_low": 0.97, "agreement_high": 0.99}
    tables["function"][0] |= {"loss_old": 5.25, "loss_new": 5.2515}
    tables["function"][0] |= {"loss_change": 0.0015, "loss_change_low": 0.001, "loss_change_high": 0.002}
    text = {"source": "texts.csv", "n_texts": {"fit": 6824, "validation": 400, "test": 4918}}
    meta = compared(3) | {"n_fit": 500, "n_texts": 500, "text": text}
    made = make_report("comparison", meta, **tables)
    assert made.lead == (
        'The model has changed from block 2 on, most on tokens such as "to". There the old states, as they are, leave '
        "0.02 [0.02, 0.02] of the variance of the new ones. The answers of the new model "
        "(next tokens) differ from the old one's by more than rounding; 98.00% [97.00%, 99.00%] of 5,000 agree. The "
        "loss goes from 5.2500 to 5.2515 nats, a change of +0.0015 [+0.0010, +0.0020]."
    )
    assert {"0.04%", "0.012%", "31.0%"} <= cells(made.screen)
    assert "0.0%" not in cells(made.screen)
    write(made, tmp_path)
    written = (tmp_path / "comparison.md").read_text()
    assert made.lead in written
    assert "| to | 31.0% |" in written
    page = write_page(made, tmp_path).read_text()
    assert "texts of texts.csv (500 of 6,824 to fit on, 500 of 4,918 held out)" in page


@pytest.mark.parametrize(("token", "written"), [("film", '"film"'), ('"', '"\\""'), ("\n", '"\\n"'), ("é", '"é"')])
def test_a_token_is_quoted_on_one_line(token: str, written: str) -> None:
    assert quoted(token) == written


@pytest.mark.parametrize(("share", "written"), [(0.31, "31.0%"), (0.00012, "0.012%"), (0.0, "0.0%"), (1, "100.0%")])
def test_a_small_share_is_not_none(share: float, written: str) -> None:
    assert percentage(share) == written


def test_the_first_sentence_advises_against_a_map_that_finds_too_little() -> None:
    made = migration()
    report = make_report("migration", made["meta"], made["rows"], forecasts=made["forecasts"])
    assert report.lead.startswith(
        "Switching by a map is possible: ridge, mapped queries over the old index, from 2,000"
    )
    assert "0.930 [0.910, 0.950] of what re-embedding finds" in report.lead
    assert "It falls short on sentences, held out (0.880 [0.860, 0.900])." in report.lead
    said = " ".join(report.sentences)
    assert "takes 6.9 hours at the 40 texts a second" in said.replace("40.0", "40")
    assert "costs 13.9 at 2 an hour" in said
    assert "0.910 [0.880, 0.940] for mapped queries over the old index (found: 0.920)" in said
    assert "It has no modules.json." in report.sentences

    strict = make_report("migration", made["meta"] | {"least_recall": 0.97}, made["rows"], forecasts=made["forecasts"])
    assert strict.lead.startswith("Switching by a map is not advised: at best, ridge")
    meta = made["meta"] | {"judged": False, "hours": None, "price": None}
    meta["serving"] = ["The map of queries (mlp) has no migrate_map.py."]
    alone = make_report("migration", meta, made["rows"], forecasts=made["forecasts"])
    assert "The map of queries (mlp) has no migrate_map.py." in alone.sentences
    assert "Nothing is judged" in " ".join(alone.sentences)
    assert "is not known: the new vectors were given" in " ".join(alone.sentences)
    wide = [row | {"predicted_recall10_high": 4.0} for row in made["forecasts"]]
    unsure = " ".join(make_report("migration", made["meta"], made["rows"], forecasts=wide).sentences)
    assert "could not be predicted: 300 validation texts are too few for an index of 1,000" in unsure
    assert "Predicted beforehand" not in unsure
    assert len(report.figures["migration"]().axes) == 6
    rounded = [row | {"recall10": row["recall10"] + 1e-16, "recall10_high": row["recall10"]} for row in made["rows"]]
    assert make_report("migration", made["meta"], rounded).figures["migration"]() is not None


def test_the_best_route_leads_whichever_it_is() -> None:
    made = migration()
    rows = []
    for row in made["rows"]:
        worse = row["route"] == "queries" and row["pairs"] == 2000
        rows.append(row | {"relative_recall10": 0.5} if worse else row)
    report = make_report("migration", made["meta"], rows, forecasts=made["forecasts"])
    assert "new queries over the mapped index, from 2,000" in report.lead
    assert "The other way, mapped queries over the old index: ridge finds 0.500" in " ".join(report.sentences)
