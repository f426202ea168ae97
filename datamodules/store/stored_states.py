"""The stored states of one model on one set of texts: their identity, a manifest, and the shards of each site."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock

from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.store.shards import DTYPES, Shard
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import UserError
from aligners.files.atomic import write_text
from aligners.files.sealed import read_sealed_json, sealed_json
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel

FORMAT = 1  # version of the file format; a store of another format has another name
# What a configuration holds besides what decides the states.
BESIDE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "id2label",
    "label2id",
    "architectures",
)


@dataclass(frozen=True)
class StateIdentity:
    """Everything that determines a model's states, at all of its sites.

    Attributes:
        weights: the model's fingerprint.
        config: hash of its configuration, without names.
        inputs: hash of the tokenised texts.
        component: what is read at a site.
        computed_in: data type of the weights, and the precision of float32 products.
        stored_as: data type of the stored values: float32, float16 or bfloat16.
        format: version of the file format.
        rows: which rows are kept, one for each text; empty: every token, from which any rows can be made.
        attention: implementation of attention, and a hash of the model's own code; empty: the implementation that
            transformers prefers, and its own code, or the store of a version that did not record them.
    """

    weights: str
    config: str
    inputs: str
    component: Component
    computed_in: str
    stored_as: str
    format: int = FORMAT
    rows: str = ""
    attention: str = ""

    def values(self) -> dict[str, Any]:
        """The identity as plain values. Empty ones are left out, as earlier versions did not have them."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    @property
    def name(self) -> str:
        """The name of the store's folder."""
        return _hash(self.values(), size=12)

    @property
    def kept_as(self) -> str:
        """Data type in the files: means of values of type `stored_as` are kept in full precision."""
        return "float32" if self.rows else self.stored_as


def _hash(values: dict[str, Any], size: int) -> str:
    """Hash plain values to so many bytes."""
    content = json.dumps(values, sort_keys=True, default=str)
    return blake2b(content.encode(), digest_size=size).hexdigest()


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a data type: `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


MANIFEST = "manifest.json"


@dataclass
class Manifest:
    """What a store holds, without the states.

    Attributes:
        identity: what determines the states.
        about: the identity in words: names of the model and of the texts.
        width: d, the width of the states.
        bounds: shard k holds the texts bounds[k] to bounds[k + 1] - 1, at every site.
        rows: number of rows of each shard.
        sites: site -> number of each shard that is there -> its checksum, which covers everything but the rows.
    """

    identity: StateIdentity
    about: dict[str, Any]
    width: int
    bounds: list[int]
    rows: list[int]
    sites: dict[int, dict[int, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the manifest of a folder.

        Raises:
            ValueError: there is none, it is damaged, another version wrote it, or it belongs to another folder.
        """
        path = folder / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
            written = json.loads(text)["identity"]["format"]
            if written != FORMAT:
                raise ValueError(
                    f"its format is {written}: another version of aligners wrote it"
                )
            held = read_sealed_json(text)
            held["identity"] = StateIdentity(**held["identity"])
            if held["identity"].name != folder.name:
                raise ValueError(
                    f"it describes the states of the folder {held['identity'].name}"
                )
            manifest = cls(**{**held, "sites": {}})
            for site, shards in held["sites"].items():
                manifest.sites[int(site)] = {
                    int(number): shards[number] for number in shards
                }
            return manifest
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"Expected {path} to be the manifest of the store of states that its folder is named after, in format "
                f"{FORMAT}, but it cannot be read: {error!r}. Remove the folder {folder}, and the states will be "
                "computed again where they are needed."
            ) from error

    def save(self, folder: Path) -> None:
        """Write the manifest, whole or not at all."""
        ordered = {}  # the file is then the same whoever wrote which shard first
        for site, shards in sorted(self.sites.items()):
            of_site = {str(number): shards[number] for number in sorted(shards)}
            ordered[str(site)] = of_site
        plain = {**asdict(self), "identity": self.identity.values(), "sites": ordered}
        write_text(folder / MANIFEST, sealed_json(plain))


def plan_shards(lengths: np.ndarray, row_bytes: int, most: int) -> list[int]:
    """Divide texts into shards of whole texts; return the number of each shard's first text, then the number of texts.

    Args:
        lengths: rows of each text, (n,).
        row_bytes: bytes of a row.
        most: largest size of a shard in bytes, which its last text may exceed.
    """
    before = (np.cumsum(lengths) - lengths) * row_bytes // most
    begins = np.flatnonzero(np.diff(before)) + 1
    return [0, *begins.tolist(), len(lengths)]


def shard_path(folder: Path, site: int, shard: int) -> Path:
    """Return the path of a shard at a site."""
    return folder / "sites" / f"{site:02d}" / f"{shard:05d}.safetensors"


SHARD = 250_000_000  # bytes of a shard, which one more text may exceed
USED = "used"  # its date is when the states were last read


class StoredStates:
    """The store of a model's states on some texts, complete or not.

    Args:
        root: folder of all stores.
        model: the model whose states they are.
        data: the texts.
        place: the model's number among the models that the texts are tokenised for.
        component: what is read at a site.
        stored_as: data type of the stored values.
        kind: kind of the rows that are kept, one for each text; None: every token is kept.

    Attributes:
        folder: folder of this store.
        source: name of the store that holds every token of the same states.
        tokens: number of tokens of each text, (n,).
        lengths: rows of each text, (n,).
        row_bytes: bytes of a row.

    Raises:
        ValueError: the folder holds the manifest of another store.
    """

    def __init__(
        self,
        root: Path,
        model: FrozenModel,
        data: TokenisedTexts,
        place: int,
        component: Component,
        stored_as: str,
        kind: RowKind | None = None,
    ) -> None:
        self.model = model
        self.data = data
        self.place = place
        self.kind = kind
        self.identity = self._identity(component, stored_as, kind)
        self.folder = root / self.identity.name
        self.source = self._identity(component, stored_as, None).name
        self.tokens = data.lengths_of(place).numpy()
        self.lengths = self.tokens if kind is None else np.ones_like(self.tokens)
        self.dtype = DTYPES[self.identity.kept_as]
        self.row_bytes = model.width * self.dtype.itemsize
        self.manifest = self._planned()
        self.reload()
        self._open: dict[tuple[int, int], Shard] = {}
        self._checked: dict[int, np.ndarray] = {}

    def _identity(
        self, component: Component, stored_as: str, kind: RowKind | None
    ) -> StateIdentity:
        model = self.model
        settings = model.config.to_dict()
        for name in BESIDE:
            settings.pop(name, None)
        attention = model.code or ""
        if model.attention_used not in (None, model.attention_preferred):
            attention = f"{model.attention_used}{attention}"
        leave_out_special = kind is not None and not kind.special_tokens
        return StateIdentity(
            weights=model.fingerprint,
            config=_hash(settings, size=16),
            inputs=self.data.digest(self.place, special=leave_out_special),
            component=component,
            computed_in=f"{name_of(model.dtype)}, products {torch.get_float32_matmul_precision()}",
            stored_as=stored_as,
            rows=str(kind or ""),
            attention=attention,
        )

    def _planned(self) -> Manifest:
        """Return the manifest of an empty store."""
        # The shards are those of a store of every token, so a text is read in the same batch whatever rows are kept.
        token_bytes = self.model.width * DTYPES[self.identity.stored_as].itemsize
        bounds = plan_shards(self.tokens, token_bytes, SHARD)
        about: dict[str, Any] = {
            "model": self.model.name,
            "revision": self.model.revision,
            "tokenizer": getattr(self.model.tokenizer, "name_or_path", None),
            "texts": len(self.lengths),
            "longest_text": int(self.tokens.max()),
        }
        rows = [int(self.lengths[a:b].sum()) for a, b in pairwise(bounds)]
        return Manifest(self.identity, about, self.model.width, bounds, rows)

    # ------------------------------------------------------------------ what is there

    def missing(self, sites: Sequence[int]) -> dict[int, list[int]]:
        """Return the number of each incomplete shard -> the sites that lack it."""
        missing = {}
        for shard in range(len(self.manifest.rows)):
            lacking = self.lacking(sites, shard)
            if lacking:
                missing[shard] = lacking
        return missing

    def lacking(self, sites: Sequence[int], shard: int) -> list[int]:
        """Return the sites that lack the shard of this number."""
        lacking = []
        for site in sites:
            written = shard in self.manifest.sites.get(site, {})
            if not written or not shard_path(self.folder, site, shard).exists():
                lacking.append(site)
        return lacking

    def size(self, shard: int) -> int:
        """Return the bytes of a shard at one site, to within a few hundred."""
        rows = self.manifest.rows[shard]
        texts = self.texts(shard)
        return 8 * len(texts) + rows * self.row_bytes

    def texts(self, shard: int) -> range:
        """Return the row numbers of the texts in a shard."""
        return range(*self.manifest.bounds[shard : shard + 2])

    def shard(self, site: int, shard: int) -> Shard:
        """Open a shard, once.

        Raises:
            ValueError: it is damaged.
        """
        if (site, shard) not in self._open:
            checksum = self.manifest.sites[site][shard]
            texts = len(self.texts(shard))
            path = shard_path(self.folder, site, shard)
            self._open[site, shard] = Shard.open(path, checksum, texts, self.row_bytes)
        return self._open[site, shard]

    def checked(self, site: int) -> np.ndarray:
        """Return which texts' rows at a site have been compared with their checksums, (n,)."""
        return self._checked.setdefault(site, np.zeros(len(self.lengths), dtype=bool))

    # ------------------------------------------------------------------ what is written

    def lock(self, name: str) -> FileLock:
        """Return a lock between processes, for a shard or for the manifest."""
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / f"{name}.lock")

    def reload(self) -> None:
        """Read the manifest again, as other processes may have written to it."""
        if (self.folder / MANIFEST).exists():
            self.manifest = Manifest.load(self.folder)

    def record(self, shard: int, checksums: Mapping[int, str]) -> None:
        """Enter a shard into the manifest.

        Args:
            shard: its number.
            checksums: site -> checksum.
        """
        with self.lock("manifest"):
            self.reload()
            for site, checksum in checksums.items():
                self.manifest.sites.setdefault(site, {})[shard] = checksum
                self._open.pop((site, shard), None)
            self.manifest.save(self.folder)
