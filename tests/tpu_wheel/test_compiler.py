"""libtpu's compiler takes the programs that docs/tpu.md promises.

`make test-tpu-compile` says where a Python with jax and libtpu is, and another
libtpu; `TFRS_EMBED_NIGHTLY=1` has it compile everything.
"""

import dataclasses
import os
import sys

import pytest
import tensorflow as tf
import tiers
from models import MODELS
from promises import PROMISES, Hardware, keras, tpu

from nightly_flag import ALL
from tfrs_embed import tpu_check
from tfrs_embed.sparsecore.host_kernels import has_kernels

PYTHON = os.environ.get("TFRS_EMBED_TPU_COMPILER")
OLDER = os.environ.get("TFRS_EMBED_TPU_COMPILER_OLDER")

if not (has_kernels() and PYTHON):
    pytest.skip("make test-tpu-compile runs it", allow_module_level=True)

COMPILERS = ("newest", "older")
TOPOLOGIES = {
    Hardware.V2: ("v5p:2x2x1", "v6e:2x2"),
    Hardware.UNSUPPORTED: ("v5e:2x2",),
}
# The choice for every change: between them, all operations there are.
CHOICE = {
    ("small tables beside large ones", "v5p:2x2x1", "newest"),
    ("a loop on the device, pipelined", "v6e:2x2", "newest"),
    ("Adam", "v5p:2x2x1", "older"),
    ("mixed_bfloat16", "v5e:2x2", "newest"),
    ("two towers: TFRS's `Retrieval`, `FactorizedTopK`", "v5p:2x2x1", "newest"),
    ("SASRec", "v6e:2x2", "newest"),
    ("GRU4Rec", "v5p:2x2x1", "newest"),
    ("`tf.scan`, `tf.map_fn`, `TensorArray`", "v6e:2x2", "newest"),
}
CASES = [
    (promise, hardware, topology, compiler)
    for promise in (*PROMISES, *MODELS)
    for hardware in promise.hardware
    for topology in TOPOLOGIES.get(hardware, ())
    for compiler in COMPILERS
    if (promise.name, topology, compiler) in CHOICE
    # An older compiler knows no more: one of its kind is enough.
    or (ALL and (compiler == "newest" or topology == "v5p:2x2x1"))
]


def name(value):
    return getattr(value, "name", None)


def check(program, topology, compiler):
    with pytest.MonkeyPatch.context() as patch:
        if compiler == "older":
            patch.setenv("TPU_LIBRARY_PATH", OLDER)
        return tpu_check.check(
            program, topology, compiler=tpu_check.Compiler(PYTHON)
        )


CRASH = "module { func.func private @f(" + "tuple<" * 300_000


def step(strategy):
    """A program that adds."""

    @tf.function
    def add(x):
        strategy.run(lambda x: x + 1, (x,))

    add(tf.constant(1))


@pytest.mark.parametrize(
    ("promise", "hardware", "topology", "compiler"), CASES, ids=name
)
def test_libtpu_takes_the_programs(promise, hardware, topology, compiler):
    generation = topology.partition(":")[0]
    with tiers.record(f"compiled for {generation}", promise, hardware):
        report = check(
            lambda strategy: promise.run(strategy, 1.0), topology, compiler
        )
        assert report.compiler.startswith("libtpu ")
        assert not report.refused, str(report)
        assert all(p.compiled is not None for p in report.programs)


def test_limits_that_are_too_large_are_refused():
    # By the older one; the newest takes any.
    limits = tpu.SparseCoreEmbeddingConfig(
        max_ids_per_table={"big": 100_000},
        max_unique_ids_per_table={"big": 100_000},
    )
    report = check(
        lambda strategy: keras(sparse_core_embedding_config=limits)(
            strategy, 1.0
        ),
        "v5p:2x2x1",
        "older",
    )
    [refused] = report.refused
    [_, call] = refused.program.calls
    assert call.max_ids == 100_000
    assert "No viable logical replica count" in refused.compiled.error
    assert f"REFUSED {refused.program.name}" in str(report)


def test_programs_without_an_answer_are_not_refused():
    good = check(step, "v6e:1x1", "newest").programs[0].program
    # A compiler that can't be asked, one that crashes, and one that answers.
    unread = dataclasses.replace(good, name="unread", stablehlo="module {")
    crash = dataclasses.replace(good, name="crash", stablehlo=CRASH)
    _, [first, second, third] = tpu_check.Compiler(PYTHON).compile(
        [unread, crash, good], tpu_check.Slice.of("v6e:1x1")
    )
    assert first.not_checked.startswith("jax can't read it:")
    assert second.not_checked.startswith("the compiler crashed (SIGSEGV")
    assert third.error is third.not_checked is None
    report = tpu_check.Report(
        tpu_check.Slice.of("v6e:1x1"),
        (
            tpu_check.CheckedFunction(
                "f", (tpu_check.CheckedProgram(unread, first),)
            ),
        ),
        tf.__version__,
        "libtpu",
        None,
        (),
    )
    assert not report.refused
    assert "1 of 1 not checked" in str(report)
    assert "NOT CHECKED unread: jax can't read it:" in str(report)


def test_a_compiler_that_is_not_there():
    for python, message in [
        ("/nowhere/python", "can't be run"),
        (sys.executable, r"(?s)can't be started .*No module named 'jax'"),
    ]:
        with pytest.raises(tpu_check.CheckError, match=message):
            tpu_check.check(
                step, "v6e:1x1", compiler=tpu_check.Compiler(python)
            )
