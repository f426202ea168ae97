"""A model is another when anything is that its states depend on: weights, settings or code, but no names."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.world import World

from aligners.models.loading.load_models import load_frozen
from aligners.models.model_identity import BESIDE, differing, same_model


def edited(world: World, folder: Path, **changes: Any) -> dict[str, Any]:
    """The identity of a model of the world, its config.json changed."""
    for path in Path(world.model_x).iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return load_frozen(folder).identity()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_act": "relu"}, 'its hidden_act was "gelu" and is "relu"'),
        ({"num_attention_heads": 1}, "its num_attention_heads was 2 and is 1"),
        ({"layer_norm_eps": 1e-5}, "its layer_norm_eps was 1e-12 and is 1e-05"),
    ],
)
def test_a_setting_that_states_depend_on_makes_another_model(
    world: World, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    plain, other = load_frozen(world.model_x).identity(), edited(world, tmp_path, **change)
    assert plain["fingerprint"] == other["fingerprint"]  # the weights
    assert differing(plain, other) == [says]
    earlier = {name: plain[name] for name in ("name", "revision", "fingerprint")}
    assert same_model(earlier, other)
    assert same_model(other, earlier)


def test_names_versions_and_how_it_is_trained_make_none(world: World, tmp_path: Path) -> None:
    change = {"transformers_version": "9.9", "id2label": {"0": "bad", "1": "good"}, "hidden_dropout_prob": 0.5}
    other = edited(world, tmp_path, **change, label2id={"bad": 0, "good": 1}, use_cache=False, bos_token_id=7)
    plain = load_frozen(world.model_x, attn_implementation="eager").identity()
    assert same_model(plain, other)
    assert (plain["attention"], other["attention"]) == ("eager", "sdpa")
    assert not set(BESIDE) & set(plain["settings"])
    del other["settings"]["hidden_act"]  # another version of transformers knows other settings
    assert same_model(plain, other)
    json.dumps(plain, allow_nan=False)
