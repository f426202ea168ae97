from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.processes import ROOT
from website.drawings import with_drawings

DRAWINGS = sorted((ROOT / "docs" / "figures" / "concepts").glob("*.svg"))


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
    assert len(DRAWINGS) == 8
