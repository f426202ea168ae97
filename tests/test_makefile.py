"""What `make` shows of an installation, with a pip that only talks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import HANGS, ROOT

PIP = '#!/bin/sh\necho "WARNING: nobody can act on this" >&2\necho "$@" >> calls\nexit {status}\n'


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    return tmp_path


def install(clone: Path, status: int) -> subprocess.CompletedProcess[str]:
    python = clone / ".venv" / "bin" / "python"
    python.write_text(PIP.format(status=status))
    python.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "GNUMAKE"))}
    return subprocess.run(["make", ".venv/dev"], cwd=clone, env=own, capture_output=True, text=True, timeout=HANGS)


def test_an_installation_is_announced_and_pip_is_not_heard(clone: Path) -> None:
    done = install(clone, 0)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Installing (once, a few minutes) ..."]
    assert done.stderr == ""
    torch, project = (clone / "calls").read_text().splitlines()
    assert "torch==" in torch
    assert project.endswith("--editable .[demo,dev]")
    assert (clone / ".venv" / "dev").exists()


def test_what_pip_says_is_shown_where_it_fails(clone: Path) -> None:
    done = install(clone, 1)
    assert done.returncode != 0
    assert "WARNING: nobody can act on this" in done.stdout
    assert not (clone / ".venv" / "dev").exists()
    assert len((clone / "calls").read_text().splitlines()) == 1
