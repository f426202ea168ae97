"""Every family of models at tiny size, and the record of what passed."""

import re

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from aligners.models.architectures import FAMILIES, REFUSED, architecture_of
from tests.contracts.families import CHECKS, NEEDED
from tests.kinds import ALIKE, KINDS
from tests.processes import ROOT
from website.families import records

RECORDS = records()
PINNED = re.search(r"^transformers==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


@pytest.mark.parametrize("family", ALIKE)
def test_a_family_passes_what_it_passed_when_recorded(family: str) -> None:
    if family not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    record = RECORDS[family].get(transformers.__version__, RECORDS[family][PINNED])
    for name in record["passed"]:
        CHECKS[name](family)


def test_the_record_is_of_the_registered_families_and_the_pinned_version() -> None:
    advice = "run python -m website.families"
    assert set(RECORDS) == {*FAMILIES, *REFUSED}, advice
    assert set(FAMILIES) == {*KINDS, *ALIKE}
    for family, versions in RECORDS.items():
        assert PINNED in versions, advice
        for record in versions.values():
            assert record.get("refused") == REFUSED.get(family), advice
            assert family in REFUSED or set(NEEDED) <= set(record["passed"]) <= set(CHECKS)


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_is_refused_with_its_reason(family: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"but got a {family!r} model: {REFUSED[family]}.")):
        architecture_of(family)
