"""Models with sharded tables: TFRS's tasks, and saving in all its forms."""

import os
import tempfile

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras

import tfrs_embed
from process_tiers import on
from strategies.keras_models import (
    PER_REPLICA,
    assert_equal_tables,
    compile_model,
    distribute,
    make_model,
    make_samples,
)
from strategies.replicas import of_chief

pytestmark = on("mirrored:2", tier="nightly")

ROWS = 30


def make_layer(names, **kwargs):
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            ROWS,
            4,
            initializer=tf_keras.initializers.RandomNormal(seed=i),
        )
        for i, name in enumerate(names)
    }
    return tfrs_embed.PartialTPUEmbedding(
        {n: tfrs_embed.FeatureConfig(n, t) for n, t in tables.items()},
        tf_keras.optimizers.Adagrad(0.2),
        size_threshold=0,
        **kwargs,
    )


class TwoTower(tfrs.Model):
    """TFRS's retrieval model: one call of the layer feeds both towers."""

    def __init__(self):
        super().__init__()
        self.embed = make_layer(["user", "item"])
        self.task = tfrs.tasks.Retrieval(
            loss=tf_keras.losses.CategoricalCrossentropy(
                from_logits=True, reduction=tf_keras.losses.Reduction.SUM
            )
        )

    def compute_loss(self, features, training=False):
        vectors = self.embed(features[0], training=training)
        return self.task(vectors["user"], vectors["item"])


class Rating(tfrs.Model):
    """TFRS's ranking model."""

    def __init__(self):
        super().__init__()
        self.embed = make_layer(["user", "item"])
        self.dense = tf_keras.layers.Dense(1)
        self.task = tfrs.tasks.Ranking(
            loss=tf_keras.losses.MeanSquaredError(
                reduction=tf_keras.losses.Reduction.SUM
            )
        )

    def compute_loss(self, features, training=False):
        inputs, labels = features
        vectors = self.embed(inputs, training=training)
        return self.task(labels, self.dense(vectors["user"] * vectors["item"]))


@pytest.mark.parametrize("kind", [TwoTower, Rating])
def test_tfrs_tasks_learn(strategy, kind):
    number = 4 * PER_REPLICA * strategy.num_replicas_in_sync
    ids = np.arange(number) % ROWS
    labels = (ids % 3).astype(np.float32)[:, None]
    samples = {"user": ids, "item": (ids * 7) % ROWS}, labels
    with strategy.scope():
        model = kind()
        model.compile(tf_keras.optimizers.Adagrad(0.2))
    losses = []
    for _ in range(6):
        history = model.fit(
            distribute(strategy, samples), steps_per_epoch=4, verbose=0
        )
        losses.append(history.history["loss"][-1])
    assert losses[-1] < 0.9 * losses[0]


def folder(strategy, name):
    """A folder of this worker's; Keras wants only the chief in the real one."""
    return os.path.join(tempfile.mkdtemp(), name)


@pytest.mark.parametrize("form", ["weights", "weights.h5", "keras", "h5"])
def test_saved_weights_are_whole_tables(strategy, form):
    samples = make_samples(PER_REPLICA * strategy.num_replicas_in_sync)
    with strategy.scope():
        model, layer = make_model()
        compile_model(model)
    model.fit(distribute(strategy, samples), steps_per_epoch=1, verbose=0)
    path = folder(strategy, f"model.{form}")
    if form in ("keras", "h5"):
        model.save(path)
        single = tf_keras.models.load_model(path)
        found = next(
            i
            for i in single.layers
            if isinstance(i, tfrs_embed.PartialTPUEmbedding)
        )
    else:
        model.save_weights(path)
        single, found = make_model()
        compile_model(single)
        single.load_weights(of_chief(strategy, path))
    assert_equal_tables(found, layer, rtol=0, atol=0)
    # And back into shards.
    with strategy.scope():
        other, again = make_model()
        compile_model(other)
    if form not in ("keras", "h5"):
        other.load_weights(of_chief(strategy, path))
        assert_equal_tables(again, layer, rtol=0, atol=0)
    # It trains on as it did before it was saved.
    model.fit(distribute(strategy, samples), steps_per_epoch=1, verbose=0)
    if form == "weights":
        other.fit(distribute(strategy, samples), steps_per_epoch=1, verbose=0)
        assert_equal_tables(again, layer, rtol=1e-6, atol=1e-7)


@pytest.mark.nightly
def test_keras_saved_model_format_is_refused(strategy):
    with strategy.scope():
        model, _ = make_model()
    with pytest.raises(
        (NotImplementedError, RuntimeError),
        match=r"Save as \.keras|tfrs_embed.serving.export exports it",
    ):
        model.save(folder(strategy, "model"), save_format="tf")
    single, _ = make_model()
    path = folder(strategy, "single")
    single.save(path, save_format="tf")
    with (
        strategy.scope(),
        pytest.raises(NotImplementedError, match="Load the model without a"),
    ):
        tf_keras.models.load_model(path)


@pytest.mark.nightly
def test_early_stopping_restores_the_tables(strategy):
    samples = make_samples(PER_REPLICA * strategy.num_replicas_in_sync)
    with strategy.scope():
        model, layer = make_model()
        compile_model(model)
    before = layer.embedding_tables["user"].numpy()
    callback = tf_keras.callbacks.EarlyStopping(
        # The loss falls, so that the first epoch is the best of this.
        monitor="loss",
        mode="max",
        patience=1,
        restore_best_weights=True,
    )
    tables = []
    note = tf_keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: tables.append(
            layer.embedding_tables["user"].numpy()
        )
    )
    model.fit(
        distribute(strategy, (samples[0], samples[1])),
        steps_per_epoch=1,
        verbose=0,
    )
    model.fit(
        tf.data.Dataset.from_tensor_slices(samples)
        .repeat()
        .batch(PER_REPLICA * strategy.num_replicas_in_sync),
        steps_per_epoch=1,
        epochs=4,
        callbacks=[note, callback],
        verbose=0,
    )
    assert len(tables) == 2
    np.testing.assert_array_equal(layer.embedding_tables["user"], tables[0])
    assert not np.array_equal(tables[0], before)


def test_saved_model(strategy):
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        pytest.skip("its shards are in several processes")
    with strategy.scope():
        model, layer = make_model()
    inputs, _ = make_samples(6)
    inputs = {
        k: v if isinstance(v, tf.RaggedTensor) else tf.constant(v)
        for k, v in inputs.items()
    }
    path = folder(strategy, "saved")

    @tf.function(
        input_signature=[
            {
                k: tf.RaggedTensorSpec([None, None], tf.int64)
                if k == "items"
                else tf.TensorSpec([None], tf.int64)
                for k in inputs
            }
        ]
    )
    def serve(features):
        return model(features, training=False)

    tf.saved_model.save(model, path, signatures=None, options=None)
    module = tf.Module()
    module.model, module.serve = model, serve
    tf.saved_model.save(module, path + "2")
    loaded = tf.saved_model.load(path + "2")
    single, fresh = make_model()
    fresh.embedding_tables["user"].assign(layer.embedding_tables["user"])
    for name, table in fresh.embedding_tables.items():
        table.assign(layer.embedding_tables[name].numpy())
    single.layers[-1].set_weights(model.layers[-1].get_weights())
    np.testing.assert_allclose(
        loaded.serve(inputs), single(inputs), rtol=1e-5, atol=1e-6
    )
