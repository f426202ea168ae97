from __future__ import annotations

import pytest

from commands import table


def test_the_first_word_says_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setitem(table.COMMANDS, "fit", ("", seen.append))
    table.main(["fit", "--run", "x"])
    assert seen == [["fit", "--run", "x"]]


def test_words_of_the_process_are_left_for_the_command_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setitem(table.COMMANDS, "fit", ("", seen.append))
    monkeypatch.setattr("sys.argv", ["train.py", "fit", "--run", "x"])
    table.main()
    assert seen == [None]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    table.main(["--help"])
    shown = capsys.readouterr().out
    assert set(table.COMMANDS) == {line.split()[0] for line in shown.splitlines() if line.startswith("  ")}


@pytest.mark.parametrize(("words", "said"), [([], "received nothing"), (["fti"], "received 'fti'")])
def test_another_word_is_an_error(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        table.main(words)
    assert done.value.code == 2
    assert said in capsys.readouterr().err
