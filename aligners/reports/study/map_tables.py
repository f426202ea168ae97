"""Maps and similarities of models: tables and figures for any study with such cells."""

from collections.abc import Sequence

from pandas import DataFrame

from aligners.fitting.training_status import MARK
from aligners.reports.names import site_name
from aligners.reports.report import Row, grouped
from aligners.reports.study import described_tables, row_selection
from aligners.reports.study.contents import Figure, Panel, Table, box_panel
from aligners.reports.study.frames import (
    STATES,
    Frames,
    Names,
    by,
    kind_words,
    place_words,
    stage_words,
)
from aligners.reports.study.statistics import (
    Difference,
    bases_of,
    holm,
    over_models,
    pair_means,
    sign_test,
)

SHOWN = (
    ("inn", "inn_paper"),
    ("linear",),
    ("mlp", "mlp_paper"),
)  # the first of each that there is
# the first that there is is what other maps are tested against
REFERENCES = ("inn", "inn_paper", "linear")
WORDS = {"mse": "mean squared error", "fvu": "FVU", "relative_error": "relative error"}
ERRORS = (
    "mse",
    "mse_printed",
    "mse_fit",
    "mse_fit_printed",
    "mse_reduced",
    "relative_error",
    "fvu_fit",
    "fvu",
    "fvu_inverse",
)
POOLED = "accuracy_source_pooler"


def similarity(frames: Frames, name: str) -> Table:
    """Tabulate every measure for untrained, pretrained and fine-tuned models."""
    frame = row_selection.similarities(frames)
    frame = row_selection.between_models(row_selection.of_one_stage(frame))
    frame = row_selection.matching(frame)
    rows = []
    for place, part in by(frame, "task", "stage", "measure"):
        means = row_selection.estimates(
            part, ("value", "held_out", "null", "untrained")
        )
        rows.append({**place, **means})
    rows += row_selection.not_computed(frames)
    return described_tables.table(name, rows, measures=set(frame["measure"]))


# ---------------------------------------------------------------------- errors of maps


def alignment(frames: Frames, name: str) -> Table:
    """Tabulate errors of every map, on fitting and on held-out rows."""
    errors = row_selection.between_models(frames.errors())
    methods = errors["method"].unique()
    errors = row_selection.blocks(errors)
    rows = []
    for place, part in by(errors, "task", "stage", "rows", "method"):
        row = map_row(place, part, ERRORS)
        row["paper_train"] = printed_of(name, "train", place, methods)
        row["paper_test"] = printed_of(name, "test", place, methods)
        rows.append(row)
    closest = closest_maps(rows, "task", "stage", "rows")
    about = row_selection.about_maps(errors)
    return described_tables.table(name, rows, closest=closest, **about)


def map_row(place: Row, own: DataFrame, quantities: Names) -> Row:
    """Return a map's place and role, and the means of quantities."""
    row = {**place, "role": own["role"].iloc[0]}
    row |= row_selection.map_cells(place["method"], own)
    return row | row_selection.estimates(own, quantities)


def printed_of(name: str, quantity: str, place: Row, methods: Names) -> object:
    """Return the number that a paper printed for a map and, if there are several, for its task.

    Args:
        name: name of the table.
        quantity: that is printed.
        place: of the map.
        methods: that the study has.
    """
    where = {key: place[key] for key in ("task", "method") if key in place}
    return described_tables.paper_value(name, quantity, methods, **where)


def closest_maps(rows: Sequence[Row], *keys: str) -> list[Row]:
    """Return, at each place, the closest trained map, and the mse of `linear` if that is another map."""
    maps = []
    for row in rows:
        if row["compared"] and row["mse"] and row["role"] != "floor":
            maps.append(row | row["mse"]._asdict())
    winners = list[Row]()
    for place, here in by(DataFrame(maps), *keys) if maps else ():
        closest = here.loc[here["mean"].idxmin()]
        linear = here.loc[here["method"] == "linear", "mean"].tolist()
        beside = None
        if linear and closest["method"] != "linear":
            beside = linear[0]
        winners.append({**closest, **place, "linear": beside})
    return winners


def alignment_tests(frames: Frames, name: str) -> Table:
    """Test every map against the invertible network, or the linear map where there is none."""
    errors = row_selection.blocks(row_selection.between_models(frames.errors()))
    # a pair without a value is not tested
    trained = errors["mse"].where(row_selection.trained(errors))
    errors = errors.assign(mse=trained)
    rows = list[Row]()
    for place, group in by(errors[errors["role"] == "method"], "task", "stage", "rows"):
        where = place_words(place["task"], place["stage"])
        for maps, test in _tests(group).items():
            row = {**place, "method": maps, "named": f"{maps} ({where})"}
            rows.append(row | test._asdict())
    row_selection.present(
        rows, "no two maps were measured on pairs of at least three models"
    )
    adjusted = holm([row["p"] for row in rows])
    for row, p in zip(rows, adjusted, strict=True):
        row["holm"] = p
    return described_tables.table(name, rows, tests=len(rows))


def _tests(group: DataFrame) -> dict[str, Difference]:
    """Return the tests of the maps at one place: `method − reference` -> test."""
    means = {}
    for at, part in by(group, "method"):
        if part["mse"].any():
            means[at["method"]] = pair_means(part, "mse")
    references = [method for method in REFERENCES if method in means]
    tests = dict[str, Difference]()
    if not references:
        return tests
    reference = references[0]
    bases = bases_of(group)
    for method, errors in means.items():
        if method == reference:
            continue
        test = sign_test(errors - means[reference], bases)
        if test:
            tests[f"{method} − {reference}"] = test
    return tests


# ---------------------------------------------------------------------- behaviour


def injection(frames: Frames, name: str) -> Table:
    """Tabulate the task's score after injection, with all ceilings and floors."""
    frame = row_selection.between_models(frames.of("inject", "score"))
    methods = frame["method"].unique()
    lost = frame["overflow"].astype(bool) & frame["n_units"].notna()
    injected = frame[frame["score"].notna() | lost]
    if POOLED in injected:  # of the paper's trained linear map, where ours is solved
        pooled = injected[POOLED]
        theirs = injected.get(f"{POOLED}_printed", pooled)
        injected = injected.assign(accuracy_printed=theirs.fillna(pooled))
    metric = described_tables.printed_metric(name, injected)
    quantities = ("score", "score_printed", *metric)
    quantities += ("accuracy_printed", "agreement", "penalty")
    rows = []
    for place, part in by(injected, "task", "stage", "method"):
        row = map_row(place, part, ())
        row |= row_selection.estimates(part[row_selection.is_last(part)], quantities)
        row["everywhere"] = over_models(row_selection.blocks(part), "score")
        row["paper"] = printed_of(name, "score", place, methods)
        rows.append(row)
    about = row_selection.about_maps(frame)
    return described_tables.table(name, rows, kept=kept_scores(rows), **about)


def kept_scores(rows: Sequence[Row]) -> list[Row]:
    """Return, for each task, the trained map that keeps most of Y's score, with Y itself and X without a map."""
    kept = []
    for (task, stage), here in grouped(rows, "task", "stage").items():
        means, maps = {}, {}
        for row in here:
            if not row["score"]:
                continue
            means[row["method"]] = 100 * row["score"].mean
            if row["role"] == "method" and row["compared"]:
                maps[row["method"]] = means[row["method"]]
        if not maps or "native_y" not in means:
            continue
        best = max(maps, key=maps.__getitem__)
        scores = {
            "native": means["native_y"],
            "score": means[best],
            "bare": means.get("identity"),
        }
        kept.append({"task": task, "stage": stage, "best": best, **scores})
    return kept


# ---------------------------------------------------------------------- errors by layer


def errors_by_layer(
    frames: Frames,
    name: str,
    column: str,
    component: str = STATES,
    paper: str | None = None,
) -> Figure:
    """Plot errors at each layer, with a box over pairs of models, before and after fine-tuning.

    Args:
        frames: frames of the study.
        name: name of the figure.
        column: the error.
        component: what was mapped.
        paper: entry of the printed numbers; default: that of the figure.
    """
    between = row_selection.between_models(frames.errors(component))
    errors = row_selection.blocks(between)
    panels: list[Panel] = []
    values: list[Row] = []
    for place, group in by(_with_layer(errors), "task", "rows"):
        for method in shown_methods(group, column):
            line = group[group["method"] == method]
            cells = row_selection.map_cells(method, line)
            kind = kind_words(place["rows"])
            title = place_words(place["task"], kind, cells["method"])
            layers = line["layer"].unique().tolist()
            boxes = _boxes(line, column)
            panels.append(box_panel(title, boxes, "stage", "layer", layers))
            for mean in _means(line, column):
                values.append({**place, **cells, **mean})
    row_selection.present(panels, "no map was fitted between models at the same site")

    stages = []
    for at, _ in by(errors, "stage"):
        if at["stage"]:
            stages.append(stage_words(at["stage"]))
    return described_tables.figure(
        name,
        panels,
        values,
        what=WORDS[column],
        trend=_trend(values),
        paper=paper or name,
        pairs=len(pair_means(errors, column)),
        stages=" and ".join(stages),
        left_out=", ".join(_left_out(errors, values)),
        **row_selection.about_maps(errors),
    )


def _with_layer(errors: DataFrame) -> DataFrame:
    """Return the rows that have sites, with the column `layer`, which names them."""
    sited = errors[errors["site_x"].notna()].astype({"site_x": int, "site_y": int})
    pairs = zip(sited["site_x"], sited["site_y"], strict=True)
    return sited.assign(layer=[site_name(pair) for pair in pairs])


def _boxes(line: DataFrame, column: str) -> DataFrame:
    """Return the error of each pair of models at each stage and layer."""
    boxes = []
    for at, part in by(line, "stage", "layer"):
        for value in pair_means(part, column).dropna():
            boxes.append({**at, "value": value})
    return DataFrame(boxes, columns=["stage", "layer", "value"])


def _means(line: DataFrame, column: str) -> list[Row]:
    """Return the mean error over pairs of models at each stage and layer."""
    means = []
    for at, part in by(line, "stage", "layer"):
        mean = over_models(part, column)
        if mean:
            means.append({**at, **mean._asdict()})
    return means


def shown_methods(frame: DataFrame, column: str, most: int = len(SHOWN)) -> list[str]:
    """Return the maps that figures show: an invertible network, linear, a free network, and the closest trained map.

    Args:
        frame: errors.
        column: the error by which a map is close.
        most: so many of the first three at most.
    """
    maps = frame[frame["role"] == "method"]
    there = maps["method"].unique().tolist()
    shown = []
    for names in SHOWN:
        known = [name for name in names if name in there]
        shown += known[:1]
    shown = shown[:most] or there[:1]
    everywhere = row_selection.trained(maps).groupby(maps["method"]).transform("all")
    means = maps[everywhere].groupby("method", sort=False)[column].mean()
    closest = means.nsmallest(1).index
    return list(dict.fromkeys([*shown, *closest]))


def _left_out(errors: DataFrame, values: Sequence[Row]) -> list[str]:
    """Return the maps that are not drawn."""
    drawn = {row["method"].rstrip(MARK) for row in values}
    maps = errors.loc[errors["role"] == "method", "method"].unique()
    return [method for method in maps if method not in drawn]


def _trend(values: Sequence[Row]) -> Row | None:
    """Say for the first trained map how its error changes from the first to the last layer, stage by stage."""
    known = [row for row in values if row["compared"]]
    if not known:
        return None
    place, of_map = by(DataFrame(known), "task", "rows", "method")[0]
    lines = []
    for at, line in by(of_map, "stage"):
        first, last = line.iloc[[0, -1]].to_dict("records")
        lines.append((at["stage"], first, last))
    return {**place, "lines": lines}
