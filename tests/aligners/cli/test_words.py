"""Help and the first check of options, which import nothing; and the parser's errors in plain words."""

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from benchmarks.real.run import TABLE, words_of
from tests.aligners.cli.test_stopped import STOPPED
from tests.processes import ROOT

from aligners.cli.known import option_cache as known
from aligners.cli.known.describe_options import describe, example_of
from aligners.cli.parsing import OptionParser, actions_of, hint_of
from aligners.cli.table import COMMANDS, find, known_options, train
from aligners.cli.words import CONFIGS, as_parsed, help_of
from aligners.errors import UserError

EVERY = [f"{script} {name}" for script, names in COMMANDS.items() for name in names]
parser_of = cache(lambda command: find(*command.split()).parser())
SHOWN = re.compile(
    r"(?:python )?(train|evaluate|study)\.py ((?:\\\n|[^\n`])+)|aligners (train|evaluate|study) ([^\n`]+)"
)
HEAVY = {"torch", "lightning", "transformers", "jsonargparse", "wandb", "matplotlib", "datasets", "numpy"}


def understood(command: str, words: list[str]) -> list[str]:
    return as_parsed(known_options(*command.split()), words)


def written_commands() -> list[tuple[str, list[str]]]:
    """All command lines of the README, the docs, the benchmark of real models, and the tests that stop commands."""
    lines = [(command, words) for command, (_, words) in STOPPED.items()]
    for script, name, *words in map(words_of, TABLE["commands"]):
        if "/" not in script:  # a benchmark is no command
            lines.append((f"{script.removesuffix('.py')} {name}", words))
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for found in SHOWN.finditer(page.read_text()):
            script, rest = found[1] or found[3], (found[2] or found[4]).replace("\\\n", " ").partition(" #")[0]
            words = shlex.split(rest.replace("'", '"') if rest.count("'") % 2 else rest)
            if words and f"{script} {words[0]}" in EVERY:
                lines.append((f"{script} {words[0]}", [word for word in words[1:] if word not in ("...", "--help")]))
    return lines


@pytest.fixture
def cache_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, in which nothing is kept yet."""
    monkeypatch.setenv("ALIGNERS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_kept_is_what_the_parser_says(cache_here: Path) -> None:
    about = describe(find("train", "fit"), "train", "fit")
    assert known.kept("train fit") is None
    known.keep("train fit", about)
    assert known.kept("train fit") == about
    assert known.kept("train probe") is None


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b'{"of": 1}', b"[" * 100_000])
def test_what_is_broken_is_as_if_it_were_not_there(content: bytes, cache_here: Path) -> None:
    known.keep("train fit", dict.fromkeys(known.PARTS, ""))
    (file,) = cache_here.rglob("*.json")
    file.write_bytes(content)
    assert known.kept("train fit") is None


def test_what_cannot_be_kept_is_done_without(cache_here: Path) -> None:
    cache_here.write_text("a file, not a folder")
    known.keep("train fit", dict.fromkeys(known.PARTS, ""))
    assert known.kept("train fit") is None


def test_an_edit_of_a_source_or_table_is_noticed(
    cache_here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    (package / "cli").mkdir(parents=True)
    monkeypatch.setattr(known, "PACKAGE", package)
    for name in ("a.py", "cli/b.yaml"):
        known.keep("train fit", dict.fromkeys(known.PARTS, ""))
        assert known.kept("train fit") is not None
        (package / name).write_text("x")
        assert known.kept("train fit") is None


def there(word: str, folder: Path) -> str:
    """The word with files that are there, and hold nothing, in place of those that it names."""
    (folder / "empty").touch()
    return re.sub(r"[^\s=\[\],\"']+\.(yaml|safetensors)|{fit}", str(folder / "empty"), word)


def test_command_lines_that_people_read_are_understood(tmp_path: Path) -> None:
    lines = written_commands()
    assert len(lines) > 80
    assert {command for command, _ in lines} >= {*STOPPED, "evaluate show", "study run", "study retry"}
    for command, words in lines:
        understood(command, [there(word, tmp_path) for word in words])


@pytest.mark.parametrize("command", EVERY)
def test_an_example_is_what_the_command_takes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about, (script, name) = known_options(*command.split()), command.split()
    words = [there(word, tmp_path) for word in shlex.split(example_of(find(script, name)))]
    assert words
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of(command.replace(" ", ".py "), about).splitlines()
    assert len(shown) <= 40
    assert max(len(line) for line in shown if "--help all" not in line) <= 80
    if command != "study run":  # whose file's name comes first
        parser_of(command).parse_args(understood(command, words))


def test_help_and_errors_import_nothing(tmp_path: Path) -> None:
    for name in ("fit", "universe"):
        known_options("train", name)
    lines = [
        ["fit", "--help"],
        ["--version"],
        ["fit", "--data.batch_size", "ten"],
        ["fit", "--config", "nothing"],
        ["fit", "--data.component", "resid"],
    ]
    code = f"""
import sys
from aligners.cli.table import known_options, train
from aligners.cli.words import as_parsed
from aligners.errors import UserError
for words in {lines}:
    try:
        train(words)
    except UserError as error:
        print(error)
own = ["--data.rows", "mine", "--model.aligners", "Mine", "--of_mine", "3"]  # which the parser decides
print(as_parsed(known_options("train", "fit"), own))
assert not {HEAVY} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for said in (
        "python train.py fit --data.model_x embedded:0",
        "torch 2",
        "`--data.batch_size` to be a whole number, but got 'ten'",
        "one of by_rows, classifiers, closed_forms, demo",
        "`--data.component` to be residual or attention or mlp, but got 'resid'",
        '--model.aligners={"mine": "Mine"}',
        "--data.rows=mine",
    ):
        assert said in done.stdout


# What is refused at once; the parser refuses it, too.
REFUSED = [
    *(["--data.batch_size", "3.0"], ["--data.batch_size=1e3"], ["--data.batch_size", "true"], ["--data.batch_size="]),
    *(["--data.batch_size", "null"], ["--data.held_out_types", "inf"], ["--upload", "1"], ["--seed_everything", "x"]),
    *(["--upload"], ["--run", "--upload", "true"], ["--data.component", "resid"], ["--data.component", "null"]),
    *(["--trainer.max_epochs", "x"], ["--model.rows", "all"], ["--trainer.min_steps", "x"]),
]
# What the parser alone refuses: it is not known here.
UNKNOWN = [
    *(["--data.batch_size.x", "3"], ["--data.batch", "3"], ["--foo", "3"], ["--data.foo=3"], ["--checkpoints", "x"]),
    *(["--data.text.sorce", "x"], ["--config", "{data: {sorce: x}}"], ["--model.aligners", "{linear: Linaer}"]),
]
TAKEN = [
    *(["--data.batch_size", "1_000"], ["--data.batch_size", "0x10"], ["--data.batch_size", " 3 "], ["--upload", "yes"]),
    *(["--data.held_out_types", "5e-1"], ["--data.held_out_types=1"], ["--data.sites", "1,2:4"], ["-c", "inn"]),
    *(["--data.text", "{source: x}"], ["--model.optimizer.lr", "3"], ["--data.sites=[1,2]"]),
    *(["--data.sites", "1", "2"], ["--model.aligners.inn", "INN", "--model.aligners.inn.init_args.couplings", "3"]),
    *(["--trainer.precision", "16-mixed"], ["--model.optimizer", "SGD", "--model.optimizer.lr=1e-3"]),
    *(["--data.model_x", "3"], ["--trainer.devices", "2"]),
    *(["--model.warmup", "-.5"], ["--model.warmup", ".5e3"], ["--model.warmup=1_0e3"], ["--run", "-"]),
    *(["--data.labels", "{a: 0, b: [1, 2]}"], ["--seed_everything", "true"], ["--sites_at_once", "null"]),
]


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_what_is_refused_at_once_the_parser_refuses(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"^Expected "):
        understood("train fit", words)
    with pytest.raises(UserError):
        parser_of("train fit").parse_args(words)


@pytest.mark.parametrize("words", UNKNOWN, ids=" ".join)
def test_what_is_not_known_is_for_the_parser_to_refuse(words: list[str]) -> None:
    with pytest.raises(UserError):
        parser_of("train fit").parse_args(understood("train fit", words))


def test_what_is_used_of_argparse_and_jsonargparse_without_their_promise_is_there() -> None:
    """See `aligners.cli.parsing`. A version without it would show no options, and read no lists of words."""
    by_name = {action.dest: action for action in actions_of(parser_of("train fit"))}
    assert hint_of(by_name["data.batch_size"]) is int
    assert hint_of(by_name["config"]) is None
    with pytest.raises(UserError, match=r"`couplings` of `--model\.aligners`"):  # by the parser of a class
        parser_of("train fit").parse_args(["--model.aligners.a", "INN", "--model.aligners.a.init_args.couplings", "x"])


def test_what_the_parser_takes_is_understood() -> None:
    parser = parser_of("train fit")
    inn = str(ROOT / "aligners/configs/train/inn.yaml")
    for words in TAKEN:
        parser.parse_args(understood("train fit", [inn if word == "inn" else word for word in words]))
    understood("train fit", ["--trainer.of_a_later_version", "3", "--print_config"])


def test_a_whole_number_is_read_as_one_wherever_its_kinds_stand() -> None:
    """`typing` gives equal unions the order of the one that any package has named first."""

    class Limited:
        def __init__(self, limit: float | int | None = None) -> None: ...

    parser = OptionParser()
    parser.add_class_arguments(Limited, "trainer")
    values = [parser.parse_args(["--trainer.limit", word]).trainer.limit for word in ("3", "0.5", "null")]
    assert [(value, type(value)) for value in values] == [(3, int), (0.5, float), (None, type(None))]


@pytest.mark.parametrize(
    ("command", "typed", "parsed"),
    [
        ("evaluate inject", "--checkpoints a.safetensors", '--checkpoints=["a.safetensors"]'),
        ("evaluate inject", "--checkpoints a 'b c' --seed 1", '--checkpoints=["a", "b c"] --seed=1'),
        ("evaluate inject", "--checkpoints a '--run=b c'", '--checkpoints=["a"] --run=b c'),
        ("evaluate inject", "--checkpoints [a,b]", "--checkpoints=[a,b]"),
        ("evaluate inject", "--checkpoints [a, b]", "--checkpoints=[a, b]"),
        ("evaluate inject", "--checkpoints+ a", "--checkpoints+=a"),
        ("evaluate inject", "--closed_form=linear,cca", '--closed_form=["linear", "cca"]'),
        ("evaluate similarity", "--measures cka", "--measures=cka"),
        ("evaluate similarity", "--measures cka rsa", '--measures=["cka", "rsa"]'),
        ("evaluate bijection", "--steps 100 300", "--steps=[100, 300]"),
        ("train fit", "--model.aligners linear INN", '--model.aligners={"linear": "Linear", "inn": "INN"}'),
        (
            "train fit",
            "--imports mine.py --model.aligners Mine",
            '--imports=["mine.py"] --model.aligners={"mine": "Mine"}',
        ),
        ("evaluate share", "run folder --names a b", 'run folder --names=["a"] b'),
        ("train fit", "-c demo", f"--config={CONFIGS}/train/demo.yaml"),
        ("train fit", "-c=demo", f"--config={CONFIGS}/train/demo.yaml"),
        ("train fit", "--model.warmup -1", "--model.warmup=-1"),
        ("evaluate show", "-- -run", "-- -run"),
    ],
)
def test_lists_and_maps_may_be_bare_words(
    command: str, typed: str, parsed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "b c", "a.safetensors"):
        Path(name).touch()
    assert " ".join(understood(command, shlex.split(typed))) == parsed


def test_folders_of_the_same_names_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo", "linear"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    config = f"--config={CONFIGS}/train/demo.yaml"
    words = ["--config", "demo", "--model.aligners", "linear", "mlp"]
    assert understood("train fit", words) == [config, '--model.aligners={"linear": "Linear", "mlp": "MLP"}']


RAW = re.compile(r"<class|Parser key|Union|NestedArg|typing\.|Namespace|Does not validate|jsonargparse")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.site", "all"], "got --data.site. Did you mean --data.sites or "),
        (["--trainer.max_epochs", "x"], "Expected `--trainer.max_epochs` to be a whole number, but got 'x'."),
        (["--trainer.foo", "1"], "Expected options of `fit`, but got --trainer.foo."),
        (["--model.aligners", "{a: Linaer}"], "but got Linaer. Did you mean Linear?"),
        (["--model.aligners.a", "Linaer"], "but got Linaer. Did you mean Linear?"),
        (["--model.aligners", "{a: {class_path: INN, init_args: {rigde: 1}}}"], "but got rigde."),
        (
            ["--model.aligners", "{a: {class_path: INN, init_args: {couplings: x}}}"],
            "`couplings` of `--model.aligners`",
        ),
        (["--model.aligners", "{a: torch.nn.Linear}"], "--model.aligners"),
        (["--model.optimizer", "Foo"], "Expected `--model.optimizer` out of the full paths of classes, but got Foo."),
        (["--model.optimizer", "SGD", "--model.optimizer.lr", "x"], "`lr` of `--model.optimizer` to be a number"),
        (["--data.labels", "x"], "to be names and values such as {a: b} or a list such as [a, b], but got 'x'"),
        (["--data.component", "resid"], "`--data.component` to be residual, attention, mlp, but got 'resid'."),
        (["--data.text", "foo"], "--data.text"),
        (["--trainer.precision", "17"], "`--trainer.precision` to be 64, 32, 16 or "),
        (["extra"], "got extra"),
    ],
)
def test_the_parsers_errors_are_in_plain_words(words: list[str], said: str) -> None:
    parser = parser_of("train fit")
    parser.prog = "fit"
    with pytest.raises(UserError) as raised:
        parser.parse_args(words)
    assert said in str(raised.value)
    assert str(raised.value).startswith("Expected ")
    assert not RAW.search(str(raised.value))


def test_a_word_that_is_like_a_command_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train(["fti"])
    assert "Did you mean fit?" in capsys.readouterr().err
