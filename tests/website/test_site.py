"""The documentation site: its navigation, its links, and what is generated."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from tests.processes import ROOT

from aligners import api
from aligners.cli.evaluate.inject import inject
from aligners.models.architectures import known_architectures
from aligners.similarity.catalogue import catalogue
from website import coverage, families, glossary, invariances, modules, options
from website.drawings import with_drawings, with_figures

DOCS = ROOT / "docs"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
WRITTEN = sorted(DOCS.rglob("*.md"))
DRAWINGS = sorted((DOCS / "figures" / "concepts").glob("*.svg"))


def navigation(entry: Any) -> Iterator[str]:
    """The places that the navigation names."""
    if isinstance(entry, str):
        yield entry
    for each in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from navigation(each)


def generated() -> set[str]:
    tutorials = {f"tutorials/{path.stem}.md" for path in (ROOT / "tutorials").glob("*.py")}
    found = (*navigation(options.nav()), *navigation(modules.nav()))
    return {"reference/families.md", "reference/measures.md", *found, *tutorials}


def prose(page: Path) -> str:
    """A page without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The headings of a page as the site names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_every_page_is_in_the_navigation() -> None:
    named = set(navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    folders = {name for name in named if not name.endswith(".md")}
    assert folders == {"reference/options", "reference/modules"}
    there = {str(page.relative_to(DOCS)) for page in WRITTEN} | generated()
    assert {*named - folders, *navigation(options.nav()), *navigation(modules.nav())} == there


@pytest.mark.parametrize("page", [*WRITTEN, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """In the repository, too, where no page has been generated."""
    for link in LINK.findall(prose(page)):
        if link.startswith(("https://", "mailto:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_pictures_have_a_text_instead() -> None:
    assert [page.name for page in WRITTEN if "![](" in page.read_text(encoding="utf-8")] == []


def test_the_glossary_has_the_words_of_the_reports() -> None:
    page = glossary.PLACE.read_text(encoding="utf-8")
    assert page == glossary.page(), "run python -m website.glossary"
    assert "\n## FVU\n\nFraction of variance unexplained" in page


def test_the_coverage_is_that_of_the_configs() -> None:
    """That its commands are understood is tested with those of all pages."""
    page = coverage.PLACE.read_text(encoding="utf-8")
    assert page == coverage.page(), "run python -m website.coverage"
    papers = coverage.items()
    made = {name for file in (ROOT / "papers").glob("*/tables.yaml") for name in yaml.safe_load(file.read_text())}
    assert {paper: len(lines) for paper, lines in papers.items()} == {
        "ren2023": 16, "wu2020": 11, "phang2021": 7, "merchant2020": 8, "brown2023": 12
    }  # fmt: skip
    for item in (item for lines in papers.values() for item in lines):
        assert set(item) <= {"item", "shows", "run", "report", "status", "paper", "ours", "note"}
        assert item["status"] in coverage.STATUSES
        assert item["status"] == "complete" or item["note"].endswith(".")
        assert ("run" in item) is (item["status"] in ("complete", "partly")), item["item"]
        assert set(item.get("report", [])) <= made
        for study in re.findall(r"study\.py run (\S+)", item.get("run", "")):
            assert (ROOT / study).is_file()
        for script, config in re.findall(r"\.py (\w+) --config (\w+)", item.get("run", "")):
            folder = {"stitch": "train"}.get(script, script)
            assert (ROOT / "aligners/configs" / folder / f"{config}.yaml").exists()


def test_every_model_family_has_its_row() -> None:
    page = families.page()
    assert all(f"| `{name}` |" in page for name in known_architectures())
    assert "not tested" not in page


def test_invariances_are_those_of_the_page_on_measures() -> None:
    """The hand-written table says the same of some that are told apart by little."""
    page = invariances.page()
    assert all(f"`{name}`" in page for name in catalogue())
    rows = {
        row.split("|")[1].strip(" *`"): [cell.strip() for cell in row.split("|")[2:-1]]
        for row in page.split("\n")
        if "|" in row
    }
    assert rows["measure"][:3] == ["rotation", "one scale", "translation"]
    assert rows["cca"] == ["both"] * 7
    assert rows["cka"] == rows["svcca"] == [*["both"] * 5, "–", "–"]
    assert rows["rsa"] == ["both", "both", "–", "both", "both", "–", "–"]
    assert rows["mixedsim"] == ["Y", *["both"] * 5, "Y"]
    assert rows["pwcca"] == ["Y", *["both"] * 4, "–", "–"]


def test_every_option_is_on_the_page_of_its_command() -> None:
    pages = options.pages()
    assert set(pages) == set(navigation(options.nav()))
    page = pages["reference/options/evaluate/inject.md"]
    parser = inject.parser()
    for name in ("--closed_form", "--data.text.source", "--trainer.devices"):
        assert f"\n`{name}`\n:   " in page
    assert set(parser.get_defaults().keys()) - {"config"} <= set(re.findall(r"^`--([\w.]+)`$", page, re.MULTILINE))
    assert "runs/inject-&lt;date>" in page  # not taken for markup


def test_every_package_has_a_page_of_its_modules() -> None:
    pages = modules.pages()
    assert set(pages) == set(navigation(modules.nav()))
    for path in ROOT.glob("aligners/similarity/functional/[a-z]*.py"):
        assert (
            f"::: aligners.similarity.functional.{path.stem}\n"
            in pages["reference/modules/aligners.similarity.functional.md"]
        )
    assert "::: aligners.datamodules.paired_activations\n" in pages["reference/modules/aligners.datamodules.md"]


def test_the_reference_of_the_api_shows_what_it_offers_and_the_most_used_first() -> None:
    page = modules.pages()["reference/modules/aligners.api.md"]
    shown = re.findall(r"^(?:::: aligners\.api\.\w+\.|### )(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(api.__all__)
    assert shown[:2] == ["Linear", "Ridge"]
    assert shown.index("states") < shown.index("minibatch_cka")


def test_a_drawing_becomes_part_of_the_page_with_its_text(tmp_path: Path) -> None:
    (tmp_path / "a.svg").write_text('<svg viewBox="0 0 1 1">\n<style>svg { color: red }</style>\n<circle/></svg>\n')
    made = with_drawings('Before.\n\n![A circle, and "more"](a.svg)\n\n![A photo](b.png)\n', tmp_path)
    assert '<svg role="img" aria-label="A circle, and &quot;more&quot;" viewBox="0 0 1 1">\n<circle/>' in made
    assert "style" not in made
    assert "![A photo](b.png)" in made


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_stays_within_its_frame(drawing: Path) -> None:
    root = ElementTree.parse(drawing).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for part in root.iter():
        for name in ("x", "y", "x2", "y2", "cx", "cy"):
            assert 0 <= float(part.attrib.get(name, 0)) <= (width if "x" in name else height)
    assert len(DRAWINGS) == 10


def test_every_figure_of_the_site_can_be_read_on_a_phone() -> None:
    """As on the page of a report: in a box that scrolls, not shrunk to the width of the screen."""
    shown = 0
    for page in WRITTEN:
        text = page.read_text(encoding="utf-8")
        boxed = with_figures(text, lambda path, folder=page.parent: (folder / path).read_bytes())
        figures = re.findall(r"^!\[.+\]\(.+\.png\)", text, re.MULTILINE)
        assert boxed.count('<div class="figure"') == len(figures) == text.count(".png)")
        shown += len(figures)
    assert shown > 10
    text = "![Penalty](figures/demo_penalty.png)"
    index = with_figures(text, lambda path: (DOCS / path).read_bytes())
    assert '.png){ width="1664" height="481" style="--least: 915px" }' in index
    style = (DOCS / "assets" / "extra.css").read_text(encoding="utf-8")
    assert "min-width: var(--least)" in style
