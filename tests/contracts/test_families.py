"""Every family of models at tiny size, and the record of what passed."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.contracts.families import CHECKS, NEEDED, SDPA, differences
from tests.kinds import ALIKE, KINDS
from tests.processes import ROOT
from tests.tiny import tiny_frozen, tiny_model, tokenised
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from aligners.models import FrozenModel
from aligners.models.architectures import FAMILIES, REFUSED, architecture_of
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


# Forms of a family that its usual settings do not show.
FORMS: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    ("falcon", {"alibi": True, "parallel_attn": False}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("mamba2", {"residual_in_fp32": False}),
]


@pytest.mark.parametrize(("family", "settings"), FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_forms_pass_the_self_test(family: str, settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = tiny_model(family, task="causal", **settings).to(dtype)
    FrozenModel(model, name="form").self_test(tokenised(side="left"))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_answer_alike_however_they_are_computed(family: str) -> None:
    grouped, inputs = tiny_frozen(family, task="causal"), tokenised(side="left")
    assert grouped.config._experts_implementation == "grouped_mm"
    for way in ("eager", "batched_mm"):
        other = tiny_frozen(family, task="causal")
        other.model.set_experts_implementation(way)
        other.self_test(inputs)
        assert max(differences(other, grouped, inputs)) < SDPA


def test_settings_with_which_a_tail_does_not_follow_from_its_states_are_refused() -> None:
    tokens = SimpleNamespace(model_type="gemma4_text", hidden_size_per_layer_input=8)
    with pytest.raises(ValueError, match="hidden_size_per_layer_input = 8: its blocks read the tokens again"):
        architecture_of("gemma4_text").check(tokens)
    whole = SimpleNamespace(model_type="gemma4", text_config=SimpleNamespace(num_kv_shared_layers=3))
    with pytest.raises(ValueError, match=r"Expected a 'gemma4' model without `num_kv_shared_layers`, .* = 3: its"):
        architecture_of("gemma4").check(whole)


def test_the_record_is_of_the_registered_families_and_the_pinned_version() -> None:
    advice = "run python -m website.families"
    assert set(RECORDS) == {*FAMILIES, *REFUSED}, advice
    assert set(FAMILIES) == {*KINDS, *ALIKE}
    for family, versions in RECORDS.items():
        assert PINNED in versions, advice
        assert versions[PINNED].get("refused") == REFUSED.get(family), advice
        assert family in REFUSED or set(NEEDED) <= set(versions[PINNED]["passed"]) <= set(CHECKS)


def test_the_page_on_models_has_the_same_families() -> None:
    page = (ROOT / "docs" / "models_and_data.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| .* \|$", page[page.index("| families |") : page.index("`aligners/models/tested.yaml`")], re.MULTILINE
    )
    named = re.findall(r"`([\w.-]+)`", "".join(rows[1:]))
    assert sorted(named) == sorted(RECORDS)


@pytest.mark.parametrize("family", REFUSED)
def test_a_refused_family_is_refused_with_its_reason(family: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"but got a {family!r} model: {REFUSED[family]}.")):
        architecture_of(family)
