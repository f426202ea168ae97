"""Artefacts on disk: safetensors and JSON, each written in the format in which it was read."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from aligners.errors import UserError, check_file_names, check_known
from aligners.files.atomic import whole_folder
from aligners.files.sealed import check_sealed, save_sealed
from aligners.fitting.saved_bank import (
    FORWARD,
    StoredBank,
    describe_aligner,
    load_bank,
    save_bank,
    take_places,
)
from aligners.maps.base import Aligner
from aligners.models.model_identity import deciding
from aligners.probing.artefacts.control_vectors import (
    read_control_vector,
    write_control_vector,
)
from aligners.probing.artefacts.dictionaries import Dictionary
from aligners.probing.artefacts.hook_names import (
    component_of_hook,
    hook_like,
    site_of_hook,
)
from aligners.probing.artefacts.kinds import Artefact, Direction, Head, Probe, Stitching
from aligners.probing.probe_bank import Bank
from aligners.probing.storing import PROBES, load_banks

logger = logging.getLogger(__name__)

KINDS = {kind.kind: kind for kind in (Direction, Head, Probe, Stitching, Dictionary)}

ABOUT = "artefact.json"
TENSORS = "artefact.safetensors"
MAP = "map.safetensors"
CARD = "README.md"
CFG = "cfg.json"  # of SAELens
WEIGHTS = "sae_weights.safetensors"
STITCHED = ("stitching.safetensors", "aligners.safetensors")
CONDITION = (
    "condition"  # condition number of a linear map: infinite where it has no inverse
)
PICKLED = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib", ".npz", ".npy", ".ckpt")


def read_artefacts(place: Path | str) -> list[Artefact]:
    """Read all artefacts of a folder: the one in the folder itself, or those in its subfolders.

    Args:
        place: a folder with artefact.json, with cfg.json of SAELens, or a run of `train.py probe` or `stitch`, whose
            single-layer probes and whose maps from its first model are artefacts; or a folder of such folders. Beside
            artefact.json may lie control vectors in GGUF, whose `model` it names: a direction for each site.

    Raises:
        ValueError: there is no artefact; or one is damaged, does not name its model, or is a pickle.
    """
    folder = Path(place)
    if not folder.is_dir():
        raise UserError(
            f"Expected `artefacts` to be a folder of artefacts, but there is no folder {folder}."
        )
    found = _of_folder(folder)
    if not found:
        for inner in sorted(folder.iterdir()):
            if inner.is_dir():
                found += _of_folder(inner)
    if not found:
        raise UserError(
            f"Expected `artefacts` to hold {ABOUT} and {TENSORS}, {CFG} and {WEIGHTS} of SAELens, {PROBES} or "
            f"{STITCHED[0]}, but {folder} holds none. {_advice(folder)}"
        )
    names = Counter(artefact.name for artefact in found)
    name, times = names.most_common(1)[0]
    if times > 1:
        raise UserError(
            f"Expected artefacts of different names, as each becomes a folder, but {name!r} occurs {times} times."
        )
    for artefact in found:
        for sentence in artefact.doubts:
            logger.warning(sentence)
    return found


def _advice(folder: Path) -> str:
    advice = "`write_artefact` of aligners.api writes one, of coefficients of scikit-learn, too (`Head.of`)."
    pickles = sorted(path.name for path in folder.rglob("*") if path.suffix in PICKLED)
    if pickles:
        return f"{pickles[0]} can run code when it is read, so it is not read. {advice}"
    return advice


def _of_folder(folder: Path) -> list[Artefact]:
    """Read the artefacts of one folder, in any of the formats."""
    if (folder / ABOUT).is_file():
        vectors = sorted(folder.glob("*.gguf"))
        if vectors:
            return _control_vectors(folder, vectors)
        return [_described(folder)]
    if (folder / CFG).is_file():
        return [_dictionary(folder, {"name": folder.name})]
    if (folder / PROBES).is_file():
        found = []
        for name, (bank, about) in load_banks(folder / PROBES).items():
            found += _probes(name, bank, about)
        return found
    for name in STITCHED:
        if (folder / name).is_file():
            return _maps(load_bank(folder / name))
    return []


def _described(folder: Path) -> Artefact:
    """Read the artefact of a folder with artefact.json."""
    about = _json(folder / ABOUT)
    check_known(KINDS, kind=str(about.get("kind")))
    about.setdefault("name", folder.name)
    check_file_names(name=str(about["name"]))
    _check_model(about, folder / ABOUT)
    through = list[Aligner]()
    if (folder / MAP).exists():
        through += load_bank(folder / MAP, arrays=True).maps[FORWARD].values()
    kind = KINDS[about["kind"]]
    if kind is Dictionary:
        return _dictionary(folder, about, through)
    return kind(_tensors(folder / TENSORS), about, through)


def _control_vectors(folder: Path, vectors: Sequence[Path]) -> list[Artefact]:
    """Read the control vectors of a folder, whose artefact.json names their model."""
    about = _json(folder / ABOUT)
    model = about.get("model")
    if model is None or about.get("kind", Direction.kind) != Direction.kind:
        raise UserError(
            f"Expected {folder / ABOUT} to name the `model` that {vectors[0].name} beside it steers, and the `kind` "
            f"'direction' or none, but got {about}."
        )
    found = list[Artefact]()
    for path in vectors:
        found += read_control_vector(path, model=str(model))
    return found


def _dictionary(
    folder: Path, about: dict[str, Any], through: Sequence[Aligner] = ()
) -> Dictionary:
    """Read a dictionary of SAELens; its cfg.json has the metadata under `metadata`, or beside the other fields."""
    cfg = _json(folder / CFG)
    told = {**cfg, **(cfg.get("metadata") or {})}
    hook = str(told.get("hook_name"))
    if "site" not in about:
        about["site"] = site_of_hook(hook, folder / CFG)
    component = component_of_hook(hook)
    if component != "residual":
        about.setdefault("component", component)
    usual = {"kind": "dictionary", "model": told.get("model_name"), "rows": "tokens"}
    about = {**usual, **about, "cfg": cfg}
    _check_model(about, folder / CFG)
    return Dictionary(_tensors(folder / WEIGHTS), about, through)


def _probes(name: str, bank: Bank, about: Mapping[str, Any]) -> list[Artefact]:
    """Return the probes of a bank that read one layer of the model, and are trained on the task itself."""
    found = list[Artefact]()
    for number, variant in enumerate(bank.variants):
        if variant.source != "model" or variant.layer is None or variant.control:
            continue
        own = bank.only([number])
        probe = {
            "class": type(own.probes).__name__,
            "rank": variant.rank,
            "options": own.probes.options(),
            **about,
        }
        described = {
            "kind": "probe",
            "name": _named(name, variant.layer, variant.rank),
            "model": about["model"],
            "site": variant.layer,
            "rows": "words_mean",
            "probe": probe,
        }
        found.append(Probe(dict(own.state_dict()), described))
    return found


def _maps(stored: StoredBank) -> list[Artefact]:
    """Return the maps from the first model of a run into its second."""
    source, rows = stored.data["models"]["x"], stored.data.get("rows", "tokens")
    found = list[Artefact]()
    for name, bank in stored.maps.get(FORWARD, {}).items():
        for number, (site, other) in enumerate(stored.pairs[FORWARD]):
            own = take_places(bank, [number])
            described = {
                "kind": "stitching",
                "name": _named(name, f"{site}-{other}"),
                "model": source["name"],
                **deciding(source),
                "site": site,
                "rows": rows,
                "into": stored.data["models"]["y"]["name"],
                "into_site": other,
                "map": describe_aligner(own),
            }
            found.append(Stitching(dict(own.state_dict()), described))
    return found


def _named(*parts: Any) -> str:
    name = "-".join(str(part) for part in parts if part is not None)
    return re.sub(r"[^\w.-]+", "-", name).strip("-")


def _check_model(about: Mapping[str, Any], path: Path) -> None:
    missing = [name for name in ("model", "site") if about.get(name) is None]
    if missing:
        raise UserError(
            f"Expected `{missing[0]}` in {path}, but it is missing: say which model the artefact reads, by its name "
            "or folder, and at which site (0: the embeddings, l: the output of block l)."
        )


def _whole(path: Path, read: Callable[[Path], Any], what: str) -> Any:
    try:
        return read(path)
    except (OSError, TypeError, ValueError, SafetensorError) as error:
        raise UserError(
            f"Expected {path} to be a {what} file, but it cannot be read as one: {error}"
        ) from error


def _json(path: Path) -> dict[str, Any]:
    def read(path: Path) -> dict[str, Any]:
        return dict(json.loads(path.read_text(encoding="utf-8")))

    return _whole(path, read, "JSON")


def _tensors(path: Path) -> dict[str, Tensor]:
    tensors = _whole(path, _loaded, "safetensors")
    for name, value in tensors.items():
        if name.rpartition(".")[2] != CONDITION and not bool(value.isfinite().all()):
            raise UserError(
                f"Expected finite numbers in {path}, but {name} holds NaN or infinity. Train it again."
            )
    return tensors


def _loaded(path: Path) -> dict[str, Tensor]:
    check_sealed(path)
    return load_file(path)


def _write_maps(maps: Sequence[Aligner], path: Path) -> None:
    """Write maps that an artefact reads through, in their order."""
    numbered = {str(number): map_ for number, map_ in enumerate(maps)}
    data: dict[str, Any] = {"columns": [], "keys": None}
    save_bank(StoredBank("arrays", {FORWARD: numbered}, {FORWARD: []}, data, {}), path)


def write_artefact(
    artefact: Artefact, folder: Path | str, card: str | None = None
) -> None:
    """Write an artefact into a new folder, whole or not at all, in the format of its kind.

    Args:
        artefact: an artefact with the name of its model and its site.
        folder: a folder that is new or empty.
        card: text of README.md.

    Raises:
        ValueError: it does not name its model.
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    _check_model(artefact.about, folder / ABOUT)
    about = {"kind": artefact.kind, **artefact.about}
    about.pop("cfg", None)
    tensors = {
        name: value.detach().cpu().contiguous()
        for name, value in artefact.tensors.items()
    }
    with whole_folder(folder) as unfinished:
        _write_json(about, unfinished / ABOUT)
        if isinstance(artefact, Dictionary):
            _write_json(_cfg(artefact), unfinished / CFG)
            save_sealed(save_file, tensors, unfinished / WEIGHTS, {})
        else:
            save_sealed(save_file, tensors, unfinished / TENSORS, {})
        if artefact.through:
            _write_maps(artefact.through, unfinished / MAP)
        if card is not None:
            (unfinished / CARD).write_text(card, encoding="utf-8")


def write_carried_control_vector(artefacts: Sequence[Artefact], path: Path) -> None:
    """Write the directions that a control vector has brought as one again, where each has a site of its own."""
    directions = []
    for artefact in artefacts:
        if isinstance(artefact, Direction) and "model_hint" in artefact.about:
            directions.append(artefact)
    sites = {direction.site for direction in directions}
    if not directions:
        return
    if len(sites) < len(directions) or 0 in sites:
        logger.warning(
            f"{path.name} is not written: several directions have gone to one site, or one to the embeddings."
        )
        return
    write_control_vector(directions, path)


def _write_json(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _cfg(dictionary: Dictionary) -> dict[str, Any]:
    """Return cfg.json with the present model and hook, where it names them."""
    told = {**dictionary.cfg, **(dictionary.cfg.get("metadata") or {})}
    site = dictionary.site
    new = {
        "model_name": dictionary.about["model"],
        "hook_name": hook_like(str(told.get("hook_name")), site),
        "hook_layer": max(site - 1, 0),
    }
    cfg = {key: new.get(key, value) for key, value in dictionary.cfg.items()}
    metadata = cfg.get("metadata")
    if metadata:
        cfg["metadata"] = {key: new.get(key, value) for key, value in metadata.items()}
    return cfg
