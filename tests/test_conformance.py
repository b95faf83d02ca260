"""Every way of looking up and training against the numpy reference."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from helpers import KINDS, differentiate, make_ids, make_weights
from processes import ALL
from reference import Feature, Reference, Table, to_tf

pytestmark = pytest.mark.usefixtures("both_implementations")

tpu = tf.tpu.experimental.embedding
BATCH, ROWS, DIMS = 6, {"x": 50, "y": 7}, {"x": 5, "y": 3}

OPTIMIZERS = {
    "sgd": (tpu.SGD(0.3), "SGD", {}),
    "adagrad": (
        tpu.Adagrad(0.3, initial_accumulator_value=0.2),
        "Adagrad",
        {"initial_accumulator_value": 0.2},
    ),
    "adagrad_momentum": (
        tpu.AdagradMomentum(
            0.3, momentum=0.8, use_nesterov=True, exponent=3.0, beta2=0.9
        ),
        "AdagradMomentum",
        {"momentum": 0.8, "use_nesterov": True, "exponent": 3.0, "beta2": 0.9},
    ),
    "adagrad_momentum_plain": (
        tpu.AdagradMomentum(0.3, momentum=0.8, epsilon=1e-3),
        "AdagradMomentum",
        {"momentum": 0.8, "epsilon": 1e-3},
    ),
    "adam": (tpu.Adam(0.3, epsilon=1e-3), "Adam", {"epsilon": 1e-3}),
    "adam_outside": (
        tpu.Adam(0.3, beta_1=0.7, beta_2=0.8, sum_inside_sqrt=False),
        "Adam",
        {"beta_1": 0.7, "beta_2": 0.8, "sum_inside_sqrt": False},
    ),
    "ftrl": (
        tpu.FTRL(
            0.3,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            beta=0.1,
        ),
        "FTRL",
        {
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "beta": 0.1,
        },
    ),
    "ftrl_linear": (
        tpu.FTRL(
            0.3,
            learning_rate_power=-0.6,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            beta=0.1,
            multiply_linear_by_learning_rate=True,
        ),
        "FTRL",
        {
            "learning_rate_power": -0.6,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.02,
            "beta": 0.1,
            "multiply_linear_by_learning_rate": True,
        },
    ),
    # As Keras stores them: each layer makes an optimizer of its own.
    "momentum": (
        {
            "class_name": "SGD",
            "config": {"learning_rate": 0.3, "momentum": 0.8},
        },
        "Momentum",
        {"momentum": 0.8},
    ),
    "momentum_nesterov": (
        {
            "class_name": "SGD",
            "config": {
                "learning_rate": 0.3,
                "momentum": 0.8,
                "nesterov": True,
            },
        },
        "Momentum",
        {"momentum": 0.8, "use_nesterov": True},
    ),
}


def build(
    combiner,
    optimizer=None,
    rule=None,
    settings=None,
    kinds=tuple(KINDS),
    called=False,
    make=tfrs_embed.PartialTPUEmbedding,
    **kwargs,
):
    """A layer whose two tables serve these kinds of ids, and its reference.

    Engines of TPUs have no tables before they have been called.
    """
    combines = make is tfrs_embed.DistributedEmbedding
    tables = {
        name: tpu.TableConfig(
            ROWS[name],
            DIMS[name],
            combiner=combiner,
            name=name,
            initializer=tf.random_normal_initializer(seed=len(name)),
        )
        for name in ROWS
    }
    features, reference = {}, {}
    for table in ROWS:
        for kind in kinds:
            if combines and kind == "scalar":
                continue  # It has no batch.
            name = f"{table}_{kind}"
            options = KINDS[kind](BATCH)
            features[name] = tpu.FeatureConfig(tables[table], **options)
            if combines and kind == "matrix":
                options = {"output_shape": (BATCH,)}
            reference[name] = Feature(table, **options)
    layer = make(features, optimizer=optimizer, **kwargs)
    if called:
        layer(first_ids(features))
    values = {n: v.numpy() for n, v in layer.embedding_tables.items()}
    return layer, Reference(
        reference,
        {
            name: Table(
                values[name],
                combiner,
                rule,
                settings or {},
                rate=lambda step: 0.3,
            )
            for name in ROWS
        },
    )


def first_ids(features):
    """Ids of row 0 for features called `<table>_<kind>`."""
    rng = np.random.default_rng(0)
    return {
        name: to_tf(make_ids(rng, name.split("_", 1)[1], BATCH, 1))
        for name in features
    }


def make_step(rng, reference, weighted):
    """Random ids, weights and activation gradients for all features."""
    ids, weights, gradients = {}, {}, {}
    for name, feature in reference.features.items():
        kind = name.split("_", 1)[1]
        rows = len(reference.tables[feature.table].rows)
        ids[name] = make_ids(rng, kind, BATCH, rows)
        weights[name] = make_weights(rng, ids[name]) if weighted else None
    for name, output in reference.lookup(ids, weights).items():
        gradients[name] = rng.normal(size=output.shape).astype(np.float32)
    return ids, weights, gradients


def trainer(layer, graph):
    """A function that makes a training step and returns the activations."""

    def step(ids, weights, gradients):
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights=weights, training=True)
            loss = tf.add_n(
                [tf.reduce_sum(outputs[k] * gradients[k]) for k in outputs]
            )
        differentiate(tape, loss, layer.trainable_variables)
        return outputs

    return tf.function(step, reduce_retracing=True) if graph else step


def tensors(values):
    return {k: to_tf(v) for k, v in values.items()}


def assert_outputs(outputs, expected):
    assert list(outputs) == list(expected)
    for name, output in outputs.items():
        np.testing.assert_allclose(
            output, expected[name], rtol=2e-5, atol=2e-6, err_msg=name
        )


def assert_tables(layer, reference):
    tables = layer.embedding_tables
    for name, table in reference.tables.items():
        np.testing.assert_allclose(
            tables[name], table.rows, rtol=2e-4, atol=2e-5, err_msg=name
        )
        slots = layer.tables[name].slots
        assert sorted(slots) == sorted(table.slots)
        for slot, value in table.slots.items():
            np.testing.assert_allclose(
                slots[slot],
                value,
                rtol=2e-4,
                atol=2e-5,
                err_msg=f"{name}/{slot}",
            )


@pytest.mark.parametrize(
    ("make", "threshold"),
    [
        (tfrs_embed.PartialTPUEmbedding, None),
        (tfrs_embed.PartialTPUEmbedding, 20),
        (tfrs_embed.DistributedEmbedding, 0),
    ],
)
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookup(combiner, weighted, make, threshold):
    layer, reference = build(
        combiner, "sgd", size_threshold=threshold, make=make
    )
    rng = np.random.default_rng(0)
    for _ in range(2):
        ids, weights, _ = make_step(rng, reference, weighted)
        outputs = layer(tensors(ids), weights=tensors(weights))
        assert_outputs(outputs, reference.lookup(ids, weights))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("combiner", "weighted", "graph", "make"),
    [
        ("sum", False, True, tfrs_embed.PartialTPUEmbedding),
        ("mean", True, False, tfrs_embed.PartialTPUEmbedding),
        ("sqrtn", True, True, tfrs_embed.DistributedEmbedding),
    ],
)
def test_training(name, combiner, weighted, graph, make, request):
    implementation = request.node.callspec.params["both_implementations"]
    if (
        (make, implementation)
        == (tfrs_embed.DistributedEmbedding, "tensorflow")
        and name != "adam"
        and not ALL
    ):
        pytest.skip("make nightly runs it: it finds little that the rest don't")
    optimizer, rule, settings = OPTIMIZERS[name]
    layer, reference = build(
        combiner, optimizer, rule, settings, size_threshold=0, make=make
    )
    rng = np.random.default_rng(1)
    step = trainer(layer, graph)
    for _ in range(3):
        ids, weights, gradients = make_step(rng, reference, weighted)
        outputs = step(tensors(ids), tensors(weights), gradients)
        assert_outputs(outputs, reference.lookup(ids, weights))
        reference.update(reference.row_gradients(ids, weights, gradients))
    assert_tables(layer, reference)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("sgd", tfrs_embed.PartialTPUEmbedding),
        ("adam", tfrs_embed.DistributedEmbedding),
    ],
)
def test_pipelined_training(name, make, graph):
    optimizer, rule, settings = OPTIMIZERS[name]
    layer, reference = build(
        "mean",
        optimizer,
        rule,
        settings,
        size_threshold=0,
        pipeline_execution_with_tensor_core=True,
        make=make,
    )
    rng = np.random.default_rng(2)
    step = trainer(layer, graph)
    put_off = None
    for _ in range(4):
        ids, weights, gradients = make_step(rng, reference, True)
        outputs = step(tensors(ids), tensors(weights), gradients)
        # Lookup i sees the updates of steps 0 to i - 2.
        assert_outputs(outputs, reference.lookup(ids, weights))
        if put_off is not None:
            reference.update(put_off)
        put_off = reference.row_gradients(ids, weights, gradients)
    reference.update(put_off)
    # Evaluating applies what is pending, before it looks up.
    outputs = layer(tensors(ids), weights=tensors(weights), training=False)
    assert_outputs(outputs, reference.lookup(ids, weights))
    assert_tables(layer, reference)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_keras_route_gradients(combiner):
    layer, reference = build(combiner, None, size_threshold=None)
    rng = np.random.default_rng(3)
    ids, weights, gradients = make_step(rng, reference, True)
    with tf.GradientTape() as tape:
        outputs = layer(tensors(ids), weights=tensors(weights))
        loss = tf.add_n(
            [tf.reduce_sum(outputs[k] * gradients[k]) for k in outputs]
        )
    tables = layer.embedding_tables
    found = tape.gradient(loss, tables)
    expected = reference.row_gradients(ids, weights, gradients)
    for name, table in tables.items():
        dense = np.zeros(table.shape)
        for row, gradient in expected[name].items():
            dense[row] = gradient
        np.testing.assert_allclose(
            tf.convert_to_tensor(found[name]), dense, rtol=2e-5, atol=2e-5
        )


@pytest.mark.parametrize(
    ("make", "threshold"),
    [
        (tfrs_embed.PartialTPUEmbedding, None),
        (tfrs_embed.DistributedEmbedding, 0),
    ],
)
def test_invalid_ids_count_as_absent(make, threshold):
    layer, reference = build(
        "mean",
        tpu.Adam(0.3),
        "Adam" if threshold == 0 else None,
        size_threshold=threshold,
        invalid_ids="zero",
        make=make,
    )
    reference.invalid_ids = "zero"
    rng = np.random.default_rng(4)
    step = trainer(layer, graph=False)
    for _ in range(2):
        ids, weights, gradients = {}, {}, {}
        for name, feature in reference.features.items():
            kind = name.split("_", 1)[1]
            rows = ROWS[feature.table]
            ids[name] = make_ids(rng, kind, BATCH, rows + 4, low=-3)
            weights[name] = make_weights(rng, ids[name])
        expected = reference.lookup(ids, weights)
        for name, output in expected.items():
            gradients[name] = rng.normal(size=output.shape).astype(np.float32)
        outputs = step(tensors(ids), tensors(weights), gradients)
        assert_outputs(outputs, expected)
        if threshold == 0:
            reference.update(reference.row_gradients(ids, weights, gradients))
            assert_tables(layer, reference)


@pytest.mark.parametrize(
    ("dim", "weighted"), [(4, True), (4, False), (40, False)]
)
def test_many_tables_of_one_width(dim, weighted):
    # Those of one rule and rate are updated together.
    shared = OPTIMIZERS["adagrad"]
    tables, features, reference, rules = {}, {}, {}, {}
    for i, setting in enumerate([shared, OPTIMIZERS["sgd"], shared, shared]):
        name = f"t{i}"
        tables[name] = tpu.TableConfig(
            9 + 30 * i,
            dim,
            tf.random_normal_initializer(seed=i),
            setting[0],
            ("sum", "mean")[i % 2],
            name,
        )
        rules[name] = (tables[name].combiner, *setting[1:])
        for kind in ("dense", "combined", "ragged", "sparse_sequence"):
            options = KINDS[kind](BATCH)
            features[f"{name}_{kind}"] = tpu.FeatureConfig(
                tables[name], **options
            )
            reference[f"{name}_{kind}"] = Feature(name, **options)
    layer = tfrs_embed.PartialTPUEmbedding(features, None, size_threshold=0)
    reference = Reference(
        reference,
        {
            name: Table(value.numpy(), *rules[name], rate=lambda step: 0.3)
            for name, value in layer.embedding_tables.items()
        },
    )
    rng = np.random.default_rng(6)
    step = trainer(layer, graph=True)
    for _ in range(2):
        ids, weights, gradients = make_step(rng, reference, weighted)
        outputs = step(tensors(ids), tensors(weights), gradients)
        assert_outputs(outputs, reference.lookup(ids, weights))
        reference.update(reference.row_gradients(ids, weights, gradients))
    assert_tables(layer, reference)
