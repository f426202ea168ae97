"""What all maps on arrays have in common: the methods of a scikit-learn estimator, over a bank of `aligners.maps`.

scikit-learn is not needed, but accepts these maps in its pipelines and searches.
"""

from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Literal,
    Self,
    cast,
    dataclass_transform,
)

import numpy as np
import torch
from torch import Tensor

from aligners.api.arrays import (
    Array,
    as_given,
    by_site,
    check_paired,
    column_names,
    of_kind,
    rows,
    rows_of_both,
)
from aligners.api.groups import Groups
from aligners.errors import UserError, check_known, check_range
from aligners.maps.base import Aligner
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.maps.linear import Affine
from aligners.similarity.algebra.moments import Moments, moments_of

if TYPE_CHECKING:
    from aligners.api.map_report import MapReport
    from aligners.fitting.saved_bank import StoredBank

__all__ = ["ArrayMap", "NotFittedError", "TrainedMap"]


class NotFittedError(UserError, AttributeError):
    """A map is used before it is fitted. The bases are those of scikit-learn's error of this name."""


@dataclass_transform(kw_only_default=True, eq_default=False)
@dataclass(init=False, repr=False, eq=False)
class ArrayMap:
    """A map from rows of X (N, d_x) to rows of Y (N, d_y), of any aligner with a closed form.

    Rows are NumPy arrays or tensors; results have the same kind, data type and device. Data frames and lists work too,
    and give NumPy arrays. Rows of several sites, as (S, N, d) or a list or a dictionary of (N, d), are fitted by one
    map for each site, and results have the same form. Closed forms are solved in float64.

    Args:
        aligner: the class: one of `aligners.maps`, or your own.
        options: options of the class, besides the number of sites and the widths.

    Attributes:
        bank_: the aligner, a bank of one map for each site; like all attributes here, there once the map is fitted.
        sites_: the keys of the sites that it was fitted on; None for rows of one site.
        mean_y_: mean of Y's fitting rows, (S, d_y).
        mean_x_: mean of X's fitting rows, (S, d_x); None for maps read from files of earlier versions.
        n_features_in_: d_x.
        feature_names_in_: names of the columns of X, if it was a data frame.
        coef_: coefficients of maps that are linear in closed form: (d_y, d_x), or (S, d_y, d_x) at several sites.
        intercept_: their intercepts, (d_y,) or (S, d_y): y = x coef_ᵀ + intercept_.
    """

    aligner: ClassVar[type[Aligner]]

    def __init_subclass__(cls, aligner: type[Aligner] | None = None) -> None:
        """Let a subclass name its aligner, and the aligner's options with their defaults."""
        if aligner is not None:
            cls.aligner = aligner
        dataclass(kw_only=True, repr=False, eq=False)(cls)

    def __init__(self, aligner: type[Aligner], **options: Any) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        vars(self).update(defaults, aligner=aligner, **options)

    def __repr__(self) -> str:
        options = self.get_params()
        words = []
        if "aligner" in options:
            words.append(options.pop("aligner").__name__)
        for name, value in options.items():
            if getattr(type(self), name, None) != value:
                words.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the options by name; `deep` exists for scikit-learn, and changes nothing."""
        return {
            name: value for name, value in vars(self).items() if name.strip("_") == name
        }

    def set_params(self, **options: Any) -> Self:
        """Set options, for the next `fit`.

        Raises:
            ValueError: the map has no such option.
        """
        check_known(self.get_params(), options=options)
        vars(self).update(options)
        return self

    def fit(self, x: Array, y: Array) -> Self:
        """Fit the map on paired rows, and forget any earlier fit.

        Args:
            x: (N, d_x), or several sites.
            y: (N, d_y), row by row the partners of `x`, or the same sites.

        Raises:
            ValueError: an option is out of range; or the rows are not paired, not finite or too few, or the map cannot
                be fitted to them.
        """
        from aligners.fitting.fits import fit_map

        of_x, of_y = rows_of_both(x, y)
        bank = self._made(len(of_x), of_x.shape[2], of_y.shape[2]).to(of_x)
        moments = self._moments(of_x, of_y)
        name = self.aligner.__name__
        kept, others = self._kept_rows(bank, of_x, of_y)
        fit_map(
            name,
            bank,
            *moments,
            advice="Give more rows.",
            kept=kept,
            kept_validation=others,
        )
        self._train(bank, of_x, of_y)
        sites, (first, *_) = by_site(x)
        means = moments[0].mean_x, moments[0].mean_y
        self._keep(bank, means, sites, first, column_names(x))
        return self

    def transform(self, x: Array) -> Any:
        """Map rows of X: (N, d_x) -> (N, d_y).

        Raises:
            ValueError: the map is not fitted; or the rows have another width, device or number of sites, or other
                names of columns, or are not finite.
        """
        return as_given(self.bank(self._rows(x, "x")), x, self.sites_)

    predict = transform

    def fit_transform(self, x: Array, y: Array) -> Any:
        """Fit the map, and map the fitting rows."""
        return self.fit(x, y).transform(x)

    def inverse_transform(self, y: Array) -> Any:
        """Map rows of Y back: (N, d_y) -> (N, d_x).

        Raises:
            ValueError: as `transform`, or the map has no inverse.
        """
        bank = self.bank
        if not bank.invertible:
            raise UserError(
                f"Expected a map with an inverse, but {self!r} from width {bank.d_x} to {bank.d_y} has none. Fit a map "
                "from Y to X, or use Procrustes, Permutation or INN."
            )
        return as_given(bank.inverse(self._rows(y, "y")), y, self.sites_)

    inverse = inverse_transform

    def score(self, x: Array, y: Array) -> Any:
        """Return 1 − FVU of paired rows: 1 is perfect, 0 no better than Y's mean in fitting; it may be negative.

        All neurons count together, by their variance; scikit-learn's score of several outputs is a mean over them.

        Returns:
            A float; for several sites, a list or a dictionary of floats.

        Raises:
            ValueError: as `transform`, or the rows are not paired, or all of Y's rows equal the mean.
        """
        bank, of_x, of_y = self.bank, self._rows(x, "x"), self._rows(y, "y")
        check_paired(of_x, of_y)
        total = (of_y.double() - self.mean_y_[:, None]).square().sum((1, 2))
        if not (total > 0).all():
            raise UserError(
                "Expected rows in `y` that differ from the mean of the fitting rows, but all of them equal it."
            )
        errors = (bank(of_x) - of_y).double().square().sum((1, 2))
        scores = (1 - errors / total).tolist()
        if isinstance(x, Mapping):
            return dict(zip(self.sites_ or x, scores, strict=True))
        keys, _ = by_site(x)
        if keys is None:
            return scores[0]
        return scores

    def report(self, x: Array, y: Array, groups: Groups | None = None) -> "MapReport":
        """Measure the map on held-out rows, beside its floors: see `MapReport`.

        Args:
            x: (N, d_x) rows that the map was not fitted on, or several sites.
            y: (N, d_y), row by row the partners of `x`, or the same sites.
            groups: (N,) the text of each row, by number or by name; intervals are then over texts. Default: every row
                is a text of its own, which makes them too narrow for rows that are alike, such as tokens of one text.

        Raises:
            ValueError: as `score`, or `groups` is not one entry for each row.
        """
        from aligners.api.map_report import HeldOut, report_of

        of_x, of_y = self._rows(x, "x"), self._rows(y, "y")
        check_paired(of_x, of_y)
        means = getattr(self, "mean_x_", None), self.mean_y_
        held_out = HeldOut(of_x, of_y, means, groups)
        return report_of(repr(self), self.bank, held_out, self.sites_)

    def at(self, site: Hashable) -> Self:
        """Return the map of one of several sites.

        Args:
            site: its key in the dictionary, or its number in the list or array, that the maps were fitted on; for a
                file of `train.py fit`, the site, or the pair (X's site, Y's site) where they differ.

        Raises:
            ValueError: there is no such site.
        """
        from aligners.fitting.saved_bank import take_places

        bank, sites = self.bank, self.sites_ or []
        if site not in sites:
            among = sites or "several, but there is only one"
            raise UserError(f"Expected `site` to be one of {among}, but got {site!r}.")
        place = [sites.index(site)]
        taken = take_places(bank, place).to(self.mean_y_.device)
        like = getattr(self, "coef_", None)
        mean_x = getattr(self, "mean_x_", None)
        if mean_x is not None:
            mean_x = mean_x[place]
        one = copy(self)
        one._keep(
            taken,
            (mean_x, self.mean_y_[place]),
            None,
            like,
            getattr(self, "feature_names_in_", ()),
        )
        return one

    @property
    def bank(self) -> Aligner:
        """The fitted aligner.

        Raises:
            NotFittedError: the map is not fitted.
        """
        if "bank_" not in vars(self):
            raise NotFittedError(
                f"Expected a map that is fitted, but {self!r} is not. Call `fit(x, y)` first."
            )
        return self.bank_

    def save(self, path: Path | str) -> None:
        """Write the fitted map and its options as safetensors, whole or not at all, for `load` to read.

        The commands do not take such a file, since it does not say which models the map is between.

        Raises:
            OSError: the file cannot be written; what was there before is still there.
            ValueError: the map is not fitted.
        """
        from aligners.fitting.saved_bank import BACKWARD, FORWARD, StoredBank, save_bank

        name = type(self.bank).__name__.lower()
        data = {
            "options": self._options("aligner"),
            "columns": list(getattr(self, "feature_names_in_", ())),
            "keys": self.sites_ and [_plain(key) for key in self.sites_],
        }
        spread = {FORWARD: {"mean": self.mean_y_}}
        if self.mean_x_ is not None:
            spread[BACKWARD] = {"mean": self.mean_x_}
        stored = StoredBank(
            "arrays",
            maps={FORWARD: {name: self.bank}},
            pairs={FORWARD: []},
            data=data,
            data_config={},
            spread=spread,
        )
        save_bank(stored, Path(path))

    @classmethod
    def load(
        cls, path: Path | str, name: str | None = None, *, route: str = "0_1"
    ) -> Self:
        """Read a map that `save` wrote, or one that `train.py fit` has fitted, onto the CPU. Nothing in it is run.

        `ArrayMap.load` reads a map of any class; `Linear.load` reads only a `Linear`.

        Args:
            path: the file, a folder written by `evaluate.py share`, or the name of a repository on the Hub.
            name: name of the map, where the file holds several of the class.
            route: `1_0` is from Y to X.

        Raises:
            ValueError: the file cannot be read, or does not hold one such map.
        """
        from aligners.fitting.saved_bank import BACKWARD, FORWARD, is_known, load_bank

        kind = getattr(cls, "aligner", Aligner)

        def wanted(held: str, of_class: str) -> bool:
            if name is not None:
                return held == name
            return kind is Aligner or is_known(of_class)

        stored = load_bank(path, arrays=True, wanted=wanted)
        if not stored.maps.get(route):
            stored = load_bank(path, arrays=True)  # to list what the file holds
        check_known({FORWARD, BACKWARD} & stored.maps.keys(), route=route)
        bank = _one_map(stored.maps[route], kind, name, path)

        means = _means(stored, route)
        options = stored.data.get("options", bank.options())
        columns = stored.data.get("columns", ())
        ready = cast(Self, _estimator(bank, options))
        ready._keep(bank, means, _sites_of(stored, route), None, columns)
        return ready

    def __sklearn_tags__(self) -> Any:
        """Return what scikit-learn needs to know of a map: that it is a regressor with several outputs."""
        from sklearn.utils import (
            InputTags,
            RegressorTags,
            Tags,
            TargetTags,
            TransformerTags,
        )

        target = TargetTags(
            required=True, two_d_labels=True, multi_output=True, single_output=False
        )
        kinds = TransformerTags(["float64", "float32", "float16"])
        return Tags(
            "regressor",
            target,
            kinds,
            None,
            RegressorTags(),
            input_tags=InputTags(three_d_array=True),
        )

    def _options(self, *others: str) -> dict[str, Any]:
        """Return the options without these, as plain values."""
        options = self.get_params()
        return {name: _plain(options[name]) for name in options if name not in others}

    def _made(self, sites: int, d_x: int, d_y: int) -> Aligner:
        return self.aligner(sites, d_x, d_y, **self._options("aligner"))

    def _moments(self, x: Tensor, y: Tensor) -> list[Moments]:
        """Return moments of the fitting rows and, for a map that chooses a strength on them, of other rows."""
        return [moments_of(x, y)]

    def _kept_rows(
        self, bank: Aligner, x: Tensor, y: Tensor
    ) -> tuple[PairedRows | None, PairedRows | None]:
        """Return the rows that a map needs beside the moments, and the last tenth, if it chooses a strength there."""
        if not isinstance(bank, ByRows):
            return None, None
        if not bank.chooses:
            return PairedRows.drawn(x, y, bank.rows, bank.seed), None
        first = x.shape[1] * 9 // 10
        kept, others = (
            PairedRows.drawn(x[:, part], y[:, part], bank.rows, bank.seed)
            for part in (slice(first), slice(first, None))
        )
        return kept, others

    def _train(self, bank: Aligner, x: Tensor, y: Tensor) -> None:
        if not bank.closed_form:
            raise UserError(
                f"Expected an aligner with a closed form, but {type(bank).__name__} needs TrainedMap."
            )

    def _keep(
        self,
        bank: Aligner,
        means: tuple[Tensor | None, Tensor],
        sites: list[Hashable] | None,
        like: Array,
        columns: Sequence[str],
    ) -> None:
        """Replace the bank by a fitted one; matrices become of the kind of `like`."""
        for name in list(vars(self)):
            if name.endswith("_"):
                delattr(self, name)
        self.bank_: Aligner = bank.requires_grad_(False).eval()
        self.mean_x_, self.mean_y_ = means
        self.sites_ = sites
        self.n_features_in_ = bank.d_x
        if len(columns):
            self.feature_names_in_ = np.array(columns, dtype=object)
        if isinstance(bank, Affine):
            weight = bank.weight.mT
            offset = (bank.mean_y - bank.mean_x @ bank.weight)[:, 0]
            if sites is None:
                weight, offset = weight[0], offset[0]
            self.coef_ = of_kind(weight, like)
            self.intercept_ = of_kind(offset, like)

    def _rows(self, given: Array, name: Literal["x", "y"]) -> Tensor:
        """Return rows of the bank's sites (S, N, d), on the device and in the precision of the map."""
        bank, names = self.bank, column_names(given)
        known = list(getattr(self, "feature_names_in_", names))
        if name == "x" and names and names != known:
            raise UserError(
                f"Expected `x` with the columns of the fitting rows, {known}, but got {names}."
            )
        width = bank.d_x if name == "x" else bank.d_y
        tensor = rows(given, name, width, self.sites_)
        if len(tensor) != bank.sites:
            raise UserError(
                f"Expected `{name}` with rows of as many sites as the map was fitted on, {bank.sites}, but got "
                f"{len(tensor)}. `at(site)` gives the map of a single site."
            )
        dtype = tensor.dtype
        for value in bank.state_dict().values():
            if value.is_floating_point():
                dtype = value.dtype
                break
        return tensor.to(self.mean_y_.device, dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    return value


def _estimator(bank: Aligner, options: Mapping[str, Any]) -> ArrayMap:
    """Make the estimator of a fitted aligner: its own class, or the one for any aligner."""
    from aligners.api import array_maps

    own = getattr(array_maps, type(bank).__name__, None)
    if own is not None:
        return own(**options)
    if bank.closed_form:
        return ArrayMap(type(bank), **options)
    return TrainedMap(type(bank), **options)


def _one_map(
    maps: Mapping[str, Aligner], kind: type[Aligner], name: str | None, path: Any
) -> Aligner:
    """Return the map of a class and, where there are several, of a name."""
    held = {key: bank for key, bank in maps.items() if isinstance(bank, kind)}
    if not held:
        classes = ", ".join(type(bank).__name__ for bank in maps.values())
        raise UserError(
            f"Expected {path} to hold a map of class {kind.__name__}, but got {classes}."
        )
    if name is None and len(held) == 1:
        return next(iter(held.values()))
    name = name or ""
    check_known(held, name=name)
    return held[name]


def _means(stored: "StoredBank", route: str) -> tuple[Tensor | None, Tensor]:
    """Return the means of the fitting rows of source and target of a route; that of the source may be unknown."""
    from aligners.fitting.saved_bank import BACKWARD, FORWARD

    turned = BACKWARD if route == FORWARD else FORWARD
    if stored.moments is None:
        source = stored.spread.get(turned, {})
        return source.get("mean"), stored.spread[route]["mean"]
    means = {FORWARD: stored.moments.mean_y, BACKWARD: stored.moments.swap().mean_y}
    return means[turned], means[route]


def _sites_of(stored: "StoredBank", route: str) -> list[Hashable] | None:
    """Return the keys of the sites in a file: as they were given, or the layers of a fit."""
    if "keys" not in stored.data:
        return [i if i == j else (i, j) for i, j in stored.pairs[route]]
    keys = stored.data["keys"]
    if not keys:
        return keys
    return [tuple(key) if isinstance(key, list) else key for key in keys]


class TrainedMap(ArrayMap):
    """Like `ArrayMap`, for aligners that take gradient steps, with optimiser, rates and clipping as in `train.py fit`.

    The last step is kept, without validation: score the map on rows that it was not fitted on. Further options are
    those of the aligner.

    Attributes:
        steps: number of steps; the learning rate rises and falls over them.
        rows_a_step: rows of each step, drawn with replacement.
        learning_rate: learning rate of matrices with up to 64 inputs; wider ones get proportionally less.
        seed: seed of the initial weights and of the rows that are drawn.
    """

    steps: int = 1000
    rows_a_step: int = 512
    learning_rate: float = 1e-2
    seed: int = 0
    __init__ = ArrayMap.__init__

    def _made(self, sites: int, d_x: int, d_y: int) -> Aligner:
        from aligners.fitting.fits import seeded

        check_range(least=1, steps=self.steps, rows_a_step=self.rows_a_step)
        check_range(above=0, learning_rate=self.learning_rate)
        options = self._options(
            "aligner", *(field.name for field in fields(TrainedMap))
        )
        return seeded(partial(self.aligner, **options), self.seed, sites, d_x, d_y)

    def _train(self, bank: Aligner, x: Tensor, y: Tensor) -> None:
        from aligners.fitting.alignment import Alignment

        optimizer = partial(
            torch.optim.AdamW, lr=self.learning_rate, weight_decay=0.0, fused=True
        )
        like = Alignment(optimizer=optimizer)
        batch = min(self.rows_a_step, x.shape[1])
        diverged = like.train_on_rows(bank, x, y, self.steps, batch, self.seed)
        if diverged.any():
            raise UserError(
                f"Expected training to converge, but {type(bank).__name__} diverged at step {int(diverged.max())} of "
                f"{self.steps} with `learning_rate` {self.learning_rate:g}. Lower it."
            )
