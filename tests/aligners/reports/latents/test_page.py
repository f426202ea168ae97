"""The page of latents: that its data are what was found, and that no text of it is read as HTML."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aligners.datamodules.rows.row_types import RowTypes
from aligners.datamodules.rows.shown_rows import ShownRows
from aligners.injection.latents.latent_texts import LatentTexts
from aligners.reports.page.latent_page import write_latent_page
from aligners.reports.report import Row
from aligners.similarity.latents.contexts import AROUND, LatentContexts
from aligners.similarity.latents.token_shares import LatentTokens

BREAKING = "</script><img src=x onerror=alert(2)><script>alert(1)</script>"
STRINGS = ["unused", " the", BREAKING, " &amp;", "\u2028", "é日本🙂", "<!--", "\n"]
SITES, LATENTS, TEXTS, LENGTH = [(1, 1), (2, 3)], 5, 6, 12
META: Row = {"models": {"x": {"name": "</script>x", "revision": None, "fingerprint": "f" * 32}}, "versions": {}}


def codes_of() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    codes = torch.randn(len(SITES), TEXTS * LENGTH, LATENTS, generator=draw).relu()
    number = torch.randint(1, len(STRINGS), (TEXTS * LENGTH,), generator=draw)
    text = torch.arange(TEXTS).repeat_interleave(LENGTH)
    return codes, text, torch.arange(LENGTH).repeat(TEXTS), number


def texts_of() -> LatentTexts:
    codes, text, place, number = codes_of()
    contexts, tokens = LatentContexts(len(SITES), LATENTS, 3), LatentTokens(len(SITES), LATENTS, len(STRINGS), 2)
    contexts.update(codes, text, place)
    tokens.update(codes, number)
    types = RowTypes("tokens", STRINGS, number, torch.full((TEXTS,), LENGTH))
    return LatentTexts(contexts.compute(), tokens.compute(), ShownRows(STRINGS, types))


def rows_of() -> list[Row]:
    rows = []
    for place, (i, j) in enumerate(SITES):
        for latent in range(LATENTS):
            verdict = ("shared", "y")[latent % 2]
            found = None if latent == 3 else 0.123456 * latent
            row: Row = {"model_x": "runs/A", "model_y": "runs/B", "site_x": i, "site_y": j, "latent": latent}
            row |= {"verdict": verdict, "recovered": found, "norm": 1e-9}
            rows.append({**row, "fired": float("nan") if place else 0.5, "correlation": None})
    return rows[::-1]


class Scripts(HTMLParser):
    """What the scripts of a page hold, and what is text elsewhere, as a browser tells them apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.inside = False
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.inside = tag == "script"
        if self.inside:
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.found[-1] += data
        else:
            self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    path = write_latent_page(folder, "Latents of <b>", "Found </script>.", META, rows_of(), texts_of(), SITES, "ν < 1.")
    assert path == folder / "latents.html"
    return path.read_text(encoding="utf-8")


def test_texts_are_never_html(page: str) -> None:
    scripts = Scripts(page)
    assert len(scripts.found) == 3  # tables, data, drawing
    assert page.count("</script>") == 3
    assert "img" not in scripts.tags
    assert "alert(1)" in scripts.found[1]
    assert "alert(1)" not in page.replace(scripts.found[1], "")
    assert "Latents of <b>" in scripts.text
    assert "Found </script>." in scripts.text
    assert "ν < 1." in scripts.text
    assert "innerHTML" not in page
    assert "http" not in page  # works offline


def test_data_are_what_was_found(page: str) -> None:
    data = json.loads(Scripts(page).found[1])
    codes, text, place, number = codes_of()
    assert data["sites"] == ["1", "2→3"]
    assert data["columns"] == ["recovered", "fired", "share of Y in the norms"]  # nothing has a correlation
    assert len(data["latents"]) == len(SITES) * LATENTS
    for row, (site, latent, verdict, numbers, tokens, contexts) in zip(rows_of(), data["latents"], strict=True):
        assert SITES[site] == (row["site_x"], row["site_y"])
        assert latent == row["latent"]
        assert data["verdicts"][verdict] == {"shared": "shared", "y": "B's own"}[row["verdict"]]
        recovered = row["recovered"]
        assert numbers[0] == (None if recovered is None else pytest.approx(recovered, rel=1e-3))
        assert numbers[1:] == [None if site else 0.5, 1e-9]
        of_latent = codes[site, :, latent]
        best = int(of_latent.argmax())
        kept, at, code, levels = contexts[0]
        assert (data["numbers"][kept], at) == (int(text[best]), int(place[best]))
        assert code == pytest.approx(float(of_latent[best]), rel=0.005)
        read = [data["strings"][each] for each in data["texts"][kept]]
        assert read == [STRINGS[each] for each in number[text == text[best]]]
        assert levels[AROUND] == "9"
        assert len(levels) == 2 * AROUND + 1
        for off in range(-AROUND, AROUND + 1):
            if not 0 <= at + off < LENGTH:
                assert levels[AROUND + off] == "0"
            else:
                share = float(of_latent[best + off]) / float(of_latent[best])
                assert int(levels[AROUND + off]) - 1 <= 9 * share <= int(levels[AROUND + off]) + 1e-6
        sums = torch.zeros(len(STRINGS)).index_add(0, number, of_latent)
        assert data["strings"][tokens[0][0]] == STRINGS[int(sums.argmax())]
        assert tokens[0][1] == pytest.approx(float(sums.max() / sums.sum()), abs=5e-4)


def test_first_latents_alone_are_drawn_if_there_are_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.reports.page.latent_page.MOST", 4)
    written = write_latent_page(tmp_path, "t", "", META, rows_of(), texts_of(), SITES).read_text(encoding="utf-8")
    scripts = Scripts(written)
    assert "The first 4 of 10 latents, in the order of the report" in scripts.text
    data = json.loads(scripts.found[1])
    assert [latent[1] for latent in data["latents"]] == [4, 3, 2, 1]
    assert f"{len(scripts.found[1].encode()) / 1e6:.1f} MB of data" in scripts.text


def test_words_of_a_latent() -> None:
    texts = texts_of()
    codes, text, place, number = codes_of()
    best = int(codes[1, :, 2].argmax())
    rows = number[text == text[best]][max(0, int(place[best]) - AROUND) :][: AROUND + 1 + min(AROUND, int(place[best]))]
    assert texts.top_context(1, 2) == "".join(STRINGS[each] for each in rows).strip()
    first = texts.top_tokens(1, 2).split("%")[0]
    assert first.startswith(STRINGS[int(texts.tokens.token[1, 2, 0])].strip())


def seen(written: str, *actions: dict[str, Any]) -> list[dict[str, Any]]:
    """What the page's script shows at first and after each action, by Node; skips where there is none."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node to run the script")
    scripts = Scripts(written)
    _, data, script = scripts.found
    given = json.dumps({"script": script, "data": data, "ids": scripts.ids, "actions": actions})
    command = [node, str(Path(__file__).with_name("fake_browser.js"))]
    done = subprocess.run(command, input=given, capture_output=True, text=True, encoding="utf-8", timeout=60)
    assert done.returncode == 0, done.stderr
    shown: list[dict[str, Any]] = json.loads(done.stdout)
    return shown


def headings(shown: dict[str, Any]) -> list[str]:
    return [card["children"][0]["children"][0] for card in shown["cards"]]


def heading(row: Row) -> str:
    site = {(1, 1): "1", (2, 3): "2→3"}[row["site_x"], row["site_y"]]
    return f"Latent {row['latent']} · site {site}"


def test_the_script_shows_every_latent_with_the_numbers_of_the_report(page: str) -> None:
    (shown,) = seen(page)
    rows = rows_of()
    assert headings(shown) == [heading(row) for row in rows]
    assert shown["found"] == "10 shown of 10 found, 10 in all"
    assert not shown["more"]
    for row, card in zip(rows, shown["cards"], strict=True):
        title, numbers, top, _ = card["children"]
        assert title["children"][1]["text"] == {"shared": "shared", "y": "B's own"}[row["verdict"]]
        found = {pair["children"][0]["text"]: pair["children"][1]["text"] for pair in numbers["children"]}
        assert len(found) == 3
        for name, text in zip(("recovered", "fired", "norm"), found.values(), strict=True):
            value = row[name]
            if value is None or value != value:
                assert text == "none"
            else:
                assert float(text) == pytest.approx(value, rel=5e-3)
        assert re.fullmatch(r"Top tokens: .+ \d+%, .+ \d+%", top["text"])


def test_the_script_shows_texts_as_they_read_and_frames_the_row(page: str) -> None:
    (shown,) = seen(page)
    codes, text, place, number = codes_of()
    for row, card in zip(rows_of(), shown["cards"], strict=True):
        of_latent = codes[SITES.index((row["site_x"], row["site_y"])), :, row["latent"]]
        best = int(of_latent.argmax())
        about = (text == text[best]) & ((place - place[best]).abs() <= AROUND)
        first, *tokens = card["children"][3]["children"][0]["children"]
        assert first["text"].startswith(f"text {int(text[best])} · ")
        read = [STRINGS[each].replace("\n", "↵") for each in number[about]]
        assert [token["text"] for token in tokens] == read
        shares = of_latent[about] / of_latent[best]
        for token, share, at in zip(tokens, shares.tolist(), place[about].tolist(), strict=True):
            assert token["className"] == ("token own" if at == place[best] else "token")
            shade = float(token["style"].get("background", "0 0)").rstrip(")").split()[-1])
            assert 0 <= shade - 0.63 * share < 0.0751
            assert (shade > 0) == (share > 0)


def test_the_script_searches_filters_and_sorts(page: str) -> None:
    rows = rows_of()
    offered = seen(page)[0]["offered"]
    verdicts = {name: number for number, name in offered["verdict"]}
    sites = {name: number for number, name in offered["site"]}
    columns = [number for number, _ in offered["sort"]]
    shown = seen(
        page,
        {"id": "verdict", "event": "change", "value": verdicts["B's own"]},
        {"id": "site", "event": "change", "value": sites["2→3"]},
        {"id": "verdict", "event": "change", "value": ""},
        {"id": "sort", "event": "change", "value": columns[0]},
        {"id": "rising", "event": "change", "checked": True},
        {"id": "sort", "event": "change", "value": ""},
        {"id": "search", "event": "input", "value": "LATENT 2"},
        {"id": "search", "event": "input", "value": "nowhere"},
        {"id": "choose", "event": "submit"},
    )[1:]
    own = [row for row in rows if row["verdict"] == "y"]
    assert headings(shown[0]) == [heading(row) for row in own]
    at_site = [row for row in rows if row["site_x"] == 2]
    assert headings(shown[1]) == [heading(row) for row in own if row in at_site]
    assert headings(shown[2]) == [heading(row) for row in at_site]
    known = sorted((row for row in at_site if row["recovered"] is not None), key=lambda row: row["recovered"])
    unknown = [row for row in at_site if row["recovered"] is None]
    assert headings(shown[3]) == [heading(row) for row in [*known[::-1], *unknown]]
    assert headings(shown[4]) == [heading(row) for row in [*known, *unknown]]
    assert headings(shown[5]) == [heading(row) for row in at_site[::-1]]
    assert headings(shown[6]) == ["Latent 2 · site 2→3"]
    assert shown[7]["found"] == "0 shown of 0 found, 10 in all"
    assert shown[7]["cards"] == []
    assert shown[8] == shown[7]


def test_the_search_finds_texts(page: str) -> None:
    _, text, place, number = codes_of()
    found = headings(seen(page, {"id": "search", "event": "input", "value": "ONERROR=ALERT"})[1])
    expected = []
    contexts = texts_of().contexts
    for row in rows_of():
        site, latent = SITES.index((row["site_x"], row["site_y"])), row["latent"]
        near = torch.zeros_like(text, dtype=torch.bool)
        for each, at in zip(contexts.text[site, latent], contexts.place[site, latent], strict=True):
            near |= (text == each) & ((place - at).abs() <= AROUND)
        top = texts_of().tokens.token[site, latent].tolist()
        if 2 in number[near].tolist() + top:
            expected.append(heading(row))
    assert found == expected


def test_latents_are_drawn_some_at_a_time(tmp_path: Path) -> None:
    rows = 13 * rows_of()
    written = write_latent_page(tmp_path, "t", "", META, rows, texts_of(), SITES).read_text(encoding="utf-8")
    shown = seen(written, *3 * [{"id": "more", "event": "click"}])
    assert [len(each["cards"]) for each in shown] == [50, 100, 130, 130]
    assert [each["more"] for each in shown] == [True, True, False, False]
    assert shown[1]["found"] == "100 shown of 130 found, 130 in all"
    assert headings(shown[2]) == [heading(row) for row in rows]


def test_a_page_without_latents_says_so(tmp_path: Path) -> None:
    written = write_latent_page(tmp_path, "t", "", META, [], texts_of(), SITES).read_text(encoding="utf-8")
    (shown,) = seen(written)
    assert shown["found"] == "0 shown of 0 found, 0 in all"
    assert shown["cards"] == []
