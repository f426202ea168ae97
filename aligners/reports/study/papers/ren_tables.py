"""The tables of Ren et al. 2023: similarity, recovery of a random network, alignment, injection."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd

from aligners.reports.study.contents import Cell, Column, Missing, Table
from aligners.reports.study.differences import holm, sign_test
from aligners.reports.study.estimates import WHAT_INTERVALS_ARE, over_models, pair_means
from aligners.reports.study.frames import Frames, by, stage_words
from aligners.reports.study.papers.choosing import (
    COUNTS,
    HELD_OUT,
    PLACE,
    between_models,
    blocks,
    counts,
    is_last,
    known,
    map_cells,
    matching,
    trained,
    untrained_said,
)
from aligners.reports.study.papers.numbers import paper_note, paper_value
from aligners.reports.study.papers.ren_words import closest_maps, differences_said, kept_scores

__all__ = ["alignment", "alignment_tests", "injection", "recovery", "similarity"]

Rows = list[dict[str, Cell]]
KIND, MAP, ROLE = Column("rows", "rows"), Column("method", "map"), Column("role", "role")
SIMILARITY = (
    "Mean over the matching layers of each pair of models, without embeddings where there are blocks; both directions "
    f"of a measure that is not symmetric are averaged. {WHAT_INTERVALS_ARE}"
)
SIMILARITY_NAMES = (
    "The paper's Table 2 defines R² of linear regression (here `r2`), CCA and SVCCA as mean squared correlations "
    "(`r2_cca`, `r2_svcca`; `cca` and `svcca` are mean correlations), and PWCCA (`pwcca`); it prints no values."
)
PAPERS_INDICES = {"r2", "cca", "r2_cca", "svcca", "r2_svcca", "pwcca"}
SIMILARITY_HELD_OUT = (
    "Held out: the texts are test texts; measures that fit directions (CCA, regression) fit them on the same rows"
)
OTHER_TEXTS = ", and `directions of other texts` takes them from the fitting texts instead"
RECOVERY = (
    "Y is a random invertible network of X's real states, so that an exact map exists. Mean over models, their sites "
    f"and the networks drawn. {WHAT_INTERVALS_ARE}"
)
ALIGNMENT = (
    "Error of each map between two models at the same site, mean over the sites of each pair (blocks, without the "
    "embeddings). mse is over rows and dimensions, what the paper calls L2; the relative error is ‖g(X) − Y‖ / ‖Y − "
    f"mean‖ and FVU its square, which can be compared between layers and tasks. {WHAT_INTERVALS_ARE}"
)
NO_FITTING_ERRORS = "Errors on fitting rows were not collected: `fitting_errors: true` among the options of `inject`."
REDUCED = "mse in the reduced space, fitting rows"
REDUCED_NOTE = (
    "The error of SVCCA in the reduced space is what the paper reports of it: within the components kept of Y, a mean "
    "over these and the fitting rows. It does not compare with the other maps, and is not known of held-out rows."
)
TESTS = (
    "{} tests by permutation of models: the signs of the models' shares (jackknife pseudo-values) in the mean "
    "difference over pairs are changed in all ways, or in 9,999 drawn with a seed where there are more than 10,000. p "
    "is two-sided; with Holm's adjustment for all tests of this table. `least p` is the smallest that so few models "
    "allow."
)
INJECTION = (
    "The task's score × 100 (accuracy, unless the task has another) when the states of all tokens of Y are replaced by "
    "mapped states of X, at the last site before the classifier and as the mean over all sites. Ceilings are the "
    f"models by themselves; floors are states and answers that know nothing of X. {WHAT_INTERVALS_ARE}"
)


def similarity(frames: Frames) -> Table:
    """Ren et al., Table 2's indices and the other measures, of untrained, pretrained and fine-tuned models."""
    frame = frames.of("similarity", "value")
    frame = frame[(frame["features"] == "raw") & (frame["stage_x"].fillna("") == frame["stage_y"].fillna(""))]
    rows: Rows = []
    for (task, stage, measure), own in by(matching(between_models(frame)), "task", "stage", "measure"):
        found = {name: over_models(own, name) for name in ("value", "held_out", "null", "untrained") if name in own}
        rows.append({"task": task, "stage": stage_words(stage), "measure": measure, **found, **counts(found["value"])})
    heading = {"value": "similarity", "held_out": "directions of other texts", "null": "null: texts permuted"}
    columns = [Column(name, said, ".3f") for name, said in {**heading, "untrained": "untrained twins"}.items()]
    shown = known([*PLACE, Column("measure", "measure"), *columns, *COUNTS], rows)
    other_texts = OTHER_TEXTS if "held_out" in {column.key for column in shown} else ""
    return Table(
        "ren_table_2",
        "Similarity of models by stage (the indices of Ren et al., Table 2, and all other measures)",
        SIMILARITY,
        shown,
        rows,
        notes=[
            f"{SIMILARITY_HELD_OUT}{other_texts}.",
            *([SIMILARITY_NAMES] if PAPERS_INDICES & {str(row["measure"]) for row in rows} else []),
        ],
    )


def recovery(frames: Frames) -> Table:
    """Ren et al., Table 3: how exactly each map recovers a random invertible network of real states."""
    frame = frames.of("recover", "mse").assign(model_y=lambda rows: rows["model_x"])
    present = frame["method"].unique()
    rows: Rows = []
    for (strength, method), own in by(frame, "strength", "method"):
        quantities = ("mse_fit", "mse_reduced", "mse", "relative_error", "fvu")
        found = {name: over_models(own, name) for name in quantities if name in own}
        paper = paper_value("ren_table_3", "mse", present, method=method)
        rows.append({"strength": strength, **map_cells(method, own), **found, "paper": paper, **counts(found["mse"])})
    errors = {
        "mse_fit": "mse, fitting rows",
        "mse_reduced": REDUCED,
        "mse": "mse",
        "relative_error": "relative error",
        "fvu": "FVU",
    }
    columns = [Column("strength", "strength of the non-linearity", ".3g"), MAP]
    columns += [Column(name, said) for name, said in errors.items()] + [Column("paper", "paper"), COUNTS[1]]
    return Table(
        "ren_table_3",
        "Recovering a random invertible network (Ren et al., Table 3)",
        RECOVERY,
        known(columns, rows),
        rows,
        notes=[HELD_OUT[True], *untrained_said(frame), *_reduced_said(rows), paper_note("ren_table_3")],
        findings=closest_maps(rows, "mse", ("strength",)),
    )


def alignment(frames: Frames) -> Table:
    """Ren et al., Table 4: errors of every map, on fitting and on held-out rows."""
    errors = between_models(frames.errors())
    rows = list(_alignment_rows(errors))
    columns = [Column("mse_fit", "mse, fitting rows"), Column("mse_reduced", REDUCED), Column("mse", "mse")]
    columns += [Column("relative_error", "relative error")]
    columns += [Column("fvu_fit", "FVU, fitting rows", ".3f"), Column("fvu", "FVU", ".3f")]
    columns += [Column("fvu_inverse", "FVU of the inverse", ".3f")]
    columns += [Column("paper_train", "paper, train"), Column("paper_test", "paper, test"), *COUNTS]
    fitting = [] if any(row.get("mse_fit") is not None for row in rows) else [NO_FITTING_ERRORS]
    return Table(
        "ren_table_4",
        "Alignment of models (Ren et al., Table 4)",
        ALIGNMENT,
        known([*PLACE, KIND, MAP, ROLE, *columns], rows),
        rows,
        notes=[
            HELD_OUT[bool(errors["held_out"].all())],
            *(*untrained_said(blocks(errors)), *fitting, *_reduced_said(rows)),
            paper_note("ren_table_4"),
        ],
        findings=closest_maps(rows, "mse", ("task", "stage", "rows")),
    )


def _alignment_rows(errors: pd.DataFrame) -> Iterator[dict[str, Cell]]:
    present = errors["method"].unique()
    for (task, stage, kind, method), own in by(blocks(errors), "task", "stage", "rows", "method"):
        quantities = ("mse_fit", "mse_reduced", "mse", "relative_error", "fvu_fit", "fvu", "fvu_inverse")
        found = {name: over_models(own, name) for name in quantities if name in own}
        paper = partial(paper_value, "ren_table_4", present=present, task=task, method=method)
        yield {
            **{"task": task, "stage": stage_words(stage), "rows": kind, "role": own["role"].iloc[0]},
            **map_cells(method, own),
            **found,
            **{f"paper_{end}": paper(end) for end in ("train", "test")},
            **counts(found["mse"]),
        }


def _reduced_said(rows: Rows) -> list[str]:
    """What the error in the reduced space is, if some map has one."""
    return [REDUCED_NOTE] if any(row.get("mse_reduced") is not None for row in rows) else []


def alignment_tests(frames: Frames) -> Table:
    """Test of every map of Table 4 against the invertible network, or the linear map where there is none."""
    errors = blocks(between_models(frames.errors()))
    errors = errors.assign(mse=errors["mse"].where(trained(errors)))  # a pair without a value is not tested
    rows = list(_tested(errors[errors["role"] == "method"]))
    if not rows:
        raise Missing("no two maps were measured on pairs of at least three models")
    for row, p in zip(rows, holm([float(str(row["p"])) for row in rows]), strict=True):
        row["holm"] = p
    form = {"difference": "+.4f", "p": ".3g", "holm": ".3g", "least": ".3g"}
    heading = {"difference": "difference in mse", "p": "p", "holm": f"p, of {len(rows)} tests", "least": "least p"}
    columns = [Column(name, said, form[name]) for name, said in heading.items()]
    return Table(
        "ren_table_4_tests",
        "Is a map closer than another?",
        TESTS.format(len(rows)),
        [*PLACE, KIND, Column("method", "maps"), *columns, COUNTS[1]],
        rows,
        findings=[differences_said(rows)],
    )


def _tested(errors: pd.DataFrame) -> Iterator[dict[str, Cell]]:
    for (task, stage, kind), own in by(errors, "task", "stage", "rows"):
        means = {str(method): pair_means(part, "mse") for (method,), part in by(own, "method") if part["mse"].any()}
        reference = next((name for name in ("inn", "inn_paper", "linear") if name in means), None)
        for method in means:
            if reference is None or method == reference:
                continue
            test = sign_test(means[method] - means[reference])
            if test is not None:
                place = {"task": task, "stage": stage_words(stage), "rows": kind, "method": f"{method} − {reference}"}
                yield {**place, **test._asdict()}


def injection(frames: Frames) -> Table:
    """Ren et al., Table 5: the task's score after injection, between all ceilings and floors."""
    frame = between_models(frames.of("inject", "score"))
    rows = list(_injection_rows(frame))
    score = partial(Column, form=".1f", scale=100)
    columns = [score("score", "score, last site"), score("everywhere", "score, mean over sites")]
    columns += [score("agreement", "agreement with Y"), Column("penalty", "penalty, nats", ".3f")]
    return Table(
        "ren_table_5",
        "Injection (Ren et al., Table 5)",
        INJECTION,
        known([*PLACE, Column("method", "method"), ROLE, *columns, Column("paper", "paper", ".1f"), *COUNTS], rows),
        rows,
        notes=[HELD_OUT[True], *untrained_said(frame), paper_note("ren_table_5")],
        findings=kept_scores(rows),
    )


def _injection_rows(frame: pd.DataFrame) -> Iterator[dict[str, Cell]]:
    present = frame["method"].unique()
    injected = frame[frame["score"].notna() | (frame["overflow"].astype(bool) & frame["n_units"].notna())]
    for (task, stage, method), own in by(injected, "task", "stage", "method"):
        last = own[is_last(own)]
        found = {name: over_models(last, name) for name in ("score", "agreement", "penalty")}
        yield {
            **{"task": task, "stage": stage_words(stage), "role": own["role"].iloc[0]},
            **map_cells(method, own),
            **found,
            "everywhere": over_models(blocks(own), "score"),
            "paper": paper_value("ren_table_5", "score", present, task=task, method=method),
            **counts(found["score"]),
        }
