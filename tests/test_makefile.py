"""What `make` shows of an installation, with a pip that only talks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.processes import HANGS, ROOT

PIP = '#!/bin/sh\necho "WARNING: nobody can act on this" >&2\necho "$@" >> calls\nexit {status}\n'


def copy_what_make_reads(folder: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)


def make(target: str, folder: Path) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "GNUMAKE"))}
    return subprocess.run(["make", target], cwd=folder, env=own, capture_output=True, text=True, timeout=HANGS)


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_is_announced_and_pip_is_heard_only_where_it_fails(status: int, tmp_path: Path) -> None:
    copy_what_make_reads(tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP.format(status=status))
    python.chmod(0o755)
    done = make(".venv/dev", tmp_path)
    installed = (tmp_path / "calls").read_text().splitlines()
    assert "torch==" in installed[0]
    assert (tmp_path / ".venv" / "dev").exists() == (status == 0)
    if status == 0:
        assert (done.returncode, done.stdout, done.stderr) == (0, "Installing (once, a few minutes) ...\n", "")
        assert installed[1].endswith("--editable .[demo,dev]")
    else:
        assert done.returncode != 0
        assert "WARNING: nobody can act on this" in done.stdout
        assert len(installed) == 1


def test_results_are_removed_only_by_their_own_target(tmp_path: Path) -> None:
    copy_what_make_reads(tmp_path)
    result = tmp_path / "runs" / "demo" / "report.json"
    for place in (result.parent, tmp_path / ".venv"):
        place.mkdir(parents=True)
    result.touch()
    assert make("clean", tmp_path).returncode == 0
    assert result.is_file()
    assert not (tmp_path / ".venv").exists()
    assert make("clean-runs", tmp_path).returncode == 0
    assert not (tmp_path / "runs").exists()


def test_help_lists_every_target() -> None:
    phony = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:"))
    listed = [line.split()[0] for line in make("help", ROOT).stdout.splitlines()]
    assert listed == phony.split()[1:]
