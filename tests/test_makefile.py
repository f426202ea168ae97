"""What `make` shows of an installation, with a pip that only talks."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes import HANGS, ROOT

PIP = '#!/bin/sh\necho "WARNING: nobody can act on this" >&2\necho "$@" >> calls\nexit {status}\n'


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_is_announced_and_pip_is_heard_only_where_it_fails(status: int, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP.format(status=status))
    python.chmod(0o755)
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "GNUMAKE"))}
    done = subprocess.run(["make", ".venv/dev"], cwd=tmp_path, env=own, capture_output=True, text=True, timeout=HANGS)
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
