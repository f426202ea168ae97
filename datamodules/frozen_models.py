"""The frozen models of a data module: which there are, how they are loaded, and on which devices."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from aligners.datamodules.text.labels import check_labelled
from aligners.datamodules.text.texts import FITTED, FittedTexts, Texts
from aligners.datamodules.tokens.tokenising import same_tokenizer, same_tokens
from aligners.errors import UserError
from aligners.models.embedded import embedded_model
from aligners.models.loading.adapters import share_weights
from aligners.models.loading.known import KnownModels, SleepingModel
from aligners.models.loading.load_models import load_frozen
from aligners.models.loading.model_files import read_config
from aligners.models.loading.placement import DeviceMap, check_device
from aligners.models.model import FrozenModel
from aligners.models.recipes import EMBEDDED, Recipe, embedded_recipe
from aligners.models.recorded.recorded_states import RecordedRun
from aligners.models.recorded.source_names import all_recorded

PACKED_ALIKE = (
    "`packed` cuts texts into sequences of equally many tokens, which must hold the same text for all models",
    "Leave `packed` out",
)
# A device, or where the parts of a model go; otherwise the run's device is used.
Place = tuple[str | None, DeviceMap | None]


class FrozenModels:
    """Models that never train, loaded on first use.

    Args:
        named: name and revision of each model; a model named twice is one object.
        one_tokenizer: why the models need equal tokenizers, and what else the user can do; None: they do not need them.
        texts: loads the texts that embedded models are trained on.
        max_length: longest text in tokens, for which each model must have positions.
        known: models whose weights were read before, so that they need not be loaded where nothing is run.
        bases: names of further models, which come after the others.
        under_heads: makes the `bases`, given the first of the other models.
        packed: whether texts are laid end to end, each followed by an end-of-text token.
        dtype: floating-point type of the models: float32, bfloat16 or float16.
        attn_implementation: eager, sdpa, flash_attention_2; default: what transformers chooses.
        trust_remote_code: run code from a model's repository. Off by default: it is somebody else's code.
        merge_adapters: add the weights of adapters (LoRA and others) to those of their bases. Unmerged, an adapter and
            its base, or two adapters of one base, share the base's memory. Default: merge where that is exact up to
            rounding: in float32, without quantisation.
        cache: where embedded models are kept. Default: $ALIGNERS_CACHE, else ~/.cache/aligners.
        devices: device of each model, such as cuda:1; default: the run's. Only for a run of one process. Batches and
            the states that are read stay on the run's device.
        device_map: for each model, where its parts go if it is too large for one device: `auto`, or modules and
            devices, as transformers takes it; needs accelerate.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, str | None]],
        one_tokenizer: tuple[str, str] | None,
        texts: Callable[[], Texts],
        max_length: int,
        known: KnownModels | None = None,
        bases: Sequence[str] = (),
        under_heads: Callable[[FrozenModel], list[FrozenModel]] | None = None,
        packed: bool = False,
        *,
        dtype: str = "float32",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        merge_adapters: bool | None = None,
        cache: Path | None = None,
        devices: list[str | None] | None = None,
        device_map: list[DeviceMap | None] | None = None,
    ) -> None:
        for name in devices or ():
            if name is not None:
                check_device(name, "devices")
        self.named = named
        self.one_tokenizer = one_tokenizer
        if packed and one_tokenizer is None:
            self.one_tokenizer = PACKED_ALIKE
        self.texts = texts
        self.max_length = max_length
        self.known = known
        self.packed = packed
        self.bases = bases
        self.under_heads = under_heads
        self.dtype = dtype
        self.attn_implementation = attn_implementation
        self.trust_remote_code = trust_remote_code
        self.merge_adapters = merge_adapters
        self.cache = cache
        self.devices = devices
        self.device_map = device_map
        # models that share another's tokenizer -> their own tokenizers
        self._replaced: dict[FrozenModel, PreTrainedTokenizerBase] = {}

    def config(self) -> dict[str, Any]:
        """Return the options that a checkpoint keeps, as plain values."""
        return {
            "dtype": self.dtype,
            "attn_implementation": self.attn_implementation,
            "trust_remote_code": self.trust_remote_code,
            "merge_adapters": self.merge_adapters,
            "cache": None if self.cache is None else str(self.cache),
        }

    @property
    def names(self) -> list[str]:
        """The names of the models, as the user wrote them."""
        return [name for name, _ in self.named]

    @cached_property
    def recorded(self) -> RecordedRun | None:
        """Open the recorded states that stand in for the models; None: there are models.

        Raises:
            ValueError: some are recorded and others are not, or as `RecordedRun`.
        """
        if not all_recorded(self.names):
            return None
        known = None
        if self.known is not None:
            known = self.known.folder
        return RecordedRun(self.names, known)

    @cached_property
    def loaded(self) -> list[FrozenModel]:
        """Load all models: those of `named` in their order, then the `bases`.

        Raises:
            ValueError: a model cannot be loaded or has too few positions, or tokenizers that must agree differ.
        """
        if self.recorded is not None:
            return self.recorded.models
        places = dict(zip(self.named, self.places, strict=True))
        loaded = {}
        awake = []
        # The weights of a model are hashed, which every run asks for, while the next model is read.
        with ThreadPoolExecutor(thread_name_prefix="hashing") as hashing:
            for named, (_, parts) in places.items():
                loaded[named] = self._load(*named, parts)
                if not isinstance(loaded[named], SleepingModel):
                    awake.append(named)
                    hashing.submit(getattr, loaded[named], "fingerprint")
        for a, b in combinations(awake, 2):
            if places[a] == places[b] and places[a][1] is None:
                share_weights(loaded[b].model, loaded[a].model)
        models = [loaded[named] for named in self.named]
        if self.bases and self.under_heads is not None:
            models += self.under_heads(models[0])
        return models

    def _load(
        self, name: str, revision: str | None, device_map: DeviceMap | None
    ) -> FrozenModel:
        model = load_frozen(
            self.path(name),
            revision=revision,
            device_map=device_map,
            known_as=name,
            dtype=self.dtype,
            attn_implementation=self.attn_implementation,
            trust_remote_code=self.trust_remote_code,
            merge_adapters=self.merge_adapters,
            known=self.known,
        )
        self._check_positions(name, model.max_length)
        return model

    def _check_positions(self, name: str, positions: int | None) -> None:
        if positions is not None and self.max_length > positions:
            raise UserError(
                f"Expected `max_length` of at most {positions}, the positions that {name} has, "
                f"but got {self.max_length}."
            )

    # ------------------------------------------------------------------ tokenizers

    @cached_property
    def sharing(self) -> list[FrozenModel]:
        """Load all models; those that get the same tokens from all texts share a tokenizer, however each would pad.

        Raises:
            ValueError: as in `loaded`, or tokenizers that must agree differ on a text.
        """
        different: list[FrozenModel] = []
        for model in self.loaded:
            alike = [other for other in different if self._same_tokens(other, model)]
            if not alike:
                different.append(model)
            elif not same_tokenizer(_tokenizer(model), _tokenizer(alike[0])):
                self._replaced[model] = _tokenizer(model)
                model.tokenizer = alike[0].tokenizer
        if self.one_tokenizer and len(different) > 1:
            why, instead = self.one_tokenizer
            raise UserError(
                f"{why}, but the tokenizers of {different[0].name} and {different[1].name} differ on these texts. "
                f"{instead}."
            )
        return self.loaded

    def check_tokens(self, texts: Texts) -> None:
        """Raise if models that share a tokenizer would get different tokens from further texts.

        Raises:
            ValueError: naming the models.
        """
        _ = self.sharing
        for model, own in self._replaced.items():
            if not self._same_tokens_of(own, _tokenizer(model), texts):
                raise UserError(
                    f"Expected texts that {model.name} and the first model turn into the same tokens, as they do the"
                    f" others, but for those of {texts.origin['source']!r} their tokens differ. Leave them out."
                )

    def _same_tokens(self, a: FrozenModel, b: FrozenModel) -> bool:
        """Tell whether two models get the same tokens from every text."""
        one = _tokenizer(a)
        other = _tokenizer(b)
        if same_tokenizer(one, other):
            return True
        if self.packed and one.eos_token_id != other.eos_token_id:
            return False
        if self.packed and one.sep_token_id != other.sep_token_id:
            return False
        return self._same_tokens_of(one, other, self.texts())

    def _same_tokens_of(
        self, a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase, texts: Texts
    ) -> bool:
        splits = [texts.fit, texts.validation, texts.test]
        return same_tokens(a, b, splits, self.max_length)

    @property
    def tokenizers(self) -> list[PreTrainedTokenizerBase]:
        """Return the tokenizer of each model."""
        return list(map(_tokenizer, self.sharing))

    def chat_tokenizers(self) -> dict[str, PreTrainedTokenizerBase]:
        """Return the tokenizers that may have a chat template, by their models' names; embedded models have none."""
        names = self.names
        for name in names:
            if name.startswith(EMBEDDED):  # it is trained on the texts
                return {}
        # Each model's own tokenizer, which may have a template: tokenizers are shared once the texts are there.
        tokenizers = {}
        for name, model in zip(names, self.loaded, strict=False):
            tokenizers[name] = self._replaced.get(model, _tokenizer(model))
        return tokenizers

    # ------------------------------------------------------------------ places

    @property
    def places(self) -> list[Place]:
        """Return where each model goes.

        Raises:
            ValueError: `devices` or `device_map` does not have one entry for each model, or they contradict each other.
        """
        count = len(self.named)
        options = {"devices": self.devices, "device_map": self.device_map}
        for option, given in options.items():
            if given is not None and len(given) != count:
                raise UserError(
                    f"Expected `{option}` to have one entry for each of {count} models, but got {len(given)}. "
                    "Write null for a model on the device of the run."
                )
        devices = self.devices or [None] * count
        device_map = self.device_map or [None] * count
        places = list(zip(devices, device_map, strict=True))
        for number, (device, parts) in enumerate(places):
            if device is not None and parts is not None:
                raise UserError(
                    f"Expected `devices` or `device_map` for a model, but model {number + 1} has both: {device} and "
                    f"{parts}. Write null in one of them."
                )
            first = self.named.index(self.named[number])
            if places[number] != places[first]:
                raise UserError(
                    f"Expected `devices` and `device_map` to put a model in one place, but models {first + 1} and "
                    f"{number + 1} are the same. Give both entries the same place."
                )
        return places

    def check_ranks(self, ranks: int) -> None:
        """Raise if several processes would put their models on the same devices."""
        if ranks > 1 and any(place != (None, None) for place in self.places):
            raise UserError(
                f"Expected one process where `devices` or `device_map` says where models are, but got {ranks}: all "
                "would use the same devices. Leave the options out, or set `trainer.devices` to 1."
            )

    def place(
        self, device: torch.device | str, needed: Collection[int] | None = None
    ) -> None:
        """Move each model to where the user wants it, or to the device of the run.

        Args:
            device: device of the run.
            needed: numbers of the models to move; the others wait on the CPU. Default: all.
        """
        wanted = set(self.loaded)
        if needed is not None:
            wanted = {self.loaded[number] for number in needed}
        movable = []
        for model, (chosen, parts) in zip(self.loaded, self.places, strict=True):
            if parts is None:
                movable.append((model, chosen))
        movable.sort(key=lambda placed: placed[0] in wanted)  # first make room
        for model, chosen in movable:
            model.to(chosen or (device if model in wanted else "cpu"))

    @contextmanager
    def running(
        self, model: FrozenModel, device: torch.device | None
    ) -> Iterator[None]:
        """Move a model to its own device or the run's, and back when the context ends."""
        chosen, _ = self.places[self.loaded.index(model)]
        before = model.device
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
        """Return the number of blocks of each model before any is made; None unless all are embedded."""
        depths = []
        for name, _ in self.named:
            if not name.startswith(EMBEDDED):
                return None
            depths.append(embedded_recipe(name)[1].layers)
        return depths

    def widths(self) -> list[int]:
        """Return the width of each model's states, before any model is made or loaded.

        Raises:
            ValueError: there is no such model.
        """
        if self.recorded is not None:
            return [model.width for model in self.recorded.models]
        widths = []
        for name, revision in self.named:
            if name.startswith(EMBEDDED):
                widths.append(embedded_recipe(name)[1].width)
                continue
            source = {"trust_remote_code": self.trust_remote_code, "revision": revision}
            widths.append(int(read_config(name, source).hidden_size))
        return widths

    def make_embedded(self) -> None:
        """Train the embedded models that are not in the cache.

        Raises:
            ValueError: one of them has too few positions, or the texts cannot train it.
        """
        for name, _ in self.named:
            if name.startswith(EMBEDDED):
                self._check_positions(name, embedded_recipe(name)[1].max_length)
        for name, _ in self.named:
            self.path(name)

    def path(self, name: str) -> str:
        """Return the folder of an embedded model, which is trained now if the cache lacks it; other names unchanged."""
        if not name.startswith(EMBEDDED):
            return name
        seed, recipe = embedded_recipe(name)
        texts = self.texts()
        if isinstance(recipe, Recipe):
            _check_classes(name, texts)
        labels = None
        if "label" in texts.fit.column_names:
            labels = texts.fit["label"][:]
        plain = texts.fit["text"][:]
        folder = embedded_model(seed, plain, labels, recipe=recipe, cache=self.cache)
        if not (folder / FITTED).is_file() and os.access(folder, os.W_OK):
            with FileLock(folder.parent / ".lock"):
                texts.fitted("fit").save(folder)
        return str(folder)

    def fitted_on(self, *, embedded: bool = False) -> dict[str, FittedTexts]:
        """Return the texts that models were trained on, by the models' names, as far as they are known.

        Args:
            embedded: whether to count embedded models, which are trained on the fitting texts.
        """
        known: dict[str, FittedTexts] = {}
        names = self.names
        for name in dict.fromkeys([*names, *self.bases]):
            stored = FittedTexts.load(Path(name))
            if stored is not None:
                known[name] = stored
            elif embedded and name.startswith(EMBEDDED):
                known[name] = self.texts().fitted("fit")
        return known


def _tokenizer(model: FrozenModel) -> PreTrainedTokenizerBase:
    """Return the tokenizer that a model was loaded with."""
    return cast(PreTrainedTokenizerBase, model.tokenizer)


def _check_classes(name: str, texts: Texts) -> None:
    """Raise unless an embedded classifier can be trained on the fitting texts."""
    who = f"The embedded model {name}, which is trained as a classifier,"
    source = texts.origin["source"]
    if texts.regression:
        raise UserError(
            f"{who} needs classes, but the labels of {source!r} are numbers to predict. Write classes as whole "
            "numbers, or give your own models."
        )
    labels = None
    if "label" in texts.fit.column_names:
        labels = torch.tensor(texts.fit["label"][:])
    instead = "give your own models"
    check_labelled(labels, who, source, instead, texts.columns_without_labels)
    _ = texts.classes_to_learn


def with_revisions(
    models: Sequence[str], revisions: Sequence[str | None] | None
) -> list[tuple[str, str | None]]:
    """Pair each model with its revision; None, the default, stands for the main one.

    Raises:
        ValueError: no model is given, or the numbers of models and revisions differ.
    """
    if not models:
        raise UserError("Expected `models` to name at least one model, but got none.")
    if revisions is not None and len(revisions) != len(models):
        raise UserError(
            f"Expected one of `revisions` for each of the {len(models)} `models`, but got {len(revisions)}. Write null "
            "for the main one."
        )
    return list(zip(models, revisions or [None] * len(models), strict=True))
