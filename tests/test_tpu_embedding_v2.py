"""TPUEmbeddingV2 without a TPU: a named topology in one process."""

import re

import numpy as np
import pytest
import tensorflow as tf

import reference
from process_tiers import nightly
from tfrs_embed.sparsecore.mid_level.tpu_embedding_v2 import TPUEmbeddingV2
from training_helpers import sparse_core_config

tpu = tf.tpu.experimental.embedding

# name: rows, dim, combiner, rule, its settings. SparseCores pad rows and dims;
# "a" and "b" are one stack, so that one of them is rotated.
TABLES = {
    "a": (37, 5, "mean", "Adagrad", {"initial_accumulator_value": 0.2}),
    "b": (50, 7, "sum", "Adagrad", {"initial_accumulator_value": 0.2}),
    "sgd": (11, 8, "sqrtn", "SGD", {}),
    "adam": (23, 6, "sqrtn", "Adam", {"beta_1": 0.8, "epsilon": 1e-3}),
    "ftrl": (
        19,
        3,
        "sum",
        "FTRL",
        {"l1_regularization_strength": 0.01, "beta": 0.1},
    ),
    "momentum": (
        29,
        4,
        "mean",
        "AdagradMomentum",
        {"momentum": 0.7, "beta2": 0.9, "use_nesterov": True, "epsilon": 1e-4},
    ),
}
# name: table, kind of ids, whether they are weighted.
FEATURES = {
    "a_dense": ("a", "dense", False),
    "a_ragged": ("a", "ragged", True),
    "b_sequence": ("b", "sequence", True),
    "b_sparse": ("b", "sparse", True),
    "sgd": ("sgd", "ragged", False),
    "adam": ("adam", "sparse", True),
    "ftrl": ("ftrl", "sparse", False),
    "momentum": ("momentum", "ragged", True),
}
BATCH = 4  # of a chip
RATE = 0.1


def optimizer(rule, settings):
    return getattr(tpu, rule)(RATE, **settings)


def configuration(seed=0):
    """The features, and the tables' rows that they begin with."""
    rng = np.random.default_rng(seed)
    start, tables = {}, {}
    for name, (rows, dim, combiner, rule, settings) in TABLES.items():
        start[name] = rng.normal(size=(rows, dim)).astype(np.float32)
        tables[name] = tpu.TableConfig(
            rows,
            dim,
            initializer=tf.constant_initializer(start[name]),
            optimizer=optimizer(rule, settings),
            combiner=combiner,
            name=name,
        )
    features = {
        name: tpu.FeatureConfig(
            tables[table],
            output_shape=[BATCH, 2] if kind == "sequence" else [BATCH],
        )
        for name, (table, kind, _) in FEATURES.items()
    }
    return features, start


def make_reference(start, names):
    tables = {}
    for table in {FEATURES[name][0] for name in names}:
        _, _, combiner, rule, settings = TABLES[table]
        tables[table] = reference.Table(
            start[table], combiner, rule, settings, lambda step: RATE
        )
    features = {name: reference.Feature(FEATURES[name][0]) for name in names}
    return reference.Reference(features, tables, by_sample=True)


def make_steps(chips, steps, seed=1):
    """Random ids and weights of each step: duplicates and empty rows too."""
    rng = np.random.default_rng(seed)
    batch = chips * BATCH
    ids = {name: [] for name in FEATURES}
    weights = {name: [] for name in FEATURES}
    for _ in range(steps):
        for name, (table, kind, weighted) in FEATURES.items():
            rows = TABLES[table][0]
            if kind in ("dense", "sequence"):
                shape = (batch, 2) if kind == "sequence" else (batch,)
                ids[name].append(rng.integers(rows, size=shape))
                drawn = rng.uniform(-0.5, 2, shape).astype(np.float32)
            else:
                lengths = rng.integers(0, 4, batch)
                ids[name].append(
                    [rng.integers(rows, size=n).tolist() for n in lengths]
                )
                drawn = [rng.uniform(-0.5, 2, n).tolist() for n in lengths]
            weights[name].append(drawn if weighted else None)
    return ids, weights


def to_reference(kind, values, dtype):
    if values is None or kind in ("dense", "sequence"):
        return values
    if kind == "ragged":
        return reference.Ragged(values, dtype)
    cells = {
        (r, c): v for r, row in enumerate(values) for c, v in enumerate(row)
    }
    return reference.Sparse(cells, (len(values), 4), dtype)


def of_step(data, step, dtype):
    return {
        name: to_reference(FEATURES[name][1], steps[step], dtype)
        for name, steps in data.items()
    }


def stacked(data, dtype):
    """All steps' ids or weights as tensors that a graph can take a step of."""
    result = {}
    for name, steps in data.items():
        if steps[0] is None:
            result[name] = None
        elif FEATURES[name][1] in ("dense", "sequence"):
            result[name] = tf.constant(np.stack(steps), dtype)
        else:
            result[name] = tf.ragged.constant(
                steps, dtype=dtype, ragged_rank=2, row_splits_dtype=tf.int64
            )
    return result


def take(tensors, step):
    result = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor = tensor[step]
            if FEATURES[name][1] == "sparse":
                tensor = tensor.to_sparse()
        result[name] = tensor
    return result


def gradient_of(activation):
    """Depends on the activation, so that a stale one is seen."""
    return 0.3 * activation + 0.5


class Model:
    """A TPUEmbeddingV2 and the reference, trained on the same steps."""

    def __init__(self, topology, steps, features=FEATURES):
        configs, start = configuration()
        self.features = features
        self.embedding = TPUEmbeddingV2(
            {name: configs[name] for name in features},
            topology=topology,
        )
        self.reference = make_reference(start, features)
        ids, weights = make_steps(topology[0], steps)
        self.ids = {name: ids[name] for name in features}
        self.weights = {name: weights[name] for name in features}
        self._ids = stacked(self.ids, tf.int64)
        self._weights = stacked(self.weights, tf.float32)

    def step(self, i):
        """Trains on step i, eagerly or in a graph; returns activations."""
        activations, preserved = self.embedding(
            take(self._ids, i), take(self._weights, i)
        )
        gradients = {k: gradient_of(v) for k, v in activations.items()}
        self.embedding.apply_gradients(gradients, preserved)
        return activations

    def loop(self, first, last):
        """Trains on steps first to last - 1 in a tf.while_loop."""
        return self._run(tf.constant(first), tf.constant(last))

    @tf.function
    def _run(self, first, last):
        outputs = {
            k: tf.TensorArray(tf.float32, 0, True) for k in self.features
        }
        for i in tf.range(first, last):
            found = self.step(i)
            outputs = {
                k: v.write(i - first, found[k]) for k, v in outputs.items()
            }
        return {k: v.stack() for k, v in outputs.items()}

    def expect(self, first, last):
        """The reference's activations of these steps, one list per feature."""
        activations = {name: [] for name in self.features}
        for i in range(first, last):
            ids = of_step(self.ids, i, "int64")
            weights = of_step(self.weights, i, "float32")
            found = self.reference.lookup(ids, weights)
            gradients = {k: gradient_of(v) for k, v in found.items()}
            self.reference.update(
                self.reference.row_gradients(ids, weights, gradients)
            )
            for name, value in found.items():
                activations[name].append(value)
        return activations

    def check_tables(self):
        found = self.embedding.unstacked_variables
        assert set(found) == set(self.reference.tables)
        for name, table in self.reference.tables.items():
            expected = {"parameters": table.rows, **table.slots}
            assert set(found[name]) == set(expected)
            for key, value in expected.items():
                np.testing.assert_allclose(
                    found[name][key],
                    value,
                    rtol=2e-4,
                    atol=2e-5,
                    err_msg=f"{name}/{key}",
                )


def check_activations(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=2e-4, atol=2e-5, err_msg=name
        )


TOPOLOGIES = [(chips, cores) for chips in (1, 2, 4) for cores in (2, 4)]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_eager_steps_equal_the_reference(topology):
    model = Model(topology, 3)
    for i in range(3):
        found = model.step(i)
        expected = model.expect(i, i + 1)
        check_activations(found, {k: v[0] for k, v in expected.items()})
    model.check_tables()


@nightly(lambda topology: topology not in ((1, 2), (4, 2)))
@pytest.mark.parametrize(
    ("topology", "features"),
    [
        ((1, 2), ["a_dense", "b_sparse", "adam"]),
        ((1, 4), ["a_ragged", "sgd", "momentum"]),
        ((2, 2), ["a_dense", "sgd", "adam", "ftrl", "momentum"]),
        ((2, 4), ["a_dense", "b_sparse", "ftrl"]),
        ((4, 2), ["a_ragged", "b_sequence"]),
        ((4, 4), ["a_dense", "b_sparse"]),
    ],
    ids=str,
)
def test_loops_equal_the_reference(topology, features):
    model = Model(topology, 5, features)
    for first, last in ((0, 3), (3, 5)):
        found = model.loop(first, last)
        check_activations(found, model.expect(first, last))
        model.check_tables()


def simple(topology=(1, 4), rate=1.0, **table):
    """One table of zeros, 9 rows and trained by SGD, and one feature."""
    arguments = {"initializer": tf.zeros_initializer(), "name": "t", **table}
    config = tpu.TableConfig(9, 5, **arguments)
    return TPUEmbeddingV2(
        tpu.FeatureConfig(config, output_shape=[4]),
        tpu.SGD(rate),
        topology=topology,
    )


def train(embedding, ids=(0, 1, 2, 3)):
    activations, preserved = embedding(tf.constant(ids))
    embedding.apply_gradients(-tf.ones_like(activations), preserved)
    return activations


def value(embedding):
    """The value that the row 0 of `simple` has."""
    return float(embedding.unstacked_tables["t"][0, 0])


def test_learning_rates_are_read_at_each_update():
    rate = {"now": 1.0}
    embedding = simple(rate=lambda: rate["now"])
    train(embedding)
    rate["now"] = 10.0
    train(embedding)
    assert value(embedding) == 11
    step = tf.function(lambda: train(embedding))
    for now in (100.0, 1000.0):
        rate["now"] = now
        step()
    assert value(embedding) == 1111

    variable = tf.Variable(1.0)
    embedding = simple(rate=variable)
    step = tf.function(lambda: train(embedding))
    step()
    variable.assign(10.0)
    step()
    assert value(embedding) == 11


def test_a_feature_without_gradient_still_decays_its_slots():
    features = {
        name: tpu.FeatureConfig(
            tpu.TableConfig(9, 5, name=name), output_shape=[4]
        )
        for name in "tu"
    }
    embedding = TPUEmbeddingV2(features, tpu.Adam(0.1), topology=(1, 2))
    for gradient in (tf.ones([4, 5]), None):
        _, preserved = embedding({k: tf.range(4) for k in features})
        embedding.apply_gradients({"t": gradient, "u": None}, preserved)
    slots = embedding.unstacked_variables
    np.testing.assert_allclose(slots["t"]["momenta"][:4], 0.09, rtol=1e-6)
    assert not np.any(slots["t"]["momenta"][4:])
    assert not np.any(slots["u"]["momenta"])


def test_quantized_tables_give_quantized_activations():
    embedding = simple(
        initializer=tf.constant_initializer(0.37),
        quantization_config=tpu.QuantizationConfig(5, 0.0, 1.0),
    )
    np.testing.assert_allclose(embedding(tf.range(4))[0], 0.25)


def test_buffers_of_one_chip_have_the_shapes_of_tensorflow():
    embedding = simple(topology=(1, 4))
    ((buffers, pointers, ids),) = embedding.enqueue(tf.range(4)).values()
    assert buffers.row_pointers.shape == [64 * 4 * 8]
    assert buffers.sorted_token_ids.shape == [64 * 4]
    assert buffers.sample_count == 4
    assert (pointers.shape, int(pointers)) == ([], 32)
    assert (ids.shape, int(ids)) == ([], 32)
    several = simple(topology=(2, 2))
    ((both, pointers, _),) = several.enqueue(tf.range(8)).values()
    assert both.sorted_token_ids.shape == [2 * 64 * 4]
    assert pointers.numpy().tolist() == [16, 16]


def test_shards_are_slices_in_the_layout_of_tensorflow():
    rows = np.arange(9 * 5, dtype=np.float32).reshape(9, 5)
    embedding = simple(
        topology=(2, 2), initializer=tf.constant_initializer(rows)
    )
    (shards,) = embedding.embedding_table_shards.values()
    assert [tuple(shard.shape) for _, shard in shards] == [(16, 8)] * 2
    # Row 6 is the second one of shard 2, which is the first one of chip 1.
    np.testing.assert_array_equal(shards[1][1][1, :5], rows[6])
    stack = embedding.embedding_tables["t"].numpy()
    assert stack.sum() == rows.sum()
    assert embedding.embedding_layouts["t"].num_sparse_cores == 4
    assert set(embedding.variables["t"]) == {"parameters"}


def test_a_checkpoint_holds_tables_and_slots(tmp_path):
    saved = Model((2, 2), 2)
    saved.step(0)
    path = tf.train.Checkpoint(embedding=saved.embedding).save(
        str(tmp_path / "c")
    )
    for built in (True, False):
        features, _ = configuration(seed=5)
        other = TPUEmbeddingV2(features, None, topology=(2, 2))
        if built:
            other.build()
        tf.train.Checkpoint(embedding=other).restore(path)
        other.build()
        for stack, variables in saved.embedding.variables.items():
            for name, variable in variables.items():
                np.testing.assert_array_equal(
                    other.variables[stack][name], variable
                )
    assert any(
        "_sparse_core_table_layouts" in key
        for key, _ in tf.train.list_variables(path)
    )


@pytest.mark.parametrize("built", [False, True])
def test_a_checkpoint_of_another_topology_is_refused(built, tmp_path):
    saved = TPUEmbeddingV2(configuration()[0], topology=(2, 4))
    saved.build()
    path = tf.train.Checkpoint(embedding=saved).save(str(tmp_path / "c"))
    # The same shapes, but rows in other places.
    other = TPUEmbeddingV2(configuration()[0], topology=(4, 2))
    if built:
        other.build()
    with pytest.raises(ValueError, match="num_partitions 2, here 4"):
        tf.train.Checkpoint(embedding=other).restore(path)


def test_stats_are_the_limits_that_a_batch_needs():
    config = tpu.FeatureConfig(
        tpu.TableConfig(64, 8, name="t"), output_shape=[4]
    )
    # The first SparseCore has samples 0 and 1; ids 0, 4 and 8 are shard 0's.
    ids = tf.ragged.constant([[0, 4, 8], [0, 1], [2], []])
    most, unique = TPUEmbeddingV2.compute_sparse_core_stats(
        ids, config, num_tpu_chips=2, num_sc_per_chip=2
    )
    assert (int(most["t"]), int(unique["t"])) == (4, 3)


def two_tables():
    """Tables t and u in one stack, t_u."""
    return {
        name: tpu.FeatureConfig(
            tpu.TableConfig(9, 5, name=name), output_shape=[4]
        )
        for name in "tu"
    }


def make(feature_config=None, optimizer=None, topology=(1, 4), **config):
    return TPUEmbeddingV2(
        two_tables() if feature_config is None else feature_config,
        optimizer or tpu.SGD(1.0),
        sparse_core_embedding_config=sparse_core_config(**config)
        if config
        else None,
        topology=topology,
    )


def feature(**arguments):
    return tpu.FeatureConfig(
        tpu.TableConfig(9, 5, name="t"), **{"output_shape": [4], **arguments}
    )


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"feature_config": {"f": feature(output_shape=None)}},
            ValueError,
            "Feature 'f' (table 't'): output_shape must be known, got none",
        ),
        (
            {"feature_config": {"f": feature(output_shape=[None])}},
            ValueError,
            "output_shape must be known, got [None]",
        ),
        (
            {"feature_config": {"f": feature(output_shape=[6])}},
            ValueError,
            "6 samples per chip, which 4 SparseCores can't share equally",
        ),
        (
            {
                "feature_config": {
                    "f": feature(output_shape=[4, 3], max_sequence_length=3)
                }
            },
            ValueError,
            "max_sequence_length=3 has no effect on SparseCores",
        ),
        (
            {"feature_config": {"f": 3}},
            TypeError,
            "Expected a FeatureConfig",
        ),
        (
            {"topology": None},
            ValueError,
            "needs a topology to emulate",
        ),
        (
            {"max_ids_per_table": {"t": 4}},
            ValueError,
            "table 't' is in the stack 't_u': use that name",
        ),
        (
            {"max_unique_ids_per_table": {"v": 4}},
            ValueError,
            "max_unique_ids_per_table has no stack 'v'; the stacks are ['t_u']",
        ),
        (
            {"max_ids_per_table": {"t_u": 0}},
            ValueError,
            "max_ids_per_table['t_u'] must be an integer from 1 to 2147483647, "
            "got 0",
        ),
        (
            {"max_ids_per_chip_per_sample": -1},
            ValueError,
            "max_ids_per_chip_per_sample must be an integer from 1",
        ),
        (
            {
                "feature_config": {"f": feature()},
                "max_ids_per_chip_per_sample": 3,
            },
            ValueError,
            "max_ids_per_chip_per_sample=3 times 4 samples per chip is 12",
        ),
        (
            {"optimizer": "adam"},
            ValueError,
            "Table 't': str is an unsupported optimizer",
        ),
        (
            {"optimizer": tpu.SGD(1.0, weight_decay_factor=0.1)},
            ValueError,
            "Table 't': SGD: a table's update rule has no weight_decay_factor",
        ),
        (
            {"optimizer": tpu.SGD(1.0, clip_weight_min=0.0)},
            ValueError,
            "Table 't': SGD: a table's update rule has no clip_weight_min=0.0",
        ),
        (
            {"optimizer": tpu.Adagrad(1.0, clipvalue=1.0)},
            ValueError,
            "Table 't': Adagrad: these TPUs have no clipvalue=",
        ),
        (
            {"optimizer": tpu.Adam(1.0, use_gradient_accumulation=False)},
            ValueError,
            "update rule has no use_gradient_accumulation=False",
        ),
        (
            {"optimizer": tpu.Adam(1.0, lazy_adam=False)},
            ValueError,
            "Table 't': Adam: a table's update rule has no lazy_adam=False",
        ),
        (
            {
                "optimizer": tpu.SGD(
                    tf.keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
                )
            },
            TypeError,
            "Table 't': the learning rate is a schedule",
        ),
        (
            {
                "feature_config": tpu.FeatureConfig(
                    tpu.TableConfig(2**31 - 8, 8, name="big"), output_shape=[4]
                )
            },
            ValueError,
            "Stack 'big' has 2147483648 rows, padding included",
        ),
    ],
)
def test_a_bad_configuration_is_refused(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        make(**arguments)


def test_pipelining_is_refused():
    with pytest.raises(NotImplementedError, match="needs a TPUStrategy"):
        TPUEmbeddingV2(feature(), tpu.SGD(1.0), True, topology=(1, 4))


def test_other_strategies_are_refused():
    with (
        tf.distribute.MirroredStrategy(["CPU:0"]).scope(),
        pytest.raises(RuntimeError, match="found MirroredStrategy"),
    ):
        make()


def sparse(indices, values, rows=4):
    return tf.SparseTensor(
        np.reshape(indices, [-1, 2]).astype(np.int64), values, [rows, 3]
    )


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("ids", "weights", "text"),
    [
        ([0, 1, 2, 9], None, "id 9 is out of range; the table has 9 rows"),
        ([0, -1, 2, 3], None, "id -1 is out of range"),
        (
            tf.ragged.constant([[], [], [2**40], []], dtype=tf.int64),
            None,
            "id 1099511627776 is out of range",
        ),
        (
            sparse([[1, 0], [0, 0]], [1, 2]),
            None,
            "must have unique indices in row-major order",
        ),
        (sparse([[4, 0]], [1]), None, "outside their dense shape"),
        (
            sparse([[3, 0]], [1], rows=5),
            None,
            "ids of 5 samples, but output_shape=[4] asks for 4",
        ),
        (
            tf.ragged.constant([[1], []]),
            None,
            "ids of 2 samples, but output_shape=[4] asks for 4",
        ),
        (
            tf.ragged.constant([[1], [], [], []]),
            tf.ragged.constant([[], [1.0], [], []]),
            "row splits of the weights",
        ),
        (
            sparse([[0, 0]], [1]),
            sparse([[0, 1]], [1.0]),
            "indices of the weights",
        ),
        (
            [0, 1, 2, 3],
            [[1.0, 1.0, 1.0, 1.0]],
            "weights have the shape (1, 4), ids (4,)",
        ),
    ],
)
def test_bad_ids_are_refused(ids, weights, text, in_graph):
    ids = tf.constant(ids) if isinstance(ids, list) else ids
    weights = tf.constant(weights) if isinstance(weights, list) else weights
    embedding = make({"f": feature()})

    def enqueue(ids, weights):
        return embedding.enqueue(
            {"f": ids}, None if weights is None else {"f": weights}
        )

    if in_graph:
        enqueue = tf.function(enqueue)
    # Eagerly, shapes are static.
    errors = (tf.errors.InvalidArgumentError, ValueError)
    with pytest.raises(errors, match=re.escape(text)):
        enqueue(ids, weights)


def test_weights_of_another_kind_are_refused():
    embedding = make({"f": feature()})
    ragged = tf.ragged.constant([[1.0]] * 4)
    with pytest.raises(TypeError, match="weights must be a Tensor like"):
        embedding.enqueue({"f": tf.range(4)}, {"f": ragged})
    with pytest.raises(TypeError, match="ids must be integers, got bool"):
        embedding.enqueue({"f": tf.ones([4], tf.bool)})
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"id 0\.5 is"):
        embedding.enqueue({"f": tf.fill([4], 0.5)})


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(
    ("limits", "ids", "text"),
    [
        (
            {"max_ids_per_table": {"t_u": 2}},
            [[0], [0], [0], [0, 4, 8]],
            "gets 3 ids while the max ids per sparse core is set to be 2 for "
            "table t_u",
        ),
        (
            {"max_unique_ids_per_table": {"t_u": 2}},
            [[0], [0], [0], [0, 4, 8]],
            "gets 3 unique ids while the max unique ids per sparse core is set "
            "to be 2 for table t_u",
        ),
        (
            {"max_ids_per_chip_per_sample": 1},
            [[0], [0], [0], [0]],
            "The max_ids_per_chip is set to be 8",
        ),
    ],
)
def test_more_ids_than_a_limit_are_refused(limits, ids, text, in_graph):
    embedding = make(**limits)
    before = embedding.unstacked_tables["t"]

    def step(ids):
        activations, preserved = embedding({"t": ids, "u": tf.range(4)})
        embedding.apply_gradients(activations, preserved)

    if in_graph:
        step = tf.function(step)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=re.escape(text)
    ) as caught:
        step(tf.ragged.constant(ids))
    assert "Traceback" not in str(caught.value)
    np.testing.assert_array_equal(embedding.unstacked_tables["t"], before)


def test_more_ids_than_the_capacity_can_be_dropped():
    embedding = make(max_ids_per_chip_per_sample=1, allow_id_dropping=True)
    activations, _ = embedding({"t": tf.range(4), "u": tf.range(4)})
    lost = sum(int(np.sum(~np.any(a, axis=1))) for a in activations.values())
    assert 0 < lost < 8


def test_another_structure_is_refused():
    embedding = make()
    ids = tf.range(4)
    with pytest.raises(ValueError, match=r"features has missing keys \['u'\]"):
        embedding.enqueue({"t": ids})
    with pytest.raises(TypeError, match="features must be a dict"):
        embedding.enqueue([ids, ids])
    with pytest.raises(ValueError, match="weights has unknown keys"):
        embedding.enqueue({"t": ids, "u": ids}, {"t": ids, "v": ids})
    with pytest.raises(ValueError, match="Non-TPU device /CPU:0"):
        embedding.enqueue({"t": ids, "u": ids}, device="/CPU:0")


def test_bad_gradients_are_refused_and_change_nothing():
    embedding = make()
    ids = {"t": tf.range(4), "u": tf.range(4)}
    _, preserved = embedding(ids)
    before = embedding.unstacked_tables
    good = tf.ones([4, 5])
    for bad, text in (
        (tf.ones([4, 8]), r"shape, \[4, 5\], or None; got .* \(4, 8\)"),
        (tf.ones([4, 5], tf.float16), "got float16 of shape"),
        (np.ones([4, 5]), "must be a float32 Tensor .* got ndarray"),
    ):
        with pytest.raises(ValueError, match=r"Feature 'u'.*" + text):
            embedding.apply_gradients({"t": good, "u": bad}, preserved)
    with pytest.raises(ValueError, match="gradients has missing keys"):
        embedding.apply_gradients({"t": good}, preserved)

    # A shape that is not known until the graph runs.
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def apply(gradient):
        embedding.apply_gradients({"t": good, "u": gradient}, preserved)

    with pytest.raises(tf.errors.InvalidArgumentError):
        apply(tf.ones([4, 4]))
    for name, table in embedding.unstacked_tables.items():
        np.testing.assert_array_equal(table, before[name])
    apply(good)
    assert np.any(embedding.unstacked_tables["t"] != before["t"])


def test_gradients_need_something_built_and_an_optimizer():
    unbuilt = make()
    with pytest.raises(
        RuntimeError,
        match=r"apply_gradients called on unbuilt TPUEmbeddingV2 object\. "
        r"Please either call the embedding lookup method first or manually "
        r"call the build method\.",
    ):
        unbuilt.apply_gradients({"t": None, "u": None}, {})
    serving = TPUEmbeddingV2(two_tables(), topology=(1, 4))
    activations, preserved = serving({"t": tf.range(4), "u": tf.range(4)})
    assert set(serving.variables["t_u"]) == {"parameters"}
    with pytest.raises(RuntimeError, match="Table 't' has no optimizer"):
        serving.apply_gradients(activations, preserved)


def test_buffers_of_something_else_are_refused():
    embedding = make()
    ids = {"t": tf.range(4), "u": tf.range(4)}
    buffers = embedding.enqueue(ids)
    for bad, text in (
        (3, "got int"),
        ({"t": 1}, r"got one with the keys \['t'\]"),
        ({"t_u": (1, 2, 3)}, "a PartitionedCsrFormatTensor, got int"),
        (
            make(topology=(1, 2)).enqueue(ids),
            "made for another topology, batch or limit",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            embedding.dequeue(bad)
    activations, _ = embedding.dequeue(buffers)
    with pytest.raises(ValueError, match="the second result of dequeue"):
        embedding.apply_gradients(activations, buffers)


def test_buffers_can_be_made_in_a_dataset():
    embedding = simple()
    batches = tf.data.Dataset.from_tensor_slices(tf.constant([[0, 1, 2, 3]]))
    (buffers,) = batches.map(embedding.enqueue)
    activations, preserved = embedding.dequeue(buffers)
    embedding.apply_gradients(-tf.ones_like(activations), preserved)
    assert value(embedding) == 1


@pytest.fixture(scope="module")
def strategy():
    """A slice of one chip, which needs no more than one logical CPU."""
    from tfrs_embed.testing import EmulatedTPUStrategy

    return EmulatedTPUStrategy((1, 4))


def test_under_a_tpu_strategy_it_is_the_class_of_tensorflow(strategy):
    with strategy.scope():
        embedding = make(topology=None)
        again = make(topology=(1, 4))
    assert isinstance(embedding, tpu.TPUEmbeddingV2)
    assert isinstance(embedding, TPUEmbeddingV2)
    assert isinstance(again, tpu.TPUEmbeddingV2)
    assert not isinstance(simple(), tpu.TPUEmbeddingV2)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="but the strategy has 1 chips x 4"),
    ):
        make(topology=(1, 2))


def test_under_a_tpu_strategy_configurations_are_checked(strategy):
    with strategy.scope():
        with pytest.raises(ValueError, match="'t' is in the stack 't_u'"):
            make(topology=None, max_ids_per_table={"t": 4})
        with pytest.raises(ValueError, match="every table needs an optimizer"):
            TPUEmbeddingV2(two_tables())


def test_under_a_tpu_strategy_ids_are_checked(strategy):
    with strategy.scope():
        embedding = TPUEmbeddingV2(feature(), tpu.SGD(tf.Variable(1.0)))

    @tf.function
    def step(ids, gradient):
        def replica(ids, gradient):
            activations, preserved = embedding(ids)
            embedding.apply_gradients(gradient, preserved)
            return activations

        return strategy.run(replica, (ids, gradient))

    before = embedding.unstacked_tables["t"]
    found = step(tf.constant([0, 3, 8, 8]), tf.ones([4, 5]))
    np.testing.assert_array_equal(found[:3], tf.gather(before, [0, 3, 8]))
    after = embedding.unstacked_tables["t"]
    np.testing.assert_allclose(
        before - after,
        np.eye(9)[[0, 3, 8, 8]].sum(0)[:, None] * np.ones(5),
        rtol=1e-5,
    )
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="id 9 is out of range"
    ):
        step(tf.constant([0, 3, 8, 9]), tf.ones([4, 5]))
    np.testing.assert_array_equal(embedding.unstacked_tables["t"], after)


@pytest.mark.parametrize("built", [False, True])
def test_checkpoints_move_between_tpu_strategies_and_none(
    strategy, built, tmp_path
):
    ids = {"t": tf.constant([0, 3, 8, 8]), "u": tf.range(4)}
    gradients = {name: tf.ones([4, 5]) for name in ids}

    @tf.function
    def step():
        def replica():
            _, preserved = there.embedding(ids)
            there.embedding.apply_gradients(gradients, preserved)

        strategy.run(replica)

    def assert_equal(left, right):
        for table, variables in left.unstacked_variables.items():
            for name, variable in variables.items():
                np.testing.assert_array_equal(
                    variable, right.unstacked_variables[table][name]
                )

    with strategy.scope():
        there = tf.train.Checkpoint(
            embedding=make(optimizer=tpu.Adam(0.1), topology=None)
        )
    step()
    here = tf.train.Checkpoint(embedding=make(optimizer=tpu.Adam(0.1)))
    if built:
        here.embedding.build()
    status = here.restore(there.save(str(tmp_path / "there")))
    here.embedding.build()
    status.assert_existing_objects_matched()
    assert_equal(there.embedding, here.embedding)

    _, preserved = here.embedding(ids)
    here.embedding.apply_gradients(gradients, preserved)
    path = here.save(str(tmp_path / "here"))
    step()
    there.restore(path).assert_existing_objects_matched()
    assert_equal(here.embedding, there.embedding)
