"""Updates by the mean gradient of several steps."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers, only_keras_3
from process_tiers import nightly, on, without_kernels
from strategies.replicas import distribute
from tfrs_embed import FeatureConfig, TableConfig
from tfrs_embed.optimizers import Regularized
from training_helpers import differentiate, state

pytestmark = on("keras:3", tier="more")

STEPS = 3
IDS = [[3, 7, 3], [7, 1, 40], [3, 40, 2]]
ALL_IDS = [3, 7, 3, 7, 1, 40, 3, 40, 2]


def make(strategy, optimizer, place="auto", **options):
    hot = [3, 20] if place == "hot" else []
    place = "auto" if place == "hot" else place
    table = TableConfig(
        "t", 50, 4, "uniform", placement=place, hot_rows=hot, **options
    )
    # A table beside it, which is updated in each step.
    other = TableConfig("u", 50, 4, "uniform", optimizer="sgd")
    with strategy.scope():
        layer = layers.DistributedEmbedding(
            {t.name: FeatureConfig(t.name, t) for t in (table, other)},
            optimizer=optimizer,
        )
        layer.build(None)
    return layer


def trainer(strategy, layer, factor=1.0):
    def replica_step(ids):
        with tf.GradientTape() as tape:
            vectors = layer({"t": ids, "u": ids}, training=True)
            loss = tf.add_n(
                [tf.reduce_sum(tf.sin(v)) * factor for v in vectors.values()]
            )
        differentiate(tape, loss, layer.trainable_variables)

    run = tf.function(
        lambda ids: strategy.run(replica_step, (ids,)), reduce_retracing=True
    )
    world = strategy.num_replicas_in_sync
    return lambda ids: run(distribute(strategy, [tf.constant(ids)] * world))


def is_one_for_each_place(both_implementations, name, place):
    """Whether a variant is the one of its place that replicas run by day."""
    of_place = {
        "auto": "adagrad",
        "column": "adam",
        "replicated": "sgd",
        "hot": "adam",
    }
    return name == of_place[place] and not without_kernels(both_implementations)


def rows(layer, table="t"):
    found = state(layer)
    return {k: v for k, v in found.items() if k.startswith(table)}


@nightly(
    lambda both_implementations, name, place: (
        without_kernels(both_implementations)
        and (name, place) != ("adam", "replicated")
    )
)
@on("mirrored:2", "workers:2", tier="nightly")
@on(
    "mirrored:2",
    tier="more",
    when=lambda both_implementations, name, place: (
        is_one_for_each_place(both_implementations, name, place)
        and place == "hot"
    ),
)
@on(
    "workers:2",
    tier="more",
    when=lambda both_implementations, name, place: (
        is_one_for_each_place(both_implementations, name, place)
        and place == "column"
    ),
)
@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("place", ["auto", "column", "replicated", "hot"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {}),
        ("adam", {"global_clipnorm": 0.1}),
        ("adagrad", {"row_clipnorm": 0.1, "weight_decay": 0.1}),
        ("row_wise_adam", {"max_norm": 0.5}),
    ],
)
def test_it_is_one_update_by_the_mean(strategy, place, name, options):
    if place == "column" and {"row_clipnorm", "max_norm"} & {*options}:
        pytest.skip("columns have no norms of rows")
    optimizer = Regularized(name, gradient_accumulation_steps=STEPS, **options)
    layer = make(strategy, optimizer, place)
    # The same in one step, by a batch of all.
    whole = make(
        strategy, Regularized(name, **options) if options else name, place
    )
    whole.load_tables({n: t.numpy() for n, t in layer.embedding_tables.items()})
    small, large = trainer(strategy, layer), trainer(strategy, whole, 1 / STEPS)
    for update in range(2):
        for i, ids in enumerate(IDS):
            before, other = rows(layer), rows(layer, "u")
            small(ids)
            after = rows(layer)
            moved = any((before[k] != after[k]).any() for k in before)
            assert moved == (i == STEPS - 1)
            assert (
                other["u/parameters"] != rows(layer, "u")["u/parameters"]
            ).any()
        large(ALL_IDS)
        expected = rows(whole)
        for k, value in rows(layer).items():
            np.testing.assert_allclose(
                value,
                expected[k],
                rtol=1e-4,
                atol=1e-6,
                err_msg=f"{update} {k}",
            )
    assert layer.step.numpy() == 2 * STEPS


def test_a_schedule_counts_updates():
    seen = []

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            seen.append(step)
            return tf.where(tf.equal(step, 0), 1.0, 0.0)

        def get_config(self):
            return {}

    optimizer = Regularized(
        keras.optimizers.SGD(Schedule()), gradient_accumulation_steps=2
    )
    layer = make(tf.distribute.get_strategy(), optimizer)
    step = trainer(tf.distribute.get_strategy(), layer)
    changed = []
    for _ in range(4):
        before = rows(layer)["t/parameters"]
        step(IDS[0])
        changed.append(bool((rows(layer)["t/parameters"] != before).any()))
    assert changed == [False, True, False, False]


@only_keras_3("tf_keras's optimizers have no such setting.")
def test_keras_3s_setting():
    optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)
    layer = make(tf.distribute.get_strategy(), optimizer)
    options = layer.table_optimizers["t"].options
    assert options.gradient_accumulation_steps == 2
    # A plain variable, trained by the same optimizer.
    plain = keras.Variable(layer.embedding_tables["t"].numpy())
    optimizer = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)
    step = trainer(tf.distribute.get_strategy(), layer)
    for ids in (*IDS, IDS[0]):
        with tf.GradientTape() as tape:
            vectors = tf.gather(plain.value, ids)
            loss = tf.reduce_sum(tf.sin(vectors))
        gradient = tape.gradient(loss, plain.value)
        optimizer.apply_gradients([(tf.convert_to_tensor(gradient), plain)])
        step(ids)
    # The variable's other rows move too: Keras's Adam has no lazy rows.
    np.testing.assert_allclose(
        layer.embedding_tables["t"].numpy()[[3, 7]],
        plain.numpy()[[3, 7]],
        rtol=1e-3,
    )


def test_configs_keep_it():
    optimizer = Regularized("sgd", gradient_accumulation_steps=STEPS)
    layer = make(tf.distribute.get_strategy(), optimizer)
    again = layer.from_config(layer.get_config())
    options = again.table_optimizers["t"].options
    assert options.gradient_accumulation_steps == STEPS


def test_a_restored_layer_drops_gradients_of_before(tmp_path):
    strategy = tf.distribute.get_strategy()
    optimizer = Regularized("sgd", gradient_accumulation_steps=2)
    layer, other = make(strategy, optimizer), make(strategy, optimizer)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "c"))
    trainer(strategy, layer)(IDS[0])
    for each in (layer, other):
        tf.train.Checkpoint(layer=each).restore(path).assert_consumed()
        step = trainer(strategy, each)
        for ids in IDS[1:]:
            step(ids)
    np.testing.assert_array_equal(
        rows(layer)["t/parameters"], rows(other)["t/parameters"]
    )


def test_what_is_refused():
    optimizer = Regularized("sgd", gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"'t' has DynamicKeys"):
        make(
            tf.distribute.get_strategy(),
            optimizer,
            keys=tfrs_embed.DynamicKeys(),
        )
    for steps in (0, 1.5, "2"):
        with pytest.raises(ValueError, match="gradient_accumulation_steps"):
            Regularized("sgd", gradient_accumulation_steps=steps)
    with pytest.raises(ValueError, match="needs one of"):
        Regularized("sgd", gradient_accumulation_steps=1)
