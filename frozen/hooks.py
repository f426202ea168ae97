"""Reading and replacing the states between the blocks of a model: the only place that touches its modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["inject", "read"]


class _Reached(Exception):
    """No error: leaves the forward pass once the deepest wanted site has been read."""


class _Injected(nn.Module):
    """Stands in for a block that is not run, and answers with the injected states.

    Everything else that the model's loop asks a block for is answered by the block itself. A stand-in and not
    an overridden `forward`, so that hooks on a block that is not run are not told that it ran.
    """

    def __init__(self, block: nn.Module, returns: int | None, states: Tensor) -> None:
        super().__init__()
        # Past nn.Module's registration: the block is no part of the stand-in.
        self.__dict__["_block"] = block
        self.__dict__["_answer"] = states if returns is None else (states, *[None] * (returns - 1))
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


def read(
    blocks: nn.ModuleList, sites: Collection[int], run: Callable[[], object], *, leave: bool = True
) -> dict[int, Tensor]:
    """The states at `sites` during `run`, which is left right after the deepest of them, unless `leave` is False.

    A state is what the model passes on: hooks that the user has put on block l act before site l is read,
    those on the input of block l + 1 after it.
    """
    states: dict[int, Tensor] = {}
    deepest = max(sites) if leave else None
    handles: list[RemovableHandle] = []

    def store(site: int, state: Tensor) -> None:
        states[site] = state
        if site == deepest:
            raise _Reached

    def after(site: int) -> Callable[..., None]:
        return lambda block, args, output: store(site, output[0] if isinstance(output, tuple) else output)

    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        store(0, args[0] if args else kwargs["hidden_states"])

    try:
        for site in set(sites):
            if site == 0:
                handles.append(blocks[0].register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            else:
                handles.append(blocks[site - 1].register_forward_hook(after(site)))
        run()
    except _Reached:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return states


@contextmanager
def inject(blocks: nn.ModuleList, returns: int | None, site: int, states: Tensor) -> Iterator[None]:
    """Within it, the model has `states` at `site`, and no block up to `site` is run."""
    if site == 0:
        with _input_replaced(blocks[0], states):
            yield
        return
    skipped = list(blocks[:site])
    try:
        for i, block in enumerate(skipped):
            blocks[i] = _Injected(block, returns, states)
        yield
    finally:
        for i, block in enumerate(skipped):
            blocks[i] = block


@contextmanager
def _input_replaced(block: nn.Module, states: Tensor) -> Iterator[None]:
    def replace(
        block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((states, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": states})

    handle = block.register_forward_pre_hook(replace, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
