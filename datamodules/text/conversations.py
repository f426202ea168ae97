"""Conversations: lists of messages, each with a role and a content, which a chat template turns into texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from aligners.datamodules.text.labels import is_mixed
from aligners.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

Tokenizers = Callable[[], Mapping[str, "PreTrainedTokenizerBase"]]


RENDERING = 2  # Increase it when conversations are rendered differently, as `datasets` caches the texts


def holds_conversations(table: Dataset, column: str) -> bool:
    """Whether the first value of a column that is not empty is a list of messages."""
    from datasets import List

    feature = table.features.get(column)
    if not (isinstance(feature, List) or is_mixed(feature)):
        return False
    first = next(filter(None, table[column]), None)
    message = first[0] if isinstance(first, list) else None
    return isinstance(message, Mapping) and {"role", "content"} <= set(message)


def template_of(
    chosen: str | None, tokenizers: Tokenizers | None
) -> tuple[str, PreTrainedTokenizerBase]:
    """Return the name of the model or file that has the chat template, and a tokenizer that renders with it.

    Args:
        chosen: one of the models, or a Jinja file. Default: the template that the models share.
        tokenizers: tokenizers of the models, by their names; None: there are no models.

    Raises:
        ValueError: there is no such file or model, or the models have no template, or different ones.
    """
    found = dict(tokenizers()) if tokenizers is not None else {}
    if chosen is not None and chosen not in found and found and Path(chosen).is_file():
        tokenizer = copy(next(iter(found.values())))
        tokenizer.chat_template = Path(chosen).read_text(encoding="utf-8")
        found = {chosen: tokenizer}
    having = {
        name: of
        for name, of in found.items()
        if of.chat_template and chosen in (None, name)
    }
    if (
        len({str([of.chat_template, of.special_tokens_map]) for of in having.values()})
        != 1
    ):
        got = (
            f"different ones for {' and '.join(having)}"
            if having
            else f"none of {chosen or ', '.join(found) or 'no model'}"
        )
        raise UserError(
            f"Expected one chat template, by which all models read the same conversations, but got {got}. Set "
            "`chat_template` to a Jinja file, or to one of the models that has one."
        )
    return next(iter(having.items()))


def rendered(
    table: Any, columns: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Any:
    """Return a table, or a stream of rows, with texts in place of conversations.

    Raises:
        ValueError: a row has no conversation, or one that the template rejects.
    """
    import datasets
    from datasets.fingerprint import Hasher

    options: dict[str, Any] = {}
    if isinstance(table, datasets.Dataset):
        # named by content: pickled tokenizers differ by what they were last used for
        decides = [
            RENDERING,
            table._fingerprint,
            *columns,
            tokenizer.chat_template,
            str(tokenizer.special_tokens_map),
        ]
        options = {
            "new_fingerprint": Hasher.hash(decides),
            "desc": "Rendering conversations",
        }
    if (
        table.features is not None
    ):  # with it, texts would be kept in the form that the conversations had
        kinds = {name: datasets.Value("string") for name in columns}
        options["features"] = datasets.Features({**table.features, **kinds})
    render = partial(_texts, columns=columns, tokenizer=tokenizer)
    return table.map(render, with_indices=True, **options)


def written_tokens(split: Dataset, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the numbers of all special tokens of a tokenizer, if the first of these texts contains any of them."""
    special = sorted(set(tokenizer.all_special_ids) - {tokenizer.unk_token_id})
    return (
        special
        if set(special)
        & set(tokenizer(split[0]["text"], add_special_tokens=False)["input_ids"])
        else []
    )


def _texts(
    row: Mapping[str, Any],
    number: int,
    columns: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    try:
        return {name: _text(row[name], tokenizer) for name in columns}
    except (TemplateError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"No chat template renders row {number} (counting from 0) as a conversation: {error}"
        ) from error


def _text(messages: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Render the text of a conversation."""
    if not messages:
        raise UserError("it is empty. Remove it from the data.")
    written = [_as_written(message) for message in messages]
    return tokenizer.apply_chat_template(written, tokenize=False)


def _as_written(value: Any) -> Any:
    """Return a message without the entries that only other messages have, which a table fills with None.

    Templates test for such entries. A `content` may be null, as in calls of tools.
    """
    if isinstance(value, Mapping):
        return {
            name: _as_written(entry)
            for name, entry in value.items()
            if entry is not None or name == "content"
        }
    return [_as_written(entry) for entry in value] if isinstance(value, list) else value
