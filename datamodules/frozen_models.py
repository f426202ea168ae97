"""The frozen models of a data module: which they are, how they are loaded, and where they go."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from aligners.datamodules.text.labels import check_labelled
from aligners.datamodules.text.texts import FITTED, FittedTexts, Texts
from aligners.datamodules.tokens.tokenised import same_tokenizer, same_tokens
from aligners.errors import UserError
from aligners.models.embedded import embedded_model
from aligners.models.loading.adapters import share_weights
from aligners.models.loading.known import KnownModels, SleepingModel
from aligners.models.loading.load_models import load_frozen
from aligners.models.loading.model_files import read_config
from aligners.models.loading.placement import DeviceMap, check_device
from aligners.models.model import FrozenModel
from aligners.models.recipes import EMBEDDED, Recipe, embedded_recipe

Place = tuple[
    str | None, DeviceMap | None
]  # of a model: a device, or where its parts go; by default the run's device


@dataclass(eq=False)
class FrozenModels:
    """Models that never train, loaded on first use.

    Args:
        named: name and revision of each; one that is named twice is one object.
        one_tokenizer: why they need equal tokenizers, and what to do otherwise; None: they do not.
        texts: loads the texts that embedded models are trained on.
        max_length: longest text in tokens, for which each model must have positions.
        known: models whose weights were read before, and need not be where nothing is run.
        bases: names of further models, which come after the others.
        under_heads: makes them, from the first of the others.
        dtype: precision of the models: float32, bfloat16 or float16.
        attn_implementation: eager, sdpa, flash_attention_2; default: what transformers chooses.
        trust_remote_code: run code from a model's repository. Off by default: it is somebody else's code.
        merge_adapters: add the weights of adapters (LoRA and others) to those of their bases. Unmerged, an adapter and
            its base, or two adapters of one base, share the base's memory. Default: where that is exact to rounding, in
            float32 and unquantised.
        cache: where embedded models are kept. Default: $ALIGNERS_CACHE, else ~/.cache/aligners.
        devices: device of each model, such as cuda:1; default: the run's. For one process only. Batches and what is
            read stay on the run's device.
        device_map: for each model, where its parts go if it is too large for one device: `auto`, or modules and
            devices, as transformers takes it; needs accelerate.
    """

    named: Sequence[tuple[str, str | None]]
    one_tokenizer: tuple[str, str] | None
    texts: Callable[[], Texts]
    max_length: int
    known: KnownModels | None = None
    bases: Sequence[str] = ()
    under_heads: Callable[[FrozenModel], list[FrozenModel]] = lambda first: []
    _: KW_ONLY
    dtype: str = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    merge_adapters: bool | None = None
    cache: Path | None = None
    devices: list[str | None] | None = None
    device_map: list[DeviceMap | None] | None = None

    def __post_init__(self) -> None:
        self._replaced: list[tuple[PreTrainedTokenizerBase, FrozenModel]] = []
        self.packed = False  # whether texts are laid end to end, with the token that ends one
        for name in self.devices or ():
            if name is not None:
                check_device(name, "devices")

    @cached_property
    def loaded(self) -> list[FrozenModel]:
        """All models, in the order of `named`, further ones last.

        Raises:
            ValueError: a model cannot be loaded or has too few positions, or tokenizers differ that must not.
        """
        places = dict(zip(self.named, self.places, strict=True))
        loaded = {named: self._load(*named, parts) for named, (_, parts) in places.items()}
        for a, b in combinations(
            [named for named in loaded if not isinstance(loaded[named], SleepingModel)], 2
        ):
            if places[a] == places[b] and places[a][1] is None:
                share_weights(loaded[b].model, loaded[a].model)
        models = [loaded[named] for named in self.named]
        return models + (self.under_heads(models[0]) if self.bases else [])

    @cached_property
    def sharing(self) -> list[FrozenModel]:
        """All models; those that make the same tokens of all texts share a tokenizer, however each would pad.

        Raises:
            ValueError: as in `loaded`, or tokenizers differ on a text that must not.
        """
        known: list[FrozenModel] = []
        for model in self.loaded:
            alike = next((other for other in known if self._same_tokens(other, model)), None)
            if alike is None:
                known.append(model)
            elif not same_tokenizer(
                *(cast(PreTrainedTokenizerBase, one.tokenizer) for one in (model, alike))
            ):
                self._replaced.append((cast(PreTrainedTokenizerBase, model.tokenizer), model))
                model.tokenizer = alike.tokenizer
        others = [model for model in known[1:] if self.one_tokenizer]
        if self.one_tokenizer and others:
            (why, instead), first = self.one_tokenizer, self.loaded[0]
            raise UserError(
                f"{why}, but the tokenizers of {first.name} and {others[0].name} differ on these texts. {instead}."
            )
        return self.loaded

    def check_tokens(self, texts: Texts) -> None:
        """Raise if models that share a tokenizer would have other tokens of further texts.

        Raises:
            ValueError: naming the models.
        """
        _ = self.sharing
        for own, model in self._replaced:
            shared = cast(PreTrainedTokenizerBase, model.tokenizer)
            if not same_tokens(
                own, shared, [texts.fit, texts.validation, texts.test], self.max_length
            ):
                raise UserError(
                    f"Expected texts of which {model.name} and the first model have the same tokens, as they have of "
                    f"the others, but those of {texts.origin['source']!r} differ. Leave them out."
                )

    def _same_tokens(self, a: FrozenModel, b: FrozenModel) -> bool:
        """Whether two models get the same tokens of every text."""
        one, other = (
            cast(PreTrainedTokenizerBase, model.tokenizer) for model in (a, b)
        )  # loaded with one
        if same_tokenizer(one, other):
            return True
        if self.packed and (one.eos_token_id, one.sep_token_id) != (
            other.eos_token_id,
            other.sep_token_id,
        ):
            return False
        texts = self.texts()
        return same_tokens(one, other, [texts.fit, texts.validation, texts.test], self.max_length)

    @property
    def tokenizers(self) -> list[PreTrainedTokenizerBase]:
        """The tokenizer of each model."""
        return [cast(PreTrainedTokenizerBase, model.tokenizer) for model in self.sharing]

    def chat_tokenizers(self) -> dict[str, PreTrainedTokenizerBase]:
        """The tokenizers of the models that may have a chat template, by the models' names: not of embedded ones."""
        if any(name.startswith(EMBEDDED) for name, _ in self.named):  # their texts come first
            return {}
        # Their own, which may have a template: they are shared once the texts are there.
        own = {model: tokenizer for tokenizer, model in self._replaced}
        models = zip(self.named, self.loaded, strict=False)
        return {
            name: own.get(model, cast(PreTrainedTokenizerBase, model.tokenizer))
            for (name, _), model in models
        }

    @property
    def places(self) -> list[Place]:
        """Where each model goes.

        Raises:
            ValueError: `devices` and `device_map` do not say that of every model, or contradict each other.
        """
        count = len(self.named)
        for option, given in (("devices", self.devices), ("device_map", self.device_map)):
            if given is not None and len(given) != count:
                raise UserError(
                    f"Expected `{option}` to have one entry for each of {count} models, but got {len(given)}. "
                    "Write null for a model on the device of the run."
                )
        nothing = [None] * count
        places = list(zip(self.devices or nothing, self.device_map or nothing, strict=True))
        for number, (device, parts) in enumerate(places, start=1):
            if device is not None and parts is not None:
                raise UserError(
                    f"Expected `devices` or `device_map` for a model, but model {number} has both: {device} and "
                    f"{parts}. Write null in one of them."
                )
            first = self.named.index(self.named[number - 1])
            if places[number - 1] != places[first]:
                raise UserError(
                    f"Expected `devices` and `device_map` to put a model in one place, but models {first + 1} and "
                    f"{number} are the same. Give both entries the same place."
                )
        return places

    def check_ranks(self, ranks: int) -> None:
        """Raise if several processes would put their models on the same devices."""
        if ranks > 1 and any(place != (None, None) for place in self.places):
            raise UserError(
                f"Expected one process where `devices` or `device_map` says where models are, but got {ranks}: all "
                "would use the same devices. Leave the options out, or set `trainer.devices` to 1."
            )

    def place(self, device: torch.device | str, needed: Collection[int] | None = None) -> None:
        """Move each model where the user wants it, or to the device of the run.

        Args:
            device: of the run.
            needed: numbers of the models that are; the others wait on the CPU. Default: all.
        """
        wanted = {model for m, model in enumerate(self.loaded) if needed is None or m in needed}
        models = zip(self.loaded, self.places, strict=True)
        for model, (chosen, parts) in sorted(
            models, key=lambda placed: placed[0] in wanted
        ):  # first make room
            if parts is None:
                model.to(chosen or (device if model in wanted else "cpu"))

    @contextmanager
    def running(self, model: FrozenModel, device: torch.device | None) -> Iterator[None]:
        """Within it, a model is where the user wants it, or on the device of the run; then again where it was."""
        (chosen, _), before = self.places[self.loaded.index(model)], model.device
        there = chosen or device
        if there is None or model.sharded:
            yield
            return
        try:
            model.to(there)
            yield
        finally:
            model.to(before)

    # ------------------------------------------------------------------ embedded models

    @property
    def embedded_depths(self) -> list[int] | None:
        """The number of blocks of each model, before any is made; None unless all are embedded."""
        if not all(name.startswith(EMBEDDED) for name, _ in self.named):
            return None
        return [embedded_recipe(name)[1].layers for name, _ in self.named]

    def widths(self) -> list[int]:
        """The width of each model's states, known before any is made or loaded.

        Raises:
            ValueError: there is no such model.
        """
        source = {"trust_remote_code": self.trust_remote_code}
        return [
            embedded_recipe(name)[1].width
            if name.startswith(EMBEDDED)
            else int(read_config(name, {**source, "revision": revision}).hidden_size)
            for name, revision in self.named
        ]

    def make_embedded(self) -> None:
        """Train the embedded models that are not in the cache.

        Raises:
            ValueError: one of them has too few positions, or the texts do not train it.
        """
        embedded = list(dict.fromkeys(name for name, _ in self.named if name.startswith(EMBEDDED)))
        for name in embedded:
            self._check_positions(name, embedded_recipe(name)[1].max_length)
        for name in embedded:
            self.path(name)

    def path(self, name: str) -> str:
        """The folder of an embedded model, which is trained now if the cache lacks it; any other name unchanged."""
        if not name.startswith(EMBEDDED):
            return name
        seed, recipe = embedded_recipe(name)
        texts = self.texts()
        if isinstance(recipe, Recipe):
            _check_classes(name, texts)
        labels = texts.fit["label"][:] if "label" in texts.fit.column_names else None
        folder = embedded_model(seed, texts.fit["text"][:], labels, recipe=recipe, cache=self.cache)
        if not (folder / FITTED).is_file() and os.access(folder, os.W_OK):
            with FileLock(folder.parent / ".lock"):
                texts.fitted("fit").save(folder)
        return str(folder)

    def fitted_on(self, *, embedded: bool = False) -> dict[str, FittedTexts]:
        """The texts that models were trained on, by the models' names, as far as that is known.

        Args:
            embedded: whether to count embedded models, which are trained on the fitting texts.
        """
        names = dict.fromkeys([*(name for name, _ in self.named), *self.bases])
        embedded_texts = {
            name: self.texts().fitted("fit")
            for name in names
            if embedded and name.startswith(EMBEDDED)
        }
        stored = {name: FittedTexts.load(Path(name)) for name in names}
        return {
            **embedded_texts,
            **{name: texts for name, texts in stored.items() if texts is not None},
        }

    # ------------------------------------------------------------------ loading

    def _load(self, name: str, revision: str | None, device_map: DeviceMap | None) -> FrozenModel:
        own = ("dtype", "attn_implementation", "trust_remote_code", "merge_adapters", "known")
        options: dict[str, Any] = {option: getattr(self, option) for option in own}
        model = load_frozen(
            self.path(name), revision=revision, device_map=device_map, known_as=name, **options
        )
        self._check_positions(name, model.max_length)
        return model

    def _check_positions(self, name: str, positions: int | None) -> None:
        if positions is not None and self.max_length > positions:
            raise UserError(
                f"Expected `max_length` of at most {positions}, the positions that {name} has, "
                f"but got {self.max_length}."
            )


def _check_classes(name: str, texts: Texts) -> None:
    """Raise unless an embedded classifier can be trained on the fitting texts."""
    who, source = (
        f"The embedded model {name}, which is trained as a classifier,",
        texts.origin["source"],
    )
    if texts.regression:
        raise UserError(
            f"{who} needs classes, but the labels of {source!r} are numbers to predict. Write classes as whole "
            "numbers, or give your own models."
        )
    labels = torch.tensor(texts.fit["label"][:]) if "label" in texts.fit.column_names else None
    check_labelled(labels, who, source, "give your own models", texts.columns_without_labels)
    _ = texts.classes_to_learn


def with_revisions(
    models: Sequence[str], revisions: Sequence[str | None] | None
) -> list[tuple[str, str | None]]:
    """Pair each model with its revision, by default None, the main one.

    Raises:
        ValueError: there is no model, or not one revision for each.
    """
    if not models:
        raise UserError("Expected `models` to name at least one model, but got none.")
    if revisions is not None and len(revisions) != len(models):
        raise UserError(
            f"Expected one of `revisions` for each of the {len(models)} `models`, but got {len(revisions)}. Write null "
            "for the main one."
        )
    return list(zip(models, revisions or [None] * len(models), strict=True))
