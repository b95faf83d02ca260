"""Variables that the kernels take as one argument."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import random_kernel_calls as cases
import tfrs_embed
from tfrs_embed.kernels import handle_packs
from training_helpers import differentiate

pytestmark = pytest.mark.usefixtures("needs_kernels")

RULES = [cases.RULES["adam"], cases.RULES["sgd"], cases.RULES["adagrad"]]


def make_case():
    rng = np.random.default_rng(0)
    tables = cases.make_tables(rng, [8, 3, 16])
    features = cases.make_features(rng, tables, 20)
    gradients = cases.make_gradients(rng, features, tables)
    return tables, features, gradients


def every(variables):
    return [v for of_table in variables for v in of_table.values()]


def test_packed_and_other_variables_are_looked_up_and_updated_alike():
    tables, features, gradients = make_case()
    wanted = cases.make_variables(tables, RULES)
    found = cases.make_variables(tables, RULES)
    unused = tf.Variable(1.0)
    several = every(found)
    kept = [
        handle_packs.HandlePack([several[4], unused, several[0]]),
        handle_packs.HandlePack([several[2], several[5]]),
    ]
    handles, places = handle_packs.arguments(several)
    assert [h.shape.num_elements() for h in handles] == [3, 1, 2, 1]
    assert places == [2, 3, 4, 6, 0, 5]
    for _ in range(2):
        for variables in (wanted, found):
            cases.update(variables, RULES, features, gradients)
        vectors = [
            cases.lookup_handles([v["parameters"] for v in variables], features)
            for variables in (wanted, found)
        ]
        for a, b in zip(*vectors, strict=True):
            np.testing.assert_array_equal(a, b)
    for a, b in zip(every(wanted), several, strict=True):
        np.testing.assert_array_equal(a, b)
    del kept
    assert handle_packs.arguments(several)[1] == list(range(len(several)))


def test_one_kernel_may_get_other_variables_in_each_call():
    # Executed eagerly, equal calls share a kernel, which remembers things.
    tables, features, _ = make_case()
    for _ in range(3):
        variables = [tf.Variable(t) for t in tables]
        kept = handle_packs.HandlePack(variables)
        wanted = cases.lookup_handles(
            [tf.Variable(t) for t in tables], features
        )
        for _ in range(2):
            found = cases.lookup_handles(variables, features)
            for a, b in zip(wanted, found, strict=True):
                np.testing.assert_array_equal(a, b)
        for v in variables:  # Another buffer, which may be elsewhere.
            v.assign(2 * v)
        for a, b in zip(
            wanted, cases.lookup_handles(variables, features), strict=True
        ):
            np.testing.assert_allclose(2 * a, b, rtol=1e-6)
        tables = [t[::-1].copy() for t in tables]
        del kept


def test_places_and_handles_that_are_wrong():
    tables, features, _ = make_case()
    variables = [tf.Variable(t) for t in tables]
    handles = [v.handle for v in variables]

    def lookup(handles, places):
        return cases.module().tfrs_embed_lookup(
            tables=handles,
            places=places,
            dims=[tables[f.table].shape[1] for f in features],
            T=tf.float32,
            **cases.describe(features),
        )

    # What is remembered of a call that fails must not mislead the next.
    wanted = lookup(handles, [0, 1, 2])
    for places in ([0, 1, 3], [0, -1, 2]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="place"):
            lookup(handles, places)
    other = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, 0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="type"):
        lookup([handles[0], other.resource_handle, handles[2]], [0, 1, 2])
    for a, b in zip(wanted, lookup(handles, [0, 1, 2]), strict=True):
        np.testing.assert_array_equal(a, b)


def make_layer(number):
    tables = [
        tfrs_embed.TableConfig(f"t{i}", 20, 8, combiner="sum")
        for i in range(number)
    ]
    layer = tfrs_embed.PartialTPUEmbedding(
        [tfrs_embed.FeatureConfig(f"f{i}", t) for i, t in enumerate(tables)],
        "adagrad",
        size_threshold=0,
    )
    layer.build()
    return layer


def train(layer, ids, number=3):
    with tf.GradientTape() as tape:
        vectors = layer([ids] * number, training=True)
        loss = tf.add_n([tf.reduce_sum(v * v) for v in vectors])
    differentiate(tape, loss, layer.trainable_variables)
    return loss


def test_tables_are_one_argument_of_a_training_step():
    layer = make_layer(30)
    step = tf.function(train, autograph=False).get_concrete_function(
        layer, tf.range(5), 30
    )
    sizes = [
        t.shape.num_elements()
        for t in step.captured_inputs
        if t.dtype == tf.resource
    ]
    # The weight that stands for the tables, the step and the learning rate.
    assert sorted(sizes) == [1, 1, 1, 60]


def train_nested(layer, ids):
    return tf.function(train, autograph=False)(layer, ids)


def train_in_cond(layer, ids):
    return tf.cond(ids[0] < 100, lambda: train(layer, ids), lambda: 0.0)


def train_in_loop(layer, ids):
    return tf.while_loop(
        lambda i, loss: i < 1,
        lambda i, loss: (i + 1, train(layer, ids)),
        [0, 0.0],
    )[1]


@pytest.mark.parametrize(
    "training", [train, train_nested, train_in_cond, train_in_loop]
)
def test_updates_are_in_order_with_what_else_uses_the_variables(training):
    layer = make_layer(3)
    table = layer.tables["t1"].table

    @tf.function(autograph=False)
    def read():
        return table.read_value() + 0

    @tf.function(autograph=False)
    def step(ids):
        before = read()
        training(layer, ids)
        after = read()
        table.assign(2 * after)
        training(layer, ids)
        return before, after

    ids = tf.range(20)
    graph = step.get_concrete_function(ids).graph
    uses = [op for op in graph.get_operations() if uses_table(op, table)]
    assert len(uses) >= 5
    # Whatever a machine with many threads would do next.
    for first, then in itertools.pairwise(uses):
        assert first in all_before(then)

    old = table.numpy()
    before, after = step(ids)
    np.testing.assert_array_equal(before, old)
    assert (after.numpy() != old).all()


def uses_table(op, table):
    """Whether an operation may read or write it: it has its handle or all."""
    captures = op.graph.captures
    handles = {id(i) for o, i in captures if o is table.handle}
    packed = {id(i) for o, i in captures if o.shape.rank == 1}
    return any(
        id(t) in handles or (id(t) in packed and t.dtype == tf.resource)
        for t in op.inputs
    )


def all_before(op):
    """The operations that one waits for."""
    found, left = {}, [op]
    while left:
        op = left.pop()
        for other in [*op.control_inputs, *(t.op for t in op.inputs)]:
            if other.name not in found:
                found[other.name] = other
                left.append(other)
    return list(found.values())
