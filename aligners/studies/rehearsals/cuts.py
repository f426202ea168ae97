"""A study file cut to what minutes allow: fewer seeds, tasks, texts and steps, and every kind of cell."""

import re
from collections import Counter
from collections.abc import Mapping
from itertools import chain
from typing import Any

from aligners.studies.cells import merged
from aligners.studies.spec import Models, Study, read_study

Options = dict[str, Any]
LAYERS = ("sites", "layers", "variants")  # options that name blocks


def cut(plain: Options, about: Mapping[str, Any]) -> tuple[Options, list[str]]:
    """Cut a study.

    Args:
        plain: the content of its file, all defaults filled in.
        about: `most_models`, `most_tasks`, `most`, `text` and `options`, as stand_ins.yaml has them.

    Returns:
        The content of the file of the rehearsal, and what was cut, in words.
    """
    study = read_study(plain)
    counts: Counter[str] = Counter()
    cut_down = _at_most(plain, about["most"], counts)
    models, pairs = _models(study, about["most_models"])
    cut_down |= {"models": models, "pairs": {**plain["pairs"], **pairs}}
    words = [f"{len(models['names'])} of {len(study.models.listed())} models"]
    for text in texts_of(cut_down):
        text |= {name: min(text.get(name) or most, most) for name, most in about["text"].items()}
    for kind, work in study.work().items():
        most, tasks = about["most_tasks"].get(kind), list(work.tasks or study.tasks)
        if most is not None and len(tasks) > most:
            cut_down[kind]["tasks"] = tasks[:most]
            words.append(f"{kind} on {most} of {len(tasks)} tasks")
    for kind, options in about["options"].items():
        if cut_down.get(kind) is not None:
            cut_down[kind]["options"] = merged(cut_down[kind]["options"], options)
    limits = ", ".join(f"{name} {most}" for name, most in about["text"].items())
    words += [f"texts: {limits}", *(f"{name} at most {about['most'][name]}" for name in counts)]
    words += [f"{kind}: {options}" for kind, options in about["options"].items() if cut_down.get(kind)]
    return cut_down, words


def texts_of(content: Any) -> list[Options]:
    """Every description of texts in a study file, to be changed in place."""
    if not isinstance(content, dict):
        return []
    here = [content["text"]] if isinstance(content.get("text"), dict) else []
    return [*here, *chain.from_iterable(texts_of(value) for value in content.values())]


def layers_named(content: Any, inside: bool = False) -> int:
    """The largest number in an option that names blocks, what the plan assumes apart."""
    if isinstance(content, dict):
        parts = {key: value for key, value in content.items() if key != "assume"}
        return max((layers_named(value, inside or key in LAYERS) for key, value in parts.items()), default=0)
    return max(map(int, re.findall(r"\d+", str(content))), default=0) if inside else 0


def _at_most(content: Any, most: Mapping[str, int], counts: Counter[str], place: str = "") -> Any:
    """Plain values with no number above those of `most`, by the ends of their dotted names."""
    if isinstance(content, dict):
        return {key: _at_most(value, most, counts, f"{place}.{key}") for key, value in content.items()}
    if isinstance(content, bool) or not isinstance(content, int):
        return content
    limit = next((name for name in most if place.endswith(f".{name}")), None)
    if limit is None or 0 <= content <= most[limit]:
        return content
    counts[limit] += 1
    return most[limit]


def _models(study: Study, most: int) -> tuple[Options, Options]:
    """The models that are kept with their groups, and what changes of the pairs."""
    given = study.pairs.given
    if given is not None:
        given = given[:most]
        names = list(dict.fromkeys(chain.from_iterable(given)))
    else:
        patterns = [study.models.names] if isinstance(study.models.names, str) else study.models.names
        alike: dict[object, list[str]] = {}  # seeds of one pattern and group
        for pattern in patterns:
            for name in Models([pattern], study.models.seeds).listed():
                alike.setdefault((pattern, study.models.group(name)), []).append(name)
        names = [name for seeds in alike.values() for name in seeds[:most]]
    bare = {name.split("#")[0] for name in names}
    groups = {
        group: [name for name in of if name.split("#")[0] in bare] for group, of in (study.models.groups or {}).items()
    }
    there = [name for name in study.models.listed() if name in bare]
    pairs = len(there) * (len(there) - 1) // 2
    random = study.pairs.random and min(study.pairs.random, pairs)
    return {"names": there, "groups": groups or None}, {"given": given, "random": random}
