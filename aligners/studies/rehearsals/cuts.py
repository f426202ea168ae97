"""A study file cut to what minutes allow: fewer seeds, tasks, texts and steps, and every kind of cell."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
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
    cut_down, lowered = deepcopy(plain), dict[str, int]()
    for at, (*_, name) in _options(cut_down):
        if (
            type(at[name]) is int
            and name in about["most"]
            and not 0 <= at[name] <= about["most"][name]
        ):
            at[name] = lowered[name] = about["most"][name]
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
    words += [f"texts: {limits}", *(f"{name} at most {most}" for name, most in lowered.items())]
    words += [
        f"{kind}: {options}" for kind, options in about["options"].items() if cut_down.get(kind)
    ]
    return cut_down, words


def texts_of(content: Options) -> list[Options]:
    """Every description of texts in a study file, to be changed in place."""
    return [
        at["text"]
        for at, name in _options(content)
        if name[-1] == "text" and isinstance(at["text"], dict)
    ]


def layers_named(content: Options) -> int:
    """The largest number in an option that names blocks, what the plan assumes apart."""
    naming = [
        at[name[-1]]
        for at, name in _options(content)
        if {*LAYERS} & {*name} and "assume" not in name
    ]
    return max(
        (int(number) for option in naming for number in re.findall(r"\d+", str(option))), default=0
    )


def _options(content: Options, *above: str) -> Iterator[tuple[Options, tuple[str, ...]]]:
    """Every option, however deep: the options among which it is, and its name after those above it."""
    for name, value in content.items():
        yield content, (*above, name)
        if isinstance(value, dict):
            yield from _options(value, *above, name)


def _models(study: Study, most: int) -> tuple[Options, Options]:
    """The models that are kept with their groups, and what changes of the pairs."""
    given = study.pairs.given
    if given is not None:
        given = given[:most]
        names = list(dict.fromkeys(chain.from_iterable(given)))
    else:
        patterns = (
            [study.models.names] if isinstance(study.models.names, str) else study.models.names
        )
        alike: dict[object, list[str]] = {}  # seeds of one pattern and group
        for pattern in patterns:
            for name in Models([pattern], study.models.seeds).listed():
                alike.setdefault((pattern, study.models.group(name)), []).append(name)
        names = [name for seeds in alike.values() for name in seeds[:most]]
    bare = {name.split("#")[0] for name in names}
    known = study.models.groups or {}
    groups = {
        group: [name for name in of if name.split("#")[0] in bare] for group, of in known.items()
    }
    there = [name for name in study.models.listed() if name in bare]
    pairs = len(there) * (len(there) - 1) // 2
    random = study.pairs.random and min(study.pairs.random, pairs)
    return {"names": there, "groups": groups or None}, {"given": given, "random": random}
