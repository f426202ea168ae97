"""A command, and a run of it: its options, folder, loggers and Trainer."""

import re
from argparse import SUPPRESS
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from inspect import cleandoc, isclass, signature
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as pl
import yaml
from jsonargparse import ArgumentParser, Namespace, class_from_function
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger, WandbLogger

from aligners.callbacks.best import BestPerSite
from aligners.callbacks.checkpoint import WholeCheckpoints
from aligners.callbacks.progress_bar import ProgressBar
from aligners.cli import folders
from aligners.cli.endings import goes_on_with
from aligners.cli.options import (
    RunOptions,
    TrainingOptions,
    check_begun,
    check_machine,
    check_trains,
    flat,
)
from aligners.cli.parsing import OptionParser
from aligners.cli.run_loggers import run_loggers, tell_wandb
from aligners.datamodules.run_identity import NOT_OF_FILES
from aligners.datamodules.text.recorded_texts import check_options
from aligners.errors import UserError, check_range
from aligners.files.atomic import confined, let_write
from aligners.progress import tell
from aligners.reports.publishing import WriteReport, write_report
from aligners.reports.tracking import complete, new_number, unfinished

LARGEST_SEED = 2**32 - 1  # NumPy's
# What to do for each run of this process's command if it ends well.
_at_the_end: list[Callable[[], None]] = []
Made = TypeVar("Made")
# Arguments that hardly anybody changes: they can only be set from Python.
FROM_PYTHON = (
    *(
        "revision",
        "revision_x",
        "revision_y",
        "revisions",
    ),  # given as NAME@REVISION here
    "cache",  # the command line has the environment variable ALIGNERS_CACHE
    # training
    "min_delta",
    "gradient_clip",
    "start_batches",
    "graphs",
    # random targets
    "target_seed",
    "couplings",
    # evaluations
    "allow_mixed",
    "least_kept",
    "prompt_tokens",
    "temperature",
    "alphas",
    "equal_kl",
    "random",
    "drawn",
    "draws",
    "long_sentences",
    "rows_a_step",
    "most_rows",
    "stretched_rows",
)


def unchecked(options: Namespace) -> None:
    """Accept any options."""


@dataclass(frozen=True)
class Command:
    """A command: its options, and what it does; `command` makes one from a function.

    Attributes:
        work: what it does, given a `Run` and its own options, which its docstring explains. The part above its
            arguments is shown above the list of options, and the words of its example after the command's name.
        kind: first part of the default name of its run's folder; None: it makes no run.
        options: classes whose arguments become options, too.
        parts: name -> a class whose arguments become `--NAME.ARGUMENT`.
        data: makes the data module: its arguments become `--data.ARGUMENT`, and those of the Trainer
            `--trainer.ARGUMENT`; None: neither is there.
        skip: arguments of all these that are not options, besides `FROM_PYTHON`.
        defaults: of options, by their dotted names, where they differ from those of the classes.
        check: raises, given the instantiated options, if the command could not run with them; studies ask it for their
            cells.
        usage: words after the command's name. Where there is no `--config`, options without a default are given in
            their order, without their names.
        config: help of `--config`, which takes a file of options; None: only a command that leaves a run takes one.
        from_files: those of `options` whose arguments may each be given in a separate file.
        flags: option without a value -> its help.
    """

    work: Callable[..., object]
    kind: str | None = None
    options: Sequence[type] = ()
    parts: Mapping[str, type] = field(default_factory=dict)
    data: Callable[..., pl.LightningDataModule] | None = None
    skip: Collection[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[Namespace], object] = unchecked
    usage: str = "[options]"
    config: str | None = None
    from_files: Collection[type] = ()
    flags: Mapping[str, str] = field(default_factory=dict)

    def about(self) -> str:
        """What the command does: its docstring up to the example and the arguments."""
        return re.split(r"\n\n(?:Example|Args):", cleandoc(self.work.__doc__ or ""))[0]

    def parser(self) -> ArgumentParser:
        """Make the parser of the command's options."""
        usage = f"%(prog)s {self.usage}"
        parser = OptionParser(description=self.about(), usage=usage, allow_abbrev=False)
        config = self.config or (self.kind and "YAML file with any of these options.")
        if config:
            parser.add_argument("-c", "--config", action="config", help=config)
        self._add_run(parser)
        self._add_own(parser, positional=not config)  # a file of options has names
        self._add_parts(parser)
        traceback = "Show the traceback of every error, also of those that you can fix."
        for name, help_line in {**self.flags, "traceback": traceback}.items():
            parser.add_argument(
                f"--{name}", action="store_true", default=SUPPRESS, help=help_line
            )
        parser.set_defaults(dict(self.defaults))
        return parser

    def _add_run(self, parser: ArgumentParser) -> None:
        if self.kind is None:
            return
        about = "New folder for this run: config, logs, checkpoints, report."
        default = f"Default: runs/{self.kind}-<date>-<time>."
        parser.add_argument(
            "--run", type=Path | None, default=None, help=f"{about} {default}"
        )
        parser.add_class_arguments(RunOptions, None)

    def _add_own(self, parser: ArgumentParser, *, positional: bool) -> None:
        """Add the arguments of the function, and of the classes whose arguments become options."""
        parser.add_function_arguments(
            self.work, as_group=False, as_positional=positional, skip={1}
        )
        for options in self.options:
            parser.add_class_arguments(
                options,
                None,
                as_positional=positional,
                skip={*self.skip, *FROM_PYTHON},
                sub_configs=options in self.from_files,
            )

    def _add_parts(self, parser: ArgumentParser) -> None:
        """Add the parts, the data module and the Trainer, each with a name before its arguments."""
        parts = dict(self.parts)
        if self.data is not None:
            parts["data"] = _class_of(self.data)
        for name, part in parts.items():
            parser.add_class_arguments(
                part, name, skip={*self.skip, *FROM_PYTHON}, sub_configs=True
            )
        if self.data is not None:
            parser.add_class_arguments(
                pl.Trainer, "trainer", instantiate=False, sub_configs=True
            )
            parser.set_defaults({"trainer.enable_checkpointing": False})


def with_named_revisions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's data options with models as NAME@REVISION, as on a command line."""
    options = dict(config)
    for model in ("model", "model_x", "model_y"):
        revision = options.pop(model.replace("model", "revision"), None)
        if revision is not None:
            options[model] = f"{options[model]}@{revision}"
    revisions = options.pop("revisions", None)
    if revisions:
        names = []
        for name, revision in zip(options["models"], revisions, strict=False):
            names.append(name if revision is None else f"{name}@{revision}")
        options["models"] = names
    return options


@cache
def _class_of(data: Callable[..., pl.LightningDataModule]) -> type:
    """Turn a function that makes a data module into a class, which jsonargparse parses ten times as fast."""
    return data if isclass(data) else class_from_function(data)


def command(
    kind: str | None = None, *options: type, **more: Any
) -> Callable[[Callable[..., object]], Command]:
    """Decorate a function to make it a command.

    Args:
        kind: see `Command`.
        options: see `Command`.
        more: further attributes of `Command`.
    """
    return lambda work: Command(work, kind, options, **more)


def trains(
    kind: str,
    *options: type,
    module: type[pl.LightningModule],
    data: Callable[..., pl.LightningDataModule],
    saving: type[pl.Callback],
    check: Callable[[Namespace], object] = check_trains,
    **trainer: Any,
) -> Callable[[Callable[..., object]], Command]:
    """Decorate a function to make it a command that trains maps.

    Args:
        kind: name of the command.
        options: classes whose arguments become options.
        module: what is trained; its arguments become `--model.NAME`.
        data: makes the data module.
        saving: the callback that writes checkpoints; its arguments become `--checkpoint.NAME`.
        check: see `Command`.
        trainer: Trainer options whose defaults differ from Lightning's.
    """
    usual = {"max_epochs": -1, "log_every_n_steps": 20, "enable_model_summary": False}
    return command(
        kind,
        TrainingOptions,
        *options,
        parts={"early_stopping": BestPerSite, "checkpoint": saving, "model": module},
        data=data,
        defaults=of_trainer(**{**usual, **trainer}),  # training ends by steps
        check=check,
    )


def of_trainer(**values: Any) -> dict[str, Any]:
    """Return the Trainer's options by their dotted names."""
    return {f"trainer.{name}": value for name, value in values.items()}


def run_command(command: Command, program: str, words: Sequence[str]) -> None:
    """Run a command; then tell W&B what its runs have left, or release the folders that it has not used.

    Args:
        command: the command.
        program: what the user typed before the words.
        words: words of the command line.
    """
    parser = command.parser()
    parser.prog = program
    try:
        run = Run(command, parser, parser.parse_args(words), words)
        names = list(signature(command.work).parameters)[1:]
        with (
            confined(),
            goes_on_with(run.begun_again_by, "To begin again"),
            goes_on_with(run.resumed_by),
        ):
            command.work(run, **{name: run.options[name] for name in names})
        for tell in _at_the_end:
            tell()
    except BaseException:
        folders.release_unused()
        raise
    finally:
        _at_the_end.clear()


class Run:
    """A command with parsed options; once started, a run with a folder, loggers and a Trainer.

    Args:
        command: the command.
        parser: its parser.
        options: options as plain values.
        words: words that the options were parsed from.

    Attributes:
        folder: where everything is written, once `claim` has been called.
        settings: arguments of the Trainer, with loggers and the user's callbacks, once `start` has been called.
    """

    folder: Path
    settings: dict[str, Any]

    def __init__(
        self,
        command: Command,
        parser: ArgumentParser,
        options: Namespace,
        words: Sequence[str] = (),
    ) -> None:
        self.command, self.parser, self.options, self.words = (
            command,
            parser,
            options,
            words,
        )

    @cached_property
    def made(self) -> Namespace:
        """The options, instantiated and checked, after setting the seed. A drawn seed is written into the options.

        Raises:
            ValueError: the command could not run with them.
        """
        seed = self.options.get("seed_everything", False)
        if seed is not False:
            check_range(least=0, most=LARGEST_SEED, seed_everything=seed)
            wanted = None if seed is True else seed
            self.options.seed_everything = pl.seed_everything(
                wanted, workers=True, verbose=False
            )
        made = self.parser.instantiate(self.options)
        self.command.check(made)
        models = getattr(made.get("data"), "frozen_models", None)
        if models is not None:
            check_options(self.command.kind, models.names, self.options.as_dict())
        return made

    def build(self, kind: Callable[..., Made], *given: Any) -> Made:
        """Call a class with the given arguments and those of the options that it takes."""
        return kind(*given, **options_of(kind, self.made))

    def use_data_of(self, config: Mapping[str, Any]) -> None:
        """Parse the command line again, with a checkpoint's data options, except `NOT_OF_FILES`, as defaults.

        Args:
            config: the checkpoint's data options.

        Raises:
            ValueError: the checkpoint has options that this version does not know.
        """
        left_out = ("batch_size", *NOT_OF_FILES)  # the first only affects speed
        defaults = with_named_revisions(config)
        for name in left_out:
            defaults.pop(name, None)
        try:
            self.parser.set_defaults(
                {f"data.{name}": value for name, value in flat(defaults).items()}
            )
        except KeyError as error:
            raise UserError(
                "Expected a checkpoint of this version or an earlier one, but some of its data options are unknown: "
                f"{error.args[0]}. Update the package to read it."
            ) from error
        self.options = self.parser.parse_args(self.words)
        store = config.get("store")
        if store and not self.options.data.get("store") and folders.rank() == 0:
            tell(
                f"The states of the fit are kept in {store}: `--data.store {store}` reads them."
            )

    def data_like(self, config: Mapping[str, Any]) -> pl.LightningDataModule:
        """Make another data module, with a checkpoint's data options, and this run's where they are of the machine.

        Args:
            config: the checkpoint's data options.

        Raises:
            ValueError: as `use_data_of` does, or an option is wrong.
        """
        parser = self.command.parser()
        other = Run(self.command, parser, parser.parse_args([]))
        other.use_data_of(config)
        for name in ("batch_size", "workers", *NOT_OF_FILES):
            if name in self.options.data:
                other.options.data[name] = self.options.data[name]
        return other.parser.instantiate(other.options).data

    def check_begun(self) -> None:
        """Raise unless the folder that `--run` names was begun with these options.

        Raises:
            ValueError: its config.yaml is damaged, or says something else; options that change no result may differ.
        """
        check_begun(self.options.run, yaml.safe_load(self.parser.dump(self.options)))

    def claim(self, *, begun: bool = False) -> None:
        """Claim the run's folder with config.yaml.

        Args:
            begun: whether to resume the run in the folder `--run`.

        Raises:
            ValueError: another command has claimed the folder, or it cannot be written to.
        """
        self.folder = folders.new_run_folder(
            self.options.run, self.command.kind or "", begun=begun
        )
        let_write(self.folder)
        if folders.rank() == 0:
            folders.claim(self.folder, self.parser.dump(self.options), begun=begun)

    def start(self, *, begun: bool = False) -> None:
        """Begin the run: claim its folder, then start its loggers.

        Args:
            begun: see `claim`.

        Raises:
            ValueError: an option is wrong, another command has claimed the folder, or it cannot be written to.
        """
        check_machine(self.options.trainer)
        trainer = self.made.trainer
        resumed = self.options.get("ckpt_path")
        self.claim(begun=begun)  # before W&B starts, which can take half a minute
        before = self.folder if begun else folders.interrupted_run(resumed)
        number = None if before is None else unfinished(before)
        if folders.rank() == 0:
            self._claim_checkpoints(resumed and Path(resumed))
        self.settings = dict(vars(trainer))
        self.settings["use_distributed_sampler"] = (
            False  # data modules divide the batches among ranks
        )
        if trainer.logger in (None, True):
            self.settings["logger"] = self._new_loggers(number, begun=begun)
        if trainer.default_root_dir is None:  # for files that no logger stores
            self.settings["default_root_dir"] = str(self.folder)
        for logger in _listed(self.settings["logger"]):
            if isinstance(logger, WandbLogger) and folders.rank() == 0:
                self._tell_wandb(logger.experiment)

    def _claim_checkpoints(self, resumed: Path | None) -> None:
        """Tidy the folder that the run resumes from, and claim another one for its checkpoints, if they have one."""
        if resumed:  # that run may have been killed while writing
            folders.tidy(resumed if resumed.is_dir() else resumed.parent)
        saving = self.options.get("checkpoint")
        if isinstance(saving, Namespace) and saving.get("folder") is not None:
            folders.claim_checkpoints(saving.folder, self.folder, resumed)

    def _new_loggers(self, number: str | None, *, begun: bool) -> list[Logger]:
        """Make the loggers of the run; at W&B it has the number of the interrupted run, or a new one."""
        place = self.folder
        if begun:  # a separate folder, because a logger deletes the files that it finds in its own
            times = len(list(self.folder.glob("resumed-*")))
            place = self.folder / f"resumed-{times + 1}"
        if folders.rank() == 0:
            number = new_number(self.folder, number)
            _at_the_end.append(partial(complete, self.folder))
        return run_loggers(place, self.command.kind or "", number)

    def _tell_wandb(self, experiment: Any) -> None:
        """Give W&B the options now, and at the end a record of what the run has used and left."""
        written = yaml.safe_load(self.parser.dump(self.options))
        experiment.config.update(written, allow_val_change=True)
        _at_the_end.append(
            partial(tell_wandb, experiment, self.folder, self.options, self.made)
        )

    def resumed_by(self) -> dict[str, Path] | None:
        """Return the options with which a command resumes this training; None if nothing is saved."""
        saving = self.options.get("checkpoint")
        if not hasattr(self, "folder") or "ckpt_path" not in self.options:
            return None
        if not isinstance(saving, Namespace):
            return None
        saved = folders.goes_on_from(self.folder, saving.folder)
        return None if saved is None else {**self._next_run(), "ckpt_path": saved}

    def begun_again_by(self) -> dict[str, Path] | None:
        """Return the option to name another folder, if this run's is named and no longer empty; else None."""
        folders.release_unused()
        if not hasattr(self, "folder") or folders.is_free(self.folder):
            return None
        return self._next_run() or None

    def _next_run(self) -> dict[str, Path]:
        """Return the option of a free folder, if this run's is named."""
        if not self.options.get("run"):
            return {}
        for number in count(2):
            folder = self.folder.with_name(f"{self.folder.name}-{number}")
            if not folder.exists():
                break
        return {"run": folder}

    def trainer(self, *callbacks: pl.Callback, **changes: Any) -> pl.Trainer:
        """Make a Trainer for this run.

        Args:
            callbacks: callbacks besides the progress bar and copies of the user's callbacks.
            changes: settings that differ.

        Raises:
            ValueError: an option is of the wrong type.
        """
        settings = {**self.settings, **changes}
        given = deepcopy(_listed(settings["callbacks"]))
        if settings["enable_progress_bar"] is not False:
            given.append(ProgressBar())
        settings["callbacks"] = [*given, *callbacks]
        saving = any(isinstance(callback, Checkpoint) for callback in callbacks)
        settings["enable_checkpointing"] = saving or settings["enable_checkpointing"]
        settings["plugins"] = _listed(settings["plugins"])
        if not any(isinstance(plugin, CheckpointIO) for plugin in settings["plugins"]):
            settings["plugins"] = [*settings["plugins"], WholeCheckpoints()]
        try:
            return pl.Trainer(**settings)
        except (
            TypeError,
            ValueError,
        ) as error:  # another type of `devices`, or no such strategy
            raise UserError(
                f"Lightning's Trainer does not take these options: {error}"
            ) from error

    def training(self, *callbacks: pl.Callback) -> pl.Trainer:
        """Make a Trainer that keeps each site's best parameters and saves the maps."""
        return self.trainer(
            self.made.early_stopping,
            self.made.checkpoint.inside(self.folder),
            *callbacks,
        )

    def fit(self, trainer: pl.Trainer) -> None:
        """Train what the options describe. Only tensors and plain values are read from a checkpoint."""
        built, resumed = self.made, self.options.ckpt_path
        trainer.fit(
            built.model, datamodule=built.data, ckpt_path=resumed, weights_only=True
        )

    def test(
        self,
        evaluation: pl.LightningModule,
        kind: str,
        *callbacks: pl.Callback,
        **options: Any,
    ) -> None:
        """Test a LightningModule on this run's data, and report.

        Args:
            evaluation: the LightningModule.
            kind: the kind of report.
            callbacks: callbacks besides those of every run.
            options: arguments of the report.
        """
        trainer = self.trainer(WriteReport(kind, self.folder, **options), *callbacks)
        trainer.test(evaluation, datamodule=self.made.data, verbose=False)

    def read(
        self,
        evaluation: pl.LightningModule,
        measure: Callable[[], None],
        kind: str,
        **changes: Any,
    ) -> None:
        """Let a LightningModule read this run's data, then measure, and report.

        Args:
            evaluation: the LightningModule, which reads as it is tested.
            measure: what to do once everything is read.
            kind: the kind of report.
            changes: settings of the Trainer that differ.
        """
        trainer = self.trainer(**changes)
        trainer.test(evaluation, datamodule=self.made.data, verbose=False)
        measure()
        write_report(evaluation, kind, self.folder, trainer)


def can_build(kind: Callable[..., Any]) -> Callable[[Namespace], object]:
    """Make a check that the class accepts these options."""
    return lambda options: kind(**options_of(kind, options))


def options_of(function: Callable[..., Any], options: Namespace) -> dict[str, Any]:
    """Select the options that a function or class takes as arguments."""
    return {
        name: options[name]
        for name in signature(function).parameters
        if name in options
    }


def _listed(given: Any) -> list[Any]:
    """Return one or several things, or None, as a list."""
    if given is None:
        return []
    return given if isinstance(given, list) else [given]
