"""What is refused under a strategy, and that nothing has changed then."""

import re

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from process_tiers import nightly, on
from strategies.replicas import distribute, local_ids
from training_helpers import assert_unchanged, differentiate, state

pytestmark = [on("mirrored:2"), on("workers:3", tier="nightly")]


def make_layer(strategy, **kwargs):
    table = tfrs_embed.TableConfig("movies", 50, 3, combiner="sum")
    with strategy.scope():
        return tfrs_embed.PartialTPUEmbedding(
            {
                "movie": tfrs_embed.FeatureConfig("movie", table),
                "seen": tfrs_embed.FeatureConfig("seen", table),
            },
            "adagrad",
            size_threshold=0,
            **kwargs,
        )


def trainer(strategy, layer):
    def step(ids, weights):
        with tf.GradientTape() as tape:
            outputs = layer(ids, weights, training=True)
            loss = tf.add_n([tf.reduce_sum(v**2) for v in outputs.values()])
        differentiate(tape, loss, layer.trainable_variables)
        return loss

    return tf.function(
        lambda ids, weights=None: strategy.run(step, (ids, weights)),
        reduce_retracing=True,
    )


def good(strategy):
    return [
        {
            "movie": np.array([1, 2, r]),
            "seen": tf.SparseTensor([[0, 0], [1, 2]], [7, r], [3, 4]),
        }
        for r in range(strategy.num_replicas_in_sync)
    ]


BAD = {
    "id": (
        {"movie": np.array([1, 2, 99])},
        r"'movie' \(table 'movies'\): id 99 is out of range; .* 0 to 49",
    ),
    "order": (
        {"seen": tf.SparseTensor([[1, 0], [0, 2]], [7, 8], [3, 4])},
        "'seen' .*order",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_of_one_replica_is_an_error_on_all(strategy, kind):
    layer = make_layer(strategy)
    train = trainer(strategy, layer)
    batches = good(strategy)
    train(distribute(strategy, batches))
    before = state(layer)
    change, message = BAD[kind]
    last = len(batches) - 1
    bad = [*batches[:-1], {**batches[-1], **change}]
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            train(distribute(strategy, bad))
        text = str(caught.value).replace("\\'", "'")
        assert re.search(f"replica of rank {last}: Feature {message}", text)
    assert_unchanged(layer, before)
    # The step after it is as if nothing had been.
    train(distribute(strategy, batches))
    after = state(layer)
    assert after["step"] == before["step"] + 1
    assert not np.array_equal(
        after["movies/parameters"], before["movies/parameters"]
    )


def several_here(strategy):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("one replica in this process")


def test_eager_replicas_are_refused(strategy):
    several_here(strategy)
    layer = make_layer(strategy)
    before = state(layer)
    with pytest.raises(NotImplementedError, match=r"inside a tf\.function"):
        strategy.run(layer, (distribute(strategy, good(strategy)),))
    assert_unchanged(layer, before)


def test_an_eager_step_of_one_replica_here_works(strategy):
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("several replicas in this process")
    layer = make_layer(strategy)
    train = trainer(strategy, layer).python_function
    batches = good(strategy)
    train(distribute(strategy, batches))
    before = state(layer)
    bad = [*batches[:-1], {**batches[-1], "movie": np.array([1, 2, 99])}]
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 99 is out of"):
        train(distribute(strategy, bad))
    assert_unchanged(layer, before)
    assert before["step"] == 1


def test_replicas_compiled_by_xla_are_refused(strategy):
    layer = make_layer(strategy)
    compiled = tf.function(layer, jit_compile=True)
    ids = {"movie": tf.constant([1]), "seen": tf.constant([2])}
    with pytest.raises(NotImplementedError, match="Tables of several replicas"):
        strategy.run(compiled, (ids,))


def test_run_eagerly_is_refused(strategy):
    several_here(strategy)
    layer = make_layer(strategy)
    with strategy.scope():
        import tf_keras

        inputs = {"movie": tf_keras.Input([], dtype=tf.int64)}
        inputs["seen"] = tf_keras.Input([None], dtype=tf.int64, sparse=True)
        model = tf_keras.Model(inputs, layer(inputs)["movie"])
        model.compile("sgd", "mse", run_eagerly=True)
    batch = {"movie": tf.range(8), "seen": tf.sparse.from_dense([[1]] * 8)}
    with pytest.raises(NotImplementedError, match="run_eagerly=False"):
        model.fit(batch, tf.zeros([8, 3]), batch_size=8, verbose=0)


def test_a_loop_inside_the_replica_function_is_refused(strategy):
    several_here(strategy)
    layer = make_layer(strategy)

    def step(ids):
        return tf.while_loop(
            lambda i, _: i < 2,
            lambda i, _: (i + 1, tf.reduce_sum(layer(ids)["movie"])),
            [0, 0.0],
        )

    with pytest.raises(NotImplementedError, match=r"loop around strategy\.run"):
        tf.function(lambda ids: strategy.run(step, (ids,)))(
            distribute(strategy, good(strategy))
        )


def test_a_loop_around_strategy_run_is_fine(strategy):
    layer = make_layer(strategy)
    train = trainer(strategy, layer).python_function
    ids = distribute(strategy, good(strategy))

    @tf.function
    def loop():
        for _ in tf.range(3):
            train(ids)

    loop()
    assert layer.tpu_embedding.step.numpy() == 3


def test_training_outside_of_replicas_is_refused(strategy):
    layer = make_layer(strategy)
    before = state(layer)
    ids = good(strategy)[0]
    with strategy.scope(), tf.GradientTape() as tape:
        if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"inside strategy\.run"
            ):
                layer(ids)
            return
        outputs = layer(ids)
    with pytest.raises(RuntimeError, match=r"inside strategy\.run"):
        differentiate(tape, outputs, layer.trainable_variables)
    assert_unchanged(layer, before)


def test_a_graph_that_trains_outside_of_replicas_is_an_error(strategy):
    several_here(strategy)
    layer = make_layer(strategy)
    before = state(layer)
    ids = good(strategy)[0]

    @tf.function
    def train():
        with tf.GradientTape() as tape:
            outputs = layer(ids)
        return differentiate(tape, outputs, layer.trainable_variables)

    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"inside strategy\.run"
    ):
        train()
    assert_unchanged(layer, before)


def test_training_a_saved_model_of_shards_is_an_error(strategy, tmp_path):
    several_here(strategy)
    module = tf.Module()
    module.layer = make_layer(strategy)
    module.serve = tf.function(
        lambda ids: module.layer({"movie": ids}, partial=True)["movie"],
        input_signature=[tf.TensorSpec([None], tf.int64)],
    )
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    with tf.GradientTape() as tape:
        vectors = loaded.serve(tf.constant([1, 2], tf.int64))
    [trigger] = loaded.layer.trainable_variables
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="exported to serve, not to train"
    ):
        tape.gradient(vectors, trigger)


def two_layers(strategy):
    layers = {}
    with strategy.scope():
        for name in ("users", "items"):
            table = tfrs_embed.TableConfig("t", 50, 3, "ones")
            layers[name] = tfrs_embed.PartialTPUEmbedding(
                tfrs_embed.FeatureConfig("f", table),
                "sgd",
                size_threshold=0,
                name=name,
            )
            layers[name].build()
    return layers


def is_first(strategy):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return strategy.cluster_resolver.task_id == 0
    return tf.distribute.get_replica_context()._local_replica_id == 0


def test_layers_called_in_another_order_are_an_error(strategy):
    layers = two_layers(strategy)

    def step(ids, mixed):
        names = sorted(layers, reverse=mixed and is_first(strategy))
        with tf.GradientTape() as tape:
            outputs = [layers[name](ids, training=True) for name in names]
            loss = tf.reduce_sum(tf.add_n(outputs) ** 2)
        variables = [v for i in layers.values() for v in i.trainable_variables]
        differentiate(tape, loss, variables)
        return loss

    @tf.function
    def train(ids, mixed):
        return strategy.run(step, (ids, mixed))

    ids = tf.range(4)
    train(ids, False)
    before = [state(layer) for layer in layers.values()]
    for _ in range(2):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"rank 0 in a lookup for training of Layer .*users.*, that "
            "of rank 1 in a lookup for training of Layer .*items",
        ):
            train(ids, True)
    for layer, was in zip(layers.values(), before, strict=True):
        assert_unchanged(layer, was)
    # The step after it is as if nothing had been.
    train(ids, False)
    assert [i.tpu_embedding.step.numpy() for i in layers.values()] == [2, 2]


@on("workers:3", tier="more")
@nightly(lambda size: size != 2)
@pytest.mark.parametrize(
    ("size", "weighted", "said"),
    [
        (30, False, "30 ids in each bag, without weights.* has 60 ids"),
        (60, True, "60 ids in each bag, with weights.* has 60 .*without"),
        # So few that rows are exchanged.
        (2, False, "another number of ids.* has 60 ids in each bag"),
    ],
    ids=["size", "weights", "rows"],
)
def test_replicas_whose_bags_differ_are_an_error(
    strategy, size, weighted, said
):
    """What a replica knows when tracing decides what it sends."""
    table = tfrs_embed.TableConfig("movies", 50, 3, combiner="sum")
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("seen", table, output_shape=(None, 3)),
            "adagrad",
            size_threshold=0,
        )
    batches = [
        np.full([4, 60], r) for r in range(strategy.num_replicas_in_sync)
    ]
    mine = local_ids(strategy)

    def train(size, weighted):
        def step(ids):
            replica = mine[
                tf.distribute.get_replica_context()._local_replica_id
            ]
            ids = ids[:, : 60 if replica else size]
            ones = tf.ones_like(ids, tf.float32)
            with tf.GradientTape() as tape:
                vectors = layer(
                    ids,
                    None if replica or not weighted else ones,
                    training=True,
                )
                loss = tf.reduce_sum(vectors**2)
            differentiate(tape, loss, layer.trainable_variables)

        function = tf.function(lambda ids: strategy.run(step, (ids,)))
        function(distribute(strategy, batches))

    train(60, False)
    before = state(layer)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        # TensorFlow may quote quotes.
        match=r"must give a feature bags of the same number of ids.*Feature "
        rf"\\?'seen\\?'.* has {said}",
    ):
        train(size, weighted)
    assert_unchanged(layer, before)
    train(60, False)
    assert layer.step.numpy() == 2


def test_a_branch_that_one_replica_takes_is_an_error(strategy):
    layers = two_layers(strategy)

    def step(ids, flag):
        first = tf.cond(
            flag,
            lambda: layers["users"](ids),
            lambda: tf.zeros([4, 3]),
        )
        return first + layers["items"](ids)

    run = tf.function(lambda ids, flag: strategy.run(step, (ids, flag)))
    number = strategy.num_replicas_in_sync
    flags = [np.array(i == number - 1) for i in range(number)]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="rank 0 in a lookup of Layer .*items.*, that of rank "
        f"{number - 1} in a lookup of Layer .*users",
    ):
        run(tf.range(4), distribute(strategy, flags))
    # One that all take is fine.
    run(tf.range(4), distribute(strategy, [np.array(True)] * number))


def test_lookup_outside_of_replicas_reads_all_shards(strategy):
    several_here(strategy)
    layer = make_layer(strategy)
    table = layer.embedding_tables["movies"].numpy()
    with strategy.scope():
        outputs = layer(good(strategy)[1])
    np.testing.assert_array_equal(outputs["movie"], table[[1, 2, 1]])
    np.testing.assert_array_equal(
        outputs["seen"], np.stack([table[7], table[1], 0 * table[0]])
    )


def test_a_table_can_ask_to_be_sharded(strategy):
    table = tfrs_embed.TableConfig("t", 7, 2, placement="sharded")
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table), "sgd"
        )
    [entry] = layer.placement.tables
    assert entry.engine == "row"
    assert entry.reason.startswith("placement='sharded'")


def test_other_cross_device_ops_are_refused(strategy):
    several_here(strategy)
    # It makes no collectives of its own, so it may share the group's keys.
    other = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )
    with pytest.raises(NotImplementedError, match="ReductionToOneDevice"):
        make_layer(other)


@pytest.mark.parametrize("placement", ["row", "column", "replicated"])
def test_tables_that_memory_lacked_for_can_be_built_again(strategy, placement):
    tries = []

    def initializer(shape, dtype=None):
        tries.append(shape)
        if len(tries) == 1:
            raise MemoryError("no memory now")
        return tf.ones(shape, dtype)

    table = tfrs_embed.TableConfig(
        "t", 8, 4, initializer=initializer, placement=placement
    )
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("f", table), "adagrad"
        )
        with pytest.raises(
            tf.errors.ResourceExhaustedError,
            match=r"(Table|Layer) 't' can't be built: /job:.* lacks memory\.",
        ):
            layer.build()
        assert not layer.built
        layer.build()
    np.testing.assert_array_equal(layer.embedding_tables["t"], np.ones([8, 4]))
