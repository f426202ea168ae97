"""Texts that are conversations, by a chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from pyarrow import Table
from tests.tiny import WORDS, tiny_folder, tiny_tokenizer
from transformers import PreTrainedTokenizerBase

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.splits import TokenisedSplits
from aligners.errors import UserError

TEMPLATE = "<s>{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}</s>"
PLAIN = "{% for m in messages %}{{ m.content }} {% endfor %}"


def with_template(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def talks(n: int = 40) -> list[dict[str, Any]]:
    def said(i: int) -> list[dict[str, str]]:
        asked, answer = WORDS[i % 30], WORDS[(i * 7) % 31]
        return [{"role": "user", "content": f"{asked} {i}"}, {"role": "assistant", "content": f"{answer} film"}]

    return [{"prompt_id": i, "messages": said(i), "label": i % 2} for i in range(n)]


@pytest.fixture(params=["jsonl", "parquet"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"chat.{request.param}"
    if request.param == "jsonl":
        path.write_text("\n".join(map(json.dumps, talks())))
    else:
        Dataset.from_list(talks()).to_parquet(path)
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_conversations_are_rendered_by_the_template_of_the_models(file: Path, streaming: bool) -> None:
    models = {"base": with_template(None), "instruct": with_template(TEMPLATE)}
    source = TextSource(str(file), streaming=streaming, max_texts=30 if streaming else None)
    texts = load_texts(source, lambda: models)
    every = {text for split in (texts.fit, texts.validation, texts.test) for text in split["text"][:]}
    expected = {models["instruct"].apply_chat_template(row["messages"], tokenize=False) for row in talks()}
    assert every <= expected
    assert streaming or every == expected
    assert (texts.origin["chat_template"], texts.origin["text_columns"]) == ("instruct", ["messages"])
    assert set(texts.fit["label"][:]) == {0, 1}


def test_special_tokens_are_not_doubled(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, talks())))
    for template, max_length in ((TEMPLATE, 60), (PLAIN, 60), (TEMPLATE, 5)):
        tokenizer = with_template(template)
        texts = load_texts(TextSource(str(path)), lambda found=tokenizer: {"model": found})
        splits = TokenisedSplits(texts, [tokenizer], max_length, words=True)
        table = splits["test"].tables[0]
        for ids, special, text in zip(
            table["input_ids"][:], table["special_tokens_mask"][:], texts.test["text"][:], strict=True
        ):
            assert ids.count(0) == 1
            assert (ids[0], ids[-1]) == (0, 2 if max_length == 60 else ids[-1])
            assert [i for i, flag in zip(ids, special, strict=True) if flag] == [i for i in ids if i in (0, 2)]
            whole = tokenizer(text, add_special_tokens=template == PLAIN)["input_ids"]
            assert ids == whole[:max_length]
        size = sum(len(text.encode()) for text in texts.test["text"][:])
        tokens = sum(table["length"][:]) - (2 * len(table) if template == PLAIN else 0)
        if max_length == 60:
            assert splits.bytes_per_token("test") == size / tokens
        else:  # what was cut does not count
            assert 1 < splits.bytes_per_token("test") < size / tokens


def test_one_template_must_be_meant(file: Path, tmp_path: Path) -> None:
    def load(templates: dict[str, str | None], **options: Any) -> Any:
        models = {name: with_template(template) for name, template in templates.items()}
        texts = load_texts(TextSource(str(file), **options), lambda: models)
        return texts.origin["chat_template"], texts.test["text"][0].startswith("<s>")

    assert load({"x": TEMPLATE, "y": TEMPLATE}) == ("x", True)
    assert load({"x": TEMPLATE, "y": PLAIN}, chat_template="y") == ("y", False)
    written = tmp_path / "mine.jinja"
    written.write_text(PLAIN)
    assert load({"x": TEMPLATE, "y": None}, chat_template=str(written)) == (str(written), False)
    with pytest.raises(UserError, match=r"but got different ones for x and y\. Set `chat_template` to a Jinja file"):
        load({"x": TEMPLATE, "y": PLAIN})
    for templates, options in (({"x": None}, {}), ({}, {}), ({"x": TEMPLATE, "y": None}, {"chat_template": "y"})):
        with pytest.raises(UserError, match=r"one chat template.*but got none"):
            load(templates, **options)
    with pytest.raises(UserError, match=r"one chat template.*but got none of gone\.jinja"):
        load({"x": TEMPLATE}, chat_template="gone.jinja")
    with pytest.raises(UserError, match="one chat template"):
        load_texts(TextSource(str(file)))


CALLS = (
    "{% for m in messages %}{{ m.role }} {% if 'tool_calls' in m %}calls {{ m.tool_calls[0].function.name }}"
    "{% elif m.name is defined %}{{ m.name }} says {{ m.content }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)


def calls(n: int = 40) -> list[dict[str, Any]]:
    """Conversations whose messages have different entries."""
    rows = []
    for i in range(n):
        call = {"type": "function", "function": {"name": f"f{i}", "arguments": {f"of_{i % 3}": i}}}
        messages = [{"role": "user", "content": f"ask {i}"}, {"role": "assistant", "content": f"answer {i}"}]
        if i % 3 == 1:
            messages[0]["name"] = "bob"
        if i % 3 == 2:
            messages[1] = {"role": "assistant", "content": None, "tool_calls": [call]}
        rows.append({"messages": messages})
    return rows


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("end", ["jsonl", "parquet"])
def test_messages_may_have_different_entries(tmp_path: Path, end: str, streaming: bool) -> None:
    path = tmp_path / f"chat.{end}"
    if end == "jsonl":
        path.write_text("\n".join(map(json.dumps, calls())))
    else:  # which fills the entries that a message lacks with null
        Table.from_pylist(calls()).to_pandas().to_parquet(path)
    source = TextSource(str(path), streaming=streaming, max_texts=40 if streaming else None)
    texts = load_texts(source, lambda: {"model": with_template(CALLS)})
    expected = set()
    for i in range(40):
        asked = f"user bob says ask {i};" if i % 3 == 1 else f"user ask {i};"
        expected.add(asked + (f"assistant calls f{i};" if i % 3 == 2 else f"assistant answer {i};"))
    assert {text for split in (texts.fit, texts.validation, texts.test) for text in split["text"][:]} == expected
    assert set(texts.fit.column_names) == {"id", "text"}


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"messages": []}, TEMPLATE, r"renders row 4 \(counting from 0\) as a conversation: it is empty. Remove it"),
        ({"messages": None}, TEMPLATE, "row 4"),
        ({}, "{{ raise_exception('roles must alternate') }}", "row 0 .*roles must alternate"),
        ({}, "{% for %}", "row 0"),
    ],
)
def test_what_cannot_be_rendered_is_said(row: dict[str, Any], template: str, says: str, tmp_path: Path) -> None:
    rows = talks(8)
    rows[4] |= row
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=says):
        load_texts(TextSource(str(path)), lambda: {"model": with_template(template)})


def test_an_empty_first_conversation_is_said(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"messages": []}, *talks(8)])))
    with pytest.raises(UserError, match=r"renders row 0 \(counting from 0\) as a conversation: it is empty"):
        load_texts(TextSource(str(path)), lambda: {"model": with_template(TEMPLATE)})


def test_several_columns_of_text_must_be_chosen_from(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps({**row, "prompt": f"{row['prompt_id']}"}) for row in talks()))
    with pytest.raises(UserError, match="2 of its columns hold text"):
        load_texts(TextSource(str(path)), lambda: {"model": with_template(TEMPLATE)})
    texts = load_texts(TextSource(str(path), text_columns=["messages"]), lambda: {"model": with_template(TEMPLATE)})
    assert texts.origin["chat_template"] == "model"


def test_a_data_module_takes_the_template_of_its_models(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, talks())))
    names = [str(tiny_folder(tmp_path / name, "llama", task="causal")) for name in ("base", "instruct")]
    with_template(TEMPLATE).save_pretrained(names[1])
    data = LayerActivations(names, text=TextSource(str(path), label_column=None), max_length=20)
    data.setup("test")
    assert data.describe()["text"]["chat_template"] == names[1]
    assert data.tokenised["test"].tables[0]["input_ids"][0][:2] != [0, 0]
    embedded = LayerActivations(["embedded-gpt:0"], text=TextSource(str(path)))
    with pytest.raises(UserError, match="one chat template"):
        _ = embedded.texts
