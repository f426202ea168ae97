"""Reading and replacing the states between the blocks of a model: the only place that touches its modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from frozen.architectures import Architecture

__all__ = ["Blocks", "inject", "read"]


class Blocks(Sequence[nn.Module]):
    """The L blocks of a model as it runs them: one that is shared comes as often as it is run.

    Args:
        listed: the model's own list of blocks.
        depth: L. With fewer listed, each is run L / len(listed) times before the next.
    """

    def __init__(self, listed: nn.ModuleList, depth: int) -> None:
        self.listed = listed
        self.order = [int(i / (depth / len(listed))) for i in range(depth)]

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[nn.Module]: ...

    def __getitem__(self, index: int | slice) -> nn.Module | Sequence[nn.Module]:
        if isinstance(index, slice):
            return [self.listed[i] for i in self.order[index]]
        return self.listed[self.order[index]]

    def numbering(self) -> Callable[[nn.Module], int]:
        """Tells, asked once at every call of a block in one run of the model, which of 1..L it is."""
        waiting: dict[nn.Module, list[int]] = {}
        for number, block in enumerate(self, start=1):
            waiting.setdefault(block, []).append(number)
        return lambda block: waiting[block].pop(0) if len(waiting[block]) > 1 else waiting[block][0]


class _Reached(Exception):
    """No error: leaves the forward pass once the deepest wanted site has been read."""


class _Injected(nn.Module):
    """Stands in for a block that is not run, or not yet, and answers with the injected states.

    Everything else that the model's loop asks a block for is answered by the block itself. A stand-in and not
    an overridden `forward`, so that hooks on a block that is not run are not told that it ran.
    """

    def __init__(self, block: nn.Module, answer: Callable[[tuple[Any, ...], dict[str, Any]], Any | None]) -> None:
        super().__init__()
        # Past nn.Module's registration: the block is no part of the stand-in.
        self.__dict__["_block"] = block
        self.__dict__["_answer"] = answer
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._answer(args, kwargs)
        return self._block(*args, **kwargs) if answer is None else answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


def read(blocks: Blocks, sites: Collection[int], run: Callable[[], object], *, leave: bool = True) -> dict[int, Tensor]:
    """The states at `sites` during `run`, which is left right after the deepest of them, unless `leave` is False.

    A state is what the model passes on: hooks that the user has put on block l act before site l is read,
    those on the input of block l + 1 after it.
    """
    states: dict[int, Tensor] = {}
    deepest = max(sites) if leave else None
    handles: list[RemovableHandle] = []
    number = blocks.numbering()

    def store(site: int, state: Tensor) -> None:
        if site not in sites:
            return
        states[site] = state
        if site == deepest:
            raise _Reached

    def after(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        store(number(block), output[0] if isinstance(output, (tuple, list)) else output)

    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if 0 not in states:
            store(0, args[0] if args else kwargs["hidden_states"])

    try:
        if 0 in sites:
            handles.append(blocks[0].register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        for block in {blocks[site - 1] for site in sites if site > 0}:
            handles.append(block.register_forward_hook(after))
        run()
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return states


@contextmanager
def inject(blocks: Blocks, architecture: Architecture, site: int, states: Tensor) -> Iterator[None]:
    """Within it, one run of the model has `states` at `site`, and no block up to `site` is run."""
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
def _input_replaced(block: nn.Module, states: Tensor) -> Iterator[None]:
    replaced = False  # a shared block comes again, with states of its own

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
