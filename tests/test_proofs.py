"""The table of docs/scaling.md that says how each promise has been tested."""

import pathlib

import pytest

from conformance import test_conformance as conformance
from process_tiers import TIERS
from test_gpu_placement import ALL_CASES

PAGE = pathlib.Path(__file__).parents[1] / "docs/scaling.md"
BEGIN, END = "<!-- proofs: begin -->\n", "<!-- proofs: end -->"

#: The conformance tests' processes.
PROCESSES = {
    "2 logical CPUs": "mirrored:2",
    "4": "mirrored:4",
    "2 processes": "workers:2",
    "3": "workers:3",
    "Keras 3, 2 logical CPUs": "keras:3 mirrored:2",
}
#: By what the page calls them: engines of the conformance tests, and steps
#: whose operations are counted for GPUs.
PROMISES = {
    "by row": (("sharded",), ("by row", "by row, one of two workers")),
    "by row, in two stages": (("two_stages",), ()),
    "by row, hot rows": (("hot_rows",), ("by row, hot rows",)),
    "by row, in files": (("sharded_files",), ()),
    "by column and by table": (("columns",), ("by column", "by table")),
    "by column and by table, in files": (("column_files",), ()),
    "copies": (("distributed_mirrored",), ("copies",)),
    "by row and copies": (("distributed_both",), ()),
    "by column and copies": (("columns_and_copies",), ()),
    "by column and by row": (("columns_and_rows",), ()),
    "`DynamicKeys`": (("dynamic_sharded",), ()),
    "`DynamicKeys`, in two stages": (("dynamic_two_stages",), ()),
    "`DynamicKeys` with a spill": (("spill_sharded",), ()),
}
_SAYS = {"test": "each change", "more": "each change", "nightly": "release"}


def runs(engines, process):
    """When training of an engine is tested in a process."""
    tests = (
        conformance.test_training,
        conformance.test_tables_of_many_optimizers,
    )
    tiers = [
        "nightly" if case.nightly else mark.kwargs["tier"]
        for test in tests
        for mark in (*test.pytestmark, *conformance.pytestmark)
        for case in test.replicas
        if mark.name == "on"
        and process in mark.args
        and case.engine in engines
        and (mark.kwargs["when"] or (lambda case: True))(case)
    ]
    return _SAYS.get(min(tiers, key=TIERS.index, default=None), "-")


def table():
    counted = {step for of in ALL_CASES.values() for step in of}
    lines = [
        f"| promise | {' | '.join(PROCESSES)} | counted for GPUs |",
        "|---" * (len(PROCESSES) + 2) + "|",
    ]
    for promise, (engines, steps) in PROMISES.items():
        assert set(engines) <= set(conformance.ENGINES)
        assert set(steps) <= counted
        when = [runs(engines, process) for process in PROCESSES.values()]
        cells = [promise, *when, "yes" if steps else "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


@pytest.mark.tools
def test_the_page_says_how_promises_are_tested():
    expected = table()
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition(BEGIN)
    assert rest.partition(END)[0] == expected, f"It should be:\n{expected}"


@pytest.mark.tools
def test_all_engines_of_replicas_are_promises():
    named = {engine for engines, _ in PROMISES.values() for engine in engines}
    tested = {case.engine for case in conformance.test_training.replicas}
    tested -= {"sharded_arrays", "hot_rows_two_stages"}  # Variants of others.
    tested -= {e for e in tested if e.startswith("distributed_")} - named
    assert tested <= named
