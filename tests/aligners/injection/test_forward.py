import copy
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.tiny import TEXTS, reference, tiny_frozen, tokenised
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import select_rows
from aligners.datamodules.task_targets import TaskBatch, classification_targets, masked_targets, next_token_targets
from aligners.injection.behaviour import mapped_rows, own_logits, read_all, stitched_logits
from aligners.injection.routes import Route
from aligners.injection.scoring.task_scores import chosen, unit_losses
from aligners.injection.stitching.stitching_training import bank_gradients
from aligners.maps.affine import AffineLayer
from aligners.models import FrozenModel

PAIRS = ((2, 1), (0, 2), (1, 0), (3, 1), (2, 2))
# What is read (3 blocks of width 16), and what goes on from there (2 blocks of width 24).
KINDS = [
    ("bert", "bert", "classification"),
    ("bert", "bert", "masked"),
    ("gpt2", "gpt2", "causal"),
    ("gpt2", "gpt2", "classification"),
    ("albert", "albert", "classification"),
    ("bert", "xlnet", "classification"),
    ("xlnet", "bert", "masked"),
]


def make_route(source: str, target: str, task: str, pairs: Any = PAIRS) -> Route:
    x = tiny_frozen(source, seed=0)
    return Route("0_1", x, tiny_frozen(target, seed=1, layers=2, width=24, task=task), tuple(pairs))


def make_batch(task: str, texts: tuple[str, ...] = TEXTS) -> TaskBatch:
    inputs = tokenised(texts)
    padding = inputs["attention_mask"] == 0
    batch = TextBatch((inputs, inputs), (padding, padding), torch.arange(len(padding)))
    if task == "classification":
        targets = classification_targets(torch.arange(len(texts)) % 2)
    elif task == "causal":
        targets = next_token_targets(inputs)
    else:
        asked = ~padding & (inputs["input_ids"] % 3 == 0)
        targets = masked_targets(torch.where(asked, inputs["input_ids"], -100))
    return TaskBatch(batch, select_rows(inputs["attention_mask"], padding, "tokens"), targets)


def plainly(target: FrozenModel, batch: TaskBatch, site: int, mapped: Tensor) -> Tensor:
    """The whole model under torch's own hooks, all of it run: logits of each unit."""
    calls, turned = 0, target.model.config.model_type == "xlnet"

    def put(states: Tensor) -> Tensor:
        states = states.transpose(0, 1) if turned else states
        new = states.flatten(0, 1).index_copy(0, batch.rows.index, mapped).view_as(states)
        return new.transpose(0, 1) if turned else new

    def before(block: Any, args: tuple[Any, ...]) -> Any:
        return (put(args[0]), *args[1:]) if site == 0 and calls == 0 else None

    def after(block: Any, args: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != site:
            return None
        return put(output) if isinstance(output, Tensor) else (put(output[0]), *output[1:])

    handles = [block.register_forward_hook(after) for block in set(target.blocks)]
    handles += [target.blocks[0].register_forward_pre_hook(before)]
    logits = target.model(**batch.inputs).logits
    for handle in handles:
        handle.remove()
    assert calls == target.depth
    return chosen(logits, batch.targets)


def task_loss(route: Route, batch: TaskBatch) -> Any:
    def loss(pair: int, rows: Tensor) -> Tensor:
        logits = stitched_logits(route.target, batch.inputs, route.pairs[pair][1], batch.rows, rows)
        return unit_losses(chosen(logits, batch.targets), batch.targets).mean()

    return loss


def trained(route: Route, batch: TaskBatch) -> tuple[AffineLayer, Tensor]:
    """A layer with gradients by the bank's own way, and the losses."""
    torch.manual_seed(0)
    layer = AffineLayer(len(route.pairs), route.source.width, route.target.width, start="random", norm=True)
    mapped = mapped_rows(layer, read_all([route], batch).sources(route))
    losses, gradients = bank_gradients(mapped, task_loss(route, batch))
    mapped.backward(gradients)
    return layer, losses


@pytest.mark.parametrize(("source", "target", "task"), KINDS)
def test_gradients_are_those_of_the_straightforward_way(source: str, target: str, task: str) -> None:
    route = make_route(source, target, task)
    # XLNet wants its padding on the left; plainly run, nobody turns it: two texts of one length have none.
    batch = make_batch(task, ("the film is good", "a dull plot never") if "xlnet" in (source, target) else TEXTS)
    layer, losses = trained(route, batch)
    assert not losses.requires_grad
    plain = copy.deepcopy(layer)
    plain.zero_grad()
    states, _ = reference(route.source, batch.inputs)
    for s, (i, j) in enumerate(route.pairs):
        rows = states[i].flatten(0, 1)[batch.rows.index]
        mapped = plain(rows.expand(len(route.pairs), -1, -1))[s]
        loss = unit_losses(plainly(route.target, batch, j, mapped), batch.targets).mean()
        assert losses[s].item() == pytest.approx(loss.item(), rel=1e-5)
        loss.backward()
    for found, expected in zip(layer.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        assert (expected.grad.flatten(1).norm(dim=1) > 0).all()
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-5, atol=1e-5 * float(expected.grad.abs().max()))


@dataclass(eq=False)
class Saved:
    """A tensor that autograd keeps for the way back."""

    tensor: Tensor


def test_nothing_is_kept_of_heads_and_of_one_tail_at_a_time() -> None:
    route, batch = make_route("bert", "bert", "classification"), make_batch("classification")
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        alive.add(saved := Saved(tensor))
        return saved

    def watched(pair: int, leaf: Tensor) -> Tensor:
        assert not alive  # the graph of the site before is gone
        value = task_loss(route, batch)(pair, leaf)
        assert alive
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
        rows = read_all([route], batch, targets=True).sources(route)
        own_logits(route.target, batch)
        assert not alive
        bank_gradients(rows[..., :1].expand(-1, -1, 24).clone().requires_grad_(), watched)
        assert not alive


def test_a_head_is_run_once_for_all_routes_that_leave_it() -> None:
    models, counts = [tiny_frozen(seed=seed) for seed in range(3)], [0, 0, 0]
    for number, model in enumerate(models):

        def count(*_: Any, number: int = number) -> None:
            counts[number] += 1

        for block in model.blocks:
            block.register_forward_hook(count)
    routes = [Route(f"{a}_{b}", models[a], models[b], ((a + 1, 1),)) for a in range(3) for b in range(3)]
    read_all(routes, make_batch("classification"))
    assert counts == [1, 2, 3]
