"""What people build on a model's hidden states: directions, heads, probes, stitching layers.

Sparse dictionaries are in `aligners.probing.artefacts.dictionaries`.

Each kind turns states (N, d) into answers (N, C), and can be carried through a map between two models.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor
from torch.nn import functional

from aligners.errors import UserError, check_known, check_range
from aligners.fitting.saved_bank import restored
from aligners.maps.affine import AffineLayer
from aligners.maps.base import Aligner
from aligners.maps.linear import Affine, Identity
from aligners.models.model_identity import DECIDING
from aligners.probing.probe_bank import Bank, ModelLayer, Variant
from aligners.probing.storing import probe_kinds

ROWS = ("tokens", "words", "words_first", "words_mean", "mean", "last", "cls")
ACTIVATIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "silu": functional.silu,
}
Tensors = dict[str, Tensor]
Parts = tuple[
    Tensor, Tensor
]  # the affine map y ↦ y W + b: W (d_x, d_y) and b (d_y,), in float64


@dataclass(frozen=True)
class Artefact(ABC):
    """Something that reads the states of one model at one site.

    Attributes:
        tensors: tensors by the names of the format.
        about: what artefact.json says: name, model, site, rows, component, score and more, as plain values.
        through: maps that states pass through, one after the other, before they are read: those that could not be
            folded into the tensors.

    Raises:
        ValueError: tensors are missing, left over or of shapes that do not fit, or a field has an unknown value.
    """

    kind: ClassVar[str]
    reads: ClassVar[str] = ""  # the tensor whose last axis has the width of the states
    tensors: Tensors
    about: Mapping[str, Any] = field(default_factory=dict)
    through: Sequence[Aligner] = ()

    def __post_init__(self) -> None:
        check_known(ROWS, rows=self.rows)
        check_range(least=0, site=self.about.get("site"))
        try:
            self._check()
        except (KeyError, TypeError, RuntimeError) as error:
            raise UserError(
                f"Expected {self.name} to be a whole {self.kind}, but it is damaged."
            ) from error

    @property
    def doubts(self) -> list[str]:
        """Cautions about what it reads."""
        return []

    @property
    def name(self) -> str:
        """The name of the artefact."""
        return str(self.about.get("name", f"a {self.kind}"))

    @property
    def rows(self) -> str:
        """The rows that it reads: tokens, words, or one for each text."""
        return str(self.about.get("rows", "tokens"))

    @property
    def site(self) -> int:
        """The site that it reads: 0 is the embedding output, l the output of block l."""
        return int(self.about["site"])

    @property
    def width(self) -> int:
        """Width of the states that it reads."""
        if self.through:
            return self.through[0].d_x
        return self.own_width

    @property
    def own_width(self) -> int:
        """Width of the states that its tensors read."""
        return self.tensors[self.reads].shape[-1]

    @abstractmethod
    def _check(self) -> None:
        """Raise unless the tensors are whole."""

    @abstractmethod
    def _read(self, states: Tensor) -> Tensor:
        """Return answers (N, C) to states of `own_width`."""

    def _moved(
        self, back: Parts, forward: Callable[[], Parts]
    ) -> tuple[Tensors, Mapping[str, Any]] | None:
        """Return tensors for the new model, and fields that change; None if no map can be folded into the tensors.

        Args:
            back: W (d_new, d_old) and b of the map g from new states to old ones, y ↦ y W + b, in float64.
            forward: returns W and b of the map from old states to new ones.
        """
        return None

    @torch.no_grad()
    def answers(self, states: Tensor) -> Tensor:
        """Return the answers to states, (N, d) -> (N, C): projections, logits or features."""
        if states.ndim != 2 or states.shape[1] != self.width:
            raise UserError(
                f"Expected states of shape (N, {self.width}), which {self.name} reads, but got {tuple(states.shape)}."
            )
        for map_ in self.through:
            states = map_(states[None].float())[0]
        return self._read(states)

    @torch.no_grad()
    def _check_map(self, back: Aligner) -> None:
        """Raise unless a bank is one map to the width that the artefact reads."""
        if back.sites != 1 or back.d_y != self.width:
            raise UserError(
                f"Expected `map` to be one map to width {self.width}, which {self.name} reads, but got {back.sites} "
                f"from {back.d_x} to {back.d_y}. It must lead from the new model's states to the old one's."
            )

    def carried(
        self, back: Aligner, forward: Aligner | None = None, **about: Any
    ) -> Self:
        """Return the artefact for another model.

        Reading is pulled back, artefact ∘ g. The map is folded into tensors of the same format if possible; otherwise,
        as for probes and stitching layers, it is kept beside them. Whatever is added to states, a direction to steer by
        or a dictionary's decoder, is pushed forward.

        Args:
            back: g, a bank of one map from the other model's states to those that it reads.
            forward: a map the other way, taken as linear about the mean of its fitting rows; default: the
                (pseudo-)inverse of g.
            about: fields of artefact.json that change, including `model` and `site`.

        Raises:
            ValueError: the map leads to another width, it is no single map, or it has no inverse and one is needed.
        """
        self._check_map(back)
        of_the_old = {*DECIDING, "score"}
        new = {key: value for key, value in self.about.items() if key not in of_the_old}
        new |= about
        moved = None
        parts = affine_parts(back)
        if parts is not None and not self.through:
            moved = self._moved(parts, partial(_forward_parts, back, parts, forward))
        if moved is None:
            return replace(self, about=new, through=(back, *self.through))

        tensors, changed = moved
        dtype = next(iter(self.tensors.values())).dtype
        tensors = {name: value.to(dtype) for name, value in tensors.items()}
        return replace(self, about={**new, **changed}, tensors=tensors)

    def expect(self, **shapes: tuple[int | None, ...]) -> None:
        """Raise unless the tensors are these, of these shapes, and finite; None stands for any length."""
        if set(shapes) != set(self.tensors):
            raise UserError(
                f"Expected the tensors {', '.join(sorted(shapes))} in {self.name}, a {self.kind}, but got "
                f"{', '.join(sorted(self.tensors)) or 'none'}."
            )
        for name, shape in shapes.items():
            got = tuple(self.tensors[name].shape)
            expected = f"Expected `{name}` of {self.name} to be finite, of shape {shape}, but it has"
            if not _fits(got, shape):
                raise UserError(f"{expected} the shape {got}.")
            if not self.tensors[name].isfinite().all():
                raise UserError(f"{expected} NaN or infinite values.")


def _fits(got: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    if len(got) != len(wanted):
        return False
    return all(want in (None, size) for want, size in zip(wanted, got, strict=True))


class Direction(Artefact):
    """A vector v (d,): states are read by v · x, and steered by adding α v.

    A carried direction has two vectors: `vector`, pushed forward, to add; and `reading` with `offset`, pulled back, to
    read by.
    """

    kind, reads = "direction", "vector"

    def _check(self) -> None:
        if len(self.tensors) == 1:
            self.expect(vector=(None,))
        else:
            self.expect(vector=(None,), reading=(None,), offset=())

    def _read(self, states: Tensor) -> Tensor:
        reading, offset = self._reading
        return states @ reading.to(states)[:, None] + offset.to(states)

    @property
    def _reading(self) -> tuple[Tensor, Tensor]:
        reading = self.tensors.get("reading", self.tensors["vector"])
        return reading, self.tensors.get("offset", torch.zeros(()))

    def _moved(
        self, back: Parts, forward: Callable[[], Parts]
    ) -> tuple[Tensors, Mapping[str, Any]]:
        reading, offset = (part.double() for part in self._reading)
        weight, bias = back
        forward_weight, _ = forward()
        moved = {
            "vector": self.tensors["vector"].double() @ forward_weight,
            "reading": weight @ reading,
            "offset": bias @ reading + offset,
        }
        return moved, {}


class Head(Artefact):
    """Logits: weight (C, d) and bias (C,), C = 1 for two classes; or a network, weight_0, bias_0, weight_1, ...

    The `activation` of artefact.json is applied between layers.
    """

    kind = "head"

    @classmethod
    def of(cls, coef: Any, intercept: Any, **about: Any) -> Self:
        """Make a head from coefficients of scikit-learn, (C, d) or (d,), and intercepts, (C,).

        Args:
            coef: `coef_`.
            intercept: `intercept_`.
            about: fields of artefact.json.
        """
        weight = torch.as_tensor(coef)
        weight = weight.reshape(-1, weight.shape[-1])
        bias = torch.as_tensor(intercept).reshape(-1)
        return cls({"weight": weight, "bias": bias}, about)

    @property
    def classes(self) -> int:
        """The number of classes it distinguishes: one logit is for two classes."""
        return max(2, len(self.tensors[self.layers[-1][1]]))

    @property
    def layers(self) -> list[tuple[str, str]]:
        """Names of the weight and the bias of each layer."""
        if "weight" in self.tensors:
            return [("weight", "bias")]
        count = max(1, len(self.tensors) // 2)
        return [(f"weight_{number}", f"bias_{number}") for number in range(count)]

    @property
    def own_width(self) -> int:
        """D, the width of the states."""
        weight, _ = self.layers[0]
        return self.tensors[weight].shape[1]

    def _check(self) -> None:
        width: int | None = None
        shapes: dict[str, tuple[int | None, ...]] = {}
        for weight, bias in self.layers:
            out = None
            if weight in self.tensors:
                out = len(self.tensors[weight])
            shapes |= {weight: (out, width), bias: (out,)}
            width = out
        self.expect(**shapes)
        if len(self.layers) > 1:
            check_known(ACTIVATIONS, activation=str(self.about.get("activation")))
        problem = self.about.get("problem_type")
        if problem not in (None, "single_label_classification"):
            raise UserError(
                f"Expected a head that distinguishes classes, but `problem_type` of {self.name} is {problem!r}. Write "
                "each of its outputs as a head of two classes, or as a direction."
            )
        told = self.about.get("classes")
        if told is not None and len(told) != self.classes:
            raise UserError(
                f"Expected {self.classes} `classes` in {self.name}, as its logits distinguish, but got {told}."
            )

    def _read(self, states: Tensor) -> Tensor:
        for number, (weight, bias) in enumerate(self.layers):
            if number:
                states = ACTIVATIONS[self.about["activation"]](states)
            product = states @ self.tensors[weight].to(states).T
            states = product + self.tensors[bias].to(states)
        return states

    def _moved(
        self, back: Parts, forward: Callable[[], Parts]
    ) -> tuple[Tensors, Mapping[str, Any]]:
        weight, bias = self.layers[0]
        first, shift = self.tensors[weight].double(), self.tensors[bias].double()
        moved = {weight: first @ back[0].T, bias: shift + first @ back[1]}
        return self.tensors | moved, {}


class Probe(Artefact):
    """One probe of `train.py probe`, as tensors of a bank of one variant; `probe` has its class and options."""

    kind, reads = "probe", "readings.mean"

    @property
    def bank(self) -> Bank:
        """The probe as a bank of one variant."""
        described = self.about["probe"]
        place = ModelLayer("model", int(self.about["site"]))
        variant = Variant(*place, rank=described["rank"])
        kind = probe_kinds()[described["class"]]
        with torch.random.fork_rng(devices=[]):
            bank = Bank(
                kind([variant], self.own_width, **described["options"]), [place]
            )
        bank.load_state_dict(self.tensors)
        return bank.eval().requires_grad_(False)

    def _check(self) -> None:
        self.bank  # noqa: B018  (built to see whether it can be)

    def _read(self, states: Tensor) -> Tensor:
        bank = self.bank.to(states.device)
        read = bank.readings(states[None].float())
        probes = cast(Any, bank.probes)
        if (
            "probes.weight" in self.tensors
        ):  # structural probes: the rows as they are laid out
            return (read @ (probes.weight * probes.kept[:, None]))[0]

        first = torch.arange(len(states))
        spans = torch.stack([first, first + 1], 1)[:, None]  # each word on its own
        part = SimpleNamespace(spans=spans.expand(-1, probes.spans, -1))
        return probes(read, part)[0]


class Stitching(Artefact):
    """A map from the model by `train.py stitch` or `fit`, as tensors of a bank of one map; `map` has its class."""

    kind = "stitching"

    @property
    def own_width(self) -> int:
        """D, the width of the states."""
        return int(self.about["map"]["d_x"])

    @property
    def bank(self) -> Aligner:
        """The map, as a bank of one."""
        return restored(self.about["map"], self.tensors).eval().requires_grad_(False)

    def _check(self) -> None:
        self.bank  # noqa: B018  (built to see whether it can be)

    def _read(self, states: Tensor) -> Tensor:
        return self.bank.to(states.device)(states[None].float())[0]


# ---------------------------------------------------------------------- affine maps


def affine_parts(aligner: Aligner) -> Parts | None:
    """Return W and b of the first map of a bank; None if it is not affine."""
    if not isinstance(aligner, (Identity, Affine, AffineLayer)) or getattr(
        aligner, "norm", False
    ):
        return None
    exact = copy.deepcopy(aligner).double()
    points = torch.eye(
        aligner.d_x + 1, aligner.d_x, dtype=torch.float64
    )  # the last one is 0
    image = exact(points.repeat(exact.sites, 1, 1))[0].detach()
    return image[:-1] - image[-1], image[-1]


def _forward_parts(back: Aligner, parts: Parts, forward: Aligner | None) -> Parts:
    """Return W and b of the map from old states to new ones: a map's own, or the way back through another map."""
    if forward is None:
        return pseudo_inverse(back, parts)
    return linearised(forward)


def linearised(aligner: Aligner) -> Parts:
    """Return W and b of an affine map; for any other map, its linearisation at the mean of the fitting rows."""
    parts = affine_parts(aligner)
    if parts is not None:
        return parts

    def image(x: Tensor) -> Tensor:
        return aligner(x[None, None])[0, 0]

    mean = _mean(aligner)
    with torch.enable_grad():
        weight = torch.autograd.functional.jacobian(image, mean).T.double()
    return weight, image(mean).double() - mean.double() @ weight


def pseudo_inverse(aligner: Aligner, parts: Parts) -> Parts:
    """Return W and b of the way back through an affine map, closest to the mean of its fitting rows."""
    there, bias = parts
    weight = torch.linalg.pinv(there)
    mean = _mean(aligner).double()
    return weight, mean - (mean @ there + bias) @ weight


def _mean(aligner: Aligner) -> Tensor:
    """Return the mean of the fitting rows of X, (d_x,); 0 if a map does not know it."""
    mean: Any = getattr(getattr(aligner, "scaling", aligner), "mean_x", None)
    if mean is None:
        return torch.zeros(aligner.d_x)
    return mean[0, 0]
