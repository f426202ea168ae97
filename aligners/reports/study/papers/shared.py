"""What the tables and figures of all papers share: their descriptions, the papers' numbers, rows and panels."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pandas as pd
from jinja2 import Environment, StrictUndefined

from aligners.files.tables import table_beside
from aligners.fitting.outcomes import MARK, is_trained
from aligners.reports.names import listed
from aligners.reports.report import Row
from aligners.reports.study.contents import Column, Figure, Panel, Table
from aligners.reports.study.frames import LEAST_SITE, Frames, Missing, by, counted, kind_words, place_words, stage_words
from aligners.reports.study.statistics import COPY, Estimate, over_models
from aligners.similarity.controls import matching_layers

Rows = TypeVar("Rows", pd.DataFrame, list[Any])
# of each table and figure, in the order of reports
DESCRIBED: dict[str, dict[str, Any]] = table_beside(__file__, "papers.yaml")
NUMBERS: dict[str, dict[str, Any]] = table_beside(__file__, "numbers.yaml")  # the papers'
TEMPLATES = Environment(undefined=StrictUndefined)
TEMPLATES.globals |= {"place_words": place_words, "kind_words": kind_words, "counted": counted}
TEMPLATES.filters |= {"form": format, "listed": listed}


def table(name: str, rows: Sequence[Row], **words: Any) -> Table:
    """Make a table as it is described, with the columns that have a value in some row, and stages in words.

    Args:
        name: of its description.
        rows: column's key -> cell.
        words: what the description's templates ask for, besides `rows` and `known`, the keys of the columns.
    """
    shown = [{**row, "stage": stage_words(row["stage"])} if "stage" in row else row for row in rows]
    known = {key for row in shown for key, cell in row.items() if cell is not None}
    texts = _texts(name, {**words, "known": known, "rows": rows}, rows)
    about = {key: [heading] if isinstance(heading, str) else heading for key, heading in texts.pop("columns").items()}
    columns = [Column(key, *heading) for key, heading in about.items() if key in known]
    return Table(name=name, columns=columns, rows=shown, **texts)


def figure(name: str, panels: Sequence[Panel], values: Sequence[Row] = (), **words: Any) -> Figure:
    """Make a figure as it is described.

    Args:
        name: of its description.
        panels: all of one kind.
        values: the values as rows of a table.
        words: what the description's templates ask for.
    """
    return Figure(name=name, panels=panels, values=values, **_texts(name, words, values))


def paper_value(table: str, quantity: str, present: Collection[str] = (), **where: str | None) -> Estimate | None:
    """Return the paper's number for the same thing, or None if it has none.

    Args:
        table: of the paper, such as `ren_table_4`.
        quantity: `test`, `score`, ...
        present: the methods that the study has; of several that are the same thing, the closest gets the number.
        where: `task`, `method`, `variant`, ...; names of tasks agree if they differ in case and punctuation only.
    """
    same = (entry.get(quantity) for entry in NUMBERS[table]["values"]
            if all(_agrees(entry[key], value, present) for key, value in where.items()))  # fmt: skip
    printed = next(same, None)
    return None if printed is None else Estimate(*printed) if isinstance(printed, list) else Estimate(printed)


def printed_metric(table: str, frame: pd.DataFrame) -> list[str]:
    """The metric of the paper's numbers, if rows have it beside another score; none if it is their score.

    Args:
        table: of the paper.
        frame: rows with `score_name` and a column for each metric.
    """
    metric = str(NUMBERS[table]["metric"])
    return [metric] if (frame.get("score_name", pd.Series()).dropna() != metric).any() else []


def plain(name: str) -> str:
    """A name in lower case, letters and digits only: SST-2 and sst2 are one task."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _agrees(printed: str | list[str], ours: str | None, present: Collection[str]) -> bool:
    if isinstance(printed, list):
        return ours == next((name for name in printed if name in present), "")
    return ours is not None and plain(printed) == plain(ours)


def _texts(name: str, words: dict[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """The fields of a description that are fields of tables and figures, filled in.

    There is a note if intervals are over pretrained models, or over the fine-tunings of one, and not over models.
    """
    numbers, every = NUMBERS.get(words.get("paper", name)), DESCRIBED["words"]
    note = f"Paper: {numbers['source']}: {numbers['setting']}." if numbers else ""
    fields = {key: value for key, value in DESCRIBED[name].items() if key not in ("from", "with")}
    words = {**every, "paper_note": note, **words}
    lines = [line for text in _filled(fields.pop("findings", []), words) for line in text.splitlines()]
    words["findings"] = [sentence for line in lines if (sentence := " ".join(line.split()))]
    texts = {"notes": [], **_filled(fields, words), "findings": words["findings"]}
    intervals = {cell.interval for row in rows for cell in row.values() if isinstance(cell, Estimate)}
    intervals |= {str(row.get("interval")) for row in rows}
    texts["notes"] += [said for interval, said in every["units"].items() if interval in intervals]
    return texts


def _filled(field: Any, words: dict[str, Any]) -> Any:
    """Render every template in a field; texts of a list that say nothing are left out."""
    if isinstance(field, dict):
        return {key: _filled(value, words) for key, value in field.items()}
    if isinstance(field, list):
        return [text for part in field if (text := _filled(part, words)) != ""]
    return TEMPLATES.from_string(field).render(words) if isinstance(field, str) else field


# ---------------------------------------------------------------------- rows that are chosen


def present(rows: Rows, lacking: str) -> Rows:
    """Rows, or whatever a table or figure is made of, if there are any.

    Raises:
        Missing: there are none; with these words.
    """
    if not len(rows):
        raise Missing(lacking)
    return rows


def similarities(frames: Frames, measures: Sequence[str] = ()) -> pd.DataFrame:
    """Similarities of raw features, by those of some measures that there are; none named: by all.

    Raises:
        Missing: none of them was measured.
    """
    frame = frames.of("similarity", "value")
    frame = frame[frame["features"] == "raw"]
    if not measures:
        return frame
    return present(frame[frame["measure"].isin(measures)], f"none of {', '.join(measures)} was measured")


def of_one_base(frames: Frames, measures: Sequence[str]) -> pd.DataFrame:
    """Similarities, by some measures, of two models of one base before or after fine-tuning, with the column `base`."""
    frame = frames.of("similarity", "value", other_tasks=True)
    frame = frame[frame["measure"].isin(measures) & (frame["features"] == "raw")]
    frame = frame[frame[["stage_x", "stage_y"]].isin(("pretrained", "finetuned")).all(axis=1)]
    bases = [without_copy(frame[f"model_{side}"]) for side in "xy"]
    return frame.assign(base=bases[0])[bases[0] == bases[1]]


def not_computed(frames: Frames) -> list[Row]:
    """Measures without a value of some pairs of models at one stage: how many pairs, and the first of the reasons."""
    try:
        frame = between_models(of_one_stage(frames.of("similarity_missing")))
    except Missing:
        return []
    return [
        {**place, "not_computed": rows["why"].iloc[0], "pairs": len(rows), "models": models_in(rows)}
        for place, rows in by(frame[frame["figure"] == "value"], "task", "stage", "measure")
    ]


def of_one_stage(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of two models at the same stage."""
    return frame[frame["stage_x"].fillna("") == frame["stage_y"].fillna("")]


def between_models(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of two different models.

    Raises:
        Missing: there are none.
    """
    return present(frame[frame["model_x"] != frame["model_y"]], "the study has no pair of different models")


def models_in(frame: pd.DataFrame) -> int:
    """Number of models among the rows."""
    return len(set(frame["model_x"]) | set(frame["model_y"]))


def blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of one and the same site of both models: blocks, or whatever there is; rows without a site stay."""
    sited = frame["site_x"].notna()
    same = frame["site_x"] == frame["site_y"]
    if not (sited & same).any():  # models of different depth
        return frame
    some = same & (frame["site_x"] >= LEAST_SITE)
    return frame[~sited | (some if some.any() else same)]


def matching(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of matching layers of each pair, without the embeddings where there are blocks."""
    matched = []
    for _, rows in frame.groupby(["model_x", "model_y"], sort=False):
        layers = [sorted(layer for layer in rows[f"layer_{side}"].unique() if layer >= LEAST_SITE) for side in "xy"]
        if all(layers):
            pairs = set(matching_layers(*layers))
            rows = rows[[place in pairs for place in zip(rows["layer_x"], rows["layer_y"], strict=True)]]
        matched.append(rows)
    return pd.concat(matched) if matched else frame


def is_last(rows: pd.DataFrame) -> pd.Series:
    """The last site of every pair, or rows without a site."""
    last = rows.groupby(["model_x", "model_y"])["site_y"].transform("max")
    return rows["site_y"].isna() | (rows["site_y"] == last)


def without_copy(models: pd.Series) -> pd.Series:
    """The models that these are fine-tunings of."""
    return models.str.replace(COPY, "", regex=True)


def trained(frame: pd.DataFrame) -> pd.Series:
    """Whether the map of each row is trained; closed forms and floors are."""
    return frame["training"].map(lambda outcome: is_trained({"training": outcome})).astype(bool)


def untrained_said(frame: pd.DataFrame) -> str:
    """What the mark means, method by method; nothing if all maps are trained."""
    maps = trained(frame).groupby(frame["method"], sort=False).agg(["sum", "size"])
    counted = ", ".join(f"{name} {size - sound} of {size}" for name, sound, size in maps.itertuples() if sound < size)
    meaning = f"{MARK}: maps that kept their untrained start or diverged, which findings and tests leave out: "
    return f"{meaning}{counted}." if counted else ""


def about_maps(errors: pd.DataFrame) -> dict[str, bool | str]:
    """Whether errors are on held-out texts, and which maps are not trained, in words."""
    held_out = "held_out" not in errors or bool(errors["held_out"].all())
    return {"held_out": held_out, "untrained": untrained_said(errors)}


# ---------------------------------------------------------------------- rows that are made


def map_cells(method: str | None, rows: pd.DataFrame) -> Row:
    """The cells of a map: its name, marked where it is not trained everywhere, and whether findings may compare it."""
    sound = bool(trained(rows).all())
    return {"method": f"{method}{'' if sound else MARK}", "compared": sound}


def estimates(rows: pd.DataFrame, quantities: Iterable[str], groups: Mapping[str, str] | None = None) -> Row:
    """The means of quantities over pairs of models, and of how many pairs and models the first of them is.

    Args:
        rows: of one line of a table.
        quantities: its columns, as far as the rows have them.
        groups: model -> group, of pairs between two groups.
    """
    means = {name: over_models(rows, name, groups) for name in quantities if name in rows}
    first = next(iter(means.values()), None)
    return {**means, "pairs": first.pairs if first else 0, "models": first.models if first else 0}
