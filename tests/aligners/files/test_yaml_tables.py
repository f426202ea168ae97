"""Tables beside the code are read as PyYAML's own loader reads them."""

from pathlib import Path

import pytest
import yaml

import aligners
from aligners.files.yaml_tables import table_beside

PACKAGE = Path(aligners.__file__).parent
TABLES = sorted(path for path in PACKAGE.rglob("*.yaml") if "configs" not in path.relative_to(PACKAGE).parts)


@pytest.mark.parametrize("table", TABLES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_table_is_what_the_loader_in_python_reads(table: Path) -> None:
    expected = yaml.load(table.read_text(encoding="utf-8"), yaml.SafeLoader)
    read = table_beside(str(table.with_name("module.py")), table.name)
    assert expected
    assert repr(read) == repr(expected)  # types and order as well


def test_what_names_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "table.yaml").write_text("a: !!python/object/apply:os.getcwd []")
    with pytest.raises(yaml.constructor.ConstructorError):
        table_beside(str(tmp_path / "module.py"), "table.yaml")
