"""A rehearsal: a study with stand-ins for what cannot be reached, in a folder of its own."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from aligners.datamodules.text.sources import KNOWN, SOURCES
from aligners.datamodules.text.text_files import ENDINGS
from aligners.errors import UserError
from aligners.files.atomic import let_write, remove, write_text
from aligners.models.recipes import EMBEDDED
from aligners.studies.rehearsals import stand_ins
from aligners.studies.rehearsals.cuts import cut, layers_named, texts_of
from aligners.studies.rehearsals.notes import ASSUMED, NOTES, REHEARSAL
from aligners.studies.spec import Models

STUDY, STAND_INS = "rehearsal.yaml", "stand_ins"
ABOUT: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("stand_ins.yaml").read_text(encoding="utf-8")
)
ON_THE_HUB = dict.fromkeys(KNOWN["glue"], "nyu-mll/glue")  # name of a source -> of its data set
ON_THE_HUB |= {name: about["open"]["dataset"] for name, about in KNOWN["hub"].items()}
Notes = list[dict[str, str]]


def prepare(options: Mapping[str, Any], study: Mapping[str, Any], folder: Path) -> Path:
    """Write the study of a rehearsal, and what stands in for its models and data sets.

    Args:
        options: all options of `study.py run`, as plain values.
        study: those of them that are the study file's.
        folder: of the rehearsal; an earlier rehearsal in it is removed.

    Returns:
        The study's file.

    Raises:
        ValueError: the folder holds something else.
    """
    if folder.exists() and any(folder.iterdir()) and not (folder / NOTES).is_file():
        raise UserError(
            f"Expected {folder} to be free for a rehearsal, but it holds something else. Move it away."
        )
    remove(folder)
    let_write(folder)
    plain, cuts = cut(dict(study), ABOUT)
    stood_in = [*_models(plain, folder / STAND_INS), *_texts(plain, folder / STAND_INS)]
    plain["name"] = f"{plain['name']}-{REHEARSAL}"
    write_text(folder / NOTES, json.dumps({"stood_in": stood_in, "cut": cuts}, indent=1))
    given = {
        name: value
        for name, value in options.items()
        if name not in ("config", "folder", "rehearse")
    }
    write_text(
        folder / STUDY, yaml.safe_dump({**given, **plain}, sort_keys=False, allow_unicode=True)
    )
    return folder / STUDY


def environment(folder: Path) -> dict[str, str]:
    """The variables with which processes take what stands in, and nothing from a network.

    Args:
        folder: of the rehearsal.
    """
    place = (folder / STAND_INS).resolve()
    caches = {"HF_HUB_CACHE": f"{place}/hub", "HF_DATASETS_CACHE": f"{place}/datasets"}
    return {**caches, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}


# ---------------------------------------------------------------------- stand-ins


def _models(plain: dict[str, Any], place: Path) -> Notes:
    texts, notes = (
        [sentence.text for sentence in stand_ins.drawn_sentences(ABOUT["rows"]["train"])],
        [],
    )
    for name in Models(**plain["models"]).listed():
        if name.startswith(EMBEDDED) or Path(name).exists():
            continue
        about = stand_ins.about_model(name, ABOUT["models"])
        settings = {**ABOUT["config"], **ABOUT["families"].get(about.family, {})}
        config = stand_ins.put_model(
            place / "hub", name, about, texts, settings, layers_named(plain)
        )
        by = f"a random {about.architecture} of {config.num_hidden_layers} blocks, width {config.hidden_size}"
        assumed = about.assumed and f"; {ASSUMED} {about.assumed}"
        notes.append({"what": "the model", "name": name, "by": f"{by}{assumed}"})
    return notes


def _texts(plain: dict[str, Any], place: Path) -> Notes:
    """Write texts; those of files get the paths of what stands in for them."""
    probed, notes = texts_of(plain["probe"] or {}), dict[str, dict[str, str]]()
    for text in texts_of(plain):
        annotated = any(text is other for other in probed)
        columns: dict[str, Any] = {name: "text" for name in text.get("text_columns") or ["text"]}
        columns[text.get("label_column") or "label"] = ["no", "yes"]
        for option in ("source", "held_out"):
            given = str(text.get(option) or "")
            path = Path(given).expanduser()
            if path.exists() or not given or (path.suffix not in ENDINGS and given[0] not in "./~"):
                continue
            file = place / "files" / option / path.name
            stand_ins.put_file(
                file, columns, ABOUT["rows"]["train"], seed=len(option), annotated=annotated
            )
            text[option] = str(file.resolve())
            notes[given] = {
                "what": "the file",
                "name": given,
                "by": f"generated {file.suffix} ({', '.join(columns)})",
            }
        source = str(text.get("source") or "")
        if source and not Path(source).exists() and (source in ON_THE_HUB or source not in SOURCES):
            name, subset = (
                ON_THE_HUB.get(source, source),
                source if source in KNOWN["glue"] else text.get("subset"),
            )
            shown = " ".join(filter(None, [name, subset]))
            if shown not in notes:
                by = _dataset(place / "datasets", name, subset, columns, text.get("held_out"))
                notes[shown] = {"what": "the data set", "name": shown, "by": by}
    return list(notes.values())


def _dataset(
    cache: Path, name: str, subset: str | None, columns: dict[str, Any], held_out: str | None
) -> str:
    """Write what stands in for a data set, and say what that is."""
    rows, about = ABOUT["rows"], ABOUT["datasets"].get(name, {}).get(subset or "default")
    real = stand_ins.first_rows(name, subset, rows["train"])
    if real is not None:
        stand_ins.put_dataset(cache, name, subset, real)
        return f"its first rows ({', '.join(real)})"
    assumed = "" if about else f"; {ASSUMED} splits and columns"
    about = about or {"splits": ["train", held_out or "validation"], "columns": columns}
    count = {split: rows["train" if split == "train" else "other"] for split in about["splits"]}
    tables = {
        split: stand_ins.generated(about["columns"], count[split], seed)
        for seed, split in enumerate(count)
    }
    stand_ins.put_dataset(cache, name, subset, tables)
    return f"generated texts ({', '.join(count)}; {', '.join(about['columns'])}){assumed}"
