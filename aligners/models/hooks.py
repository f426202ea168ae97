"""Reads and replaces the states between the blocks of a model; the only module that touches its modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from aligners.errors import UserError
from aligners.models.architectures import Architecture, SubLayer, architecture_of


class Blocks(list[nn.Module]):
    """The L blocks of a model in the order of execution; a shared block appears as often as it is run.

    Args:
        listed: the model's own list of blocks.
        depth: L. With fewer listed, each is run L / len(listed) times before the next.
    """

    def __init__(self, listed: nn.ModuleList, depth: int) -> None:
        self.listed = listed
        self.order = [int(i / (depth / len(listed))) for i in range(depth)]
        super().__init__(listed[i] for i in self.order)

    def numbering(self) -> Callable[[nn.Module], int]:
        """A function to call once per call of a block in one run: it tells which of 1..L the block is."""
        return _numbering([[block] for block in self])


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """The part of a `transformers` model that runs its blocks."""
    return model.base_model.get_submodule(architecture_of(model.config.model_type).trunk)


def blocks_of(model: PreTrainedModel) -> Blocks:
    """The blocks of a `transformers` model in the order of execution.

    Raises:
        ValueError: the architecture is not registered, or its entry does not hold for this config.
    """
    architecture = architecture_of(model.config.model_type)
    architecture.check(model.config)
    listed = trunk_of(model).get_submodule(architecture.blocks)
    if not isinstance(listed, nn.ModuleList):
        raise UserError(
            f"Expected a list of blocks at {architecture.blocks!r} of a {type(model).__name__}, but got a "
            f"{type(listed).__name__}. Correct the entry of {model.config.model_type!r} in "
            "aligners/models/architectures.py."
        )
    return Blocks(listed, int(model.config.num_hidden_layers) if architecture.shared else len(listed))


class SubLayers:
    """The same sub-layer of all L blocks, in the order of execution.

    Args:
        blocks: the blocks.
        layer: where in a block it is.

    Raises:
        ValueError: a block has no such module.
    """

    def __init__(self, blocks: Blocks, layer: SubLayer) -> None:
        self._modules = [_found(block, layer.path, number) for number, block in enumerate(blocks, start=1)]
        self._calls = layer.calls

    def __getitem__(self, index: int) -> nn.Module:
        return self._modules[index]

    def numbering(self) -> Callable[[nn.Module], int]:
        """A function to call once per call in one run: it returns whose output this is, 1..L, or 0 if incomplete."""
        return _numbering([[module] * self._calls for module in self._modules])


def _found(block: nn.Module, path: str, number: int) -> nn.Module:
    try:
        return block.get_submodule(path)
    except AttributeError as error:
        raise UserError(
            f"Expected a sub-layer at `path` {path!r} of every block, but got block {number}, a "
            f"{type(block).__name__}, which has none there. Correct the family's entry in "
            "aligners/models/architectures.py."
        ) from error


def _numbering(calls: Sequence[Sequence[nn.Module]]) -> Callable[[nn.Module], int]:
    """From the calls in each block 1..L, in order: a function that tells which block a module's next call completes."""
    waiting: dict[nn.Module, list[int]] = {}
    for number, modules in enumerate(calls, start=1):
        for place, module in enumerate(modules, start=1):
            waiting.setdefault(module, []).append(number if place == len(modules) else 0)
    return lambda module: waiting[module].pop(0) if len(waiting[module]) > 1 else waiting[module][0]


class _Reached(Exception):
    """Leaves the forward pass once the deepest requested site was read; not an error."""


class _Injected(nn.Module):
    """Stands in for a block that is not run, or not yet, and answers with the injected states.

    The block itself answers everything else that the model's loop asks of it. This is a stand-in and not an overridden
    `forward`, so that hooks on a block that is not run do not fire.
    """

    def __init__(self, block: nn.Module, answer: Callable[[tuple[Any, ...], dict[str, Any]], Any | None]) -> None:
        super().__init__()
        # Bypasses nn.Module's registration: the block is no part of the stand-in.
        self.__dict__["_block"] = block
        self.__dict__["_answer"] = answer
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._answer(args, kwargs)
        return self._block(*args, **kwargs) if answer is None else answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


def read(
    places: Blocks | SubLayers, sites: Collection[int], run: Callable[[], object], *, leave: bool = True
) -> dict[int, Tensor]:
    """Return the states at `sites` during `run`, which ends right after the deepest of them unless `leave` is False.

    A state is what the model passes on: hooks that the user has put on block l act before site l is read, those on the
    input of block l + 1 after. Sub-layers have no site 0.
    """
    states: dict[int, Tensor] = {}
    deepest = max(sites) if leave else None
    handles: list[RemovableHandle] = []
    number = places.numbering()

    def store(site: int, state: Tensor) -> None:
        if site not in sites:
            return
        states[site] = state
        if site == deepest:
            raise _Reached

    def after(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        site = number(block)
        if site > 0:
            store(site, output[0] if isinstance(output, (tuple, list)) else output)

    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if 0 not in states:
            store(0, args[0] if args else kwargs["hidden_states"])

    try:
        if 0 in sites:
            handles.append(places[0].register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        for place in {places[site - 1] for site in sites if site > 0}:
            handles.append(place.register_forward_hook(after))
        run()
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return states


@contextmanager
def inject(blocks: Blocks, architecture: Architecture, site: int, states: Tensor) -> Iterator[None]:
    """Within it, one run of the model uses `states` at `site`, and skips all blocks up to `site`."""
    if site == 0:
        with _input_replaced(blocks[0], states):
            yield
        return
    number = blocks.numbering()

    def stand_in(block: nn.Module) -> _Injected:
        def answer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
            return architecture.answer(block, states, args, kwargs) if number(block) <= site else None

        return _Injected(block, answer)

    skipped = {i: blocks.listed[i] for i in blocks.order[:site]}
    try:
        for i, block in skipped.items():
            blocks.listed[i] = stand_in(block)
        yield
    finally:
        for i, block in skipped.items():
            blocks.listed[i] = block


@contextmanager
def replace(places: SubLayers, site: int, states: Tensor) -> Iterator[None]:
    """Within it, one run of the model continues with `states` instead of what the sub-layer of block `site` answers.

    They arrive in the shape and data type, and on the device, of that answer. The sub-layer is run all the same: what
    it answers is needed for nothing else.
    """
    number = places.numbering()

    def exchange(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if number(layer) != site:
            return None
        if isinstance(output, (tuple, list)):
            return type(output)((states.reshape(output[0].shape).to(output[0]), *output[1:]))
        return states.reshape(output.shape).to(output)

    handle = places[site - 1].register_forward_hook(exchange)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _input_replaced(block: nn.Module, states: Tensor) -> Iterator[None]:
    replaced = False  # a shared block runs again, on other states

    def replace(
        block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        nonlocal replaced
        if replaced:
            return None
        replaced = True
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    handle = block.register_forward_pre_hook(replace, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
