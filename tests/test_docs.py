"""The code in docs/migrating.md runs as it stands."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs/migrating.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Whose a block is, its first line says.
NEW, OLD = "# New", "# Old"


def sections():
    """The blocks of code before the first heading, and below each."""
    parts = re.split(r"^## ", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    before, *below = [
        (part.partition("\n")[0], BLOCK.findall(part)) for part in parts
    ]
    return before[1], {heading: found for heading, found in below if found}


BEFORE, BELOW = sections()


def test_every_library_has_code():
    assert len(BELOW) == 5


@pytest.mark.parametrize("heading", BELOW)
def test_new_code_runs(heading):
    names = {}
    for block in [*BEFORE, *BELOW[heading]]:
        assert block.startswith((NEW, OLD)), block
        if block.startswith(NEW):
            exec(compile(block, f"{PAGE}: {heading}", "exec"), names)
