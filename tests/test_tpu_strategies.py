"""Runs tests/strategies on emulated slices: "<chips>x<SparseCores of each>"."""

import pytest

from processes import run

SLICES = ["1x2", "1x4", "2x2", "2x4", "4x2", "4x4"]


@pytest.mark.parametrize("topology", SLICES)
def test_training(topology):
    run(
        ["test_tpu_conformance.py"],
        f"tpu:{topology}",
        select="V2 and (optimizer or loops)",
    )


def test_ids_and_other_hardware():
    run(
        ["test_tpu_conformance.py", "test_tpu_embedding_cores.py"],
        "tpu:2x4",
        select="not (V2 and (optimizer or loops))",
    )


def test_keras():
    run(["test_tpu_keras.py"], "tpu:2x2")
