"""Every example of docs/python.md gives what the page says."""

import doctest

import pytest
from tests.processes import ROOT

from aligners.api import load


@pytest.mark.slow
def test_the_examples() -> None:
    for seed in range(2):  # who calls for them first is told that they are made
        load(f"embedded-gpt:{seed}:layers=2,width=32,steps=40,batch=2")
    page = str(ROOT / "docs" / "python.md")
    failed, tried = doctest.testfile(page, module_relative=False, optionflags=doctest.ELLIPSIS)
    assert tried > 50
    assert failed == 0
