"""The marks that say where tests run; tests/process_tiers.py has them."""

import types

import pytest

import process_tiers

#: Files whose processes other tests start.
STARTED_BY_TESTS = {
    "strategies/test_checkpoints.py",
    "strategies/test_documentation.py",
    "strategies/test_sharded_notebook.py",
    "strategies/test_tpu_promises.py",
}


def variant(*marks, **params):
    """What pytest collects of a test with a parameter."""
    return types.SimpleNamespace(
        nodeid=f"test_x.py::test_x[{params}]",
        callspec=types.SimpleNamespace(params=params),
        iter_markers=lambda name: [m.mark for m in marks if m.name == name],
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"processes": ["mirrored:3"]}, "No process 'mirrored:3'"),
        (
            {"processes": ["mirrored:4"], "tier": "test"},
            "Tier 'test' starts no process 'mirrored:4'",
        ),
        (
            {"processes": ["mirrored:2"], "tier": "often"},
            "No tier 'often'",
        ),
    ],
)
def test_an_unknown_process_or_tier_is_an_error(arguments, message):
    with pytest.raises(ValueError, match=message):
        process_tiers.on(*arguments.pop("processes"), **arguments)


def test_a_test_runs_in_the_earliest_tier_of_its_marks():
    few = process_tiers.on("mirrored:2", when=lambda size: size == 1)
    others = process_tiers.on("mirrored:2", tier="more")
    items = [variant(few, others, size=size) for size in (1, 2)]
    assert [process_tiers.tier_of(i, "mirrored:2") for i in items] == [
        "test",
        "more",
    ]
    assert process_tiers.tier_of(items[0], "workers:2") is None


def test_a_mark_for_no_variant_is_an_error(needs_kernels):
    item = variant(process_tiers.nightly(lambda size: size == 3), size=2)
    with pytest.raises(pytest.UsageError, match=r"no variant of: .*test_x"):
        process_tiers.check([item], "")
    # In another process the test may have other variants.
    item = variant(
        process_tiers.on("tpu:2x4", when=lambda size: size == 3), size=2
    )
    process_tiers.check([item], "mirrored:2")
    with pytest.raises(pytest.UsageError, match="no variant"):
        process_tiers.check([item], "tpu:2x4")


def test_a_mark_that_names_no_parameter_is_an_error():
    item = variant(process_tiers.nightly(lambda width: width == 3), size=2)
    with pytest.raises(pytest.UsageError, match=r"\['width'\]"):
        process_tiers.holds(next(iter(item.iter_markers("nightly"))), item)


def test_every_file_of_strategies_runs_in_a_process():
    found = {
        f for name in process_tiers.NAMES for f in process_tiers.files(name)
    }
    there = {
        f"strategies/{path.name}"
        for path in (process_tiers.TESTS / "strategies").glob("test_*.py")
    }
    assert there - found == STARTED_BY_TESTS


@pytest.mark.xdist_group("marks")
def test_tests_of_a_group_stay_together(request):
    """A pytest that pytest-xdist doesn't know yet would spread them."""
    if not getattr(request.config.option, "loadgroup", False):
        pytest.skip("pytest -n 2 --dist loadgroup runs it")
    assert request.node.nodeid.endswith("@marks")
