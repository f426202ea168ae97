import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.aligners.injection.test_injecting import evaluate, fit
from tests.datamodules.test_model_texts import labelled
from tests.runs import activations, quiet_trainer
from tests.stitches import evaluate as stitch
from tests.tiny import tiny_model, tiny_tokenizer, tokenised
from tests.world import GOOD, TEST_TEXTS, World, read_texts, sentences, write_texts

from aligners.datamodules.text.labels import class_map
from aligners.datamodules.text.sources import TextSource
from aligners.finetuning.truncating import SurgeryEvaluation
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.scoring.scores import wrong_order
from aligners.injection.scoring.task_scores import in_data_order, match_heads, one_after_another
from aligners.maps.linear import Linear
from aligners.models.loading.load_models import load_frozen
from aligners.reports.finished_runs import make_report

NAMES = ["negative", "positive"]
NLI = ["entailment", "neutral", "contradiction"]


def test_probabilities_of_several_classes_are_added() -> None:
    logits = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0)).double()
    found = in_data_order(logits, ((1,), (2, 0))).softmax(-1)
    own = logits.softmax(-1)
    torch.testing.assert_close(found, torch.stack([own[..., 1], own[..., 0] + own[..., 2]], -1))
    assert torch.equal(in_data_order(logits, ((2,), (0,), (1,))), logits[..., [2, 0, 1]])
    assert in_data_order(logits, None) is logits
    assert one_after_another(((2,), (0, 1))) == ((0,), (1, 2))  # of a new head, groups of the same sizes
    assert one_after_another(((1,), (0,))) is None
    assert one_after_another(None) is None


def test_of_several_classes_the_largest_answers_if_that_is_asked_for() -> None:
    """As in McCoy et al. 2019, where the prediction, one of three, is renamed: .4 is the largest, and below the sum."""
    logits = torch.tensor([[0.4, 0.35, 0.25], [0.2, 0.5, 0.3]]).log()
    given = {"entailment": 0, "not-entailment": {"largest": ["neutral", "contradiction"]}}
    groups = class_map(NLI, ["entailment", "not-entailment"], 2, given=given, model="m", source="s")
    assert in_data_order(logits, groups).argmax(-1).tolist() == [0, 1]
    assert in_data_order(logits, ((0,), (1, 2))).argmax(-1).tolist() == [1, 1]
    again = one_after_another(groups)
    assert again == ((0,), (1, 2))
    assert torch.equal(in_data_order(logits, again), in_data_order(logits, groups))


def named_world(folder: Path, names: list[str], swapped: bool = False) -> World:
    """Two tiny models with these classes, Y's perhaps in the other order, and texts with the names as labels."""
    folder.mkdir()
    for place, side in enumerate("xy"):
        model = tiny_model("bert", seed=place, n_labels=len(names))
        own = list(names)
        if swapped and side == "y":
            own.reverse()
            for weight in model.classifier.parameters():
                weight.data.copy_(weight.data.flip(0))
        model.config.id2label = dict(enumerate(own))
        model.config.label2id = {name: k for k, name in enumerate(own)}
        model.save_pretrained(folder / side)
        tiny_tokenizer().save_pretrained(folder / side)
    texts = sentences(200)
    written = [
        write_texts(folder / name, own, [NAMES[bool(GOOD & set(text.split()))] for text in own])  # type: ignore[misc]
        for name, own in (("fit.csv", texts[TEST_TEXTS:]), ("test.csv", texts[:TEST_TEXTS]))
    ]
    return World(str(folder / "x"), str(folder / "y"), *written)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, World]:
    """The same world twice, in the second with Y's classes in the other order; both under one path, in turn."""
    folder = tmp_path_factory.mktemp("named")
    return named_world(folder / "plain", NAMES), named_world(folder / "swapped", NAMES, swapped=True)


def inject(world: World, folder: Path, **options: Any) -> InjectionEvaluation:
    """Linear maps at two sites, both ways."""
    shutil.rmtree(folder, ignore_errors=True)
    stored = fit(world, folder, {"linear": Linear}, sites=[1, 3])
    return evaluate(world, [stored], closed_form=(), both=True, **options)


def without_names(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.startswith("model")} for row in rows]


def test_classes_in_another_order_change_nothing_in_a_report(worlds: tuple[World, World], tmp_path: Path) -> None:
    plain, swapped = (inject(world, tmp_path / "maps") for world in worlds)
    assert without_names(plain.rows) == without_names(swapped.rows)
    assert plain.meta["labels"][worlds[0].model_y] == {"negative": ["negative"], "positive": ["positive"]}
    (head,) = (model for model in swapped.task.answering if model.name == worlds[1].model_y)
    assert head.class_map == ((1,), (0,))
    assert {model.class_map for model in plain.task.answering} == {None}
    assert not torch.equal(*(load_frozen(w.model_y).model.classifier.weight for w in worlds))


def test_classes_in_another_order_change_nothing_in_stitching_and_surgery(worlds: tuple[World, World]) -> None:
    rows = [stitch(world, data={"sites": "blocks"}).rows for world in worlds]
    assert without_names(rows[0]) == without_names(rows[1])
    tables = []
    for world in worlds:
        surgery, trainer = SurgeryEvaluation(), quiet_trainer(max_epochs=1)
        data = labelled(world, models=[world.model_y], bases=[world.model_x])
        trainer.fit(surgery, datamodule=data)
        trainer.test(surgery, datamodule=data, verbose=False)
        tables.append([row[name] for row in surgery.rows for name in ("accuracy", "accuracy_low", "loss")])
    assert tables[0] == pytest.approx(tables[1], rel=1e-5)


@pytest.mark.parametrize(
    ("order", "found"),
    [
        ([0, 1, 2], None),
        ([2, 0, 1], r"an accuracy of 20\.0% on .*, and would have 80\.0% with .* \(0 as 1, 1 as 2, 2 as 0\)"),
        ([1, 0, 2], r"an accuracy of 33\.3% on .*, and would have 80\.0% with .* \(0 as 1, 1 as 0\)"),
    ],
)
def test_a_classifier_whose_classes_stand_in_another_order_is_a_caution(order: list[int], found: str | None) -> None:
    labels, five = torch.arange(300) % 3, torch.arange(300) // 3 % 5
    meant = torch.where(five > 0, labels, (labels + 1) % 3)  # right about four of five
    answers = torch.tensor(order)[meant].double()
    caution = wrong_order("m", answers, labels)
    assert caution is None if found is None else re.search(found, caution or "")
    assert wrong_order("m", answers.where(answers > 0, torch.nan), labels) is None  # it does not answer all of them
    assert wrong_order("m", (five % 3).double(), labels) is None  # it knows nothing: no order is far better
    assert wrong_order("m", torch.zeros(100), torch.ones(100)) is None  # of one class, as a part of HANS


def test_a_head_without_names_in_another_order_is_a_caution_of_every_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = named_world(tmp_path / "numbers", ["LABEL_0", "LABEL_1"])
    texts, _ = read_texts(world.test)
    y = load_frozen(world.model_y)
    answers = [int(y.logits(tokenised((text,))).argmax()) for text in texts]
    write_texts(Path(world.test), texts, [NAMES[1 - answer] for answer in answers])  # type: ignore[misc]
    surgery = SurgeryEvaluation(heads=False)
    quiet_trainer().test(surgery, datamodule=labelled(world, models=[world.model_y]), verbose=False)
    for run in (inject(world, tmp_path / "maps"), stitch(world, data={"sites": [1]}), surgery):
        numbers, orders = (
            [said for said in run.meta["cautions"] if words in said and f" {world.model_y} " in said]
            for words in ("matched by number, as only the texts name them", "would have 100.0% with its classes")
        )
        assert (len(numbers), len(orders)) == (1, 1)
        assert orders[0] not in caplog.text  # it is printed with the report
    right = {"negative": "LABEL_1", "positive": "LABEL_0"}
    meta = stitch(world, data={"sites": [1], "labels": right}).meta
    assert not any(world.model_y in said for said in meta["cautions"])


def test_a_head_of_three_classes_answers_texts_of_two(tmp_path: Path) -> None:
    world = named_world(tmp_path / "nli", NLI)
    given = {"negative": "contradiction", "positive": [0, 1]}
    found = inject(world, tmp_path / "maps", labels=given)
    (native,) = (r for r in found.rows if r["method"] == "native_y" and r["direction"] == "forward")
    data = activations(world)
    batch = data.split("test")[list(range(TEST_TEXTS))]
    own = data.frozen[1].logits(batch.inputs[-1]).softmax(-1)
    positive = own[:, 0] + own[:, 1] > own[:, 2]
    assert native["accuracy"] == pytest.approx((positive.long() == batch.labels).double().mean().item())
    drawn = next(r for r in found.rows if r["method"] == "random_label")
    assert drawn["agreement"] > 0  # of two classes, not three


def test_unknown_names_are_refused_before_anything_is_measured(
    tmp_path: Path, worlds: tuple[World, World], caplog: pytest.LogCaptureFixture
) -> None:
    world = named_world(tmp_path / "other", ["bad", "good"])
    for run in (
        lambda: inject(world, tmp_path / "maps"),
        lambda: stitch(world),
        lambda: quiet_trainer().test(SurgeryEvaluation(heads=False), datamodule=labelled(world)),
    ):
        with pytest.raises(ValueError, match=r"0: negative, 1: positive, but it has 0: bad, 1: good.*--data\.labels"):
            run()
    given = [{"negative": "bad", "positive": "good"}, None]
    mixed = World(world.model_x, *worlds[0][1:])
    data = activations(mixed, labels=given)
    assert len(match_heads(data, data.frozen)) == 2
    with pytest.raises(ValueError, match=r"a list of one for each of the 2 models .* but got 1"):
        match_heads(activations(mixed, labels=given[:1]), data.frozen)
    data = activations(mixed)
    x, y = data.frozen
    assert list(match_heads(data, [y], [x])) == [y]  # a source of another task is not asked
    assert f"{world.model_x} only supplies states" in caplog.text


def test_heads_that_differ_need_texts_with_names(tmp_path: Path, worlds: tuple[World, World], world: World) -> None:
    numbers = TextSource(world.fit, held_out=world.test)
    plain, swapped = (activations(each, text=numbers) for each in (worlds[0], World(worlds[0].model_x, *worlds[1][1:])))
    assert len(match_heads(plain, plain.frozen)) == 2
    with pytest.raises(ValueError, match=r"have no names.*negative, positive; .* positive, negative.*--data\.labels"):
        match_heads(swapped, swapped.frozen)
    swapped.labels = {"0": "negative", "1": "positive"}
    match_heads(swapped, swapped.frozen)
    assert [model.class_map for model in swapped.frozen] == [None, ((1,), (0,))]


def test_named_heads_on_numbered_texts_are_a_caution_in_every_report(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = named_world(tmp_path / "named", NLI)
    for path in (world.fit, world.test):
        texts, _ = read_texts(path)
        write_texts(Path(path), texts, [k % len(NLI) for k in range(len(texts))])
    surgery = SurgeryEvaluation(heads=False)
    quiet_trainer().test(surgery, datamodule=labelled(world))
    kinds = {"injection": inject(world, tmp_path / "maps"), "stitching": stitch(world), "surgery": surgery}
    for kind, found in kinds.items():
        said = [line for line in make_report(kind, found.meta, found.rows).sentences if "matched by number" in line]
        assert len(said) == len(found.meta["labels"])
        assert all(any(f"the head of {model} " in line for line in said) for model in found.meta["labels"])
        assert all("0 is entailment, 1 is neutral" in line and line in caplog.text for line in said)
    caplog.clear()
    data = activations(world, labels={str(k): name for k, name in enumerate(NLI)})
    assert len(match_heads(data, data.frozen)) == 2
    assert "by number" not in caplog.text
