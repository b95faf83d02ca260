"""Wheels that bring kernels: for which TensorFlows, made of what.

`make wheels` makes them, and has each of these TensorFlows use them.
"""

import runpy
from pathlib import Path

import pytest

from tfrs_embed.compat import version

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "wheels" / "run.py"

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(
        not TOOL.exists(), reason="only a checkout has the tool"
    ),
]


def test_every_tensorflow_that_the_library_takes_is_there():
    releases = runpy.run_path(str(TOOL))["RELEASES"]
    assert len(set(releases)) == len(releases)
    minors = [int(release.split(".")[1]) for release in releases]
    oldest, newest = (
        int(bound.removeprefix("2."))
        for bound in (version.OLDEST_TENSORFLOW, version.NEWEST_TENSORFLOW)
    )
    assert set(minors) == set(range(oldest, newest + 1))
    assert all(release.startswith("2.") for release in releases)


def test_they_are_made_of_all_modules_beside_the_package():
    packaging = runpy.run_path(str(TOOL))["PACKAGING"]
    assert {path.name for path in ROOT.glob("*.py")} <= set(packaging)
