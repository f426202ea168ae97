"""Maps and similarities of models: tables and figures that any study with such cells has."""

from collections.abc import Sequence
from functools import partial

import pandas as pd

from aligners.fitting.training_status import MARK
from aligners.reports.names import site_name
from aligners.reports.report import Row, grouped
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.contents import Figure, Panel, Table, box_panel
from aligners.reports.study.frames import STATES, Frames, by, kind_words, place_words, stage_words
from aligners.reports.study.statistics import bases_of, holm, over_models, pair_means, sign_test

SHOWN = (("inn", "inn_paper"), ("linear",), ("mlp", "mlp_paper"))  # the first of each that there is
REFERENCES = (
    "inn",
    "inn_paper",
    "linear",
)  # the first that there is is what other maps are tested against
WORDS = {"mse": "mean squared error", "fvu": "FVU", "relative_error": "relative error"}
POOLED = "accuracy_source_pooler"
BOXES = ["stage", "layer", "model_x", "model_y", "value"]


def similarity(frames: Frames, name: str) -> Table:
    """Every measure of untrained, pretrained and fine-tuned models."""
    frame = row_selection.of_one_stage(row_selection.similarities(frames))
    frame = row_selection.matching(row_selection.between_models(frame))
    quantities = ("value", "held_out", "null", "untrained")
    rows = []
    for place, part in by(frame, "task", "stage", "measure"):
        rows.append(place | row_selection.estimates(part, quantities))
    rows += row_selection.not_computed(frames)
    return described_tables.table(name, rows, measures=set(frame["measure"]))


def alignment(frames: Frames, name: str) -> Table:
    """Errors of every map, on fitting and on held-out rows."""
    errors = row_selection.between_models(frames.errors())
    shown = (
        "mse",
        "mse_printed",
        "mse_fit",
        "mse_fit_printed",
        "mse_reduced",
        "relative_error",
        "fvu_fit",
        "fvu",
    )
    quantities = (*shown, "fvu_inverse")
    row = partial(map_row, name, errors, quantities, paper_train="train", paper_test="test")
    errors = row_selection.blocks(errors)
    rows = [row(place, part) for place, part in by(errors, "task", "stage", "rows", "method")]
    closest = closest_maps(rows, "task", "stage", "rows")
    return described_tables.table(name, rows, closest=closest, **row_selection.about_maps(errors))


def map_row(
    name: str,
    frame: pd.DataFrame,
    quantities: Sequence[str],
    place: Row,
    own: pd.DataFrame,
    **printed: str,
) -> Row:
    """A map's place and role, means of quantities, and printed numbers: column -> what they call it."""
    row = {**place, "role": own["role"].iloc[0]}
    row |= row_selection.map_cells(place["method"], own)
    row |= row_selection.estimates(own, quantities)
    methods = frame["method"].unique()
    where = {key: place[key] for key in ("task", "method") if key in place}
    for column, what in printed.items():
        row[column] = described_tables.paper_value(name, what, methods, **where)
    return row


def alignment_tests(frames: Frames, name: str) -> Table:
    """Test of every map against the invertible network, or the linear map where there is none."""
    errors = row_selection.blocks(row_selection.between_models(frames.errors()))
    errors = errors.assign(
        mse=errors["mse"].where(row_selection.trained(errors))
    )  # a pair without a value is not tested
    rows = list[Row]()
    for place, group in by(errors[errors["role"] == "method"], "task", "stage", "rows"):
        rows += [{**place, **test} for test in _tests(group)]
    row_selection.present(rows, "no two maps were measured on pairs of at least three models")
    adjusted = holm([row["p"] for row in rows])
    for row, p in zip(rows, adjusted, strict=True):
        where = place_words(row["task"], row["stage"])
        row |= {"holm": p, "named": f"{row['method']} ({where})"}
    return described_tables.table(name, rows, tests=len(rows))


def _tests(group: pd.DataFrame) -> list[Row]:
    """The tests of the maps at one place, each named `method − reference`."""
    means = {}
    for at, part in by(group, "method"):
        if part["mse"].any():
            means[at["method"]] = pair_means(part, "mse")
    reference = next((method for method in REFERENCES if method in means), None)
    tests = list[Row]()
    if reference is None:
        return tests
    bases = bases_of(group)
    for method in means:
        test = sign_test(means[method] - means[reference], bases) if method != reference else None
        if test:
            tests.append({"method": f"{method} − {reference}", **test._asdict()})
    return tests


def injection(frames: Frames, name: str) -> Table:
    """The task's score after injection, between all ceilings and floors."""
    frame = row_selection.between_models(frames.of("inject", "score"))
    lost = frame["overflow"].astype(bool) & frame["n_units"].notna()
    injected = frame[frame["score"].notna() | lost]
    if POOLED in injected:  # of the paper's trained linear map, where ours is solved
        theirs = injected.get(f"{POOLED}_printed", injected[POOLED]).fillna(injected[POOLED])
        injected = injected.assign(accuracy_printed=theirs)
    metric = described_tables.printed_metric(name, injected)
    quantities = ("score", "score_printed", *metric, "accuracy_printed", "agreement", "penalty")
    rows = []
    for place, part in by(injected, "task", "stage", "method"):
        row = map_row(name, frame, (), place, part, paper="score")
        row |= row_selection.estimates(part[row_selection.is_last(part)], quantities)
        row["everywhere"] = over_models(row_selection.blocks(part), "score")
        rows.append(row)
    return described_tables.table(
        name, rows, kept=kept_scores(rows), **row_selection.about_maps(frame)
    )


def errors_by_layer(
    frames: Frames, name: str, column: str, component: str = STATES, paper: str | None = None
) -> Figure:
    """Errors at each layer, a box over pairs of models, before and after fine-tuning.

    Args:
        frames: of the study.
        name: of the figure.
        column: the error.
        component: what was mapped.
        paper: entry of the printed numbers; default: that of the figure.
    """
    errors = row_selection.blocks(row_selection.between_models(frames.errors(component)))
    sited = errors[errors["site_x"].notna()].astype({"site_x": int, "site_y": int})
    sited["layer"] = [
        site_name(pair) for pair in zip(sited["site_x"], sited["site_y"], strict=True)
    ]
    panels, values = list[Panel](), list[Row]()
    for place, group in by(sited, "task", "rows"):
        for method in shown_methods(group, column):
            line = group[group["method"] == method]
            cells = row_selection.map_cells(method, line)
            boxes, means = _boxes(line, column)
            title = place_words(place["task"], kind_words(place["rows"]), cells["method"])
            layers = list(dict.fromkeys(line["layer"]))
            panels.append(box_panel(title, boxes, "stage", "layer", layers))
            values += [{**place, **cells, **mean} for mean in means]
    row_selection.present(panels, "no map was fitted between models at the same site")
    about: Row = {"what": WORDS[column], "trend": _trend(values), "paper": paper or name}
    about["pairs"] = len(pair_means(errors, column))
    about["stages"] = " and ".join(
        stage_words(at["stage"]) for at, _ in by(errors, "stage") if at["stage"]
    )
    drawn = {row["method"].rstrip(MARK) for row in values}
    methods = dict.fromkeys(errors.loc[errors["role"] == "method", "method"])
    about["left_out"] = ", ".join(method for method in methods if method not in drawn)
    return described_tables.figure(
        name, panels, values, **about, **row_selection.about_maps(errors)
    )


def _boxes(line: pd.DataFrame, column: str) -> tuple[pd.DataFrame, list[Row]]:
    """The error of each pair of models at each stage and layer, and the means over pairs."""
    boxes, means = list[Row](), list[Row]()
    for at, part in by(line, "stage", "layer"):
        for (x, y), value in pair_means(part, column).dropna().items():
            boxes.append({**at, "model_x": x, "model_y": y, "value": value})
        mean = over_models(part, column)
        if mean:
            means.append({**at, **mean._asdict()})
    return pd.DataFrame(boxes, columns=BOXES), means


def shown_methods(frame: pd.DataFrame, column: str, most: int = len(SHOWN)) -> list[str]:
    """The maps that figures show: an invertible network, linear, a free network, and whatever trained map is closest.

    Args:
        frame: errors.
        column: the error by which a map is close.
        most: so many of the first three at most.
    """
    maps = frame[frame["role"] == "method"]
    there = list(dict.fromkeys(maps["method"]))
    shown = []
    for names in SHOWN:
        known = [name for name in names if name in there]
        shown += known[:1]
    shown = shown[:most] or there[:1]
    everywhere = row_selection.trained(maps).groupby(maps["method"]).transform("all")
    means = maps[everywhere].groupby("method", sort=False)[column].mean()
    closest = means.nsmallest(1).index
    return list(dict.fromkeys([*shown, *closest]))


def _trend(values: Sequence[Row]) -> Row | None:
    """Of the first map that is trained, the errors at the first and the last layer, stage by stage."""
    known = [row for row in values if row["compared"]]
    if not known:
        return None
    place, of_map = by(pd.DataFrame(known), "task", "rows", "method")[0]
    lines = []
    for at, line in by(of_map, "stage"):
        first, last = line.iloc[[0, -1]].to_dict("records")
        lines.append((at["stage"], first, last))
    return {**place, "lines": lines}


def closest_maps(rows: Sequence[Row], *keys: str) -> list[Row]:
    """At each place the closest map of those that are trained, and the mse of `linear` if that is another."""
    maps = []
    for row in rows:
        if row["compared"] and row["mse"] and row.get("role") != "floor":
            maps.append(row | row["mse"]._asdict())
    winners = list[Row]()
    if not maps:
        return winners
    for place, here in by(pd.DataFrame(maps), *keys):
        closest = here.loc[here["mean"].idxmin()]
        linear = here.loc[here["method"] == "linear", "mean"]
        other = closest["method"] != "linear" and len(linear) > 0
        winners.append({**closest, **place, "linear": linear.iloc[0] if other else None})
    return winners


def kept_scores(rows: Sequence[Row]) -> list[Row]:
    """For each task the trained map that keeps the most of Y's score, beside Y itself and X without a map."""
    best_maps = []
    for (task, stage), here in grouped(rows, "task", "stage").items():
        scored = [row for row in here if row["score"]]
        means = {row["method"]: 100 * row["score"].mean for row in scored}
        maps = [row["method"] for row in scored if row["role"] == "method" and row["compared"]]
        if maps and "native_y" in means:
            best = max(maps, key=means.__getitem__)
            scores = {
                "native": means["native_y"],
                "score": means[best],
                "bare": means.get("identity"),
            }
            best_maps.append({"task": task, "stage": stage, "best": best, **scores})
    return best_maps
