"""Every kind, carried through a known map, says of the new states what it said of the old ones."""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.aligners.probing.artefacts.made import (
    ARTEFACTS,
    FEATURES,
    THROUGH,
    UPDATES,
    WIDTH,
    about,
    back_map,
    dictionary,
    draw,
    head,
    paired,
)
from torch import Tensor

from aligners import maps as banks
from aligners.api import INN, Linear, carry, read_artefacts, write_artefact
from aligners.fitting.saved_bank import StoredBank, save_bank
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.hook_names import component_of_hook, hook_like, site_of_hook
from aligners.probing.artefacts.kinds import Direction, Head, Probe, Stitching


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("kind", ARTEFACTS)
def test_carried_answers_are_the_old_ones(kind: str, update: str) -> None:
    artefact, rows = ARTEFACTS[kind], paired(update)
    carried = artefact.carried(back_map(update), model="new-model", site=1)
    assert bool(carried.through) == isinstance(artefact, Probe | Stitching)
    assert carried.width == rows.new.shape[1]
    torch.testing.assert_close(carried.answers(rows.new), artefact.answers(rows.old), rtol=1e-3, atol=2e-3)
    assert not torch.allclose(carried.answers(rows.new.flip(0)), artefact.answers(rows.old), rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("kind", ["direction", "topk", "edge", "stitching"])
def test_files_hold_what_was_carried(kind: str, tmp_path: Path) -> None:
    carried = ARTEFACTS[kind].carried(back_map("wider"), model="new-model", site=1)
    write_artefact(carried, tmp_path / "one", card="# A card\n")
    (read,) = read_artefacts(tmp_path)
    assert type(read) is type(carried)
    assert (read.about["model"], read.about["site"], read.name) == ("new-model", 1, carried.name)
    assert (tmp_path / "one" / "README.md").read_text() == "# A card\n"
    rows = paired("wider").new
    assert torch.equal(read.answers(rows), carried.answers(rows))


@pytest.mark.parametrize("artefact", [head(), *THROUGH.values()])
def test_a_map_that_cannot_be_folded_stays_beside(artefact: Head, tmp_path: Path) -> None:
    rows = paired("rotated")
    inn = INN(couplings=2, hidden=8, steps=3).fit(rows.new, rows.old)
    carried = carry(artefact, inn, model="new-model")
    assert carried.through
    torch.testing.assert_close(carried.answers(rows.new), artefact.answers(inn.predict(rows.new)))
    write_artefact(carried, tmp_path / "one")
    (read,) = read_artefacts(tmp_path / "one")
    torch.testing.assert_close(read.answers(rows.new), carried.answers(rows.new))
    again = carry(read, back_map("rotated")).answers(rows.new)  # and after a further update
    expected = carried.answers(back_map("rotated").float()(rows.new[None])[0])
    rounding = 1e-6 * float(expected.abs().max())  # of sums of terms of this size
    torch.testing.assert_close(again, expected, rtol=1e-3, atol=max(1e-3, rounding))


def test_a_direction_reads_and_steers() -> None:
    """Under a scaling the two are different vectors: one is divided by it, the other multiplied."""
    direction = Direction({"vector": draw(WIDTH)}, about("direction"))
    carried = direction.carried(back_map("scaled"))
    scales = UPDATES["scaled"].diagonal()
    torch.testing.assert_close(carried.tensors["vector"].double(), direction.tensors["vector"] * scales)
    torch.testing.assert_close(carried.tensors["reading"].double(), direction.tensors["vector"] / scales)
    again = carried.carried(back_map("rotated"))
    rows = paired("scaled").new.double() @ UPDATES["rotated"] + 1
    expected = direction.answers(paired("scaled").old)
    torch.testing.assert_close(again.answers(rows.float()), expected, rtol=1e-3, atol=1e-3)


def test_what_steers_goes_forward_through_a_map_of_its_own_and_what_was_true_of_the_old_model_is_left() -> None:
    rows, direction = paired("rotated"), Direction({"vector": draw(WIDTH)}, about("direction"))
    linear, inn = Linear().fit(rows.old, rows.new), INN(couplings=2, hidden=8, steps=3).fit(rows.old, rows.new)
    nudge = 1e-2 * direction.tensors["vector"]
    for forward, at in ((linear, rows.old[0]), (inn, rows.old.mean(0))):
        vector = carry(direction, back_map("scaled"), forward).tensors["vector"]
        step = (forward.predict(torch.stack([at + nudge, at - nudge]))).diff(dim=0)[0] / -2e-2
        torch.testing.assert_close(vector, step, rtol=0.05, atol=0.02)
    centred = cast(Dictionary, ARTEFACTS["dictionary"])
    centred = replace(centred, tensors={**centred.tensors, "b_dec": rows.old.mean(0)})
    b_dec = carry(centred, back_map("rotated"), inn).tensors["b_dec"]
    torch.testing.assert_close(b_dec, inn.predict(rows.old.mean(0)[None])[0], rtol=1e-3, atol=1e-3)
    told = carry(head(score={"value": 0.9}, fingerprint="old", rows="mean"), back_map("rotated"), model="new").about
    assert told == {"name": "my-head", "model": "new", "site": 2, "rows": "mean"}


@pytest.mark.parametrize("kind", ["dictionary", "jumprelu", "topk"])
def test_features_are_those_of_the_formula(kind: str) -> None:
    sae, states = cast(Dictionary, ARTEFACTS[kind]), paired("rotated").old
    encoder, b_enc, decoder, b_dec = (sae.tensors[name] for name in ("W_enc", "b_enc", "W_dec", "b_dec"))
    norm = decoder.norm(dim=1) if kind == "topk" else torch.ones(len(b_enc))
    before = ((states - (b_dec if kind != "jumprelu" else 0)) @ encoder + b_enc) * norm
    least = {"dictionary": 0, "jumprelu": sae.tensors.get("threshold"), "topk": before.topk(5).values[:, -1:]}[kind]
    expected = before.where((before > cast(Tensor, least)) & (before > 0), 0)
    torch.testing.assert_close(sae.answers(states), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sae.decode(expected), expected / norm @ decoder + b_dec, rtol=1e-3, atol=1e-3)
    dark = replace(sae, tensors={**sae.tensors, "b_enc": b_enc - 1000})
    assert not dark.answers(states).any()


@pytest.mark.parametrize("kind", ["gated", "gated_unshifted", "batchtopk"])
def test_features_are_those_of_saelens(kind: str) -> None:
    """Row by row and feature by feature, in the order in which SAELens computes."""
    sae, states = cast(Dictionary, ARTEFACTS[kind]), paired("rotated").old.double().numpy()
    tensors = {name: value.double().numpy() for name, value in sae.tensors.items()}
    norms = np.sqrt((tensors["W_dec"] ** 2).sum(1))
    expected = np.zeros((len(states), FEATURES))
    for row, state in enumerate(states):
        shifted = state if kind == "gated_unshifted" else state - tensors["b_dec"]
        for feature in range(FEATURES):
            product = shifted @ tensors["W_enc"][:, feature]
            if kind == "batchtopk":
                size = (product + tensors["b_enc"][feature]) * norms[feature]
                there = size > tensors["topk_threshold"]
            else:
                there = product + tensors["b_gate"][feature] > 0
                size = product * np.exp(tensors["r_mag"][feature]) + tensors["b_mag"][feature]
            expected[row, feature] = max(size, 0) if there else 0
    found = sae.answers(torch.from_numpy(states))
    assert 0.1 < np.count_nonzero(expected) / expected.size < 0.9
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("normalisation", ["layer_norm", "constant_norm_rescale"])
def test_what_changes_each_row_keeps_the_map_beside_it(normalisation: str, tmp_path: Path) -> None:
    plain, rows = dictionary("standard"), paired("wider")
    made = dictionary("standard", normalize_activations=normalisation)
    states = rows.old.double().numpy()
    if normalisation == "layer_norm":
        changed = (states - states.mean(1, keepdims=True)) / (states.std(1, ddof=1, keepdims=True) + 1e-5)
    else:
        changed = states * np.sqrt(WIDTH) / np.linalg.norm(states, axis=1, keepdims=True)
    expected = plain.answers(torch.from_numpy(changed)).float()
    torch.testing.assert_close(made.answers(rows.old), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain.answers(rows.old), expected, rtol=1e-2, atol=1e-2)
    write_artefact(made.carried(back_map("wider"), model="new-model"), tmp_path / "one")
    (read,) = read_artefacts(tmp_path)
    assert read.through
    torch.testing.assert_close(read.answers(rows.new).float(), expected, rtol=1e-3, atol=1e-3)


HOOKS = {
    "blocks.3.hook_resid_pre": (3, "blocks.5.hook_resid_post"),
    "blocks.3.hook_resid_post": (4, "blocks.5.hook_resid_post"),
    "blocks.3.hook_in": (3, "blocks.5.hook_out"),
    "blocks.3.hook_out": (4, "blocks.5.hook_out"),
    "blocks.3.hook_mlp_out": (4, "blocks.5.hook_mlp_out"),
    "blocks.3.attn.hook_out": (4, "blocks.5.attn.hook_out"),
    "model.layers.3": (4, "model.layers.5"),
    "transformer.h.3": (4, "transformer.h.5"),
    "bert.encoder.layer.3": (4, "bert.encoder.layer.5"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_are_sites(hook: str) -> None:
    site, sixth = HOOKS[hook]
    assert site_of_hook(hook, Path("cfg.json")) == site
    assert hook_like(hook, 6) == sixth
    if component_of_hook(hook) == "residual":  # a sub-layer has no site 0
        assert site_of_hook(hook_like(hook, 0), Path("cfg.json")) == 0


@pytest.mark.parametrize("hook", ["blocks.3.attn.hook_z", "blocks.3.mlp.hook_post", "ln_final.hook_normalized", "None"])
def test_other_hooks_are_refused(hook: str) -> None:
    with pytest.raises(ValueError, match=r"only dictionaries of the residual stream .* adds to it, can be carried\.$"):
        site_of_hook(hook, Path("cfg.json"))
    with pytest.raises(ValueError, match=r"carried\. The stream in the middle of a block is a sum that no module"):
        site_of_hook("blocks.3.hook_resid_mid", Path("cfg.json"))


def test_hooks_of_sub_layers_name_their_component() -> None:
    assert component_of_hook("blocks.3.hook_attn_out") == component_of_hook("blocks.3.attn.hook_out") == "attention"
    assert component_of_hook("blocks.3.hook_mlp_out") == component_of_hook("blocks.3.mlp.hook_out") == "mlp"
    assert component_of_hook("blocks.3.hook_resid_post") == component_of_hook("model.layers.3") == "residual"


@pytest.mark.parametrize("kind", ["dictionary", "jumprelu", "topk", "gated", "batchtopk"])
def test_a_dictionary_reconstructs(kind: str) -> None:
    old, rows = ARTEFACTS[kind], paired("wider")
    new = old.carried(back_map("wider"))
    assert isinstance(old, Dictionary)
    assert isinstance(new, Dictionary)
    expected = old.decode(old.answers(rows.old)).double() @ UPDATES["wider"] + 1
    torch.testing.assert_close(new.decode(new.answers(rows.new)).double(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("metadata", [True, False])
def test_saelens_goes_in_and_comes_out(metadata: bool, tmp_path: Path) -> None:
    made = dictionary("standard")
    cfg = {key: value for key, value in made.cfg.items() if key != "metadata"}
    told = {"model_name": "old-model", "hook_name": "blocks.1.hook_resid_post", "hook_layer": 1, "release": "mine"}
    cfg |= {"metadata": told} if metadata else told
    _written(tmp_path / "sae", made, cfg)
    (read,) = read_artefacts(tmp_path)
    assert (read.about["model"], read.about["site"]) == ("old-model", 2)
    write_artefact(carry(read, back_map("wider"), model="new-model", site=3), tmp_path / "new" / "sae")
    (again,) = read_artefacts(tmp_path / "new")
    assert isinstance(again, Dictionary)
    now = again.cfg["metadata"] if metadata else again.cfg
    assert (now["model_name"], now["hook_name"], now["hook_layer"]) == ("new-model", "blocks.2.hook_resid_post", 2)
    assert (again.cfg["d_in"], now["release"]) == (WIDTH + 4, "mine")
    rows = paired("wider")
    torch.testing.assert_close(again.answers(rows.new), made.answers(rows.old), rtol=1e-3, atol=1e-3)


def _written(folder: Path, made: Dictionary, cfg: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    save_file(made.tensors, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps(cfg))


def test_maps_of_a_run_are_artefacts_site_by_site(tmp_path: Path) -> None:
    bank = banks.Linear(2, WIDTH, 5)
    bank.weight.copy_(draw(2, WIDTH, 5))
    models = {"x": {"name": "old-model", "fingerprint": "f"}, "y": {"name": "other"}}
    data = {"models": models, "rows": "words"}
    save_bank(
        StoredBank("fit", {"0_1": {"linear": bank}}, {"0_1": [(1, 2), (3, 3)]}, data, {}),
        tmp_path / "aligners.safetensors",
    )
    found, rows = read_artefacts(tmp_path), draw(7, WIDTH)
    assert [(one.name, one.site, one.rows) for one in found] == [("linear-1-2", 1, "words"), ("linear-3-3", 3, "words")]
    for one, expected in zip(found, bank(rows.expand(2, -1, -1)), strict=True):
        torch.testing.assert_close(one.answers(rows), expected)


def test_scikit_learn_comes_in_by_array() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    rows = paired("rotated")
    fitted = linear_model.LogisticRegression().fit(rows.old.numpy(), (rows.old[:, 0] > 0).numpy())
    mine = Head.of(fitted.coef_, fitted.intercept_, model="old-model", site=2)
    logits = torch.from_numpy(fitted.decision_function(rows.old.numpy())).float()
    torch.testing.assert_close(mine.answers(rows.old)[:, 0], logits, rtol=1e-4, atol=1e-4)


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "kind": ({"kind": "monitor"}, "Expected `kind` to be one of"),
    "no_model": ({"model": None}, "Expected `model` in"),
    "no_site": ({"site": None}, "Expected `site` in"),
    "rows": ({"rows": "pixels"}, "Expected `rows` to be one of"),
    "classes": ({"classes": ["a", "b", "c"]}, "Expected 2 `classes`"),
    "direction": ({"kind": "direction"}, "Expected the tensors"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said(wrong: str, tmp_path: Path) -> None:
    change, words = WRONG[wrong]
    write_artefact(head(), tmp_path / "one")
    path = tmp_path / "one" / "artefact.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=words):
        read_artefacts(tmp_path)


@pytest.mark.parametrize("place", ["beside", "metadata"])
def test_a_dictionary_of_centred_weights_is_said(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kwargs = {"model_from_pretrained_kwargs": {"center_writing_weights": True}}
    write_artefact(dictionary("standard"), tmp_path / "one")
    path = tmp_path / "one" / "cfg.json"
    cfg = json.loads(path.read_text())
    changed = {**cfg, **kwargs} if place == "beside" else {**cfg, "metadata": {**cfg["metadata"], **kwargs}}
    assert read_artefacts(tmp_path)[0].doubts == []
    path.write_text(json.dumps(changed))
    (said,) = read_artefacts(tmp_path)[0].doubts
    assert "my-dictionary-standard-0 was trained on states of a model whose writing weights were centred" in said
    assert said in caplog.text


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no folder"):
        read_artefacts(tmp_path / "none")
    torch.save({"weight": draw(1, WIDTH)}, tmp_path / "head.pt")
    with pytest.raises(ValueError, match=r"head\.pt can run code"):
        read_artefacts(tmp_path)
    write_artefact(head(), tmp_path / "one")
    torch.save({"weight": draw(1, WIDTH)}, tmp_path / "one" / "artefact.safetensors")
    with pytest.raises(ValueError, match="to be a safetensors file"):
        read_artefacts(tmp_path)
    with pytest.raises(ValueError, match="Expected `model` in"):
        write_artefact(Head.of(draw(WIDTH), draw(1)), tmp_path / "two")


def test_maps_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="Expected `map` to be one map to width 12"):
        carry(head(width=12), back_map("wider").__class__(1, 12, 13))
    with pytest.raises(ValueError, match="fitted map of this package"):
        carry(head(), draw(12, 12))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Expected states of shape \(N, 12\)"):
        head().answers(draw(3, 13))
    with pytest.raises(ValueError, match="NaN"):
        Head.of(draw(WIDTH) * torch.nan, draw(1))
    with pytest.raises(ValueError, match="`problem_type` of a head is 'multi_label_classification'"):
        Head.of(draw(2, WIDTH), draw(2), problem_type="multi_label_classification")
    with pytest.raises(ValueError, match="architecture"):
        dictionary("temporal")
    with pytest.raises(ValueError, match="tensors"):
        replace(dictionary("gated"), tensors=dictionary("standard").tensors)
    with pytest.raises(ValueError, match="`rescale_acts_by_decoder_norm` false"):
        dictionary("gated", rescale_acts_by_decoder_norm=True)
    with pytest.raises(ValueError, match="reshape_activations"):
        dictionary("standard", reshape_activations="hook_z")
    with pytest.raises(ValueError, match="Expected `k`"):
        dictionary("topk", k=FEATURES + 1)
    with pytest.raises(ValueError, match="normalize_activations"):
        dictionary("standard", normalize_activations="covariance_whitening")
