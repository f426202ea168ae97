"""What the page of each kind of report begins with."""

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.aligners.reports.every import FEATURES_META, carrying, compared, comparison, features, migration, steering
from tests.aligners.reports.made import printed, row, scored, stitched

from aligners.reports.finished_runs import KINDS, make_report
from aligners.reports.page.run_page import write_page
from aligners.reports.report import Row

FIVE = {"score": 0.5, "score_low": 0.4, "score_high": 0.6, "score_name": "accuracy", "n_texts": 1200}
MAPS = [
    row("x", "y", name, "method", (1, 1), fvu=fvu, fvu_unseen=2 * fvu, fvu_inverse=fvu, training=None)
    for name, fvu in (("linear", 0.4), ("inn", 0.1))
]


def bijection() -> list[Row]:
    about = dict.fromkeys(("fvu_seen", "fvu_unseen", "fvu_other", "round_trip", "stretch_low", "stretch_high"))
    about |= {"model_x": "x", "model_y": "y", "site_x": 1, "site_y": 1, "training": "trained", "size": 100, "steps": 9}
    fvus = {"inn": 0.3, "mlp": 0.2}
    return [
        about | {"method": name, "direction": way, "seed": seed, "fvu": fvu + seed / 100}
        for name, fvu in fvus.items()
        for way in ("X to Y", "Y to X")
        for seed in range(2)
    ]


def finetuning() -> list[Row]:
    about = {"kind": "none", "count": 0, "loss": 0.7, "seconds": 1.0, "trained": 9, "layers": 2, "accuracy": 0.5}
    return [FIVE | about | {"variant": name, "score": score} for name, score in (("none", 0.7), ("top-1", 0.5))]


def similarity() -> list[Row]:
    about: Row = {"model_x": "x", "model_y": "y", "direction": "both", "features": "raw", "layer_x": 0, "layer_y": 0}
    about |= {"held_out": None, "null": 0.1, "value": 0.5, "high": 0.6, "n_rows": 12000}
    controls = {"cka": (0.45, 0.4), "cca": (0.45, 0.5)}
    return [
        about | {"measure": name, "label": name, "low": low, "untrained": twin}
        for name, (low, twin) in controls.items()
    ]


def probing() -> list[Row]:
    about = FIVE | dict.fromkeys(("rank", "control", "selectivity", "centre_of_gravity", "parameters"))
    about |= {"model": "x", "task": "pos", "probe": "edge", "n_sentences": 1300}
    sources = {"majority": (None, 0.2), "model": (1, 0.7), "untrained": (1, 0.6)}
    return [about | {"source": name, "site": site, "score": score} for name, (site, score) in sources.items()]


def across() -> list[Row]:
    about: Row = {"model_x": "x", "model_y": "y", "site_x": 1, "site_y": 1, "task": "pos", "measure": "F1", "kept": 0.9}
    about |= {"score_low": None, "score_high": None, "training": None}
    roles = {"native_y": ("ceiling", 0.8), "linear": ("method", 0.75), "baseline": ("floor", 0.2)}
    return [about | {"method": name, "role": role, "score": score} for name, (role, score) in roles.items()]


def surgery() -> list[Row]:
    kinds = {"native": (2, None, 0.7), "untuned": (1, 2, 0.5), "skip": (None, 1, 0.4)}
    about = {"model": "x", "first": 1}
    return [
        FIVE | about | {"kind": name, "site": site, "last": last, "score": score}
        for name, (site, last, score) in kinds.items()
    ]


UNIVERSE = [r | {"method": "universe", "cycle": 1e-6, "round_trip": 1e-6} for r in MAPS[1:]]
INJECTION = [
    row("x", "y", "native_y", "ceiling", (None, None), direction="forward", n_texts=1200, **scored(0.7, 0.02)),
    *(r | {"direction": "forward", "n_texts": 1200, **scored(0.69, 0.02)} for r in MAPS),
]
STEERED = steering(1, "x")
FEATURES: dict[str, Any] = features(1, "x", "y")
COMPARED: dict[str, Any] = comparison(4)
PENALTY = ("penalty", "penalty_low", "penalty_high")
CARRIED: dict[str, Any] = carrying(1)
MIGRATED = migration()
CASES: dict[str, tuple[list[Row], Row, str]] = {
    "attention": (MAPS, {}, "The closest, inn, leaves 10.0% of the target's variance unexplained (FVU), linear 40.0%"),
    "bijection": (bijection(), {}, "is 1.49 times that of a free network (MLP) with as many parameters (100)"),
    "comparison": (
        COMPARED.pop("rows"),
        COMPARED,
        'most on tokens such as "film". There the old states, as they are, leave 0.02 [0.02, 0.02] of the variance',
    ),
    "carrying": (CARRIED.pop("rows"), CARRIED, "Carry: tone (forecast 0.800 [0.800, 0.800] of 0.800, as it is 0.800)."),
    "features": (
        FEATURES.pop("rows"),
        FEATURES,
        "Of 120 latents that fire on 600 held-out texts, at 1 site, 90 are shared, 3 are x's own, 4 y's own and 23 "
        "undecided; by the controls the same rule makes about 1.2 own ones of nothing, a share of 17.0%. By the norms "
        "of decoders alone (one at least nine times as long as the other) 30 would be own, of which 24 do not survive. "
        "Of what the dictionary leaves, 20.0% of x's variance and 25.0% of y's variance, nothing is said.",
    ),
    "finetuning": (finetuning(), {}, "highest with none, 70.0% [40.0%, 60.0%], and lowest with top-1"),
    "fit": (MAPS, {}, "inn 20.0% on types that no map was fitted on"),
    "injection": (INJECTION, {}, "y classifies 70.0% [68.0%, 72.0%] of 1,200 held-out texts correctly"),
    "migration": (
        MIGRATED["rows"],
        {"forecasts": MIGRATED["forecasts"]},
        "finds 0.930 [0.910, 0.950] of what re-embedding finds (recall@10); 0.9 is asked for.",
    ),
    "probes_across": (across(), {}, "in the states of the best map, linear (90.0% kept), 80.0 in y's own, 20.0 is"),
    "probing": (probing(), {}, "pos: F1 70.0 [40.0, 60.0] at site 1 (at most 60.0 untrained)"),
    "recovery": ([r | {"strength": 0.3} for r in MAPS], {}, "inn, leaves 10% of the variance of held-out rows"),
    "similarity": (similarity(), {"layers": [], "distances": []}, "by cka. At none are they more alike by cca."),
    "steering": (
        STEERED["rows"],
        {name: STEERED[name] for name in ("equal", "generation", "samples")},
        "Carried directions have 57% of the native effect at equal cost",
    ),
    "stitching": (stitched(), {}, "at its worst place 0.208 [0.186, 0.230]"),
    "surgery": (surgery(), {}, "Skipping one block costs the most at block 1: 40.0%"),
    "universe": (UNIVERSE, {"directions": [{"site": 1, "direction": 1, "variance": 1.0, "x": 0.6}]}, "leaves 10% unex"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_begins_with_what_was_found(kind: str, tmp_path: Path) -> None:
    rows, more, part = CASES[kind]
    meta: dict[str, Any] = {"majority_score": 0.5, "unit": "text", **MIGRATED["meta"], **compared(4), **FEATURES_META}
    text = write_page(make_report(kind, meta, rows, **more), tmp_path).read_text(encoding="utf-8")
    lead = re.search(r'</h1>\n<p class="lead">(.*)</p>\n</header>', text)
    assert lead is not None
    words = unescape(re.sub("<[^>]*>", "", lead[1]))
    assert part in words
    assert 2 <= len(re.findall(r"[.](?: |$)", words)) <= 5
    assert set(KINDS[kind]["captions"])


def test_a_map_that_overflows_at_a_site_is_compared_with_no_other() -> None:
    tokens = {
        "loss": 4.0,
        "perplexity": 50.0,
        "score": 0.3,
        "score_name": "accuracy",
        "n_texts": 9,
        "direction": "forward",
    }
    native = row("x", "y", "native_y", "ceiling", (None, None), penalty=0.0, **tokens)
    costs = {"linear": (0.1, None), "mlp": (0.5, 0.3), "inn": (0.2, 0.4)}
    maps = [
        row("x", "y", name, "method", (site, site), fvu=cost, **dict.fromkeys(PENALTY, cost), **tokens)
        for name, both in costs.items()
        for site, cost in enumerate(both, start=1)
    ]
    lead = make_report("injection", {}, [native, *maps]).lead
    costs_said = "Mapped states of x raise the loss by (nats): mlp 0.300 to 0.500 and inn 0.200 to 0.400"
    assert f"{costs_said}; linear overflowed at some site." in lead
    assert "linear" not in make_report("fit", {}, maps).lead


def test_a_share_of_what_chance_does_as_well_is_not_boasted_of() -> None:
    def findings(least: float) -> str:
        equal = [one | {"value_low": least} if one["role"] == "random" else one for one in STEERED["equal"]]
        equal = [one | {"value_high": 9.0} if one["role"] == "random" else one for one in equal]
        return " ".join(make_report("steering", {}, STEERED["rows"], equal=equal).findings)

    assert "no more than chance" in findings(0.0)
    assert "than directions drawn at random: shares" in findings(0.0)
    assert "of the native effect at equal cost" not in findings(0.0)
    assert "chance" not in findings(5.0)
    assert "of the native effect at equal cost" in findings(5.0)


def test_steering_that_never_costs_so_much_is_said_to() -> None:
    equal = [one | dict.fromkeys(("value", "value_low", "value_high", "share")) for one in STEERED["equal"]]
    assert (
        "no amount of a direction that was tried costs"
        in make_report("steering", {}, STEERED["rows"], equal=equal).lead
    )


@pytest.mark.parametrize(
    ("scores", "part"),
    [
        ((0.5, 0.6), "more than a point below that after every site but the last, 60.0% [40.0%, 60.0%] at best"),
        ((0.7, 0.6), "it is within a point of that after site 0 alone"),
        ((0.5, 0.695), "it stays within a point of that from site 1 on"),
    ],
)
def test_a_truncated_model_is_said_to_keep_its_score_only_where_it_does(scores: tuple[float, ...], part: str) -> None:
    kept, whole = surgery()[1], surgery()[0]
    rows = [whole, *(kept | {"site": site, "score": score} for site, score in enumerate(scores)), surgery()[2]]
    skipped = "Skipping one block costs the most at block 1: 40.0%"
    lead = make_report("surgery", {"majority_score": 0.5}, rows).lead
    assert part in lead
    assert skipped in lead
    rows[-1]["score"] = 0.7
    assert "No block is needed" in make_report("surgery", {"majority_score": 0.5}, rows).lead


@pytest.mark.parametrize(
    ("kind", "gone"),
    [("stitching", {"score", "score_penalty"}), ("finetuning", {"loss"}), ("finetuning", {"score", "accuracy"})],
)
@pytest.mark.parametrize("every", [True, False], ids=["every", "first"])
def test_a_report_is_made_where_what_was_measured_is_no_number(kind: str, gone: set[str], every: bool) -> None:
    rows, more, _ = CASES[kind]
    rows = [row | dict.fromkeys(gone if every or number == 0 else ()) for number, row in enumerate(rows)]
    made = make_report(kind, {"majority_score": 0.5}, rows, **more)
    for draw in made.figures.values():
        draw()
    shown = printed(made.screen) + "".join(made.findings)
    assert not re.search(r"\b(None|nan)\b", shown)
    assert len(shown) > 200


@pytest.mark.parametrize(
    ("kind", "column", "part"),
    [
        ("fit", "fvu", "None of them has a finite error at every site"),
        ("probes_across", "score", "by probes that were trained on y alone."),
        ("similarity", "value", "no value is a number."),
        ("universe", "round_trip", "of the largest value."),
    ],
)
def test_a_column_without_a_number_is_not_said(kind: str, column: str, part: str) -> None:
    rows, more, _ = CASES[kind]
    lead = make_report(kind, {}, [one | {column: None} for one in rows], **more).lead
    assert part in lead
    assert "nan" not in lead
