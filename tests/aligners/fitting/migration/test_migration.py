"""The study: on spaces that are known to agree or not, with and without judgements, and what is said beforehand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aligners.errors import UserError
from aligners.fitting.migration.migration import AS_IT_IS, OLD, RE_EMBEDDED, Migration
from aligners.fitting.migration.text_rows import TextRows, read_judged
from aligners.fitting.migration.vector_sources import VectorSource

N, WIDTH = 900, 12
DRAW = np.random.default_rng(0)
MIXED = DRAW.normal(size=(6, WIDTH))
TURN = np.linalg.qr(DRAW.normal(size=(WIDTH, WIDTH)))[0]


def meant(rows: int) -> np.ndarray:
    """Rows of few directions, as vectors of texts are."""
    return DRAW.normal(size=(rows, 6)) @ MIXED + 0.3 * DRAW.normal(size=(rows, WIDTH))


def saved(folder: Path, **parts: np.ndarray) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        np.save(folder / f"{name}.npy", rows.astype(np.float32))
    return str(folder)


def texts(rows: int = N, domains: bool = False) -> TextRows:
    of = ["reviews" if place < rows * 2 // 3 else "sentences" for place in range(rows)]
    return TextRows([f"text {place}" for place in range(rows)], None, of if domains else None)


def study(old: str, new: str, rows: TextRows, judged: Any = None, **options: Any) -> Migration:
    options = {"maps": ["procrustes", "ridge"], **options}
    made = Migration(VectorSource(old), VectorSource(new), rows, judged, **options)
    made.run()
    return made


def value(made: Migration, name: str, route: str | None = None, domain: str = "all", column: str = "recall10") -> float:
    found = [row for row in made.rows if (row["map"], row["route"], row["domain"]) == (name, route, domain)]
    return float(found[-1][column])


def test_a_rotation_is_found_and_loses_nothing(tmp_path: Path) -> None:
    old = meant(N)
    made = study(saved(tmp_path / "old", texts=old), saved(tmp_path / "new", texts=old @ TURN), texts())
    assert value(made, RE_EMBEDDED) == 1
    assert value(made, AS_IT_IS) < 0.2
    for route in ("queries", "documents"):
        assert value(made, "procrustes", route) > 0.999
        np.testing.assert_allclose(made.chosen[route].weight.numpy(), TURN.T if route == "queries" else TURN, atol=1e-4)
    for row in made.report_tables["forecasts"]:
        assert row["predicted_recall10"] > 0.999
    assert made.meta["least_recall"] == 0.9
    assert made.cautions == []


def test_unrelated_rows_are_at_chance_and_said(tmp_path: Path) -> None:
    made = study(saved(tmp_path / "old", texts=meant(N)), saved(tmp_path / "new", texts=meant(N)), texts())
    documents = made.meta["documents"]
    for route in ("queries", "documents"):
        assert value(made, "procrustes", route) < 5 * 10 / documents
    assert any("the same texts, in the same order" in caution for caution in made.cautions)


def test_rows_in_another_order_are_said(tmp_path: Path) -> None:
    old = meant(N)
    shuffled = (old @ TURN)[np.random.default_rng(1).permutation(N)]
    made = study(saved(tmp_path / "old", texts=old), saved(tmp_path / "new", texts=shuffled), texts())
    assert any("the same texts, in the same order" in caution for caution in made.cautions)


def test_fewer_documents_than_are_looked_at_are_refused(tmp_path: Path) -> None:
    judged = read_judged(judged_files(tmp_path / "beir", 9, 5))
    rows = {"texts": meant(N), "corpus": meant(9), "queries": meant(5)}
    place = saved(tmp_path / "both", **rows)
    with pytest.raises(UserError, match="at least 10 documents in the index, but got 9"):
        study(place, place, texts(), judged)


def test_widths_that_differ_leave_chance_and_maps_that_can_be(tmp_path: Path) -> None:
    old = meant(N)
    wide = np.concatenate([old, np.tanh(old)], 1)
    maps = ["procrustes", "linear", "ridge", "inn"]
    made = study(saved(tmp_path / "old", texts=old), saved(tmp_path / "new", texts=wide), texts(), maps=maps)
    assert value(made, AS_IT_IS) == pytest.approx(10 / made.meta["documents"])
    assert "inn needs equal widths, and they are 12 and 24" in made.cautions
    assert value(made, "ridge", "documents") > 0.6
    assert (made.meta["old"]["width"], made.meta["new"]["width"]) == (12, 24)


def test_few_pairs_for_the_width_leave_ridge(tmp_path: Path) -> None:
    old = DRAW.normal(size=(400, 8)) @ DRAW.normal(size=(8, 300))
    new = old[:, ::-1] + 0
    maps = ["linear", "ridge"]
    made = study(saved(tmp_path / "old", texts=old), saved(tmp_path / "new", texts=new), texts(400), maps=maps)
    assert {row["map"] for row in made.rows if row["route"]} == {"ridge"}
    assert any("linear needs 301 pairs" in caution and "ridge does with fewer" in caution for caution in made.cautions)
    with pytest.raises(UserError, match="Add ridge"):
        study(saved(tmp_path / "old", texts=old), saved(tmp_path / "new", texts=new), texts(400), maps=["linear"])


def test_held_out_domains_are_not_fitted_on(tmp_path: Path) -> None:
    """In the domain that is held out another map holds, which nothing but its own texts could tell."""
    old = meant(N)
    old[600:] += 40 * MIXED[0]  # so that neighbours are of one domain
    new = old @ TURN
    new[600:] = old[600:] @ np.linalg.qr(DRAW.normal(size=(WIDTH, WIDTH)))[0]
    places = (saved(tmp_path / "old", texts=old), saved(tmp_path / "new", texts=new))
    made = study(*places, texts(domains=True), held_out=["sentences"])
    assert value(made, "procrustes", "queries", "reviews") > 0.9
    assert value(made, "procrustes", "queries", "sentences") < 0.3
    held = {row["domain"]: row["held_out"] for row in made.rows}
    assert held == {"all": False, "reviews": False, "sentences": True}
    with pytest.raises(UserError, match="`held_out_domains` out of reviews, sentences, but got news"):
        study(*places, texts(domains=True), held_out=["news"])


def judged_files(folder: Path, documents: int, queries: int) -> Path:
    folder.mkdir()
    rows = {"corpus": documents, "queries": queries}
    for name, number in rows.items():
        lines = [json.dumps({"_id": f"{name}-{place}", "text": f"{name} {place}"}) for place in range(number)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    lines = ["query\tdocument\tscore", *(f"queries-{place}\tcorpus-{place}\t1" for place in range(queries))]
    (folder / "qrels.tsv").write_text("\n".join(lines))
    return folder


@pytest.fixture
def asked(tmp_path: Path) -> tuple[str, str, Any]:
    """Both models see the same meaning, each with noise of its own; a query is a noisy document."""
    judged = read_judged(judged_files(tmp_path / "beir", 400, 150))
    parts = {"texts": meant(N), "corpus": meant(400)}
    parts["queries"] = parts["corpus"][:150] + 0.7 * DRAW.normal(size=(150, WIDTH))
    sides = []
    for side in ("old", "new"):
        made = {}
        for name, rows in parts.items():
            turned = rows if side == "old" else rows @ TURN
            made[name] = turned + 0.4 * DRAW.normal(size=rows.shape)
        sides.append(saved(tmp_path / side, **made))
    return sides[0], sides[1], judged


def test_judged_queries_are_scored_against_judgements(asked: tuple[str, str, Any]) -> None:
    old, new, judged = asked
    made = study(old, new, texts(), judged, pairs=[200, 10**6], index_size=10**6)
    folders = {side: {part: np.load(f"{place}/{part}.npy") for part in ("corpus", "queries")} for side, place in
               (("old", old), ("new", new))}  # fmt: skip
    for name, side in ((RE_EMBEDDED, "new"), (OLD, "old")):
        unit = {part: rows / np.linalg.norm(rows, axis=1, keepdims=True) for part, rows in folders[side].items()}
        order = np.argsort(-(unit["queries"] @ unit["corpus"].T), 1)[:, :10]
        expected = np.mean([place in row for place, row in enumerate(order)])
        assert value(made, name) == pytest.approx(expected)
    assert {row["pairs"] for row in made.rows if row["route"]} == {200, made.meta["pairs"]}
    relative = value(made, "ridge", "documents", column="relative_recall10")
    ratio = value(made, "ridge", "documents") / value(made, RE_EMBEDDED)
    assert relative == pytest.approx(ratio)
    assert made.meta["index_size"] == 10**6
    assert made.meta["hours"] is None


def test_what_is_predicted_comes_near_what_is_found(asked: tuple[str, str, Any]) -> None:
    made = study(*asked[:2], texts(), asked[2])
    alone = study(*asked[:2], texts())
    for one, off in ((made, 0.12), (alone, 0.08)):
        for row in one.report_tables["forecasts"]:
            assert row["predicted_recall10"] == pytest.approx(row["relative_recall10"], abs=off)
            assert row["predicted_recall10_low"] <= row["predicted_recall10"] <= row["predicted_recall10_high"]


def test_zero_rows_are_left_out_and_lengths_told_apart(tmp_path: Path) -> None:
    old = meant(N)
    new = old @ TURN
    new /= np.linalg.norm(new, axis=1, keepdims=True)
    old[5] = 0
    made = study(saved(tmp_path / "old", texts=old), saved(tmp_path / "new", texts=new), texts())
    assert any("1 of 900 old vectors are zero" in caution for caution in made.cautions)
    assert any("The new vectors all have length 1, and the old ones have not" in caution for caution in made.cautions)
    assert made.chosen["documents"].normalised
    assert not made.chosen["queries"].normalised


def test_too_few_texts_and_missing_parts(tmp_path: Path, asked: tuple[str, str, Any]) -> None:
    place = saved(tmp_path / "few", texts=meant(60))
    with pytest.raises(UserError, match="at least 200 texts"):
        study(place, place, texts(60))
    with pytest.raises(UserError, match="as many vectors"):
        study(place, place, texts(61))
    with pytest.raises(UserError, match="vectors of the queries"):
        study(f"{asked[0]}/texts.npy", f"{asked[1]}/texts.npy", texts(), asked[2])
    narrow = study(f"{asked[0]}/texts.npy:width=5", f"{asked[1]}/texts.npy", texts())
    assert narrow.meta["old"]["width"] == 5


def test_pieces_show_where_queries_lie(asked: tuple[str, str, Any]) -> None:
    """New queries are moved aside, as by a prompt; with pieces the map takes that back."""
    old, new, judged = asked
    aside = 6 * TURN[0]
    np.save(f"{new}/queries.npy", np.load(f"{new}/queries.npy") + aside.astype(np.float32))
    blind = study(old, new, texts(), judged)
    for side, moved in ((old, 0.0), (new, aside)):
        documents = np.load(f"{side}/texts.npy")
        pieces = documents + moved + 0.3 * DRAW.normal(size=documents.shape)
        np.save(f"{side}/pieces.npy", pieces.astype(np.float32))
    seen = study(old, new, texts(), judged)
    assert (blind.meta["pieces"], seen.meta["pieces"]) == (False, True)
    best = {}
    for made in (blind, seen):
        (row,) = [row for row in made.rows if row["chosen"] and row["route"] == "queries" and row["domain"] == "all"]
        best[made.meta["pieces"]] = row["recall10"]
    assert best[True] > best[False] + 0.1
    assert study(old, new, texts()).meta["pieces"] is False
