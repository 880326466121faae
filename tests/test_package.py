"""What `import twostep` offers."""

import re
from importlib import import_module
from pathlib import Path

import twostep


def test_the_stubs_name_the_modules_that_names_come_from() -> None:
    """mypy takes a name from a module that is not there for `Any`, without a word."""
    stubs = (Path(twostep.__file__).parent / "__init__.pyi").read_text()
    found = re.findall(r"^from (\S+) import (\w+) as \w+$", stubs, re.MULTILINE)
    assert {name: module for module, name in found} == twostep._HOMES
    for module, name in found:
        assert getattr(import_module(module), name) is getattr(twostep, name)
