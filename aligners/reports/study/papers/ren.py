"""Ren et al. 2023: similarity, recovery of a random network, alignment, injection; errors and complexity by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd

from aligners.fitting.outcomes import MARK
from aligners.reports.names import listed, site_name
from aligners.reports.report import Row
from aligners.reports.study.frames import (
    STATES,
    BoxPanel,
    Cell,
    Figure,
    Frames,
    LinePanel,
    Missing,
    Series,
    Table,
    by,
    in_order,
    kind_words,
    place_words,
    stage_words,
)
from aligners.reports.study.papers import shared
from aligners.reports.study.statistics import Estimate, holm, over_models, pair_means, sign_test

Rows = list[dict[str, Cell]]
PAPERS_INDICES = {"r2", "cca", "r2_cca", "svcca", "r2_svcca", "pwcca"}
SHOWN = (("inn", "inn_paper"), ("linear",), ("mlp", "mlp_paper"))  # the first of each that there is
WORDS = {"mse": "mean squared error", "fvu": "FVU"}


# ---------------------------------------------------------------------- tables


def similarity(frames: Frames, name: str) -> Table:
    """Table 2's indices and the other measures, of untrained, pretrained and fine-tuned models."""
    frame = shared.matching(shared.between_models(shared.of_one_stage(shared.similarities(frames))))
    rows: Rows = [
        {"task": task, "stage": stage_words(stage), "measure": measure}
        | shared.estimates(own, ("value", "held_out", "null", "untrained"))
        for (task, stage, measure), own in by(frame, "task", "stage", "measure")
    ]
    return shared.table(name, rows, papers_indices=PAPERS_INDICES & set(frame["measure"]))


def recovery(frames: Frames, name: str) -> Table:
    """Table 3: how exactly each map recovers a random invertible network of real states."""
    frame = frames.of("recover", "mse").assign(model_y=lambda rows: rows["model_x"])
    rows: Rows = [
        {"strength": strength, "paper": shared.paper_value(name, "mse", frame["method"].unique(), method=method)}
        | shared.map_cells(method, own)
        | shared.estimates(own, ("mse", "mse_fit", "mse_reduced", "relative_error", "fvu"))
        for (strength, method), own in by(frame, "strength", "method")
    ]
    findings = closest_maps(rows, ("strength",))
    return shared.table(name, rows, findings, held_out=shared.HELD_OUT[True], untrained=shared.untrained_said(frame))


def alignment(frames: Frames, name: str) -> Table:
    """Table 4: errors of every map, on fitting and on held-out rows."""
    errors = shared.between_models(frames.errors())
    paper, rows = partial(shared.paper_value, name, present=errors["method"].unique()), Rows()
    for (task, stage, kind, method), own in by(shared.blocks(errors), "task", "stage", "rows", "method"):
        place = {"task": task, "stage": stage_words(stage), "rows": kind, "role": own["role"].iloc[0]}
        quantities = ("mse", "mse_fit", "mse_reduced", "relative_error", "fvu_fit", "fvu", "fvu_inverse")
        printed = {f"paper_{end}": paper(end, task=task, method=method) for end in ("train", "test")}
        rows.append({**place, **shared.map_cells(method, own), **shared.estimates(own, quantities), **printed})
    findings = closest_maps(rows, ("task", "stage", "rows"))
    return shared.table(
        name, rows, findings, held_out=shared.held_out(errors), untrained=shared.untrained_said(shared.blocks(errors))
    )


def alignment_tests(frames: Frames, name: str) -> Table:
    """Test of every map of Table 4 against the invertible network, or the linear map where there is none."""
    errors = shared.blocks(shared.between_models(frames.errors()))
    errors = errors.assign(mse=errors["mse"].where(shared.trained(errors)))  # a pair without a value is not tested
    rows = list(_tested(errors[errors["role"] == "method"]))
    if not rows:
        raise Missing("no two maps were measured on pairs of at least three models")
    for row, p in zip(rows, holm([float(str(row["p"])) for row in rows]), strict=True):
        row["holm"] = p
    return shared.table(name, rows, [differences_said(rows)], tests=len(rows))


def _tested(errors: pd.DataFrame) -> Iterator[dict[str, Cell]]:
    for (task, stage, kind), own in by(errors, "task", "stage", "rows"):
        means = {str(method): pair_means(part, "mse") for (method,), part in by(own, "method") if part["mse"].any()}
        reference = next((name for name in ("inn", "inn_paper", "linear") if name in means), None)
        for method in means:
            if reference is not None and method != reference and (test := sign_test(means[method] - means[reference])):
                place = {"task": task, "stage": stage_words(stage), "rows": kind, "method": f"{method} − {reference}"}
                yield {**place, **test._asdict()}


def injection(frames: Frames, name: str) -> Table:
    """Table 5: the task's score after injection, between all ceilings and floors."""
    frame = shared.between_models(frames.of("inject", "score"))
    paper, rows = partial(shared.paper_value, name, "score", frame["method"].unique()), Rows()
    injected = frame[frame["score"].notna() | (frame["overflow"].astype(bool) & frame["n_units"].notna())]
    for (task, stage, method), own in by(injected, "task", "stage", "method"):
        rows.append(
            {"task": task, "stage": stage_words(stage), "role": own["role"].iloc[0]}
            | shared.map_cells(method, own)
            | shared.estimates(own[shared.is_last(own)], ("score", "agreement", "penalty"))
            | {"everywhere": over_models(shared.blocks(own), "score"), "paper": paper(task=task, method=method)}
        )
    return shared.table(
        name, rows, kept_scores(rows), held_out=shared.HELD_OUT[True], untrained=shared.untrained_said(frame)
    )


# ---------------------------------------------------------------------- figures


def errors_by_layer(
    frames: Frames, name: str, column: str, component: str = STATES, paper: str = "ren_figure_2"
) -> Figure:
    """Figures 2, 4, 5 and 7: errors at each layer, a box over pairs of models, before and after fine-tuning.

    Args:
        frames: of the study.
        name: of the figure.
        column: the error.
        component: what was mapped.
        paper: entry of the papers' numbers.
    """
    errors = shared.blocks(shared.between_models(frames.errors(component)))
    if component != STATES:
        errors = errors.assign(rows=None)  # of one kind, which the title names
    panels, values = [], list[Row]()
    sited = errors[errors["site_x"].notna()].astype({"site_x": int, "site_y": int})
    for (task, kind), own in by(sited, "task", "rows"):
        for method in shown_methods(own, column):
            line = own[own["method"] == method]
            cells = shared.map_cells(method, line)
            panels.append(_boxes(line, column, place_words(task, kind_words(kind), str(cells["method"]))))
            values += _box_values(line, column, {"task": task, "rows": kind, **cells})
    if not panels:
        raise Missing("no map was fitted between models at the same site")
    said, drawn = _trend(values, column), {str(row["method"]).rstrip(MARK) for row in values}
    methods = dict.fromkeys(errors.loc[errors["role"] == "method", "method"])
    return shared.figure(
        name, panels, values, [said] if said else [],
        what=WORDS[column], said=said, paper=paper, pairs=len(pair_means(errors, column)),
        stages=" and ".join(stage_words(stage) for stage in in_order(list(errors["stage"])) if not pd.isna(stage)),
        left_out=", ".join(method for method in methods if method not in drawn),
        held_out=shared.held_out(errors), untrained=shared.untrained_said(errors),
    )  # fmt: skip


def _boxes(line: pd.DataFrame, column: str, title: str) -> BoxPanel:
    """A panel of one map: a box for each stage at each layer."""
    sites = list(dict.fromkeys(zip(line["site_x"], line["site_y"], strict=True)))
    series = []
    for (stage,), own in by(line, "stage"):
        each = [pair_means(own[(own["site_x"] == x) & (own["site_y"] == y)], column).dropna() for x, y in sites]
        points = [[f"{a} and {b}" for a, b in means.index] for means in each]
        name = stage_words(stage) or "all pairs"
        series.append(Series(name, ("stage", str(stage)), [means.tolist() for means in each], points))
    return BoxPanel(title, [site_name(site) for site in sites], series)


def _box_values(line: pd.DataFrame, column: str, place: Row) -> Iterator[Row]:
    for (stage, x, y), own in by(line, "stage", "site_x", "site_y"):
        if (mean := over_models(own, column)) is not None:
            yield {**place, "stage": stage, "layer": site_name((x, y)), **mean._asdict()}


def shown_methods(frame: pd.DataFrame, column: str, most: int = len(SHOWN)) -> list[str]:
    """The maps that figures show: an invertible network, linear, a free network, and whatever trained map is closest.

    Args:
        frame: errors.
        column: the error by which a map is close.
        most: so many of the first three at most.
    """
    maps = frame[frame["role"] == "method"]
    there = list(dict.fromkeys(maps["method"]))
    shown = [next(name for name in names if name in there) for names in SHOWN if set(names) & set(there)][:most]
    sound = maps[shared.trained(maps).groupby(maps["method"]).transform("all")]
    closest = sound.groupby("method", sort=False)[column].mean().nsmallest(1).index
    return list(dict.fromkeys([*(shown or there[:1]), *closest]))


def layer_maps(frames: Frames, name: str, *, within: bool) -> Figure:
    """Figures 3, 6 and 8: learned error from every layer to every layer, within a model or between models."""
    errors, whom = frames.errors(), "within a model" if within else "between models"
    errors = errors[((errors["model_x"] == errors["model_y"]) == within) & errors["site_x"].notna()]
    if errors.empty or bool((errors["site_x"] == errors["site_y"]).all()):
        raise Missing(f"no map was fitted from one layer to another {whom}: `data.sites` names such pairs, as 1:2")
    errors = errors.astype({"site_x": int, "site_y": int})
    panels, values = [], list[Row]()
    for (task, stage, kind), own in by(errors, "task", "stage", "rows"):
        for method in shown_methods(own, "fvu", 2):
            line = own[own["method"] == method]
            means = line.groupby(["site_x", "site_y"])["fvu"].mean()
            title = place_words(task, stage, kind_words(kind), str(shared.map_cells(method, line)["method"]))
            panels.append(shared.heat_panel(title, means, "layer of X", "layer of Y"))
            values += [{"panel": title, "layer_x": x, "layer_y": y, "fvu": value} for (x, y), value in means.items()]
    models = len(set(errors["model_x"]) | set(errors["model_y"]))
    about: Row = {"held_out": shared.held_out(errors), "untrained": shared.untrained_said(errors), "models": models}
    return shared.figure(name, panels, values, within=within, whom=whom, **about)


def nuclear_norms(frames: Frames, name: str) -> Figure:
    """B.2: the nuclear norm of each layer's rows, as its complexity."""
    frame = frames.of("similarity_layers", "nuclear_norm")
    frame = frame.assign(model_x=frame["model"], model_y=frame["model"])
    panels, values = [], list[Row]()
    for (task,), own in by(frame, "task"):
        layers, series = sorted(own["layer"].unique()), []
        for (stage,), line in by(own, "stage"):
            each = [over_models(line[line["layer"] == layer], "nuclear_norm") for layer in layers]
            series.append(shared.series_of(stage_words(stage) or "all models", ("stage", str(stage)), each))
            values += [{"task": task, "stage": stage, "layer": int(layer), "nuclear_norm": mean and mean.mean}
                       for layer, mean in zip(layers, each, strict=True)]  # fmt: skip
        panels.append(LinePanel(place_words(task), [str(layer) for layer in layers], series))
    depths = frame.groupby("model")["layer"].max().nunique()
    return shared.figure(name, panels, values, models=frame["model"].nunique(), depths=depths)


# ---------------------------------------------------------------------- sentences


def _at(*place: str | None) -> str:
    """Where a finding holds, to begin its sentence with."""
    where = place_words(*(name or None for name in place))
    return f"{where}: " if where else ""


def _trend(values: Sequence[Row], column: str) -> str:
    """Say of the first map that is trained how its error goes from the first layer to the last, stage by stage."""
    known = [row for row in values if row["compared"]]
    if not known:
        return ""
    task, kind, method = (known[0][key] for key in ("task", "rows", "method"))
    lines: dict[str | None, list[Row]] = {row["stage"]: [] for row in known}
    for row in known:
        if (row["task"], row["rows"], row["method"]) == (task, kind, method):
            lines[row["stage"]].append(row)
    ends = [(stage, line[0], line[-1]) for stage, line in lines.items() if line]
    said = "; ".join(
        f"{stage_words(stage)} {first['mean']:.3g} at layer {first['layer']} to {last['mean']:.3g} at layer "
        f"{last['layer']}".strip()
        for stage, first, last in ends
    )
    where = (f" on {task}" if task else "") + (f", {kind_words(kind)}" if kind else "")
    return f"The {WORDS[column]} of {method}{where}, mean over pairs: {said}."


def _word(key: str, value: Cell) -> str | None:
    return kind_words(str(value)) if key == "rows" else f"strength {value}" if key == "strength" else str(value)


def closest_maps(rows: Sequence[dict[str, Cell]], keys: Sequence[str]) -> list[str]:
    """Say at each place which map is closest of those that are trained, and where linear stands."""
    said = []
    for place in dict.fromkeys(tuple(row.get(key) for key in keys) for row in rows):
        here = [row for row in rows if tuple(row.get(key) for key in keys) == place and row.get("role") != "floor"]
        means = {str(row["method"]): row["mse"] for row in here if row["compared"] and isinstance(row["mse"], Estimate)}
        if means:
            best, closest = min(means.items(), key=lambda item: item[1].mean)
            linear = f"; linear {means['linear'].mean:.4f}" if "linear" in means and best != "linear" else ""
            over = f"{closest.models} model{'s' * (closest.models != 1)}"
            if "strength" not in keys:
                over = f"{closest.pairs} pair{'s' * (closest.pairs != 1)} of {over}"
            where = _at(*(_word(key, name) for key, name in zip(keys, place, strict=True) if name is not None))
            said.append(f"{where}the closest map is {best}, with an mse of {closest.mean:.4f} over {over}{linear}.")
    return said


def differences_said(rows: Sequence[dict[str, Cell]]) -> str:
    """Say which maps differ in error, and how small a p the number of models allows."""
    clear = [f"{row['method']} ({place_words(*(str(row[key]) for key in ('task', 'stage') if row[key]))})"
             for row in rows if isinstance(row["holm"], float) and row["holm"] < 0.05]  # fmt: skip
    if clear:
        return f"{len(clear)} of {len(rows)} differences between maps are significant at .05: {listed(clear)}."
    least = min(float(str(row["least"])) for row in rows)
    few = f", and {rows[0]['models']} models allow no p below {least:.3g}" if least >= 0.05 / len(rows) else ""
    return f"None of {len(rows)} differences between maps is significant at .05{few}."


def kept_scores(rows: Sequence[dict[str, Cell]]) -> list[str]:
    """Say for each task which trained map keeps the most of Y's score."""
    said = []
    for task, stage in dict.fromkeys((row["task"], row["stage"]) for row in rows):
        own = [row for row in rows if (row["task"], row["stage"]) == (task, stage)]
        means = {str(row["method"]): 100 * row["score"].mean for row in own if isinstance(row["score"], Estimate)}
        maps = [str(row["method"]) for row in own if row["role"] == "method" and row["compared"]]
        best = max((method for method in maps if method in means), key=lambda method: means[method], default=None)
        if best and "native_y" in means:
            bare = f", {means['identity']:.1f} without a map" if "identity" in means else ""
            place = _at(*(str(name) if name else None for name in (task, stage)))
            said.append(
                f"{place}Y by itself scores {means['native_y']:.1f}; "
                f"with X's states at the last site {means[best]:.1f}, mapped by {best}{bare}."
            )
    return said
