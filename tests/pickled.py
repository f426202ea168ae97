"""What a file must not do that somebody else has written."""

import os
from pathlib import Path
from typing import Any


class Code:
    """Pickled, it makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)
