"""Recorded states as a model that looks its states up: its tokens are numbers of rows, its texts are groups of rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, Self, cast

import numpy as np
import torch
from torch import Tensor

from aligners.errors import UserError
from aligners.models.architectures import Component, Task
from aligners.models.model import FrozenModel, Inputs
from aligners.models.recorded.files import Opened, column_of, open_states
from aligners.models.recorded.joining import Joined, Side, join
from aligners.models.recorded.known_states import KnownStates
from aligners.models.recorded.row_arrays import Seen
from aligners.models.recorded.source_names import StatesSource, states_source

SHOWN = 5  # rows that a message names
ABSENT = ("model", "config", "blocks", "architecture", "_caller", "_head", "_passed")
NO_TASK = "is recorded states, without the model that made them"

logger = logging.getLogger(__name__)


class GroupTokens:
    """Stands in for a tokenizer: turns the name of a group into the numbers of its rows.

    Args:
        joined: the rows and their groups.

    Attributes:
        longest: rows of the largest group.
    """

    is_fast = False
    padding_side = truncation_side = "right"
    pad_token_id = pad_token_type_id = 0
    unk_token_id = mask_token_id = eos_token_id = sep_token_id = None
    model_input_names = ("input_ids", "attention_mask")
    name_or_path = "recorded states"

    def __init__(self, joined: Joined) -> None:
        order = np.argsort(joined.group, kind="stable")
        counts = np.bincount(joined.group, minlength=len(joined.names))
        parts = np.split(order, np.cumsum(counts)[:-1])
        self._rows = dict(zip(joined.names, parts, strict=True))
        self._digest = joined.digest()
        self.longest = int(counts.max())

    def __call__(self, groups: Sequence[str], **options: Any) -> dict[str, Any]:
        """Return the numbers of the rows of some groups, none of which is special or cut off."""
        unknown = [group for group in groups if group not in self._rows]
        if unknown:
            raise UserError(
                f"Expected groups of recorded rows, but got {unknown[0]!r}: recorded states read no texts."
            )
        ids = [self._rows[group].tolist() for group in groups]
        special = [[0] * len(rows) for rows in ids]
        return {"input_ids": ids, "special_tokens_mask": special}

    def get_vocab(self) -> dict[str, int]:
        """Return what tells two of them apart."""
        return {self._digest: 0}


class RecordedStates(FrozenModel):
    """States of one source, in place of a model.

    Row numbers are those of the rows that all sources of a run have; `rows` says where they are in this one.

    Args:
        source: what the user named.
        opened: the open files.
        seen: what a look at all rows found.
        rows: (P,) number of each row in the files.
        tokens: the groups.
    """

    def __init__(
        self,
        source: StatesSource,
        opened: Opened,
        seen: Seen,
        rows: np.ndarray,
        tokens: GroupTokens,
    ) -> None:
        self.name = source.name
        self.revision = None
        self.tokenizer = cast(Any, tokens)
        self.site_names = opened.sites
        self.arrays = opened.arrays
        self.rows = torch.from_numpy(rows)
        self.fingerprint = seen.fingerprint
        self.depth = len(opened.arrays) - 1
        self.width = opened.arrays[0].width
        self.dtype = opened.arrays[0].dtype
        self.vocabulary = len(rows)
        self.heads = 0
        self.nbytes = 0
        self.max_length = None
        self.n_labels = None
        self.regression = False
        self.class_map = None
        self.causal = False
        self.quantised = None
        self.sharded = False
        self.code = None
        self.attention_used = None
        self.attention_preferred = ""
        self.cautions: list[str] = []
        self._place = torch.device("cpu")
        _check_finite(source, opened, seen, rows)

    def __getattr__(self, name: str) -> NoReturn:
        """Raise for whatever only a model has.

        Raises:
            ValueError: what was asked for needs the model.
        """
        if name in ABSENT:
            self._refuse()
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}"
        )

    def _refuse(self) -> NoReturn:
        raise UserError(
            f"This needs a model that can be run, but {self.name} {NO_TASK}. On recorded states run `evaluate.py "
            "similarity`, `train.py fit`, `train.py universe`, `evaluate.py bijection` or `evaluate.py inject`, or "
            "name the model."
        )

    @property
    def unasked(self) -> str | None:
        """Nothing: there is no head."""
        return None

    @property
    def no_task(self) -> str:
        """Why there is no task, as the end of a sentence that begins with the name."""
        return NO_TASK

    @property
    def task(self) -> Task | None:
        """Nothing: there is no head."""
        return None

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sites after the first, and width; there are no heads."""
        return {
            "layers": self.depth,
            "width": self.width,
            "heads": None,
            "head_width": None,
            "rotary_width": None,
        }

    @property
    def device(self) -> torch.device:
        """Where its rows are wanted."""
        return self._place

    @property
    def label_names(self) -> list[str]:
        """Nothing: there is no head."""
        return []

    def to(self, device: torch.device | str) -> Self:
        """Note where the rows are wanted: they stay on disk until they are read."""
        self._place = torch.device(device)
        return self

    def identity(self) -> dict[str, Any]:
        """What a checkpoint records: the name, a hash of all states at all sites, and the names of the sites."""
        return {
            "name": self.name,
            "revision": None,
            "fingerprint": self.fingerprint,
            "settings": {},
            "recorded_sites": self.site_names,
            "attention": None,
            "code": None,
        }

    def check_site(
        self, site: int, argument: str, component: Component = "residual"
    ) -> None:
        """Raise if there is no such site.

        Raises:
            ValueError: naming `argument` and the sites.
        """
        if component != "residual":
            raise UserError(
                f"Expected `component` 'residual' for recorded states, but got {component!r}: {self.name} has what was "
                "recorded. Record what the sub-layer adds, and leave `component` out."
            )
        if 0 <= site <= self.depth:
            return
        named = [f"{place} ({name})" for place, name in enumerate(self.site_names)]
        raise UserError(
            f"Expected `{argument}` out of the sites of {self.name}, which are {', '.join(named)}, but got {site}."
        )

    def front(
        self, inputs: Inputs, sites: Sequence[int], component: Component = "residual"
    ) -> list[Tensor]:
        """Return the states at `sites`, each (B, T, d) float32, of the rows numbered in `input_ids` (B, T).

        Only these rows are read.

        Raises:
            ValueError: as `check_site`.
        """
        ids = inputs["input_ids"]
        real = inputs["attention_mask"].bool()
        wanted = self.rows[ids[real].cpu()]
        states = []
        for site in sites:
            self.check_site(site, "sites", component)
            rows = self.arrays[site].take(wanted)
            of_site = torch.zeros(*ids.shape, self.width, device=ids.device)
            of_site[real] = rows.to(ids.device)
            states.append(of_site)
        return states

    def attention(
        self,
        inputs: Inputs,
        sites: Sequence[int] = (),
        component: Component = "residual",
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Raise: there are no attention weights."""
        self._refuse()

    def untrained(self, seed: int) -> FrozenModel:
        """Raise: there is no recipe to draw weights by."""
        self._refuse()

    def self_test(self, inputs: Inputs, component: Component = "residual") -> None:
        """Raise: nothing can be injected."""
        self._refuse()

    def _check_answers(self) -> None:
        """Raise: there is no head."""
        self._refuse()


def _check_finite(
    source: StatesSource, opened: Opened, seen: Seen, rows: np.ndarray
) -> None:
    """Raise if a row that counts holds NaN or infinity."""
    for site, bad in seen.bad.items():
        wrong = bad[np.isin(bad, rows)]
        if not len(wrong):
            continue
        first = ", ".join(map(str, wrong[:SHOWN].tolist()))
        cause = ""
        if opened.arrays[site].dtype == torch.float16:
            cause = " float16 holds numbers up to 65,504: record them in bfloat16 or float32."
        raise UserError(
            f"Expected finite states, but {len(wrong)} rows of {source.path} hold NaN or infinity at site "
            f"{opened.sites[site]!r}: rows {first}{', ...' if len(wrong) > SHOWN else ''} (counted from 0).{cause} "
            "Record them again, or leave them out with a `mask` column."
        )


class RecordedRun:
    """The recorded states of a run, their rows paired.

    Args:
        names: the names of the models, all of recorded states.
        known: where is written down what was seen in files that have not changed; None: all are read through.

    Attributes:
        models: one for each name; a name that comes twice has one object.
        said: all names, for reports.
        joined: which rows belong together.
        tokens: what all models share for a tokenizer.

    Raises:
        ValueError: a source cannot be read, or rows cannot be paired; see `join`.
    """

    def __init__(self, names: Sequence[str], known: Path | None = None) -> None:
        sources = {name: states_source(name) for name in names}
        opened = {name: open_states(source) for name, source in sources.items()}
        sides = [_side(sources[name], opened[name]) for name in sources]
        self.said = ", ".join(sources)
        self.joined = join(sides)
        self.tokens = GroupTokens(self.joined)
        by_name: dict[str, RecordedStates] = {}
        units: dict[str, bool] = {}
        for name, rows in zip(sources, self.joined.rows, strict=True):
            seen = KnownStates(known).seen(sources[name], opened[name].arrays)
            units[name] = seen.unit
            by_name[name] = RecordedStates(
                sources[name], opened[name], seen, rows, self.tokens
            )
        cautions = [*self.joined.cautions, *_cautions_on_norms(units)]
        if all(side.group is None for side in sides):
            tokens = [name for name in sources if opened[name].of_tokens]
            cautions += map(_caution_on_tokens, tokens)
        for caution in cautions:
            logger.warning(caution)
        for model in by_name.values():
            model.cautions = cautions
        self.models: list[FrozenModel] = [by_name[name] for name in names]


def _side(source: StatesSource, opened: Opened) -> Side:
    """Return what a source says of its rows."""
    side = Side(source.name, opened.arrays[0].rows, tokens=opened.tokens)
    if source.key is not None:
        side.key = column_of(source, opened, source.key)
    if source.group is not None:
        side.group = column_of(source, opened, source.group)
    elif opened.sequence is not None:
        side.group = opened.sequence
    if source.mask is not None:
        side.mask = column_of(source, opened, source.mask)
    return side


def _caution_on_tokens(name: str) -> str:
    """Return a caution on rows of tokens whose texts are not known."""
    return (
        f"Caution: the rows of {name} are tokens, and nothing says which text each is of (`group`): tokens of one text "
        "are both fitted on and held out, so errors look smaller and intervals narrower than they are."
    )


def _cautions_on_norms(units: dict[str, bool]) -> list[str]:
    """Return a caution where only some sources have rows of norm 1."""
    normalised = [name for name, unit in units.items() if unit]
    others = [name for name, unit in units.items() if not unit]
    if not normalised or not others:
        return []
    return [
        f"Caution: all rows of {normalised[0]} have norm 1, those of {others[0]} do not: one was normalised and the "
        "other was not. Norms are then to be predicted or are lost, and measures of unnormalised rows are of something "
        "else: normalise both or neither."
    ]
