"""Where and when tests run: processes, tiers, and the marks that name them.

`make test` and `make test-more` start the same processes each time, and each
runs all of its tests: starting TensorFlow takes longer than many tests. A test
of a process has a mark for it, `on`. Tests of one device need none.
"""

import functools
import inspect
import pathlib
import re

import pytest

from nightly_flag import ALL

TESTS = pathlib.Path(__file__).parent

#: The folders of tests that some process without a strategy runs.
FOLDERS = ("abilities", "conformance")

#: From what runs most often to what runs least.
TIERS = ("test", "more", "nightly")

#: The processes that each tier starts: a strategy, Keras 3, or both. Of
#: strategies, "mirrored:2" has two logical CPUs, "workers:2" is a process for
#: each of two workers, and "tpu:2x4" emulates 2 chips of 4 SparseCores.
PROCESSES = {
    "test": ("mirrored:2", "workers:2", "tpu:2x4", "keras:3"),
    "more": (
        "mirrored:2",
        "mirrored:4",
        "mirrored:12",
        "workers:2",
        "workers:3",
        "tpu:2x2",
        "tpu:2x4",
        "tpu:4x4",
        "keras:3",
        "keras:3 mirrored:2",
        "keras:3 workers:2",
    ),
}
NAMES = tuple(dict.fromkeys(sum(PROCESSES.values(), ())))


def process_of(strategy, keras):
    """The name of the process that has a strategy, and the layers of a Keras.

    Args:
        strategy: "mirrored:2", ...; "": none.
        keras: "2" or "3".
    """
    names = [f"keras:{keras}" if keras == "3" else "", strategy]
    return " ".join(name for name in names if name)


def keras_and_strategy(process):
    """The Keras's number and the strategy of a process, as texts."""
    if process.startswith("keras:3"):
        return "3", process.removeprefix("keras:3").strip()
    return "2", process


def on(*processes, tier="test", when=None):
    """Marks tests that run in processes.

    Several marks for one process stand side by side, such as one for some
    variants and one, of a later tier, for the others: a test runs in the
    earliest tier of the marks that hold for it. `make nightly` runs all.

    Args:
        *processes: names in PROCESSES. A file is searched for them, in quotes.
        tier: one of TIERS.
        when: a function of some of the test's parameters, by their names, that
            says which variants the mark is for; None: all.
    """
    if tier not in TIERS:
        raise ValueError(f"No tier {tier!r}; there are {TIERS}.")
    for process in processes:
        if process not in NAMES:
            raise ValueError(f"No process {process!r}; there are {NAMES}.")
        if tier != "nightly" and process not in PROCESSES[tier]:
            raise ValueError(f"Tier {tier!r} starts no process {process!r}.")
    return pytest.mark.on(*processes, tier=tier, when=when)


def nightly(when):
    """Marks those variants of a test that only `make nightly` runs.

    Args:
        when: as that of `on`.
    """
    return pytest.mark.nightly(when=when)


def without_kernels(both_implementations):
    """Whether a variant turns the kernels off, where others have them.

    Without compiled kernels it repeats no other variant.
    """
    return both_implementations == "tensorflow" and has_kernels()


def with_kernels(both_implementations):
    """Whether a variant has the compiled kernels."""
    return both_implementations == "kernels"


@functools.cache
def has_kernels():
    """Whether the compiled kernels are loaded."""
    # Importing it takes seconds, and some files do without.
    from tfrs_embed import kernels

    return kernels.status().loaded


def holds(mark, item):
    """Whether a mark is for this variant of a test."""
    when = mark.kwargs.get("when")
    if when is None:
        return True
    values = item.callspec.params if hasattr(item, "callspec") else {}
    names = inspect.signature(when).parameters
    if missing := names - values.keys():
        raise pytest.UsageError(
            f"{item.nodeid}: a mark names {sorted(missing)}, which aren't"
            f" parameters of the test; it has {sorted(values)}."
        )
    return bool(when(*(values[name] for name in names)))


def tier_of(item, process):
    """The tier in which a test runs in a process; None: in none."""
    tiers = [
        mark.kwargs["tier"]
        for mark in item.iter_markers("on")
        if process in mark.args and holds(mark, item)
    ]
    return min(tiers, key=TIERS.index, default=None)


def check(items, process):
    """Raises an error if a mark holds for no variant of its test.

    Args:
        items: all tests of their files.
        process: the process that collected them.
    """
    used = {}
    for item in items:
        marks = [m for m in item.iter_markers("on") if process in m.args]
        for mark in [*marks, *item.iter_markers("nightly")]:
            key = item.nodeid.partition("[")[0], id(mark)
            used[key] = used.get(key, False) or holds(mark, item)
    unused = sorted({test for (test, _), held in used.items() if not held})
    if unused and has_kernels():
        raise pytest.UsageError(
            "A mark's `when` holds for no variant of: " + ", ".join(unused)
        )


def files(process):
    """The test files with marks that name a process, in quotes."""
    _, strategy = keras_and_strategy(process)
    named = re.compile(rf'\bon\(.*"{re.escape(process)}"', re.DOTALL)
    return [
        str(path.relative_to(TESTS))
        for folder in FOLDERS + (("strategies",) if strategy else ()) + ("",)
        for path in sorted((TESTS / folder).glob("test_*.py"))
        if named.search(path.read_text(encoding="utf-8"))
    ]


def starts(tier, *kinds):
    """The processes that a tier starts; `make nightly` starts each only once.

    Args:
        tier: "test" or "more".
        *kinds: what their names begin with.
    """
    before = PROCESSES["test"] if ALL and tier == "more" else ()
    return [
        process
        for process in PROCESSES[tier]
        if process.startswith(kinds) and process not in before
    ]
