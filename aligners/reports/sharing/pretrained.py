"""What a run has trained, in the form that others get: saved to a folder, loaded from one, uploaded to the Hub."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from logging import getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from huggingface_hub import ModelCard, ModelHubMixin

from aligners.errors import UserError
from aligners.files.atomic import check_new_folder, whole_folder
from aligners.files.shared_folder import (
    CONFIG,
    FILE_ENDINGS,
    FORMAT,
    LIBRARY,
    MODEL,
    fetch,
    own_file,
    read_config,
    sha256,
)
from aligners.fitting.saved_bank import StoredBank, for_others, load_bank, save_bank
from aligners.models.model_identity import same_models
from aligners.probing.probe_bank import Bank
from aligners.probing.storing import PROBES, load_banks, save_banks
from aligners.reports.finished_runs import FinishedRun, finished_run
from aligners.reports.page.run_page import models_of
from aligners.reports.sharing.card import PLACE, card_text, with_notice
from aligners.reports.sharing.public_names import renamed

if TYPE_CHECKING:
    from aligners.models.model import FrozenModel

logger = getLogger(__name__)
CARD, REPORT, FIGURES = "README.md", "report.json", "figures"
Named = Sequence["str | FrozenModel"]

Identity = dict[str, Any]  # name, revision, fingerprint


class Shared(ModelHubMixin, library_name=LIBRARY, tags=[LIBRARY]):
    """What a run has trained, with the models that it belongs to, its card, and the files of its report.

    A folder of it holds `model.safetensors`, in the format of the run's own file, `config.json`, the card
    (`README.md`), and where a report came with it `report.json` and `figures/`. Nothing is pickled.

    Attributes:
        kind: what it is, as config.json has it.
        file: the file of a run that holds it.
        models: name, revision and fingerprint of each model.
        data: options of the data module that it was trained with.
        fitted_on_models: of a copy that was declared for others, the models that it was trained on; else none.
        card: text of the card.
        files: path within the folder -> content of each further file.
    """

    kind: ClassVar[str]
    file: ClassVar[str]

    def __init__(
        self, models: Sequence[Mapping[str, Any]], data: Mapping[str, Any]
    ) -> None:
        self.models = [dict(model) for model in models]
        self.data = for_others(data)
        self.fitted_on_models: list[Identity] = []
        self.card = ""
        self.files: dict[str, bytes] = {}

    # ------------------------------------------------------------------ what each kind has

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """Further entries of config.json, for readers."""

    @abstractmethod
    def write_weights(self, path: Path) -> None:
        """Write the file of weights."""

    @classmethod
    @abstractmethod
    def read_weights(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Read the weights of a folder, or of a file."""

    @classmethod
    def of_run(cls, path: Path) -> Self:
        """Read the file of a run."""
        return cls.read_weights(path, {})

    @abstractmethod
    def rename(self, names: Mapping[str, str]) -> None:
        """Give models other names, and remove the paths of this machine from the header of the weights' file."""

    # ------------------------------------------------------------------ saving

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **options: Any,
    ) -> str | None:
        """Write a folder, whole or not at all.

        Args:
            save_directory: the folder, new or empty.
            push_to_hub: whether to upload it as well.
            repo_id: its name on the Hub; default: that of the folder.
            options: options of `push_to_hub`.

        Returns:
            The address of the commit, if it was uploaded.

        Raises:
            ValueError: the folder holds files, or cannot be written to.
        """
        folder = Path(save_directory)
        check_new_folder(folder, "folder")
        with whole_folder(folder) as unfinished:
            super().save_pretrained(unfinished)
        return (
            self.push_to_hub(repo_id or folder.name, **options) if push_to_hub else None
        )

    def config(self) -> dict[str, Any]:
        """The content of config.json, without the checksum of the weights."""
        return {
            "library_name": LIBRARY,
            "format": FORMAT,
            "kind": self.kind,
            "version": version(LIBRARY),
            "models": self.models,
            "fitted_on_models": self.fitted_on_models,
            **self.about(),
            "data": self.data,
        }

    def _save_pretrained(self, save_directory: Path) -> None:
        self.write_weights(save_directory / MODEL)
        config = {**self.config(), "sha256": sha256(save_directory / MODEL)}
        (save_directory / CONFIG).write_text(
            json.dumps(config, indent=2), encoding="utf-8"
        )
        for name, content in self.files.items():
            file = save_directory / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the card that the run's report made, or one without numbers."""
        if not self.card:
            self.write_card()
        return ModelCard(self.card)

    def write_card(
        self, run: FinishedRun | None = None, license: str | None = None
    ) -> None:
        """Write the card.

        Args:
            run: with the report that its numbers come from.
            license: as the Hub names it.
        """
        self.card = card_text(self.config(), self.files, run, license)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the folder in one commit; the card then gives its name on the Hub.

        Args:
            repo_id: its name on the Hub, `owner/name`.
            options: options of `huggingface_hub.ModelHubMixin.push_to_hub`, such as `private`, `token` and
                `commit_message`.

        Returns:
            The address of the commit.
        """
        if not self.card:
            self.write_card()
        self.card = self.card.replace(PLACE, repo_id)
        options.setdefault("commit_message", f"Upload {self.kind}")
        return str(super().push_to_hub(repo_id, **options))

    # ------------------------------------------------------------------ loading

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        models: Named | None = None,
        other_models: bool = False,
        revision: str | None = None,
        **options: Any,
    ) -> Self:
        """Read a shared folder. Nothing in it is run.

        Args:
            pretrained_model_name_or_path: the folder, or its name on the Hub, `owner/name`.
            models: those that it is to be used with, by name or as they are loaded; default: they are not checked.
            other_models: whether they may be others than those that it belongs to: it is then declared for them.
            revision: branch, tag or commit on the Hub.
            options: options of `huggingface_hub.snapshot_download`, such as `token` and `cache_dir`.

        Raises:
            ValueError: there is no such folder, it is damaged or of another kind, or is for other models.
        """
        folder = fetch(pretrained_model_name_or_path, revision, **options)
        config = read_config(folder)
        kind = config.get("kind", "")
        if kind != cls.kind:
            loader = KINDS[kind].__name__ if kind in KINDS else "a later version"
            raise UserError(
                f"Expected {pretrained_model_name_or_path} to hold {cls.kind}, but it holds {kind}. "
                f"Load it with {loader}."
            )
        shared = cls.read_weights(folder, config)
        shared.fitted_on_models = list(config.get("fitted_on_models") or [])
        shared.read_card(folder)
        if models is not None:
            shared.use_with(
                models, str(pretrained_model_name_or_path), other_models=other_models
            )
        return shared

    def read_card(self, folder: Path) -> None:
        """Read the card of a folder, and the files of its report."""
        card = own_file(folder, CARD)
        if card is not None:
            self.card = card.read_text(encoding="utf-8")
        names = [REPORT]
        for figure in sorted((folder / FIGURES).glob("*.png")):
            names.append(f"{FIGURES}/{figure.name}")
        for name in names:
            path = own_file(folder, name)
            if path is not None:
                self.files[name] = path.read_bytes()

    def use_with(
        self, models: Named, what: str = "it", *, other_models: bool = False
    ) -> None:
        """Check that it belongs to some models, or declare it for them.

        Args:
            models: by name or as they are loaded, in the order of its own.
            what: its name, for the message.
            other_models: whether to declare it for them where they are others.

        Raises:
            ValueError: they are others.
        """
        present = identities(models, self.data)
        if same_models(self.models, present):
            return
        if not other_models:
            raise UserError(
                f"Expected `models` to be those that {what} belongs to, {listed(self.models)}, but got "
                f"{listed(present)}. Name them in this order, or set `other_models=True` to use it with other "
                "models nevertheless: every number in its card is then about other models."
            )
        if len(present) != len(self.models):
            raise UserError(
                f"Expected {len(self.models)} `models`, as {what} belongs to, but got {len(present)}."
            )
        self.fitted_on_models = self.fitted_on_models or self.models
        names = {}
        for own, other in zip(self.models, present, strict=True):
            names[own["name"]] = other["name"]
        self.rename(names)
        self.declare(present)
        trained_on = listed(self.fitted_on_models)
        notice = f"Declared for {listed(present)}, but trained on {trained_on}."
        self.card = with_notice(
            self.card, f"{notice} All that follows is about the latter."
        )
        logger.warning(
            "%s: %s Every number in its card is about the latter.", what, notice
        )

    def declare(self, models: Sequence[Identity]) -> None:
        """Say that it belongs to some models."""
        self.models = list(models)


class _SharedBank(Shared):
    """Banks of maps.

    Attributes:
        bank: the maps, where they lead, and what they were fitted on.
    """

    command: ClassVar[str]

    def __init__(self, bank: StoredBank) -> None:
        if bank.command != self.command:
            raise UserError(
                f"Expected {self.kind} of `train.py {self.command}`, but got those of `{bank.command}`."
            )
        super().__init__(models_of(bank.data), bank.data_config)
        self.bank = replace(bank, data_config=self.data)

    def about(self) -> dict[str, Any]:
        """Routes, site pairs, maps, and what was read."""
        about: dict[str, Any] = {"maps": {}, "pairs": self.bank.pairs}
        for route, maps in self.bank.maps.items():
            types = {name: type(aligner).__name__ for name, aligner in maps.items()}
            about["maps"][route] = types
        for name in ("component", "rows", "text"):
            if name in self.bank.data:
                about[name] = self.bank.data[name]
        return about

    def write_weights(self, path: Path) -> None:
        """Write the file of weights, as `train.py` writes it."""
        save_bank(self.bank, path)

    @classmethod
    def read_weights(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Read the weights of a folder."""
        return cls(load_bank(folder))

    def rename(self, names: Mapping[str, str]) -> None:
        """Give models other names, and remove the paths of this machine."""
        self.models = renamed(self.models, names)
        self.data = renamed(self.data, names)
        fitted = self.bank.fitted
        if fitted:
            fitted = replace(fitted, origins=renamed(fitted.origins, names))
        data = renamed(self.bank.data, names)
        self.bank = replace(self.bank, data=data, data_config=self.data, fitted=fitted)

    def declare(self, models: Sequence[Identity]) -> None:
        """Say that the maps belong to some models."""
        super().declare(models)
        revisions: list[Any] = [model["revision"] for model in models]
        options = {
            "revisions": revisions,
            "revision_x": revisions[0],
            "revision_y": revisions[-1],
        }
        for name, value in options.items():
            if name in self.data:
                self.data[name] = value
        data = {**self.bank.data, "models": list(models)}
        sides = self.bank.data["models"]
        if isinstance(sides, dict):
            data["models"] = dict(zip(sides, models, strict=True))
        self.bank = replace(self.bank, data=data, data_config=self.data)


class SharedMaps(_SharedBank):
    """Maps between two models, of `train.py fit`, one for each site pair."""

    kind = "maps"
    command = "fit"
    file = "aligners.safetensors"


class SharedUniverse(_SharedBank):
    """One space for many models, of `train.py universe` or `train.py join`."""

    kind = "universe"
    command = "universe"
    file = "universe.safetensors"


class SharedStitching(_SharedBank):
    """Stitching layers, of `train.py stitch`."""

    kind = "stitching"
    command = "stitch"
    file = "stitching.safetensors"


class SharedProbes(Shared):
    """Probes, of `train.py probe`.

    Attributes:
        banks: name -> bank, and what is known of it.
    """

    kind = "probes"
    file = PROBES

    def __init__(
        self,
        banks: Mapping[str, tuple[Bank, dict[str, Any]]],
        models: Sequence[Identity],
        data: Mapping[str, Any],
    ) -> None:
        super().__init__(models, data)
        self.banks = dict(banks)

    def about(self) -> dict[str, Any]:
        """The task of each bank."""
        banks = {}
        for name, (bank, about) in self.banks.items():
            banks[name] = {
                "kind": type(bank.probes).__name__,
                "task": about.get("task"),
            }
        return {"banks": banks}

    def write_weights(self, path: Path) -> None:
        """Write the file of weights, as `train.py probe` writes it."""
        save_banks(path, self.banks)

    @classmethod
    def read_weights(cls, folder: Path, config: Mapping[str, Any]) -> Self:
        """Read the weights of a folder."""
        return cls(load_banks(folder), config["models"], config["data"])

    @classmethod
    def of_run(cls, path: Path) -> Self:
        """Read the file of a run, with what its report and its options say."""
        run = finished_run(path.parent)
        return cls(
            load_banks(path), run.report.meta["models"], run.options.get("data", {})
        )

    def rename(self, names: Mapping[str, str]) -> None:
        """Give models other names, in the names of banks too."""
        self.models = renamed(self.models, names)
        self.data = renamed(self.data, names)
        banks = {}
        for name, (bank, about) in self.banks.items():
            banks[_in_name(name, names)] = (bank, renamed(about, names))
        self.banks = banks


def _in_name(name: str, names: Mapping[str, str]) -> str:
    """Return the name of a bank of probes, which ends with that of its model."""
    for model, other in names.items():
        if name.endswith(f", {model}"):
            return name.removesuffix(model) + other
    return name


KINDS = {
    kind.kind: kind
    for kind in (SharedUniverse, SharedStitching, SharedMaps, SharedProbes)
}
# by the file that a run keeps, and as the version before called it
KEPT: dict[str, type[Shared]] = {}
for end in FILE_ENDINGS:
    for shared_kind in KINDS.values():
        KEPT[str(Path(shared_kind.file).with_suffix(end))] = shared_kind


def identities(
    models: Sequence[str | FrozenModel], data: Mapping[str, Any]
) -> list[Identity]:
    """Return name, revision and fingerprint of models.

    Args:
        models: loaded ones, or names, which are loaded now.
        data: options of a data module, of which those that decide what a name means are taken: the precision, and the
            texts of embedded models.
    """
    found = []
    for model in models:
        if isinstance(model, str):
            model = _loaded(model, data)
        found.append(model.identity())
    return found


def _loaded(name: str, data: Mapping[str, Any]) -> FrozenModel:
    # The imports are here because maps are read without transformers.
    from aligners.datamodules.layers import LayerActivations
    from aligners.datamodules.text.sources import TextSource

    options: dict[str, Any] = {"max_length": 2}  # nothing is read
    options["dtype"] = data.get("dtype", "float32")
    if "text" in data:
        options["text"] = TextSource(**data["text"])
    return LayerActivations([name], **options).frozen[0]


def listed(models: Sequence[Identity]) -> str:
    """List names and the beginnings of fingerprints."""
    known = []
    for model in models:
        known.append(f"{model['name']} (fingerprint {model['fingerprint'][:12]})")
    return ", ".join(known) or "none"
