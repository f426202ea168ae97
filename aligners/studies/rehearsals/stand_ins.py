"""What stands in for models and texts: random models of their families, generated data sets, files."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
import transformers
from datasets import ClassLabel, Dataset, Features, load_dataset
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub.file_download import repo_folder_name
from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from aligners.datamodules.text.annotated.annotated_files import TREEBANK
from aligners.datamodules.text.annotated.grammar import Lexicon, sentences
from aligners.datamodules.text.annotated.sentence import Sentence
from aligners.models.architectures import FAMILIES
from aligners.models.loading.model_files import quiet, read_config, save_model
from aligners.models.loading.named import located
from aligners.models.tokenizers import byte_pairs

STEMS, MOST_WORDS = 60, 14  # few words, so that a small tokenizer knows them, and short sentences
Columns = Mapping[str, str | Sequence[str]]
TEXTS = {"text": 1, "texts": 4}  # of a row


def drawn_sentences(count: int, seed: int = 0) -> list[Sentence]:
    """Different short sentences of the project's grammar."""
    drawn: dict[str, Sentence] = {}
    for sentence in sentences(100 * count, seed, Lexicon(0, STEMS)):
        if len(sentence.words) <= MOST_WORDS:
            drawn[sentence.text] = sentence
        if len(drawn) == count:
            break
    return list(drawn.values())


def generated(columns: Columns, rows: int, seed: int) -> Dataset:
    """Rows of a data set.

    Args:
        columns: name -> `text`, `texts` (a list), `number`, `score` (in [0, 5)), `truth`, `answer` (the first word of
            `context`, which stands before it), or the names of classes.
        rows: how many.
        seed: of the texts.
    """
    texts = iter(
        drawn_sentences(rows * sum(TEXTS.get(str(kind), 0) for kind in columns.values()), seed)
    )
    kinds: dict[str, Callable[[int], Any]] = {
        "text": lambda _: next(texts).text,
        "texts": lambda _: [next(texts).text for _ in range(TEXTS["texts"])],
        "number": lambda row: row,
        "score": lambda row: row * 7 % 50 / 10,
        "truth": lambda row: row * 7 % 5 < 3,
        "answer": lambda row: {"text": [values["context"][row].split()[0]], "answer_start": [0]},
    }
    values = dict[str, list[Any]]()
    for name, kind in columns.items():
        values[name] = [
            kinds[kind](row) if isinstance(kind, str) else row * 7 % 11 % len(kind)
            for row in range(rows)
        ]
    table = Dataset.from_dict(values)
    classes = {
        name: ClassLabel(names=list(kind))
        for name, kind in columns.items()
        if not isinstance(kind, str)
    }
    return table.cast(Features({**table.features, **classes}))


def first_rows(name: str, subset: str | None, rows: int) -> dict[str, Dataset] | None:
    """The first rows of every split of a data set on the Hub; None if it cannot be reached."""
    try:
        splits = dict(load_dataset(name, subset, streaming=True))
        return {
            split: Dataset.from_list(list(of.take(rows)), features=of.features)
            for split, of in splits.items()
        }
    except (OSError, ValueError):  # no such data set, gated, offline
        return None


def put_dataset(cache: Path, name: str, subset: str | None, splits: Mapping[str, Dataset]) -> None:
    """Write a data set where `load_dataset` finds it without a network.

    Args:
        cache: what HF_DATASETS_CACHE will name.
        name: its id on the Hub.
        subset: its configuration.
        splits: by their names.
    """
    *owner, short = name.split("/")
    config, short = subset or "default", camelcase_to_snakecase(short)
    place = cache / "___".join([*owner, short]) / config / "0.0.0"
    place.mkdir(parents=True, exist_ok=True)
    files = {split: str(place / f"{split}.parquet") for split in splits}
    for split, table in splits.items():
        table.to_parquet(files[split])
    builder = Parquet(str(cache), short, config, data_files=files)
    builder.download_and_prepare(str(place / "rehearsal"))


def put_file(path: Path, columns: Columns, rows: int, seed: int, *, annotated: bool) -> None:
    """Write a file of texts, of the kind that its name ends in.

    Args:
        path: of the file.
        columns: of a table, as for `generated`.
        rows: texts.
        seed: of the texts.
        annotated: whether JSON lines are sentences with labelled spans.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = drawn_sentences(rows, seed)
    if path.suffix == TREEBANK:
        path.write_text("\n".join(map(_tree, lines)), encoding="utf-8")
    elif path.suffix == ".txt":
        path.write_text("".join(f"{sentence.text}\n" for sentence in lines), encoding="utf-8")
    elif annotated and path.suffix in (".json", ".jsonl"):
        path.write_text(
            "".join(f"{json.dumps(_spans(sentence))}\n" for sentence in lines), encoding="utf-8"
        )
    else:
        writers = {
            ".parquet": Dataset.to_parquet,
            ".csv": Dataset.to_csv,
            ".tsv": partial(Dataset.to_csv, sep="\t"),
        }
        writers.get(path.suffix, Dataset.to_json)(generated(columns, rows, seed), path)


def _tree(sentence: Sentence) -> str:
    """A sentence as CoNLL-U."""
    pos, relations = sentence.labels("pos"), sentence.labels("dependencies")
    words = enumerate(zip(sentence.words, sentence.heads, strict=True))
    fields = (
        [n + 1, word, "_", pos[n], "_", "_", head, relations.get(n, "root"), "_", "_"]
        for n, (word, head) in words
    )
    return "".join("\t".join(map(str, line)) + "\n" for line in fields)


def _spans(sentence: Sentence) -> dict[str, Any]:
    """A sentence with its roles as labelled pairs of spans."""
    targets = [target for target in sentence.targets if target.task == "roles"]
    spans = [
        {"span1": target.span1, "span2": target.span2, "label": target.labels[0]}
        for target in targets
    ]
    return {"text": sentence.text, "targets": spans}


COMMIT = "0" * 40  # by which the cache of the Hub knows the files
VOCABULARY, LONGEST = 600, 128  # pieces of a tokenizer; tokens of a text
BLOCKS, WIDTH, STEP = (
    3,
    384,
    8,
)  # a stand-in has a third of the blocks, and 8 of every 384 components
SOURCE = {"revision": None, "trust_remote_code": False}


class About(NamedTuple):
    """What is known of a model.

    Attributes:
        family: the `model_type` of its config.
        architecture: the class that its config names.
        layers: blocks.
        width: of its states.
        labels: names of its classes; none: those of its class.
        assumed: what of it was guessed, in words; empty: nothing.
    """

    family: str
    architecture: str
    layers: int
    width: int
    labels: Sequence[str] = ()
    assumed: str = ""


def about_model(name: str, known: Mapping[str, Mapping[str, Any]]) -> About:
    """What is known of a model: by its config, by the begin of its name, or else by a family in its name.

    Args:
        name: Hub id or folder.
        known: begin of a name -> attributes of `About`.
    """
    try:
        config: Any = read_config(name, SOURCE)
        sizes = config.get_text_config()
        labels = (
            list(config.id2label.values()) if "Classification" in config.architectures[0] else ()
        )
        return About(
            config.model_type,
            config.architectures[0],
            sizes.num_hidden_layers,
            sizes.hidden_size,
            labels,
        )
    except (ValueError, TypeError):  # it cannot be reached, or names no class
        begins = [begin for begin in known if name.startswith(begin)]
    if begins:
        return About(**known[max(begins, key=len)])
    plain = name.lower().replace("_", "-")
    families = sorted(FAMILIES, key=len, reverse=True)
    family = next((family for family in families if family.replace("_", "-") in plain), "bert")
    model: Any = transformers.MODEL_MAPPING[CONFIG_MAPPING[family]]
    return About(
        family, model.__name__, 12, 768, (), f"family {family}, no head, 12 blocks of width 768"
    )


def put_model(
    hub: Path,
    name: str,
    about: About,
    texts: Sequence[str],
    settings: Mapping[str, Any],
    least_layers: int,
) -> PreTrainedConfig:
    """Write a random model where `from_pretrained` finds it without a network.

    Args:
        hub: what HF_HUB_CACHE will name.
        name: its id on the Hub.
        about: what is known of it.
        texts: from which its tokenizer learns, if it cannot be reached.
        settings: of its config.
        least_layers: blocks that it needs.

    Returns:
        Its config.
    """
    repository, where = located(name, {})
    place = hub / repo_folder_name(repo_id=repository, repo_type="model")
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(crc32(name.encode()))
        tokenizer = _tokenizer(name, about.family, texts)
        kind: Any = CONFIG_MAPPING[about.family]
        given: dict[str, Any] = {
            "vocab_size": len(tokenizer),
            "hidden_size": STEP * max(2, round(about.width / WIDTH)),
            "num_hidden_layers": max(least_layers, about.layers // BLOCKS),
            "id2label": dict(enumerate(about.labels)) or None,
            **{
                f"{name}_token_id": getattr(tokenizer, f"{name}_token_id", None)
                for name in ("pad", "bos", "eos")
            },
            **settings,
        }
        config = kind(
            **{kind.attribute_map.get(name, name): n for name, n in given.items() if n is not None}
        )
        model = getattr(transformers, about.architecture)(config)
        save_model(place / "snapshots" / COMMIT / where.get("subfolder", ""), model, tokenizer)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(COMMIT)
    return config


def _tokenizer(name: str, family: str, texts: Sequence[str]) -> PreTrainedTokenizerBase:
    """The model's own tokenizer; if it cannot be reached, one that its family shares."""
    try:
        return AutoTokenizer.from_pretrained(name, **SOURCE)
    except (OSError, ValueError):
        return _learned_tokenizer(family, tuple(texts))


@cache
def _learned_tokenizer(family: str, texts: tuple[str, ...]) -> PreTrainedTokenizerBase:
    """A tokenizer of the family's class that learns from texts; of byte-level pieces, if the family has none."""
    named = TOKENIZER_MAPPING_NAMES.get(family)
    kind = tokenizer_class_from_name(named) if named and named != "TokenizersBackend" else None
    if kind is None:
        return byte_pairs(list(texts), VOCABULARY, LONGEST)
    empty = kind()
    empty.init_kwargs["model_max_length"] = LONGEST
    return empty.train_new_from_iterator(texts, VOCABULARY, show_progress=False)
