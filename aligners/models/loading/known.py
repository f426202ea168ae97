"""What is known of models whose weights were read before, so that they need not be read again."""

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import transformers
from filelock import FileLock
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from aligners.errors import UserError
from aligners.files.atomic import let_write, write_text
from aligners.files.sealed import read_sealed_json, sealed_json
from aligners.models.calling import Caller
from aligners.models.hooks import blocks_of
from aligners.models.loading.adapters import adapter_of, located
from aligners.models.loading.placement import check_placement
from aligners.models.model import FrozenModel

WEIGHTS, OTHERS = (".safetensors", ".bin"), (".json",)


class Known(NamedTuple):
    """What is known of a model.

    Attributes:
        fingerprint: of its weights.
        headless: whether it was loaded without the head that its config names.
        causal: whether a position sees only those before it.
        nbytes: bytes of its weights.
    """

    fingerprint: str
    headless: bool
    causal: bool
    nbytes: int


class KnownModels:
    """Remembers models by their files: a file that was rewritten has another date, and is read again.

    Args:
        folder: where it is written down.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._new: list[tuple[Path, FrozenModel, bool]] = []

    def place(self, name: str, source: Mapping[str, Any], *options: Any) -> Path | None:
        """Return where a model is recorded; None if its files are not on this machine or contain code.

        Args:
            name: Hub id or folder.
            source: `revision` and `trust_remote_code`.
            options: what else decides its weights, such as their data type.
        """
        files = _files_of(name, source)
        if source.get("trust_remote_code") or not files:
            return None
        about = [*map(str, options), transformers.__version__, *map(_described, files)]
        digest = blake2b(json.dumps(about).encode(), digest_size=12)
        return self.folder / f"{digest.hexdigest()}.json"

    def find(self, place: Path) -> Known | None:
        """Return what is recorded there of the model; None: nothing."""
        try:
            return Known(**read_sealed_json(place.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None  # it is read again

    def note(self, place: Path, model: FrozenModel, headless: bool) -> None:
        """Note what `save` will record of a model."""
        self._new.append((place, model, headless))

    def save(self) -> None:
        """Write down the models that were noted."""
        for place, model, headless in self._new:
            place.parent.mkdir(parents=True, exist_ok=True)
            let_write(place.parent)
            with FileLock(place.parent / ".lock"):
                known = Known(model.fingerprint, headless, model.causal, model.nbytes)
                write_text(place, sealed_json(known._asdict()))
        self._new = []


def _files_of(name: str, source: Mapping[str, Any]) -> list[Path]:
    """Return the files of a model and of an adapter's base; for one on the Hub, the downloaded files of its revision.

    Returns:
        Their paths; an empty list if any of them has no weights.
    """
    place, where = located(name, source)
    folder = _folder_of(place, where.get("revision"))
    if folder is None:
        return []
    folder /= where.get("subfolder", "")
    if "gguf_file" in where:
        return [folder / where["gguf_file"]]

    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS + OTHERS)
    suffixes = {path.suffix for path in files}
    if suffixes.isdisjoint(WEIGHTS):
        return []
    adapter = adapter_of(name, source)
    if adapter is None:
        return files
    beneath = _files_of(*adapter.base)
    return [*files, *beneath] if beneath else []


def _folder_of(place: str, revision: str | None) -> Path | None:
    """Return the folder itself, or that of a repository's downloaded files; None if it is not on this machine."""
    if Path(place).is_dir():
        return Path(place)
    try:
        downloaded = snapshot_download(
            place, revision=revision, allow_patterns=["config.json"]
        )
    except (OSError, ValueError):  # it is not on this machine, or its name is none
        return None
    return Path(downloaded)


def _described(path: Path) -> list[Any]:
    """Describe a file by its place, size and dates: writing it changes one of them."""
    status = path.resolve().stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns]


WITH_WEIGHTS = ("model", "blocks", "_caller")  # what is not there before they are read


class SleepingModel(FrozenModel):
    """A `FrozenModel` that reads its weights on first use.

    Where all states come from a store that is never.

    Args:
        model: as for `FrozenModel`: the model without weights, on the meta device, and its tokenizer.
        about: what is known of the weights, which must be theirs once they are read.
        read: reads the model.
        named: `name` and `revision`, as for `FrozenModel`.
    """

    def __init__(
        self,
        *model: Any,
        about: Known,
        read: Callable[[], PreTrainedModel],
        **named: Any,
    ) -> None:
        super().__init__(*model, **named)
        self._place = torch.device("cpu")
        self._read = read
        self.fingerprint = about.fingerprint
        self.nbytes = about.nbytes
        self.causal = about.causal
        for part in WITH_WEIGHTS:
            del self.__dict__[part]

    def __getattr__(self, name: str) -> Any:
        """Read the weights when something is asked for that has them.

        Raises:
            ValueError: they are not those that were expected, or cannot be read.
        """
        if name not in WITH_WEIGHTS:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}"
            )
        self._wake()
        return self.__dict__[name]

    @property
    def awake(self) -> bool:
        """Whether the weights have been read."""
        return "model" in self.__dict__

    @property
    def device(self) -> torch.device:
        """The device of the inputs, where the weights are or will be."""
        return super().device if self.awake else self._place

    def to(self, device: torch.device | str) -> Self:
        """Move the weights, now or when they are read."""
        if self.awake:
            return super().to(device)
        self._place = torch.device(device)
        return self

    def _check_placement(self) -> None:
        """Do nothing: the weights are nowhere yet."""

    def _wake(self) -> None:
        """Read the weights."""
        model = self._read().eval().requires_grad_(False)
        known = self.__dict__.pop("fingerprint")
        self.model = model
        self.blocks = blocks_of(model)
        self._caller = Caller(model)
        check_placement(model, self.blocks)
        if self.fingerprint != known:
            raise UserError(
                f"Expected the weights of {self.name} that were read before, of fingerprint {known}, but its files "
                f"hold others, of {self.fingerprint}. They were changed but kept their dates: `touch` them."
            )
        self.to(self._place)
