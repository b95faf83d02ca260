"""All that docs/tpu.md promises, through TensorFlow's own TPUStrategy.

Traced, put through the bridge, and lowered by the kernels of the
`tensorflow-tpu` wheel; and, on an emulated slice, run.
"""

import pytest
import tiers
from models import MODELS
from promises import PROMISES, Hardware

from process_tiers import nightly
from run_in_processes import run
from tfrs_embed import tpu_check
from tfrs_embed.sparsecore.host_kernels import has_kernels

SLICES = {
    Hardware.V2: "v5p:2x2x1",
    Hardware.V1: "v4:2x2x1",
    Hardware.UNSUPPORTED: "v5e:2x2",
}
OF_HARDWARE = [(p, h) for p in PROMISES for h in p.hardware]
# What uses the most at once.
FULL = [p for p in PROMISES if p.name == "a loop on the device, pipelined"]

if not has_kernels():
    pytest.skip(
        "needs the kernels of the tensorflow-tpu wheel", allow_module_level=True
    )


def name(value):
    return getattr(value, "name", None)


def operations(function, kind):
    """How many operations of a kind a function's programs have."""
    return sum(
        count
        for checked in function.programs
        for operation, count in checked.program.operations.items()
        if operation.startswith(kind)
    )


def check_report(report, promise, hardware):
    """Asserts what the programs must have in them."""
    assert len(report.functions) == promise.functions
    training = report.functions[0]
    if promise.pipelined and hardware is Hardware.V2:
        # The first lookup and dense part, the second lookup, the loop's body,
        # and the two that are left.
        assert len(training.programs) == 5
    else:
        assert len(training.programs) == 1
    for function in report.functions:
        for checked in function.programs:
            program = checked.program
            # Ids are checked, and prepared, on the host.
            assert not any(
                kind.startswith(("String", "ConvertToSparseCore"))
                or kind == "Assert"
                for kind in program.operations
            ), program.operations
            if hardware is not Hardware.V1:
                assert program.stablehlo is not None
    calls = [c for p in training.programs for c in p.program.calls]
    if hardware is not Hardware.V2:
        assert not calls
    if hardware is Hardware.V1:
        alone = "alone" in promise.name
        expected = 0 if alone else 1
        assert (
            operations(training, "XlaRecvTPUEmbeddingActivations") == expected
        )
        assert operations(training, "XlaSendTPUEmbeddingGradients") == expected
    if hardware is Hardware.V2 and calls:
        stacks = {c.table for c in calls}
        updates = [c.table for c in calls if c.slots is not None]
        lookups = [c.table for c in calls if c.slots is None]
        # A pipelined loop's first lookup is made on its own, as is its second.
        times = 3 if promise.pipelined else 1
        layers = 2 if promise.name == "two layers" else 1
        assert len(updates) == len(lookups) == times * layers * len(stacks)
        for call in calls:
            assert (call.max_ids, call.max_unique_ids) == (256, 256)
            tables = call.table.split("_")
            rows = {"big": 512, "wide": 304, "small": 32}
            assert call.rows * report.slice.chips >= sum(
                rows[t] - 16 for t in tables
            )
        text = "".join(p.program.tensorflow for p in training.programs)
        for part in promise.holds:
            assert part in text, part


@pytest.mark.parametrize(("promise", "hardware"), OF_HARDWARE, ids=name)
def test_traced_and_lowered(promise, hardware):
    with tiers.record("lowered", promise, hardware):
        report = tpu_check.check(
            lambda strategy: promise.run(strategy, 1.0), SLICES[hardware]
        )
        check_report(report, promise, hardware)


@pytest.mark.parametrize("model", MODELS, ids=name)
def test_models_are_lowered(model):
    [hardware] = model.hardware
    with tiers.record("lowered", model, hardware):
        report = tpu_check.check(
            lambda strategy: model.run(strategy, 1.0), SLICES[hardware]
        )
        calls = [c for p in report.programs for c in p.program.calls]
        assert {c.slots is None for c in calls} == {True, False}


@nightly(lambda topology: topology in ("v5p:2x2x4", "v6e:2x2"))
@pytest.mark.parametrize(
    "topology", ["v5p:1x1x1", "v5p:2x2x4", "v6e:2x2", "v6e:2x4"]
)
@pytest.mark.parametrize("promise", FULL, ids=name)
def test_slices(promise, topology):
    report = tpu_check.check(
        lambda strategy: promise.run(strategy, 1.0), topology
    )
    check_report(report, promise, Hardware.V2)
    chips = report.slice.chips
    for checked in report.programs:
        for call in checked.program.calls:
            assert call.rows % report.slice.sparse_cores == 0
        groups = ", ".join(map(str, range(chips)))
        if checked.program.collectives["CrossReplicaSum"] and chips > 1:
            assert f"[[{groups}]]" in checked.program.stablehlo


@pytest.mark.parametrize("hardware", ["V2", "UNSUPPORTED"])
def test_emulated(hardware):
    run(
        ["strategies/test_tpu_promises.py"],
        "tpu:2x4",
        TFRS_EMBED_TEST_HARDWARE=hardware,
    )
