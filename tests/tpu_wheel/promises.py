"""What docs/tpu.md promises, as programs that any strategy can run.

Each trains some layers. Every replica gets the same batch and gradients are
summed over replicas, so one device trains its tables alike if its loss is
multiplied by their number: that is `scale`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed

Hardware = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
tpu = tf.tpu.experimental.embedding

BATCH = 8
STEPS = 4
ROWS = {"big": 500, "wide": 300, "small": 20}
DIMS = {"big": 8, "wide": 16, "small": 8}
COMBINERS = {"big": "mean", "wide": "sqrtn", "small": "sum"}
KINDS = ("dense", "ragged", "sparse", "sequence", "matrix")


@dataclasses.dataclass(frozen=True)
class Promise:
    """A line of the table in docs/tpu.md.

    Attributes:
        name: what is promised.
        run: trains under a strategy, with a loss that is multiplied by a
            number; returns the layers.
        hardware: the embedding hardware that it is promised for.
        functions: how many functions with TPU programs there are.
        pipelined: whether the first of them is a pipelined loop.
        holds: what the programs' text in TensorFlow's operations has in it, on
            SparseCores.
    """

    name: str
    run: Callable
    hardware: tuple = (Hardware.V2, Hardware.V1, Hardware.UNSUPPORTED)
    functions: int = 1
    pipelined: bool = False
    holds: tuple[str, ...] = ()


def make_ids(kinds, tables):
    """One batch: ids by feature, "<kind>_<table>"."""
    rng = np.random.default_rng(0)
    found = {}
    for kind in kinds:
        for table in tables:
            rows = ROWS[table]
            if kind == "dense":
                ids = tf.constant(rng.integers(0, rows, BATCH))
            elif kind == "matrix":
                ids = tf.constant(rng.integers(0, rows, (BATCH, 3)))
            else:
                ids = tf.ragged.constant(
                    [rng.integers(0, rows, i % 4).tolist() for i in range(8)],
                    dtype=tf.int64,
                    ragged_rank=1,
                )
                ids = ids.to_sparse() if kind == "sparse" else ids
            found[f"{kind}_{table}"] = ids
    return found


def make_features(kinds, tables):
    """The features' configurations."""
    made = {
        t: tfrs_embed.TableConfig(
            t,
            ROWS[t],
            DIMS[t],
            combiner=COMBINERS[t],
            initializer=tf_keras.initializers.RandomUniform(-1, 1, seed=3),
        )
        for t in tables
    }
    features = {}
    for kind in kinds:
        for table in tables:
            name = f"{kind}_{table}"
            features[name] = tfrs_embed.FeatureConfig(
                name,
                made[table],
                max_sequence_length=3 if kind == "sequence" else 0,
                # A matrix's rows are combined.
                output_shape=(BATCH, DIMS[table]) if kind == "matrix" else None,
            )
    return features


def make_weights(ids):
    """Weights of the ids' kinds."""

    def weights(value):
        if isinstance(value, tf.Tensor):
            return tf.cast(value % 3 + 1, tf.float32)
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensor(
                value.indices,
                tf.cast(value.values % 3 + 1, tf.float32),
                value.dense_shape,
            )
        return value.with_values(tf.cast(value.values % 3 + 1, tf.float32))

    return {name: weights(value) for name, value in ids.items()}


class Model(tf_keras.Model):
    """Puts a layer's vectors side by side under one dense layer."""

    def __init__(self, layer, weighted=False):
        super().__init__()
        self.embeddings = layer
        self.weighted = weighted
        self.dense = tf_keras.layers.Dense(
            1, kernel_initializer=tf_keras.initializers.Constant(0.1)
        )

    def call(self, inputs, training=None):
        weights = None
        if self.weighted:
            inputs, weights = inputs
            vectors = self.embeddings(inputs, weights=weights)
        else:
            vectors = self.embeddings(inputs)
        flat = [
            tf.reshape(vector, [BATCH, -1])
            for vector in tf.nest.flatten(vectors)
        ]
        return tf.cast(self.dense(tf.concat(flat, -1)), tf.float32)


class SumOfSquares(tf_keras.losses.Loss):
    """A sum over the batch, which Keras then adds up over the replicas."""

    def __init__(self, scale):
        super().__init__(reduction="sum")
        self.scale = scale

    def call(self, y_true, y_pred):
        return self.scale * tf.reduce_sum(tf.square(y_true - y_pred), -1)


def make_layer(
    kinds, tables, optimizer="adagrad", threshold=100, pipelined=False, **kwargs
):
    """A PartialTPUEmbedding; what `optimizer` makes is made here."""
    if callable(optimizer):
        optimizer = optimizer()
    return tfrs_embed.PartialTPUEmbedding(
        make_features(kinds, tables),
        optimizer,
        pipelined,
        batch_size=BATCH,
        size_threshold=threshold,
        **kwargs,
    )


def make_dataset(strategy, inputs):
    """Batches without end, the same for each replica."""
    labels = np.linspace(-1, 1, BATCH, dtype=np.float32)[:, None]

    def make(_):
        return tf.data.Dataset.from_tensors((inputs, labels)).repeat()

    if isinstance(strategy, tf.distribute.TPUStrategy):
        return strategy.distribute_datasets_from_function(
            make, tf.distribute.InputOptions(experimental_fetch_to_device=False)
        )
    return make(None)


def keras(
    kinds=("dense",),
    tables=("big",),
    weighted=False,
    steps_per_execution=1,
    policy=None,
    then=(),
    before=None,
    cls=Model,
    keras_optimizer=lambda: tf_keras.optimizers.SGD(0.01),
    **options,
):
    """Keras's loops over a model with one layer."""

    def run(strategy, scale, **hardware):
        ids = make_ids(kinds, tables)
        inputs = (ids, make_weights(ids)) if weighted else ids
        with _policy(policy):
            with strategy.scope():
                layer = make_layer(kinds, tables, **options, **hardware)
                model = cls(layer, weighted)
                model.compile(
                    keras_optimizer(),
                    SumOfSquares(scale),
                    steps_per_execution=steps_per_execution,
                )
            if before is not None:
                before(layer)
            data = make_dataset(strategy, inputs)
            model.fit(
                data,
                steps_per_epoch=max(STEPS, steps_per_execution),
                verbose=0,
            )
            for method in then:
                getattr(model, method)(
                    data, steps=max(2, steps_per_execution), verbose=0
                )
        return [layer]

    return run


@contextlib.contextmanager
def _policy(name):
    if name is None:
        yield
        return
    tf_keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


def sum_of_squares(vectors):
    return tf.add_n(
        [tf.reduce_sum(tf.square(v)) for v in tf.nest.flatten(vectors)]
    )


def train_pipelined(make, ids, scale):
    """One device's layer after steps whose lookups miss the last update."""
    layer, stale = make(), make()
    layer(ids, training=False)
    stale(ids, training=False)
    for _ in range(STEPS):
        vectors = stale(ids, training=False)
        with tf.GradientTape() as tape:
            tape.watch(vectors)
            loss = scale * sum_of_squares(vectors)
        gradients = tape.gradient(loss, vectors)
        stale.load_tables(
            {n: rows.numpy() for n, rows in layer.embedding_tables.items()}
        )
        with tf.GradientTape() as tape:
            found = tf.nest.flatten(layer(ids, training=True))
            loss = tf.add_n(
                [
                    tf.reduce_sum(v * g)
                    for v, g in zip(
                        found, tf.nest.flatten(gradients), strict=True
                    )
                ]
            )
        tape.gradient(loss, layer.trainable_variables)
    return [layer]


def loop(
    layers, kinds=("dense",), tables=("big",), in_loop=True, pipelined=False
):
    """A loop of one's own over `strategy.run`, on the device or around it."""
    if pipelined:
        layers = [
            functools.partial(make, pipelined=True, threshold=0)
            for make in layers
        ]

    def run(strategy, scale, **hardware):
        ids = make_ids(kinds, tables)
        if pipelined and not isinstance(strategy, tf.distribute.TPUStrategy):
            [make] = layers
            return train_pipelined(lambda: make(kinds, tables), ids, scale)
        with strategy.scope():
            # It needs no variables before the first call.
            optimizer = tf_keras.optimizers.legacy.SGD(0.01)
            made = [make(kinds, tables, **hardware) for make in layers]

        def step(ids):
            with tf.GradientTape() as tape:
                loss = scale * tf.add_n(
                    [sum_of_squares(m(ids, training=True)) for m in made]
                )
            variables = [v for m in made for v in m.trainable_variables]
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        if in_loop:

            @tf.function
            def steps(ids):
                for _ in tf.range(STEPS):
                    strategy.run(step, (ids,))

            steps(ids)
        else:
            # TPUStrategy takes no tf.function of a lambda.
            @tf.function
            def one(ids):
                strategy.run(step, (ids,))

            for _ in range(STEPS):
                one(ids)
        return made

    return run


def distributed(strategy, scale, **hardware):
    """A DistributedEmbedding with tables of every placement."""

    def make(kinds, tables, **_):
        replicas = strategy.num_replicas_in_sync
        features = {}
        for table in tables:
            config = tfrs_embed.TableConfig(
                table,
                ROWS[table],
                DIMS[table],
                combiner=COMBINERS[table],
                initializer=tf_keras.initializers.RandomUniform(-1, 1, seed=3),
                optimizer=tpu.Adagrad(0.1),
            )
            for kind in kinds:
                name = f"{kind}_{table}"
                width = () if kind == "dense" else (3,)
                features[name] = tfrs_embed.FeatureConfig(
                    name,
                    config,
                    input_shape=(BATCH * replicas, *width),
                    output_shape=(BATCH * replicas, DIMS[table]),
                )
        return tfrs_embed.DistributedEmbedding(
            features, size_threshold=100, **hardware
        )

    return loop(
        [make], ("dense", "matrix", "ragged"), ("big", "small"), in_loop=False
    )(strategy, scale)


class Ranking(tfrs.Model):
    """A tfrs.Model with a task."""

    def __init__(self, layer, scale):
        super().__init__()
        self.embeddings = layer
        self.dense = tf_keras.layers.Dense(
            1, kernel_initializer=tf_keras.initializers.Constant(0.1)
        )
        self.task = tfrs.tasks.Ranking(
            loss=SumOfSquares(scale),
            metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
        )

    def compute_loss(self, inputs, training=False):
        ids, labels = inputs
        vectors = self.embeddings(ids, training=training)
        flat = [tf.reshape(v, [BATCH, -1]) for v in vectors.values()]
        return self.task(labels, self.dense(tf.concat(flat, -1)))


def ranking(strategy, scale, **hardware):
    """fit and evaluate of a tfrs.Model."""
    kinds, tables = ("dense", "ragged"), ("big", "small")
    with strategy.scope():
        layer = make_layer(kinds, tables, **hardware)
        model = Ranking(layer, scale)
        model.distribute_reduction_method = "first"
        model.compile(tf_keras.optimizers.SGD(0.01), steps_per_execution=2)
    data = make_dataset(strategy, make_ids(kinds, tables))
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    model.evaluate(data, steps=2, verbose=0)
    return [layer]


def composite(strategy, scale, **hardware):
    """fit with TFRS's optimizer of several."""
    with strategy.scope():
        layer = make_layer(["dense"], ["big", "small"], **hardware)
        model = Model(layer)
        legacy = tf_keras.optimizers.legacy
        optimizer = tfrs.experimental.optimizers.CompositeOptimizer(
            [
                (legacy.SGD(0.01), lambda: layer.trainable_variables),
                (legacy.Adagrad(0.01), lambda: model.dense.trainable_variables),
            ]
        )
        model.compile(optimizer, SumOfSquares(scale))
    data = make_dataset(strategy, make_ids(["dense"], ["big", "small"]))
    model.fit(data, steps_per_epoch=STEPS, verbose=0)
    return [layer]


def assign_rate(layer):
    """Halves the rate of every table."""
    for optimizer in layer.table_optimizers.values():
        optimizer.learning_rate = 0.05


class MidLevel:
    """A TPUEmbeddingV2's tables, as a layer has them."""

    def __init__(self, embedding):
        self._embedding = embedding

    @property
    def embedding_tables(self):
        return self._embedding.unstacked_tables


def mid_level(pipelined):
    """TPUEmbeddingV2 itself; on one device a layer with the same tables."""

    def run(strategy, scale, **_):
        features = {
            "a": tpu.FeatureConfig(
                tpu.TableConfig(
                    500,
                    8,
                    tf.constant_initializer(0.5),
                    combiner="mean",
                    name="big",
                ),
                output_shape=[BATCH],
            ),
            "b": tpu.FeatureConfig(
                tpu.TableConfig(
                    300, 16, tf.constant_initializer(0.5), name="wide"
                ),
                output_shape=[BATCH],
            ),
        }
        ids = {
            "a": make_ids(["ragged"], ["big"])["ragged_big"],
            "b": make_ids(["dense"], ["wide"])["dense_wide"],
        }
        if not isinstance(strategy, tf.distribute.TPUStrategy):

            def make():
                return tfrs_embed.PartialTPUEmbedding(
                    features, tpu.Adam(0.1), size_threshold=0
                )

            if pipelined:
                return train_pipelined(make, ids, 0.25 * scale)
            layer = make()
            for _ in range(STEPS):
                with tf.GradientTape() as tape:
                    vectors = layer(ids, training=True)
                    loss = 0.25 * scale * sum_of_squares(vectors)
                tape.gradient(loss, layer.trainable_variables)
            return [layer]
        with strategy.scope():
            embedding = tfrs_embed.TPUEmbeddingV2(
                features, tpu.Adam(0.1), pipelined
            )
            embedding.build()

        def step(ids):
            activations, buffers = embedding(ids)
            embedding.apply_gradients(
                {k: v * 0.5 for k, v in activations.items()}, buffers
            )

        @tf.function
        def steps(ids):
            for _ in tf.range(STEPS):
                strategy.run(step, (ids,))

        steps(ids)
        return [MidLevel(embedding)]

    return run


def _rule(name, **settings):
    return functools.partial(getattr(tpu, name), 0.1, **settings)


ALL_TABLES = ("big", "wide", "small")
V2 = (Hardware.V2,)

PROMISES = [
    Promise("dense ids", keras()),
    Promise("ragged ids", keras(["ragged"])),
    Promise("sparse ids", keras(["sparse"])),
    Promise("weights", keras(["matrix", "ragged", "sparse"], weighted=True)),
    Promise("sequences", keras(["sequence"], ["big", "small"])),
    Promise("dense ids, combined", keras(["matrix"], ["big", "small"])),
    Promise("small tables beside large ones", keras(KINDS, ALL_TABLES)),
    Promise("small tables alone", keras(KINDS, ["small"])),
    Promise(
        '`invalid_ids="zero"`',
        keras(["dense", "ragged"], ["big", "small"], invalid_ids="zero"),
    ),
    Promise("SGD", keras(optimizer=_rule("SGD")), holds=("GradWithSgd",)),
    Promise(
        "Adagrad",
        keras(optimizer=_rule("Adagrad", initial_accumulator_value=0.3)),
        holds=("GradWithAdagradAnd",),
    ),
    Promise(
        "AdagradMomentum",
        keras(
            optimizer=_rule(
                "AdagradMomentum", momentum=0.8, beta2=0.9, exponent=3.0
            )
        ),
        V2,
        holds=(
            "GradWithAdagradMomentum",
            "beta1 = 8.000000e-01",
            "beta2 = 0.899999976",
            "exponent = 3.000000e+00",
        ),
    ),
    Promise(
        "Adam",
        keras(optimizer=_rule("Adam", beta_1=0.8, beta_2=0.9, epsilon=0.25)),
        holds=(
            "GradWithAdam",
            "beta1 = 8.000000e-01",
            "beta2 = 0.899999976",
            "epsilon = 2.500000e-01",
        ),
    ),
    Promise(
        "FTRL",
        keras(
            optimizer=_rule(
                "FTRL",
                l1_regularization_strength=0.25,
                l2_regularization_strength=0.5,
            )
        ),
        holds=(
            "GradWithFtrl",
            "l1_regularization_strength = 2.500000e-01",
            "l2_regularization_strength = 5.000000e-01",
        ),
    ),
    Promise(
        "Keras's Adam with a schedule",
        keras(
            optimizer=lambda: tf_keras.optimizers.Adam(
                tf_keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
            )
        ),
        holds=("GradWithAdam",),
    ),
    Promise("an assigned learning rate", keras(before=assign_rate)),
    Promise(
        "a callable learning rate",
        keras(optimizer=lambda: tpu.Adagrad(lambda: tf.constant(0.05))),
    ),
    Promise(
        "mixed_bfloat16", keras(KINDS, ALL_TABLES, policy="mixed_bfloat16")
    ),
    Promise(
        "`fit`, `evaluate`, `predict`, steps_per_execution 1",
        keras(["dense", "ragged"], then=("evaluate", "predict")),
        functions=3,
    ),
    Promise(
        "the same, steps_per_execution 10",
        keras(
            ["dense", "ragged"],
            steps_per_execution=10,
            then=("evaluate", "predict"),
        ),
        functions=3,
    ),
    Promise(
        "the same, pipelined",
        keras(
            ["dense", "ragged", "matrix"],
            ["big", "small"],
            steps_per_execution=10,
            pipelined=True,
            then=("evaluate", "predict"),
        ),
        (Hardware.V2, Hardware.V1),
        functions=3,
        pipelined=True,
    ),
    Promise(
        "pipelined, steps_per_execution 1",
        keras(["dense", "ragged"], pipelined=True),
        (Hardware.V2, Hardware.V1),
    ),
    Promise("`tfrs.Model`", ranking, functions=2),
    Promise("TFRS's `CompositeOptimizer`", composite),
    Promise(
        "a loop of one's own",
        loop([make_layer], KINDS, ALL_TABLES, in_loop=False),
    ),
    Promise("a loop on the device", loop([make_layer], KINDS, ALL_TABLES)),
    Promise(
        "a loop on the device, pipelined",
        loop([make_layer], KINDS, ALL_TABLES, pipelined=True),
        V2,
        pipelined=True,
    ),
    Promise(
        "two layers",
        loop([make_layer, make_layer], ["dense"], ["big"], in_loop=False),
        (Hardware.V2, Hardware.UNSUPPORTED),
    ),
    Promise(
        "`DistributedEmbedding`",
        distributed,
        (Hardware.V2, Hardware.UNSUPPORTED),
    ),
    Promise("`TPUEmbeddingV2`", mid_level(False), V2),
    Promise("`TPUEmbeddingV2`, pipelined", mid_level(True), V2, pipelined=True),
]
