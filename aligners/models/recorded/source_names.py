"""How users name recorded states: `states:vectors.parquet:column=embedding,key=id,group=document`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aligners.errors import UserError

RECORDED = "states:"
OPTIONS = ("column", "key", "group", "mask")
# Commands that run no model, by their kinds.
COMMANDS = {"features", "fit", "fit_pairs", "validate", "universe", "join", "recover"}
COMMANDS |= {"similarity", "inject", "bijection"}


@dataclass(frozen=True)
class StatesSource:
    """Where states are recorded.

    Args:
        name: as the user wrote it.
        path: file or folder.
        column: the columns, tensors or files that hold states, one for each site, joined by `+`; default: all that
            can.
        key: the column that says which rows of several sources belong together; default: those of the same number.
        group: the column that says which text, image or other whole a row is of; default: each row is its own.
        mask: the column that is true where a row counts; default: all count.
    """

    name: str
    path: Path
    column: str | None = None
    key: str | None = None
    group: str | None = None
    mask: str | None = None

    @property
    def columns(self) -> list[str] | None:
        """The names of what holds states, in the order of the sites; None: whatever can."""
        return self.column.split("+") if self.column else None


def is_recorded(name: str) -> bool:
    """Tell whether a model's name stands for recorded states."""
    return name.startswith(RECORDED)


def all_recorded(names: Sequence[str]) -> bool:
    """Tell whether the names of a run's models stand for recorded states.

    Raises:
        ValueError: some do and some do not.
    """
    recorded = [name for name in names if is_recorded(name)]
    if recorded and len(recorded) < len(names):
        others = [name for name in names if not is_recorded(name)]
        raise UserError(
            f"Expected models or recorded states, but got {recorded[0]!r} beside the model {others[0]!r}: nothing says "
            "which of its texts the rows are of. Record the model's states of the same texts too "
            "(docs/howto/my_own_states.md)."
        )
    return bool(recorded)


def check_command(kind: str | None, names: Sequence[str]) -> None:
    """Raise if a command would run models, of which only states are recorded.

    Args:
        kind: kind of the command.
        names: names of its models.

    Raises:
        ValueError: naming the first, and what can be done instead.
    """
    recorded = [name for name in names if is_recorded(name)]
    if recorded and kind not in COMMANDS:
        raise UserError(
            f"This command ({kind}) runs models, but {recorded[0]} is recorded states, without the model that made "
            "them. `evaluate.py similarity`, `evaluate.py features`, `train.py fit`, `train.py universe`, "
            "`evaluate.py bijection` and `evaluate.py inject`, which then measures errors alone, take states; for "
            "everything else name the model."
        )


def states_source(name: str) -> StatesSource:
    """Parse the name of recorded states.

    Args:
        name: `states:PATH`, or `states:PATH:column=a+b,key=c,group=d,mask=e` with any of these.

    Raises:
        ValueError: the name is written in another way, or there is no such path.

    Examples:
        >>> states_source("states:.:key=id").key
        'id'
    """
    place, written = split_name(name)
    options = _options(name, written) if written else {}
    path = Path(place).expanduser()
    if not place or not path.exists():
        raise UserError(
            f"Expected recorded states as `{RECORDED}PATH` or `{RECORDED}PATH:column=a,key=b`, but got {name!r}: there "
            f"is no file or folder {place!r}."
        )
    return StatesSource(name, path, **options)


def split_name(name: str) -> tuple[str, str]:
    """Return the path and the options of recorded states as their name has them, whether there are any or not."""
    place = name.removeprefix(RECORDED)
    before, _, written = place.rpartition(":")
    if before and "=" in written:
        return before, written
    return place, ""


def _options(name: str, written: str) -> dict[str, str]:
    """Parse `key=id,group=document`."""
    options: dict[str, str] = {}
    for part in written.split(","):
        option, equals, value = part.partition("=")
        option = option.strip()
        if option not in OPTIONS or option in options or not equals or not value:
            raise UserError(
                f"Expected recorded states with the options {', '.join(OPTIONS)}, each once, as in "
                f"`{RECORDED}vectors.parquet:column=embedding,key=id`, but got {part!r} in {name!r}."
            )
        options[option] = value.strip()
    return options
