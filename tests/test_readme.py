"""The Python of the first page runs as it stands, with smaller models, texts and trainings."""

import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from tests.processes import ROOT

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SMALLER = {
    '"embedded-gpt:0"': '"embedded-gpt:0:layers=2,width=16,steps=4,batch=2,vocabulary=300"',
    '"embedded-gpt:1"': '"embedded-gpt:1:layers=2,width=16,steps=4,batch=2,vocabulary=300"',
    'sites="blocks"': 'sites="blocks", text=TextSource(max_texts=80, max_held_out=20)',
    "Alignment()": "Alignment(most_steps=4)",
}


def test_the_first_screen_is_short() -> None:
    """Under 120 words and three lines of Python before the picture."""
    screen = PAGE.split("![")[0]
    prose = re.sub(r"```.*?```", "", screen, flags=re.DOTALL)
    assert len(prose.split()) < 120
    assert BLOCKS[0] in screen
    assert len([line for line in BLOCKS[0].splitlines() if line]) == 3


def test_the_three_lines_on_arrays(capsys: pytest.CaptureFixture[str]) -> None:
    draw = np.random.default_rng(0)
    every = draw.normal(size=(600, 8))
    turned = every @ np.linalg.qr(draw.normal(size=(8, 8)))[0]
    names = {"x": every[:500], "y": turned[:500], "x_new": every[500:], "y_new": turned[500:]}
    exec(BLOCKS[0], names)
    alike, explained = map(float, capsys.readouterr().out.split())
    assert alike == pytest.approx(1)
    assert explained == pytest.approx(1)


def test_the_lines_with_a_trainer_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = BLOCKS[1]
    for written, smaller in SMALLER.items():
        assert written in text
        text = text.replace(written, smaller)
    names: dict[str, Any] = {}
    exec("from aligners import TextSource\n" + text, names)
    assert names["data"].trainer.max_epochs != 1000
    assert isinstance(names["alignment"], pl.LightningModule)
    methods = {row["method"] for row in names["evaluation"].rows}
    assert {"native_y", "identity", "linear", "ridge", "procrustes", "inn"} <= methods
    assert all(row["penalty"] is not None for row in names["evaluation"].rows)
    assert "linear 2 " in capsys.readouterr().out
    assert list(tmp_path.glob("logs/lightning_logs/version_0/metrics.csv"))
    assert (tmp_path / "report" / "report.json").exists()
