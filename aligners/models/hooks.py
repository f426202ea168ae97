"""Reads and replaces the states between the blocks of a model, and after its final norm.

The only module that touches a model's modules.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from aligners.errors import UserError
from aligners.models.architectures import Architecture, SubLayer, architecture_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
# of states (B, T, d), and the arguments of a model's call
Changed = Callable[[Tensor, dict[str, Any]], Tensor]


class Places(list[nn.Module]):
    """The modules of blocks 1..L that answer with the states at sites 1..L; a shared one appears as often as it is run.

    Args:
        modules: one for each block, in the order of execution.
        calls: of a module by a block in one run; the last output counts.
        norm: the module that answers with the states at site L + 1, once in a run; None: there is no such site.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        calls: int = 1,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__(modules)
        self._calls = calls
        self.norm = norm

    @property
    def last_site(self) -> int:
        """L, or L + 1 where there is a final norm."""
        return len(self) + (self.norm is not None)

    def module_at(self, site: int) -> nn.Module:
        """The module that answers with the states at a site from 1 to the last one."""
        if site > len(self) and self.norm is not None:
            return self.norm
        return self[site - 1]

    def numbering(self) -> Callable[[nn.Module], int]:
        """Return a function to call at every call in one run, which returns the site, or 0 if it is incomplete."""
        incomplete = [0] * (self._calls - 1)
        waiting: dict[nn.Module, list[int]] = {}
        for number, module in enumerate(self, start=1):
            waiting.setdefault(module, []).extend([*incomplete, number])
        if self.norm is not None:
            waiting[self.norm] = [self.last_site]

        def next_number(module: nn.Module) -> int:
            numbers = waiting[module]
            if len(numbers) == 1:
                return numbers[0]
            return numbers.pop(0)

        return next_number


class Blocks(Places):
    """The L blocks of a model.

    Args:
        listed: the model's own list of blocks.
        depth: L. With fewer listed, each is run L / len(listed) times before the next.
        norm: the final norm, if there is one.
    """

    def __init__(
        self, listed: nn.ModuleList, depth: int, norm: nn.Module | None = None
    ) -> None:
        self.listed = listed
        # place in the list of each block; a model may have none
        self.order = [i * len(listed) // depth for i in range(depth)]
        super().__init__((listed[i] for i in self.order), norm=norm)

    def sub_layers(self, layer: SubLayer) -> Places:
        """The same sub-layer of all blocks.

        Raises:
            ValueError: a block has no such module.
        """
        try:
            modules = [block.get_submodule(layer.path) for block in self]
        except AttributeError as error:
            raise UserError(
                f"Expected a sub-layer at `path` {layer.path!r} of every block, but not every {type(self[0]).__name__} "
                "has one there. Correct the family's entry in aligners/models/architectures.yaml."
            ) from error
        return Places(modules, layer.calls)


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a `transformers` model that runs its blocks."""
    architecture = architecture_of(model.config.model_type)
    return model.base_model.get_submodule(architecture.trunk)


def reserved_positions(model: PreTrainedModel) -> int:
    """Return how many positions no token has: some models number positions from one past the padding index."""
    for name, module in trunk_of(model).named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            if module.padding_idx is None:
                return 0
            return module.padding_idx + 1
    return 0


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
            "aligners/models/architectures.yaml."
        )
    depth = len(listed)
    if architecture.shared:
        depth = int(model.config.num_hidden_layers)
    return Blocks(listed, depth, final_norm(model))


def final_norm(model: PreTrainedModel) -> nn.Module | None:
    """The norm that follows a model's last block; None: it has none, or none that is known."""
    architecture = architecture_of(model.config.model_type)
    if not architecture.norm:
        return None
    try:
        return trunk_of(model).get_submodule(architecture.norm)
    except AttributeError:  # as in an OPT that normalises after each sub-layer
        return None


class _Reached(Exception):
    """Raised to leave the forward pass once the deepest requested site was read; not an error."""


class _Injected(nn.Module):
    """Stands in for a block that does not run, and returns the injected states.

    The block itself answers everything else that the model's loop asks of it. This is a stand-in and not an overridden
    `forward`, so that hooks on a block that is not run do not fire.
    """

    def __init__(self, block: nn.Module, answer: Callable[..., Any | None]) -> None:
        super().__init__()
        # Bypasses nn.Module's registration: the block is no part of the stand-in.
        self.__dict__["_block"] = block
        self.__dict__["_answer"] = answer
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._answer(self._block, args, kwargs)
        if answer is None:
            return self._block(*args, **kwargs)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


def read(
    places: Places,
    sites: Collection[int],
    run: Callable[[], object],
    *,
    leave: bool = True,
) -> dict[int, Tensor]:
    """Return the states at `sites` during `run`, which ends right after the deepest of them unless `leave` is False.

    A state is what the model passes on: hooks that the user has put on block l act before site l is read, those on the
    input of block l + 1 after. Sub-layers have no site 0.
    """
    states: dict[int, Tensor] = {}
    number = places.numbering()

    def store(site: int, state: Tensor) -> None:
        if site not in sites:
            return
        states[site] = state
        if leave and site == max(sites):
            raise _Reached

    def before(block: nn.Module, args: Args, kwargs: Kwargs) -> None:
        if 0 not in states:
            store(0, _received(args, kwargs))

    def after(block: nn.Module, args: Args, output: Any) -> None:
        store(number(block), _answered(output))

    with ExitStack() as hooks, suppress(_Reached):
        if 0 in sites:
            hooks.enter_context(_before(places[0], before))
        for place in {places.module_at(site) for site in sites if site > 0}:
            hooks.enter_context(place.register_forward_hook(after))
        run()
    return states


@contextmanager
def inject(
    places: Places, architecture: Architecture, site: int, states: Tensor
) -> Iterator[None]:
    """Context in which one run of the model uses `states` at `site`.

    Of blocks, all up to `site` are skipped. A sub-layer, and a final norm, is run all the same: what it answers is
    needed for nothing else, and `states` take its shape, data type and device.
    """
    if isinstance(places, Blocks) and site > len(places):
        with (
            inject(places, architecture, len(places), states),
            _exchanging(places, site, lambda _: states),
        ):
            yield
        return
    if site == 0 or not isinstance(places, Blocks):
        with _exchanging(places, site, lambda _: states):
            yield
        return
    number = places.numbering()

    def answer(block: nn.Module, args: Args, kwargs: Kwargs) -> Any | None:
        if number(block) > site:
            return None
        return architecture.answer(block, states, args, kwargs)

    skipped = {i: places.listed[i] for i in places.order[:site]}
    try:
        for i, block in skipped.items():
            places.listed[i] = _Injected(block, answer)
        yield
    finally:
        for i, block in skipped.items():
            places.listed[i] = block


@contextmanager
def change(
    model: nn.Module, places: Blocks, site: int, changed: Changed
) -> Iterator[None]:
    """Context in which every run of a model continues from `changed(states, arguments)` at `site`. All blocks run.

    That fills the cache of every block, as generation requires. `changed` is given the states at the site, and the
    arguments by name with which the model was called. If it runs the model itself, nothing is changed in that run. No
    block may be shared.
    """
    called: dict[str, Any] = {}
    inside: list[bool] = []

    def begins(whole: nn.Module, args: Args, kwargs: Kwargs) -> None:
        called.update(kwargs)

    def once(states: Tensor) -> Tensor:
        if inside:
            return states
        inside.append(True)
        moved = changed(states, called)
        inside.clear()
        return moved

    begin = model.register_forward_pre_hook(begins, with_kwargs=True)
    with begin, _exchanging(places, site, once):
        yield


@contextmanager
def _exchanging(
    places: Places, site: int, changed: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Context in which the model continues from `changed(states)` at `site`, in the module's shape, type and device."""
    number = places.numbering()

    def before(block: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Any, Any] | None:
        if number(block) > 1:  # a shared block runs again, on other states
            return None
        states = changed(_received(args, kwargs))
        if args:
            return (states, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": states}

    def after(module: nn.Module, args: Args, output: Any) -> Any | None:
        if number(module) != site:
            return None
        old = _answered(output)
        states = changed(old).reshape(old.shape).to(old)
        if isinstance(output, (tuple, list)):
            return type(output)((states, *output[1:]))
        return states

    if site:
        hook = places.module_at(site).register_forward_hook(after)
    else:
        hook = _before(places[0], before)
    with hook:
        yield


def _before(block: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a hook on the input of a block, before all others."""
    return block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


def _received(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the states that a block is called with."""
    if args:
        return args[0]
    return kwargs["hidden_states"]


def _answered(output: Any) -> Tensor:
    """Return the states that a module returns, alone or first of several outputs."""
    if isinstance(output, (tuple, list)):
        return output[0]
    return output
