"""The page of latents: that its data are what was found, and that no text of it is read as HTML."""

import json
from html.parser import HTMLParser
from pathlib import Path

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

STRINGS = ["unused", " the", "</script><script>alert(1)</script>", " &amp;", "\u2028", "é", "<!--"]
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
            row = {"site_x": i, "site_y": j, "latent": latent, "verdict": verdict, "recovered": found, "norm": 1e-9}
            rows.append({**row, "fired": float("nan") if place else 0.5, "correlation": None})
    return rows[::-1]


class Scripts(HTMLParser):
    """What the scripts of a page hold, and what is text elsewhere, as a browser tells them apart."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text = ""
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
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
    path = write_latent_page(folder, "Latents of <b>", "Found </script>.", META, rows_of(), texts_of(), SITES)
    assert path == folder / "latents.html"
    return path.read_text(encoding="utf-8")


def test_texts_are_never_html(page: str) -> None:
    scripts = Scripts(page)
    assert len(scripts.found) == 3  # tables, data, drawing
    assert page.count("</script>") == 3
    assert "alert(1)" in scripts.found[1]
    assert "alert(1)" not in page.replace(scripts.found[1], "")
    assert "Latents of <b>" in scripts.text
    assert "Found </script>." in scripts.text
    assert "innerHTML" not in page
    assert "http" not in page  # works offline


def test_data_are_what_was_found(page: str) -> None:
    data = json.loads(Scripts(page).found[1])
    codes, text, place, number = codes_of()
    assert data["sites"] == ["1", "2→3"]
    assert data["columns"] == ["recovered", "fired", "norm"]  # nothing has a correlation
    assert len(data["latents"]) == len(SITES) * LATENTS
    for row, (site, latent, verdict, numbers, tokens, contexts) in zip(rows_of(), data["latents"], strict=True):
        assert SITES[site] == (row["site_x"], row["site_y"])
        assert latent == row["latent"]
        assert data["verdicts"][verdict] == {"shared": "shared", "y": "Y's own"}[row["verdict"]]
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
