from __future__ import annotations

import pytest
import torch

from aligners.models.calling import Caller
from tests.tiny import CLASSIFIERS, TEXTS, tiny_model, tiny_tokenizer, tokenised


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_batch_is_answered_as_its_texts_alone(architecture: str) -> None:
    model, caller = tiny_model(architecture), Caller(tiny_model(architecture))
    with torch.no_grad():
        expected = torch.cat([model(**tokenised((text,))).logits for text in TEXTS])
        for side in ("left", "right"):
            batch = dict(
                tiny_tokenizer()(
                    list(TEXTS), padding=True, padding_side=side, return_token_type_ids=True, return_tensors="pt"
                )
            )
            assert "token_type_ids" in batch  # not every family has them
            # The mask says what is padding, whatever token stands there.
            batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)
            assert torch.allclose(caller.logits(batch), expected, atol=1e-5)
