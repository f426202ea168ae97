"""The page's example of a dictionary of three models runs, and its latents are what was planted."""

import re
from typing import Any

import torch
from tests.processes import ROOT

PAGE = ROOT / "docs" / "shared_latents.md"


def test_a_dictionary_of_three_models_finds_what_each_has() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "Crosscoder(" in block)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(code, names)
    codes, features, has, shares = names["codes"][0], names["features"], names["has"], names["shares"][:, 0]
    latents = codes.shape[1]
    together = torch.cat([codes, features], 1).T
    cosines = torch.corrcoef(together)[:latents, latents:].nan_to_num()
    best, latent = cosines.max(0)
    found = (best > 0.975).nonzero()[:, 0]
    lacks = has[[0, 2]][:, found]
    assert len(found) >= 7
    assert (lacks == 0).any(1).all(), "features that a model lacks are among them"
    of_found = shares[:, latent[found]]
    assert (of_found[has[:, found] == 0] < 0.1).all()
    assert (of_found[has[:, found] == 1] > 0.2).all()
    verdict = names["verdicts"](names["found"].parts).verdict[0, latent[found]]
    expected = torch.full_like(verdict, 2)
    expected[lacks[1] == 0] = 0
    expected[lacks[0] == 0] = 1
    assert torch.equal(verdict, expected)
