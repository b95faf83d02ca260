"""TPUEmbeddingV2 on emulated slices computes what the reference does."""

import pytest
import tensorflow as tf

from process_tiers import nightly, on
from strategies.slices import FEW, Slice

pytestmark = on("tpu:4x4", tier="more")

TOPOLOGIES = [(1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (4, 4)]


@nightly(lambda topology: topology == (2, 2))
@pytest.mark.parametrize("topology", [(1, 4), (2, 2), (4, 4)])
def test_steps_train_as_the_reference(topology):
    s = Slice(topology, pipelined=False)
    step = tf.function(s.step)
    batches = s.batches(3)
    iterator = s.dataset(batches)
    for batch in batches:
        outputs = step(next(iterator))
        s.check_activations(outputs, s.reference_loop([batch]))
    s.check()


# Of loops, which take longest, those of one slice.
@nightly(lambda topology: topology != (2, 4))
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_pipelined_loops_train_as_the_reference(topology):
    s = Slice(topology, pipelined=True)

    @tf.function
    def loop(iterator, steps):
        for _ in tf.range(steps):
            s.step(next(iterator))

    for length in (3, 1, 2):
        batches = s.batches(length)
        loop(s.dataset(batches), tf.constant(length))
        s.reference_loop(batches)
        s.check()
    loop(s.dataset(s.batches(1)), tf.constant(0))
    s.check()


def test_loops_that_are_not_pipelined_train_as_the_reference():
    s = Slice((2, 2), pipelined=False, features=FEW)

    @tf.function
    def loop(iterator):
        for _ in tf.range(3):
            s.step(next(iterator))

    batches = s.batches(3)
    loop(s.dataset(batches))
    s.reference_loop(batches)
    s.check()


def test_loops_in_sequence_start_from_drained_tables():
    s = Slice((2, 2), pipelined=True, features=FEW)

    @tf.function
    def loops(iterator):
        for _ in tf.range(2):
            s.step(next(iterator))
        for _ in tf.range(3):
            s.step(next(iterator))

    first, second = s.batches(2), s.batches(3)
    loops(s.dataset(first + second))
    s.reference_loop(first)
    s.reference_loop(second)
    s.check()


def test_a_loop_in_a_loop_is_drained_each_time():
    s = Slice((1, 2), pipelined=True, features=FEW)

    @tf.function
    def loops(iterator):
        for _ in tf.range(2):
            for _ in tf.range(3):
                s.step(next(iterator))

    first, second = s.batches(3), s.batches(3)
    loops(s.dataset(first + second))
    s.reference_loop(first)
    s.reference_loop(second)
    s.check()


@pytest.mark.parametrize("first", ["loop", "step"])
def test_a_function_is_pipelined_in_loops_only(first):
    s = Slice((1, 2), pipelined=True, features=FEW)

    @tf.function
    def step(batch):
        return s.step(batch)

    @tf.function
    def loop(iterator):
        for _ in tf.range(3):
            step(next(iterator))

    for kind in (first, *{"loop", "step"} - {first}, first):
        batches = s.batches(3)
        iterator = s.dataset(batches)
        if kind == "loop":
            loop(iterator)
            s.reference_loop(batches)
        else:
            for batch in batches:
                step(next(iterator))
                s.reference_loop([batch])
        s.check()


def test_run_takes_a_function():
    s = Slice((2, 2), pipelined=True, features=FEW)
    replica_step = tf.function(s.replica_step)

    @tf.function
    def loop(iterator):
        for _ in tf.range(2):
            s.strategy.run(replica_step, next(iterator))
            s.steps.assign_add(1)

    batches = s.batches(3)
    iterator = s.dataset(batches)
    loop(iterator)
    s.reference_loop(batches[:2])
    s.check()
    outputs = s.strategy.run(replica_step, next(iterator))
    s.check_activations(outputs, s.reference_loop(batches[2:]))
    s.check()


def test_the_sequential_context_turns_pipelining_off():
    contexts = pytest.importorskip(
        "tensorflow.python.tpu.embedding_context_utils",
        reason="TensorFlow before 2.20 has no such context",
    )
    s = Slice((1, 2), pipelined=True, features=FEW)

    @tf.function
    def loop(iterator):
        with contexts.SequentialEmbeddingContext():
            for _ in tf.range(3):
                s.step(next(iterator))

    batches = s.batches(3)
    loop(s.dataset(batches))
    s.pipelined = False
    s.reference_loop(batches)
    s.check()


def test_recording_summaries_turns_pipelining_off(tmp_path):
    s = Slice((1, 2), pipelined=True, features=FEW)
    writer = tf.summary.create_file_writer(str(tmp_path))

    @tf.function
    def loop(iterator):
        for _ in tf.range(3):
            s.step(next(iterator))

    batches = s.batches(3)
    with writer.as_default(), tf.summary.record_if(True):
        loop(s.dataset(batches))
    s.pipelined = False
    s.reference_loop(batches)
    s.check()


def test_tables_are_made_in_the_first_step_if_not_before():
    s = Slice((2, 2), pipelined=False)
    with s.strategy.scope():
        s.embedding = s._make_embedding(None)

    @tf.function
    def lookup(iterator):
        def replica_fn(ids, weights, _):
            weights = {name: weights.get(name) for name in ids}
            return s.embedding(ids, weights)[0]

        return s.strategy.run(replica_fn, next(iterator))

    batches = s.batches(1)
    outputs = lookup(s.dataset(batches))
    for name, table in s.reference.tables.items():
        table.rows[:] = s.table(name)
    s.check_activations(outputs, s.reference_loop(batches))
