"""Properties of lookups and updates, on random configurations and ids."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfrs_embed
from keras_under_test import layers
from process_tiers import on, with_kernels
from reference import Feature, Ragged, Reference, Sparse, Table, to_tf
from training_helpers import train

pytestmark = [
    pytest.mark.usefixtures("both_implementations"),
    on("keras:3", tier="nightly"),
]

tpu = tf.tpu.experimental.embedding
bounded = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# Sums of these are exact in float32: a sum is zero here and there alike.
EIGHTHS = st.integers(-16, 16).map(lambda n: n / 8)
COMBINERS = st.sampled_from(["sum", "mean", "sqrtn"])

# Accumulators and epsilons are not small, so that a gradient that is zero but
# for rounding makes no large step.
OPTIMIZERS = [
    (tpu.SGD(0.25), "SGD", {}),
    (
        tpu.Adagrad(0.25, initial_accumulator_value=0.5),
        "Adagrad",
        {"initial_accumulator_value": 0.5},
    ),
    (
        tpu.AdagradMomentum(
            0.25, momentum=0.5, use_nesterov=True, beta2=0.75, epsilon=0.1
        ),
        "AdagradMomentum",
        {
            "momentum": 0.5,
            "use_nesterov": True,
            "beta2": 0.75,
            "epsilon": 0.1,
        },
    ),
    (
        tpu.Adam(0.25, beta_1=0.5, beta_2=0.75, epsilon=0.1),
        "Adam",
        {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 0.1},
    ),
    (
        tpu.FTRL(0.25, l1_regularization_strength=0.125, beta=0.5),
        "FTRL",
        {"l1_regularization_strength": 0.125, "beta": 0.5},
    ),
]


@dataclasses.dataclass
class Case:
    """Features of random kinds, with ids, weights and nesting."""

    features: list
    tables: list
    rows: list
    optimizer: tuple
    ids: list
    weights: list
    nest: object


def arrays(shape, elements):
    size = int(np.prod(shape))
    return st.lists(elements, min_size=size, max_size=size).map(
        lambda values: np.reshape(np.array(values, np.float64), shape)
    )


@st.composite
def dense_ids(draw, rows, shape):
    dtype = draw(st.sampled_from([np.int32, np.int64, np.uint8]))
    return draw(arrays(shape, st.integers(0, rows - 1))).astype(dtype)


def ragged_ids(rows, batch):
    row = st.lists(st.integers(0, rows - 1), max_size=4)
    return st.lists(row, min_size=batch, max_size=batch).map(Ragged)


def sparse_ids(rows, batch):
    if not batch:
        return st.just(Sparse({}, (0, 4)))
    cell = st.tuples(st.integers(0, batch - 1), st.integers(0, 3))
    return st.dictionaries(
        cell, st.integers(0, rows - 1), max_size=3 * batch
    ).map(lambda cells: Sparse(cells, (batch, 4)))


@st.composite
def weights_of(draw, ids):
    if isinstance(ids, np.ndarray):
        return draw(arrays(ids.shape, EIGHTHS)).astype(np.float32)
    if isinstance(ids, Ragged):
        return Ragged(
            [
                draw(st.lists(EIGHTHS, min_size=len(r), max_size=len(r)))
                for r in ids.rows
            ],
            "float32",
        )
    cells = {key: draw(EIGHTHS) for key in ids.cells}
    return Sparse(cells, ids.shape, "float32")


@st.composite
def feature_input(draw, table, rows):
    """A feature of a random kind on a table, and ids for it."""
    batch = draw(st.integers(0, 3))
    kinds = "dense", "combined", "ragged", "sparse", "uncombined"
    kind = draw(st.sampled_from(kinds))
    if kind == "dense":
        shape = draw(st.sampled_from([(), (batch,), (batch, 2)]))
        return Feature(table), draw(dense_ids(rows, shape))
    if kind == "combined":
        shape = draw(st.sampled_from([(batch,), (batch, 2)]))
        width = draw(st.integers(1, 3))
        known = draw(st.booleans())
        wanted = shape if known else (None, *shape[1:])
        return (
            Feature(table, output_shape=wanted),
            draw(dense_ids(rows, (*shape, width))),
        )
    if kind == "uncombined":
        make = draw(st.sampled_from([ragged_ids, sparse_ids]))
        return Feature(table, combiner=None), draw(make(rows, batch))
    length = draw(st.sampled_from([0, 1, 3]))
    make = ragged_ids if kind == "ragged" else sparse_ids
    return Feature(table, max_sequence_length=length), draw(make(rows, batch))


@st.composite
def nestings(draw, size):
    """A function that nests a list of `size` leaves at random."""
    kind = draw(st.sampled_from(["list", "tuple", "dict", "split"]))
    if kind == "list":
        return list
    if kind == "tuple":
        return tuple
    if kind == "dict" or size < 2:
        return lambda leaves: {f"f{i}": x for i, x in enumerate(leaves)}
    cut = draw(st.integers(1, size - 1))
    first, second = draw(nestings(cut)), draw(nestings(size - cut))
    return lambda leaves: {
        "z": first(leaves[:cut]),
        "a": [second(leaves[cut:])],
    }


@st.composite
def cases(draw):
    num_tables = draw(st.integers(1, 2))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    tables, values = [], []
    for i in range(num_tables):
        rows, dim = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        values.append(
            np.random.default_rng(i).normal(size=(rows, dim)).astype("float32")
        )
        tables.append(
            tpu.TableConfig(
                rows,
                dim,
                tf.constant_initializer(values[-1]),
                combiner=draw(COMBINERS),
                name=f"t{i}",
            )
        )
    features, ids, weights = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        table = draw(st.integers(0, num_tables - 1))
        feature, its_ids = draw(
            feature_input(f"t{table}", tables[table].vocabulary_size)
        )
        features.append(feature)
        ids.append(its_ids)
        weights.append(draw(st.none() | weights_of(its_ids)))
    nest = draw(nestings(len(features)))
    return Case(features, tables, values, optimizer, ids, weights, nest)


def is_empty(ids):
    """Whether ids have a batch of 0; the reference knows no such features."""
    if isinstance(ids, np.ndarray):
        return ids.size == 0
    return not (ids.rows if isinstance(ids, Ragged) else ids.shape[0])


def make_layer(case, threshold):
    tables = {t.name: t for t in case.tables}
    configs = [
        tfrs_embed.FeatureConfig(f"f{i}", tables[f.table], combiner=None)
        if f.combiner is None
        else tpu.FeatureConfig(
            tables[f.table],
            max_sequence_length=f.max_sequence_length,
            output_shape=f.output_shape,
        )
        for i, f in enumerate(case.features)
    ]
    layer = layers.PartialTPUEmbedding(
        case.nest(configs), case.optimizer[0], size_threshold=threshold
    )
    layer.build(None)
    return layer


def make_reference(case):
    _, rule, its_settings = case.optimizer
    used = {f.table for f in case.features}
    return Reference(
        {
            i: f
            for i, (f, ids) in enumerate(
                zip(case.features, case.ids, strict=True)
            )
            if not is_empty(ids)
        },
        {
            t.name: Table(
                rows, t.combiner, rule, dict(its_settings), lambda step: 0.25
            )
            for t, rows in zip(case.tables, case.rows, strict=True)
            if t.name in used
        },
    )


def empty_shape(feature, ids, dim):
    """The shape of the activations of ids with a batch of 0."""
    if feature.combiner is None:
        return (0, 0, dim)
    if not isinstance(ids, np.ndarray):
        length = feature.max_sequence_length
        return (0, length, dim) if length else (0, dim)
    combined = feature.output_shape is not None
    return (*(ids.shape[:-1] if combined else ids.shape), dim)


def assert_close(actual, expected, name=""):
    np.testing.assert_allclose(
        actual, expected, rtol=1e-4, atol=1e-5, err_msg=str(name)
    )


def unpadded(feature, ids, gradient):
    """A padded gradient as the layer's output is: ragged, if not combined."""
    if feature.combiner is not None:
        return gradient
    if isinstance(ids, Ragged):
        lengths = [len(row) for row in ids.rows]
    else:
        of_cells = np.array([row for row, _ in ids.cells], np.int64)
        lengths = np.bincount(of_cells, minlength=ids.shape[0])
    lengths = tf.constant(lengths, tf.int64)
    return tf.RaggedTensor.from_tensor(gradient, lengths)


def padded(output):
    return output.to_tensor() if isinstance(output, tf.RaggedTensor) else output


def assert_activations(case, reference, layer):
    """Looks the ids up and compares; returns the activations' shapes."""
    outputs = layer(
        case.nest([to_tf(ids) for ids in case.ids]),
        weights=case.nest([to_tf(w) for w in case.weights]),
    )
    expected = reference.lookup(case.ids, case.weights)
    # The same nesting, with each feature's shape as its leaf.
    dims = {t.name: t.dim for t in case.tables}
    for i, (feature, ids) in enumerate(
        zip(case.features, case.ids, strict=True)
    ):
        if is_empty(ids):
            shape = empty_shape(feature, ids, dims[feature.table])
            expected[i] = np.zeros(shape)
    wanted = case.nest([expected[i] for i in range(len(case.features))])
    outputs = tf.nest.map_structure(padded, outputs)
    tf.nest.assert_same_structure(outputs, wanted)
    tf.nest.map_structure(assert_close, outputs, wanted)
    return [expected[i].shape for i in range(len(case.features))]


@on("keras:3", tier="nightly", when=with_kernels)
@bounded
@given(cases())
def test_lookup_and_training_equal_the_reference(case):
    reference = make_reference(case)
    assert_activations(case, reference, make_layer(case, None))
    layer = make_layer(case, 0)
    shapes = assert_activations(case, reference, layer)
    rng = np.random.default_rng(0)
    for _ in range(2):  # The second step starts from slots of its own.
        gradients = [
            rng.integers(-8, 9, shape).astype(np.float32) / 8
            for shape in shapes
        ]
        train(
            layer,
            case.nest([to_tf(ids) for ids in case.ids]),
            case.nest([*map(unpadded, case.features, case.ids, gradients)]),
            case.nest([to_tf(w) for w in case.weights]),
        )
        reference.update(
            reference.row_gradients(
                case.ids, case.weights, dict(enumerate(gradients))
            )
        )
    for name, table in reference.tables.items():
        assert_close(layer.embedding_tables[name], table.rows, name)
        slots = layer.tables[name].slots
        assert sorted(slots) == sorted(table.slots)
        for slot, value in table.slots.items():
            assert_close(slots[slot], value, f"{name}/{slot}")
    assert int(layer.tpu_embedding.step) == 2


@st.composite
def lookups(draw):
    """A table's size, a combiner or None, ids and weights it allows."""
    rows, dim = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batch = draw(st.integers(0, 3))
    combiner = draw(st.none() | COMBINERS)
    shapes = [(batch, 3), (2, batch, 2)]
    kinds = [ragged_ids(rows, batch)]
    if combiner is None:
        shapes += [(), (batch,)]
    else:
        kinds.append(sparse_ids(rows, batch))
    kinds += [dense_ids(rows, shape) for shape in shapes]
    ids = draw(st.one_of(kinds))
    weights = None
    if combiner is not None:
        weights = draw(st.none() | weights_of(ids))
    return rows, dim, combiner, ids, weights


def all_ids(ids):
    """The ids of all rows, in order."""
    if isinstance(ids, np.ndarray):
        return ids.ravel()
    if isinstance(ids, Ragged):
        return [i for row in ids.rows for i in row]
    return [ids.cells[key] for key in sorted(ids.cells)]


@on("keras:3", tier="nightly", when=with_kernels)
@bounded
@given(lookups())
def test_a_lookups_gradient_is_over_its_sorted_unique_ids(lookup):
    rows, dim, combiner, ids, weights = lookup
    rng = np.random.default_rng(0)
    param = tf.Variable(rng.normal(size=(rows, dim)).astype(np.float32))
    with tf.GradientTape() as tape:
        output = tfrs_embed.embedding_lookup(
            param, to_tf(ids), combiner, to_tf(weights)
        )
        flat = getattr(output, "flat_values", output)
        gradient = rng.normal(size=flat.shape).astype(np.float32)
        loss = tf.reduce_sum(flat * gradient)
    slices = tape.gradient(loss, param)
    assert isinstance(slices, tf.IndexedSlices)
    np.testing.assert_array_equal(slices.indices, np.unique(all_ids(ids)))
    if is_empty(ids):
        return
    if combiner is None:
        # One id a bag, whatever the kind.
        ids, feature = np.array(all_ids(ids), np.int64), Feature("t")
    else:
        shape = ids.shape[:-1] if isinstance(ids, np.ndarray) else None
        feature = Feature("t", output_shape=shape)
    if isinstance(ids, np.ndarray) and not ids.size:
        return
    reference = Reference(
        {"f": feature}, {"t": Table(param.numpy(), combiner or "sum")}
    )
    expected = reference.lookup({"f": ids}, {"f": weights})["f"]
    assert_close(flat, expected.reshape(flat.shape))
    sums = reference.row_gradients({"f": ids}, {"f": weights}, {"f": gradient})[
        "t"
    ]
    dense = np.zeros((rows, dim))
    for row, value in sums.items():
        dense[row] = value
    assert_close(tf.convert_to_tensor(slices), dense)
