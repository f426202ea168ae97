"""`train.py carry`: makes what reads one model's states read another's."""

from collections.abc import Sequence
from pathlib import Path

from aligners.cli.command import Run, command
from aligners.datamodules.paired_activations import PairedActivations, Pairing
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.rows.policies import check_component
from aligners.datamodules.rows.read_rows import Link
from aligners.errors import UserError
from aligners.models.architectures import Component
from aligners.probing.artefacts.artefact_files import (
    read_artefacts,
    write_artefact,
    write_carried_control_vector,
)
from aligners.probing.artefacts.carrying import Carrying, own_sites
from aligners.probing.artefacts.kinds import Artefact
from aligners.reports.names import file_names
from aligners.reports.runs.updates.carrying_report import artefact_card


class ArtefactSites(Pairing):
    """Two models at the sites of the artefacts that are carried from the one to the other."""

    def __init__(self, named: Pairing, artefacts: list[Artefact]) -> None:
        super().__init__(named.named, named.options)
        self.artefacts = artefacts

    def links(self, depths: Sequence[int], component: Component) -> list[Link]:
        """See `own_sites`."""
        return own_sites(self.artefacts, depths, component)


@command(
    "carry",
    Carrying,
    data=pair_states,
    skip={"owned", "labels", "packed", "component", "special_tokens", "held_out_types"},
    defaults={
        "data.batch_size": 64,
        "data.rows": "mean",
        "data.text.validation_share": 0.2,
    },
)
def carry(run: Run, artefacts: Path | None = None) -> None:
    """Carry what reads X, the old model, to Y, the new one: heads, directions, probes, stitching layers, dictionaries.

    Maps are fitted on text without labels. Each artefact is written for Y, in its own format, below artefacts/ of the
    run, with a card. Its agreement with its old answers is measured without labels; if its `score` on the old model is
    given, its new score is predicted. If the texts have the labels of its `classes`, its scores are reported:
    unchanged, carried, trained anew, and floors.

    Example: `--artefacts mine --data.model_x old --data.model_y new --run runs/carried`

    Args:
        run: of the command.
        artefacts: Folder of an artefact or of several, with artefact.json and artefact.safetensors, SAELens' cfg.json
            and sae_weights.safetensors, a control vector in GGUF with an artefact.json that names its `model`, or what
            `train.py probe` or `train.py stitch` has left. It is carried from its
            own site to the same site of Y, or to the best one if depths differ; `--data.sites 4:6` names others.
    """
    if artefacts is None:
        raise UserError("Expected a folder in `artefacts`, but got none.")
    found, data = read_artefacts(artefacts), run.made.data
    data.component = component_of(found)
    check(found, data)  # before any model is made or loaded
    if data.pairing.options["sites"] == "all":
        data.pairing = ArtefactSites(data.pairing, found)
    run.start()
    carrying = run.build(Carrying, found)
    run.read(carrying, carrying.carry, "carrying")
    names = file_names([artefact.name for artefact in found])
    for old, new, row in zip(found, carrying.carried, carrying.rows, strict=True):
        every = carrying.report_tables["scores"]
        scores = [score for score in every if score["artefact"] == old.name]
        card = artefact_card(row, scores, carrying.meta, through=bool(new.through))
        write_artefact(new, run.folder / "artefacts" / names[old.name], card)
    vector = run.folder / "artefacts" / "control_vector.gguf"
    write_carried_control_vector(carrying.carried, vector)


def component_of(artefacts: list[Artefact]) -> Component:
    """Return what all artefacts read at their sites.

    Raises:
        ValueError: they read different things, or what is not known.
    """
    first = artefacts[0]
    component = first.about.get("component", "residual")
    check_component(component)
    for other in artefacts[1:]:
        also = other.about.get("component", "residual")
        if also != component:
            raise UserError(
                f"Expected `artefacts` that read one component of the blocks, but {first.name} reads {component} and "
                f"{other.name} reads {also}. Carry each in a run of its own."
            )
    return component


def check(artefacts: list[Artefact], data: PairedActivations) -> None:
    """Raise unless artefacts have the width of the old model."""
    name, width = data.models[0], data.frozen_models.widths()[0]
    for artefact in artefacts:
        if artefact.width != width:
            raise UserError(
                f"Expected artefacts of width {width}, that of {name}, but {artefact.name} reads states of width "
                f"{artefact.width}. Name its own model as `data.model_x`."
            )
