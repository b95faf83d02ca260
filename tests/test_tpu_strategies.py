"""Runs tests/strategies on emulated slices, "tpu:<chips>x<SparseCores>"."""

import pytest

from processes import ALL, run


# The largest slice has the CPUs for the smaller ones, too.
@pytest.mark.parametrize("pipelined", [False, True])
def test_loops_on_every_slice(pipelined):
    if not (pipelined or ALL):
        pytest.skip("make test-tpu-wheel runs it")
    run(
        ["test_tpu_conformance.py"],
        "tpu:4x4",
        select=f"V2 and loops and {pipelined}",
    )


@pytest.mark.parametrize("what", ["training", "strategy", "keras"])
def test_emulated_slices(what):
    # Of loops, which take longest, those of one slice.
    select = None if ALL else "not (pipelined_loops and not topology3)"
    run([f"test_emulated_{what}.py"], "tpu:4x4", select)


def test_ids_and_other_hardware():
    run(
        ["test_tpu_conformance.py", "test_tpu_embedding_cores.py"],
        "tpu:2x4",
        select="not (loops and (V2 or 4))",
    )


def test_gradients():
    # What one device's tests don't cover already.
    select = "penalty or persistent or updat" if not ALL else None
    run(["test_gradients_on_replicas.py"], "tpu:2x4", select)


def test_keras():
    run(["test_tpu_keras.py", "test_tpu_distributed.py"], "tpu:2x2")


def test_serving():
    run(["test_serving_export.py"], "tpu:2x4", select="partial")
