"""How a tutorial becomes a page of the site."""

from pathlib import Path

import pytest

pytest.importorskip("nbclient", reason="the extra `docs` is not installed")

from website import tutorials

SCRIPT = """# %% [markdown]
# # A title

# %%
import sys
print("one")
print("aside", file=sys.stderr)
print("two")

# %% [markdown]
# ## A bar

# %%
# a comment
import matplotlib.pyplot as plt
plt.bar([0], [1])
plt.show()
"""


def test_a_tutorial_becomes_a_page_with_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tutorials").mkdir()
    (tmp_path / "tutorials" / "bars.py").write_text(SCRIPT)
    monkeypatch.setattr(tutorials, "ROOT", tmp_path)
    pages = tutorials.pages()
    page = pages["tutorials/bars.md"]
    assert isinstance(page, str)
    assert page.startswith("# A title\n\n!!! note")
    assert "    one\n    two\n" in page
    assert "    aside\n" not in page
    (picture,) = (place for place in pages if place.endswith(".png"))
    assert f"![Figure: A bar]({picture.removeprefix('tutorials/')})" in page
    content = pages[picture]
    assert isinstance(content, bytes)
    assert content.startswith(b"\x89PNG")


def test_a_tutorial_that_fails_is_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient.exceptions import CellExecutionError

    (tmp_path / "wrong.py").write_text("# %%\n1 / 0\n")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        tutorials.executed(tmp_path / "wrong.py")
