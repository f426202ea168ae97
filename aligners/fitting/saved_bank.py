"""The file of a finished run: its maps, their description, and the moments of the rows that they were fitted on."""

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import aligners
from aligners.datamodules.rows.row_types import SeenTypes
from aligners.datamodules.text.recorded_texts import without_ignored
from aligners.datamodules.text.texts import FittedTexts
from aligners.errors import UserError
from aligners.files.atomic import whole_file
from aligners.files.sealed import check_sealed, save_sealed
from aligners.files.shared_folder import is_shared, shared_file
from aligners.maps.base import Aligner
from aligners.models.model_identity import differing, listed_change
from aligners.similarity.algebra.moments import Moments


def check_names(names: Iterable[str], argument: str) -> None:
    """Raise if a module cannot hold aligners under one of these names.

    Raises:
        ValueError: the message names `argument` and these names.
    """
    bad = []
    for name in names:
        if not name.replace("_", "").isalnum() or hasattr(nn.ModuleDict, name):
            bad.append(name)
    if bad:
        raise UserError(
            f"Expected the names in `{argument}` to be letters, digits and underscores, and not a name that PyTorch "
            f"keeps for itself, but got {', '.join(bad)}."
        )


def describe_aligner(aligner: Aligner) -> dict[str, Any]:
    """Return class, sizes and options of an aligner as plain values, from which `build_aligner` makes an equal one."""
    size = {"sites": aligner.sites, "d_x": aligner.d_x, "d_y": aligner.d_y}
    return {"class": aligner.kind, **size, "options": aligner.options()}


def kind_of(aligner: Aligner) -> dict[str, Any]:
    """Return class and options of an aligner of any size, as plain values."""
    return {"class": aligner.kind, "options": aligner.options()}


def is_known(kind: str) -> bool:
    """Tell whether there is an aligner class of this name; a module of this package is imported for it."""
    return kind in Aligner.registry or getattr(aligners, kind, None) is not None


def build_aligner(description: Mapping[str, Any]) -> Aligner:
    """Build an aligner as described, not yet fitted.

    Raises:
        ValueError: no aligner of that name is known here.
    """
    known = Aligner.registry
    name = description["class"]
    if not is_known(name):
        raise UserError(
            f"The checkpoint holds an aligner of class {name!r}, but only {', '.join(sorted(known))} are known. "
            "Import the module that defines it first."
        )
    size = [description[key] for key in ("sites", "d_x", "d_y")]
    with torch.random.fork_rng(devices=[]):
        return known[name](*size, **description["options"])


def restored(description: Mapping[str, Any], state: Mapping[str, Tensor]) -> Aligner:
    """Build an aligner as described, with these parameters and buffers in their own precision."""
    aligner = build_aligner(description)
    aligner.to(_precision(state)).load_state_dict(state)
    return aligner


def _precision(state: Mapping[str, Tensor]) -> torch.dtype | None:
    for value in state.values():
        if value.is_floating_point():
            return value.dtype
    return None


def take_places(bank: Aligner, places: slice | list[int]) -> Aligner:
    """Return some places of a bank as a separate bank, frozen."""
    description = describe_aligner(bank)
    description["sites"] = len(torch.arange(bank.sites)[places])
    state = {name: value[places] for name, value in bank.state_dict().items()}
    taken = restored(description, state)
    return taken.requires_grad_(False).eval()


def join_banks(banks: Sequence[Aligner]) -> Aligner:
    """Concatenate banks along their sites."""
    description = describe_aligner(banks[0])
    description["sites"] = sum([bank.sites for bank in banks])
    joined = build_aligner(description)
    states = [bank.state_dict() for bank in banks]
    whole = {}
    for name in states[0]:
        whole[name] = torch.cat([state[name] for state in states])
    joined.load_state_dict(whole)
    return joined.requires_grad_(False).eval()


def moments_at(moments: Moments, places: slice | list[int]) -> Moments:
    """Return the moments of some places of a bank, by their numbers."""
    n, *parts = moments
    return Moments(n, *[part[places] for part in parts])


def records_at(
    records: Mapping[str, Mapping[str, Any]], places: list[int]
) -> dict[str, dict[str, Any]]:
    """Return the training records of some places of banks: lists have an entry for each place."""
    found: dict[str, dict[str, Any]] = {}
    for key, record in records.items():
        found[key] = {}
        for name, value in record.items():
            if isinstance(value, list):
                value = [value[s] for s in places]
            found[key][name] = value
    return found


def join_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join training records: lists have an entry for each place, numbers are those of the longest run."""
    joined: dict[str, Any] = {}
    for name, value in records[0].items():
        values = [record[name] for record in records]
        if isinstance(value, list):
            joined[name] = list(chain(*values))
        else:
            joined[name] = max(values)
    return joined


# For each model: name, fingerprint, ...
Identities = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]


def refuse_other_models(stored: Identities, present: Identities, what: str) -> None:
    """Raise unless two runs have the same models.

    Models are compared by what decides their states. Names may differ, as when a folder has moved.

    Args:
        stored: identities in a checkpoint, X and Y by name or all in the order of the run.
        present: identities of the run's models, likewise.
        what: the checkpoint, for the message.

    Raises:
        ValueError: they are not the same models in the same order; says which differ.
    """
    sides: Sequence[str] = ()
    if isinstance(present, Mapping):
        sides = ("X", "Y")
    both = zip_longest(_listed(stored), _listed(present), fillvalue=NO_MODEL)
    different = []
    for place, (before, after) in enumerate(both):
        if not differing(before, after):
            continue
        side = f"model {place}"
        if place < len(sides):
            side = sides[place]
        different.append(f"{side} was {listed_change(before, after)}")
    if different:
        raise UserError(
            f"{what} was fitted on other models: {'; '.join(different)}. Name the same models in the same order. "
            "`evaluate.py share` with `--models` makes a copy of a finished run's maps for other models."
        )


NO_MODEL = {"name": "nothing", "fingerprint": "none"}


def _listed(models: Identities) -> list[Mapping[str, Any]]:
    if isinstance(models, Mapping):
        models = list(models.values())
    return list(models)


@dataclass
class StoredBank:
    """The maps of a run, and what another process has to know of them.

    Routes have the numbers of their two models for keys: `0_1` leads from the first model of the run into the second.

    Attributes:
        command: command of `train.py`, which made it; `arrays`: a map of `aligners.api`, whose models nobody has named.
        maps: route -> name -> bank, one map for each site pair.
        pairs: route -> site pairs (l, m) in the order of the banks.
        data: what the data module was, by its `describe()`.
        data_config: the data module's options as they were given, enough to make it again.
        moments: moments of the fitting rows of route `0_1`; None if only some rows were read, for a start.
        seen: the types of the fitting rows; None if types are not told apart.
        fitted: hashes of the fitting and validation texts.
        training: route.name -> at which step each site was best and whether it diverged: see
            `aligners.fitting.training_status.outcomes`.
        spread: route -> mean (S, d_y) and variance (S,) of the target's states, if they were read.
        curves: points of the learning curves of stitching layers.
        loss: weights of the loss of stitching layers.
        path: the file, the shared folder, or its name on the Hub.
    """

    command: Literal["fit", "stitch", "universe", "arrays"]
    maps: dict[str, dict[str, Aligner]]
    pairs: dict[str, list[tuple[int, int]]]
    data: dict[str, Any]
    data_config: dict[str, Any]
    moments: Moments | None = None
    seen: SeenTypes | None = None
    fitted: FittedTexts | None = None
    training: dict[str, dict[str, Any]] = field(default_factory=dict)
    spread: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    curves: list[dict[str, Any]] = field(default_factory=list)
    loss: dict[str, float] | None = None
    path: Path = Path()

    def of_each(self, function: Callable[[Aligner], Any]) -> dict[str, dict[str, Any]]:
        """What a function returns for each map: route -> name -> value."""
        found: dict[str, dict[str, Any]] = {}
        for route, maps in self.maps.items():
            found[route] = {name: function(aligner) for name, aligner in maps.items()}
        return found

    def freeze(self) -> Self:
        """Keep the maps from training, as those are that come from a file."""
        self.of_each(lambda aligner: aligner.requires_grad_(False).eval())
        return self


def take_sites(bank: StoredBank, sites: Sequence[int]) -> StoredBank:
    """Some sites of a bank, by their numbers, as a bank of their own."""
    chosen = list(sites)
    moments = bank.moments
    if moments is not None:
        moments = moments_at(moments, chosen)
    pairs = {}
    for route, of_route in bank.pairs.items():
        pairs[route] = [of_route[s] for s in chosen]
    return replace(
        bank,
        maps=bank.of_each(lambda aligner: take_places(aligner, chosen)),
        pairs=pairs,
        moments=moments,
        training=records_at(bank.training, chosen),
    )


def refuse_other_bank(
    bank: StoredBank,
    models: Identities,
    component: str,
    pairs: Mapping[str, Sequence[tuple[int, int]]],
) -> None:
    """Raise unless the maps of a finished run fit the run that is to use them.

    Args:
        bank: the maps.
        models: models of the run, as in `refuse_other_models`.
        component: `data.component` of the run.
        pairs: route -> the run's site pairs.

    Raises:
        ValueError: the models, the component, or the site pairs of a route differ.
    """
    refuse_other_models(bank.data["models"], models, str(bank.path))
    then = bank.data.get("component", "residual")
    if then != component:
        raise UserError(
            f"{bank.path} was fitted on `component` {then!r}, but `data.component` is {component!r}. Leave it out, or "
            f"set it to {then!r}."
        )
    for route, present in pairs.items():
        fitted = bank.pairs.get(route, [])
        if fitted != list(present):
            raise UserError(
                f"{bank.path} holds maps of the site pairs {fitted}, but `data.sites` gives {list(present)}. Leave "
                "`data.sites` out, or set it to those of the fit."
            )


# The routes between the two models of a fit, and how reports and messages call them.
FORWARD = "0_1"
BACKWARD = "1_0"
DIRECTIONS = {FORWARD: "forward", BACKWARD: "backward"}
ROUTE = re.compile(r"\d+_\d+")
HEADER = "bank"  # the one entry of the file's metadata, as JSON
# Attributes that JSON can store.
PLAIN = ("command", "pairs", "data", "data_config", "training", "curves", "loss")
# Entries that modules add to the checkpoints that runs are resumed from.
ALIGNMENT = "alignment"
STITCHING = "stitching"
# Options that concern one machine, with their defaults. The first one would run somebody else's code.
OF_A_MACHINE: dict[str, Any] = {
    "trust_remote_code": False,
    "cache": None,
    "store": None,
    "devices": None,
    "device_map": None,
    "workers": 0,
}


def save_bank(bank: StoredBank, path: Path) -> None:
    """Write a bank as safetensors, whole or not at all. Equal banks make equal files.

    Raises:
        OSError: the file cannot be written; what was there before is still there.
    """
    described: dict[str, Any] = {name: getattr(bank, name) for name in PLAIN}
    described["maps"] = bank.of_each(describe_aligner)
    described["seen"] = described["fitted"] = None
    if bank.seen is not None:
        described["seen"] = bank.seen.state()
    if bank.fitted is not None:
        described["fitted"] = bank.fitted.origins
    tensors = {}
    for name, value in flat(_tensors_of(bank)):
        # a copy: safetensors refuses tensors that share memory, as tied weights do
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
    with whole_file(path) as unfinished:
        save_sealed(save_file, tensors, unfinished, {HEADER: json.dumps(described)})


def _tensors_of(bank: StoredBank) -> dict[str, Any]:
    """Return the part of a bank that is not in the header of its file: nested dictionaries of tensors."""
    states: dict[str, Any] = {"spread": bank.spread}
    states["maps"] = bank.of_each(lambda aligner: aligner.state_dict())
    if bank.moments is not None:
        states["moments"] = bank.moments._asdict()
    if bank.fitted is not None:
        states["fitted"] = {"keys": bank.fitted.state()["keys"]}
    return states


def flat(tree: Mapping[str, Any], folder: str = "") -> Iterator[tuple[str, Tensor]]:
    """Return the tensors of nested dictionaries, by names such as maps/0_1/linear/weight."""
    for name, value in tree.items():
        if isinstance(value, Tensor):
            yield folder + name, value
        else:
            yield from flat(value, f"{folder}{name}/")


def nested(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Build nested dictionaries of tensors from their names: the inverse of `flat`."""
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *folders, last = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


Wanted = Callable[[str, str], bool]  # by the name of a map and that of its class


def every_map(name: str, kind: str) -> bool:
    """Accept every map of a file."""
    return True


def load_bank(
    path: Path | str, *, arrays: bool = False, wanted: Wanted = every_map
) -> StoredBank:
    """Read the file of a finished run of `train.py fit` or `train.py stitch`. Nothing in it is run.

    Args:
        path: the file, a folder written by `evaluate.py share`, or the name of a repository on the Hub.
        arrays: whether it may be a map that `save` of `aligners.api` wrote, which says nothing of models.
        wanted: tells which maps are read; the classes of the others need not be known here.

    Raises:
        ValueError: the file is missing, damaged or something else, is a last.ckpt to resume from, is a map on arrays,
            or holds a map with NaN or infinity; or as `shared_file`.
    """
    shared = is_shared(path)
    file = shared_file(path)
    path = Path(path)
    bank = None
    try:
        check_sealed(file)
        command = _resumed_by(file)
        if command is None:
            bank = _read(file, wanted)
    except FileNotFoundError:
        raise UserError(
            f"Expected a checkpoint at {path}, but there is no such file."
        ) from None
    except Exception as error:  # reading any other file can raise anything
        raise UserError(
            f"Expected {path} to be a checkpoint written by `train.py fit` or `train.py stitch`, but it cannot be read "
            f"as one: {error}"
        ) from error
    if bank is None:
        raise UserError(
            f"Expected the file of a finished run, but {path} is a checkpoint to resume from: `train.py {command} "
            f"--ckpt_path {path}` resumes the run, and writes the finished file beside its report."
        )
    if bank.command == "arrays" and not arrays:
        raise UserError(
            f"Expected a file of `train.py`, which says which models its maps are between, but {path} was written from "
            "Python. Read it there, by `aligners.api.ArrayMap.load`."
        )
    bank.path = path
    refuse_not_finite(bank)
    if "recipe" in bank.data_config:  # as earlier versions kept it
        from aligners.models.recipes import recipe_in_names  # which takes seconds

        bank.data_config = recipe_in_names(bank.data_config)
    bank.data_config = without_ignored(bank.data_config)
    if shared:
        bank.data_config = for_others(bank.data_config)
    return bank.freeze()


@torch.no_grad()
def refuse_not_finite(bank: StoredBank) -> None:
    """Raise if a map holds NaN or infinity, which would spread to every figure.

    Raises:
        ValueError: a map does; the message names the map and the site pairs.
    """
    for route, maps in bank.maps.items():
        for name, aligner in maps.items():
            sound = _finite_sites(aligner)
            if bool(sound.all()):
                continue
            where = ""
            sites = []
            for (i, j), fine in zip(bank.pairs[route], sound, strict=False):
                if not fine:
                    sites.append(f"{i}-{j}")
            if sites:
                where = f" at site pair {', '.join(sites)}"
            raise UserError(
                f"Expected finite numbers in every map of {bank.path}, but {name} ({DIRECTIONS.get(route, route)}) "
                f"holds NaN or infinity{where}. Fit it again, or leave it out."
            )


def _finite_sites(aligner: Aligner) -> Tensor:
    """Return whether the parameters of a map, and its output for zeros, are finite: (S,) bool.

    Buffers are not checked: the findings of a closed form may be NaN.
    """
    precision = _precision(aligner.state_dict())
    zeros = torch.zeros(aligner.sites, 1, aligner.d_x, dtype=precision)
    answer = aligner(zeros)
    sound = answer.isfinite().flatten(1).all(1)
    for name, weight in aligner.named_parameters():
        places = aligner.places(name)
        sound[places] &= weight.isfinite().flatten(1).all(1)
    return sound


def for_others(data_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data module's options without those that concern one machine."""
    return {name: OF_A_MACHINE.get(name, value) for name, value in data_config.items()}


def _resumed_by(path: Path) -> str | None:
    """Return the command of `train.py` that resumes from a checkpoint of Lightning; None for any other file."""
    if path.suffix == ".safetensors" or not zipfile.is_zipfile(path):
        return None
    content = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    for command, entry in (("fit", ALIGNMENT), ("stitch", STITCHING)):
        if entry in content:
            return command
    return None


def _check_names_in(described: Mapping[str, Any]) -> None:
    """Check the names of routes, maps and sites in a file, as strictly as if somebody had typed them.

    Raises:
        ValueError: a name could not have been typed.
    """
    for route, entries in described["maps"].items():
        if not ROUTE.fullmatch(route):
            raise UserError(
                f"it holds a route {route!r} between models that are not numbers"
            )
        check_names(entries, "aligners")
    for route, pairs in described["pairs"].items():
        kinds = set(map(type, chain(*pairs)))
        if not ROUTE.fullmatch(route) or not kinds <= {int}:
            raise UserError(f"its site pairs of {route!r} are not numbers")


def _read(path: Path, wanted: Wanted) -> StoredBank:
    described, tensors = _contents(path)
    plain = {name: described[name] for name in PLAIN}
    bank = StoredBank(**plain, maps={})
    for route, pairs in bank.pairs.items():
        bank.pairs[route] = [(i, j) for i, j in pairs]
    states = tensors.get("maps", {})
    for route, entries in described["maps"].items():
        of_route = states.get(route, {})
        bank.maps[route] = _read_maps(entries, of_route, wanted)
    bank.spread = tensors.get("spread", {})
    if "moments" in tensors:
        bank.moments = Moments(**tensors["moments"])
    if described["seen"]:
        bank.seen = SeenTypes.from_state(described["seen"])
    if described["fitted"]:
        state = {**tensors["fitted"], "origins": described["fitted"]}
        bank.fitted = FittedTexts.from_state(state)
    return bank


def _read_maps(
    entries: Mapping[str, Any], states: Mapping[str, Any], wanted: Wanted
) -> dict[str, Aligner]:
    maps = {}
    for name, about in entries.items():
        if wanted(name, about["class"]):
            maps[name] = restored(about, states.get(name, {}))
    return maps


def _contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the header of a file, and its tensors by name, nested."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if HEADER not in metadata:
            raise UserError("it holds no maps")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    described = json.loads(metadata[HEADER])
    _check_names_in(described)
    return described, nested(tensors)
