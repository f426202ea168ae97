"""The LightningModule that fits one more model to a universe that stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch

from aligners.fitting.alignment import Alignment
from aligners.fitting.fits import Fit, seeded
from aligners.fitting.storage.bank import FORWARD, StoredBank
from aligners.fitting.storage.describing import build_aligner, describe_aligner
from aligners.fitting.storage.refusals import refuse_other_models
from aligners.fitting.universe.universe import NETWORK, Universe
from aligners.maps.base import Aligner
from datamodules.universe import NewcomerStates

__all__ = ["Joining"]


class Joining(Alignment):
    """Fits the bijection of one more model into the shared space of a universe, whose members stay as they are.

    It is one fit of two sides, both ways: x is the newcomer's state, y what a member makes of the same text in the
    shared space, row by row another member's, in turn.

    Args:
        options: of `Alignment`, by their names.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(aligners=None, both_directions=False, **options)
        self.members: Universe | None = None

    def join(self, members: Universe, data: NewcomerStates) -> None:
        """Choose the universe, before the fit."""
        self.members, data.embed = members, members.embed

    def setup(self, stage: str) -> None:
        """Build the newcomer's maps, as the members' are; only its places count."""
        super().setup(stage)
        each = cast(NewcomerStates, self._stream).sites_each
        self.sites, self.places = self.sites[-each:], self.places[-each:]

    def made(self, sites: int, d_x: int, d_y: int) -> Iterator[Fit]:
        """Build the newcomer's maps for the places of all models, and keep none."""
        members = cast(Universe, self.members)
        like = describe_aligner(members.maps)

        def network(places: int, d_x: int, d_y: int) -> Aligner:
            return build_aligner({**like, "sites": places, "d_x": d_x, "d_y": d_y})

        yield Fit(NETWORK, "forward", seeded(network, self.seed, sites // (members.models + 1), d_x, d_y))

    def joined(self, stored: StoredBank) -> StoredBank:
        """The universe of all models, the newcomer last; its moments are not known.

        Args:
            stored: the universe of the members.
        """
        members, own = stored.maps[FORWARD][NETWORK], self.fits()[0].aligner
        maps = build_aligner({**describe_aligner(members), "sites": members.sites + own.sites})
        state = own.state_dict()
        maps.load_state_dict({k: torch.cat((v, state[k].to(v.device))) for k, v in members.state_dict().items()})
        then, now = stored.training.get(f"{FORWARD}.{NETWORK}"), self.training_record.get(f"forward.{NETWORK}")
        records = {}
        if then is not None and now is not None:
            records = {k: [*v, *now[k]] if isinstance(v, list) else max(v, now[k]) for k, v in then.items()}
        return replace(
            stored,
            maps={FORWARD: {NETWORK: maps}},
            pairs={FORWARD: [*stored.pairs[FORWARD], *self.sites]},
            data=self.data,
            data_config=self.data_config,
            moments=None,
            seen=self._stream.seen,
            training={f"{FORWARD}.{NETWORK}": records} if records else {},
        ).freeze()

    def refuse_other_members(self, stored: StoredBank, data: NewcomerStates) -> None:
        """Raise unless the run reads the universe's models at its sites on its texts, and a model that is not in it.

        Raises:
            ValueError: it does not.
        """
        described = data.describe()
        refuse_other_models(stored.data["models"], described["models"][:-1], str(stored.path))
        for name in ("sites", "component", "rows", "special_tokens"):
            if stored.data[name] != described[name]:
                raise ValueError(
                    f"{stored.path} was fitted with `{name}` {stored.data[name]}, but `data.{name}` gives "
                    f"{described[name]}. Leave it out."
                )
        then, now = (about["text"]["hashes"] for about in (stored.data, described))
        if then != now:
            raise ValueError(
                f"{stored.path} was fitted on other texts than `data.text` gives. The members' states of the same "
                "texts are what a newcomer is fitted to: leave `data.text` out."
            )
