"""Tables that every replica has a copy of, alone and beside sharded ones."""

import dataclasses
import tempfile

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfrs_embed
from conformance.descriptors import OPTIMIZERS, TableCase, fresh
from conformance.harness import (
    assert_outputs,
    assert_tables,
    check_step,
    make_ids,
    make_steps,
    tensors,
    train,
    trainer,
)
from process_tiers import nightly, on
from reference import Feature, Reference, to_tf
from strategies.replicas import of_chief
from tfrs_embed import kernels
from tfrs_embed.configs.parsing import parse
from tfrs_embed.distribution import replicas
from tfrs_embed.engines.composite import CompositeEngine
from tfrs_embed.engines.data_parallel import DataParallelEngine
from tfrs_embed.engines.one_device import OneDeviceEngine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.row_wise import RowWiseEngine
from tfrs_embed.layers.keras2 import EngineLayer
from tfrs_embed.ops.inputs import CallInputs, to_bags, unchecked
from tfrs_embed.optimizers import conversion
from tfrs_embed.storage import initial_values
from training_helpers import assert_same, differentiate, state

pytestmark = on("workers:2", tier="more")

TABLES = {
    "x": TableCase(50, 5, "mean", "adagrad"),
    "y": TableCase(7, 3, "sum", "adam"),
    "fixed": TableCase(9, 3, "mean"),  # Not trained.
    "z": TableCase(20, 5, "sqrtn", "ftrl"),
}
#: Those that a sharded engine holds where there are two engines.
LARGE = ("x", "fixed")
#: How many features are traced is what a test costs.
KINDS = ("ragged",)


class Lookup(tf_keras.layers.Layer):
    """Feeds an engine as the library's own layers do."""

    def __init__(self, engine):
        super().__init__(autocast=False)
        self._supports_ragged_inputs = True
        self.engine = engine
        self.inner = EngineLayer(engine)
        self.inner.ensure_built()

    def call(self, ids, weights=None, training=None):
        names = [f.name for f in self.engine.features]
        together = self.engine.together
        consensus = together and together.consensus()
        given = CallInputs(
            self.engine.features,
            [ids[name] for name in names],
            [weights and weights[name] for name in names],
            "error",
            bool(training),
        )
        if consensus:
            parsed = unchecked(given, consensus)
            bags, begun = parsed.agree(together.begin(parsed, bool(training)))
        else:
            bags, begun = to_bags(given), None
        outputs = self.inner(bags, training=training, begun=begun)
        return dict(zip(names, outputs, strict=True))

    @property
    def tables(self):
        return self.inner.tables

    @property
    def embedding_tables(self):
        tables = self.inner.embedding_tables
        return {config.name: table for config, table in tables.items()}

    @property
    def step(self):
        return self.engine.step


def make_features(kinds, names, initializer=tf.random_normal_initializer):
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            case.rows,
            case.dim,
            initializer(seed=i),
            combiner=case.combiner,
        )
        for i, (name, case) in enumerate(TABLES.items())
    }
    spec = parse(
        {
            f"{name}_{kind}": tfrs_embed.FeatureConfig(
                f"{name}_{kind}", tables[name]
            )
            for kind in kinds
            for name in names
        }
    )
    return spec.features


def make_optimizers(names):
    return {
        name: TABLES[name].optimizer
        and conversion.convert(
            fresh(OPTIMIZERS[TABLES[name].optimizer].optimizer), name
        )
        for name in names
    }


def make_engine(kind, strategy, features):
    optimizers = make_optimizers(dict.fromkeys(f.table.name for f in features))
    options = EngineOptions(features, optimizers, strategy, "The test")

    def of(kind, features):
        return kind(dataclasses.replace(options, features=features))

    if kind == "one device":
        return of(OneDeviceEngine, features)
    if kind == "sharded":
        return of(RowWiseEngine, features)
    if kind == "mirrored":
        return of(DataParallelEngine, features)
    large = [f for f in features if f.table.name in LARGE]
    small = [f for f in features if f.table.name not in LARGE]
    engines = [of(DataParallelEngine, small), of(RowWiseEngine, large)]
    return CompositeEngine(options, engines)


def make_layer(kind, strategy, kinds=KINDS, names=TABLES, features=None):
    features = features or make_features(kinds, names)
    if kind == "one device":
        return Lookup(make_engine(kind, strategy, features))
    with strategy.scope():
        return Lookup(make_engine(kind, strategy, features))


def make_reference(layer):
    tables = {
        name: TABLES[name].reference(layer.embedding_tables[name].numpy())
        for name in layer.engine.states
    }
    features = layer.engine.features
    return Reference({f.name: Feature(f.table.name) for f in features}, tables)


def variables_of(engine):
    return [v for s in engine.states.values() for v in s.variables.values()]


def state_of_replicas(layer):
    """Copies of all that a step may change, the replicas' own included."""
    values = state(layer)
    for name in layer.embedding_tables:
        for key, variable in layer.tables[name].variables.items():
            for i, part in enumerate(getattr(variable, "_variables", [])):
                values[f"{name}/{key}/{i}"] = part.numpy()
    return values


def logical(values):
    """Of a layer's state, what does not depend on where its tables are."""
    return {k: v for k, v in values.items() if k.count("/") < 2}


def assert_equal_copies(strategy, layer):
    """Asserts that all replicas' tables and slots are equal, bit for bit."""
    variables = variables_of(layer.engine)
    all_replicas = replicas.get_replicas(strategy)
    slot = all_replicas.allocate(len(variables))

    @tf.function(autograph=False)
    def gather():
        gathered = [
            [
                all_replicas.gather(replica, copy[None], slot + i)
                for i, copy in enumerate(
                    tf.convert_to_tensor(v._variables[replica])
                    for v in variables
                )
            ]
            for replica in range(all_replicas.local)
        ]
        return gathered[0]

    for variable, copies in zip(variables, gather(), strict=True):
        assert len(copies) == strategy.num_replicas_in_sync
        for copy in copies.numpy():
            np.testing.assert_array_equal(
                copy, variable.numpy(), err_msg=variable.name
            )


def randomize(layer):
    """Sets all tables, slots and the step."""
    rng = np.random.default_rng(7)
    for of_table in layer.engine.states.values():
        for variable in of_table.variables.values():
            variable.assign(rng.uniform(size=variable.shape))
    layer.engine.step.assign(12)


def restore(strategy, layer, path):
    checkpoint = tf.train.Checkpoint(layer=layer.inner)
    path = of_chief(strategy, path)
    checkpoint.restore(path).assert_existing_objects_matched()


def workers(strategy):
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


@on("mirrored:4", tier="nightly")
@nightly(lambda kernel: not kernel)
@pytest.mark.parametrize("kernel", [True, False], ids=["kernels", "without"])
def test_training(strategy, monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(kernels, "operations", lambda *_, **__: None)
    layer = make_layer("mirrored", strategy, ["dense", "ragged"])
    reference = make_reference(layer)

    def change(i, batches):
        if i == 2:
            # Momenta move a row that is looked up, and has no gradient.
            for gradient in tf.nest.flatten([b[2] for b in batches]):
                gradient[:] = 0.0

    train(trainer(strategy, layer), reference, strategy, 3, change=change)
    assert_tables(layer, reference)
    assert layer.engine.step.numpy() == 3
    assert_equal_copies(strategy, layer)


def test_training_beside_sharded_tables(strategy):
    layer = make_layer("combined", strategy)
    reference = make_reference(layer)

    def change(i, batches):
        if i == 2:
            # A replica may have no ids at all.
            for ragged in tf.nest.flatten(batches[0][:2]):
                ragged.rows = [[] for _ in ragged.rows]

    step = trainer(strategy, layer)
    batches = train(step, reference, strategy, 4, change=change)
    check_step(trainer(strategy, layer, training=False), reference, batches)
    assert_tables(layer, reference)


@pytest.mark.parametrize("kind", ["mirrored", "combined"])
def test_an_invalid_id_of_one_replica_changes_nothing(strategy, kind):
    layer = make_layer(kind, strategy)
    reference = make_reference(layer)
    step = trainer(strategy, layer)
    batches = make_steps(np.random.default_rng(6), reference, True, strategy)
    sums = check_step(step, reference, batches)
    reference.update(sums)
    before = state_of_replicas(layer)
    # An id of the last table, so that all others could have been updated.
    row = next(row for row in batches[-1][0]["z_ragged"].rows if row)
    good, row[0] = row[0], TABLES["z"].rows
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="id 20 is"):
            step(batches)
    assert_same(state_of_replicas(layer), before)
    # The step after it is as if nothing had been.
    row[0] = good
    reference.update(check_step(step, reference, batches))
    assert_tables(layer, reference)
    assert layer.engine.step.numpy() == 2


def test_initial_values_are_those_of_one_device(strategy, monkeypatch):
    # Blocks of three sizes: of a part of the table, of what is left, of all.
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 60)
    expected = logical(state_of_replicas(make_layer("one device", strategy)))
    for kind in ("mirrored", "combined"):
        layer = make_layer(kind, strategy)
        assert_same(logical(state_of_replicas(layer)), expected)
        if kind == "mirrored":
            assert_equal_copies(strategy, layer)


def test_initial_values_without_a_seed_are_equal(strategy):
    features = make_features(
        KINDS, TABLES, lambda seed: tf.random_normal_initializer(mean=seed)
    )
    layer = make_layer("mirrored", strategy, features=features)
    assert_equal_copies(strategy, layer)
    assert layer.embedding_tables["y"].numpy().std() > 0


@nightly(lambda kind: kind == "mirrored")
@pytest.mark.parametrize("kind", ["mirrored", "combined"])
def test_checkpoints_move_between_engines(strategy, kind):
    layer = make_layer(kind, strategy)
    randomize(layer)
    expected = logical(state_of_replicas(layer))
    folder = tempfile.mkdtemp()
    path = tf.train.Checkpoint(layer=layer.inner).save(f"{folder}/0")
    found = dict(tf.train.list_variables(of_chief(strategy, path)))
    prefix, suffix = "layer/tables/", "/.ATTRIBUTES/VARIABLE_VALUE"
    for name, case in TABLES.items():
        shape = found[f"{prefix}{name}/parameters{suffix}"]
        assert shape == [case.rows, case.dim]
    assert sum("step" in key for key in found) == 1
    for i, other in enumerate(("one device", "sharded", "combined"), 1):
        through = make_layer(other, strategy)
        restore(strategy, through, path)
        assert_same(logical(state_of_replicas(through)), expected)
        back = tf.train.Checkpoint(layer=through.inner).save(f"{folder}/{i}")
        fresh = make_layer(kind, strategy)
        restore(strategy, fresh, back)
        assert_same(state_of_replicas(fresh), state_of_replicas(layer))


def test_restoring_takes_a_step_back(strategy):
    layer = make_layer("combined", strategy, names="xy")
    reference = make_reference(layer)
    checkpoint = tf.train.Checkpoint(layer=layer.inner)
    path = checkpoint.save(f"{tempfile.mkdtemp()}/0")
    store = {}
    layer.inner.save_own_variables(store)
    before = state_of_replicas(layer)
    step = trainer(strategy, layer)
    batches = make_steps(np.random.default_rng(8), reference, True, strategy)
    step(batches)
    checkpoint.restore(of_chief(strategy, path))
    assert_same(state_of_replicas(layer), before)
    step(batches)
    layer.inner.load_own_variables(store)
    assert_same(state_of_replicas(layer), before)


def test_variables_of_a_combined_engine(strategy):
    layer = make_layer("combined", strategy)
    alone = make_layer("one device", strategy)
    names = [v.name for v in variables_of(alone.engine)]
    assert [v.name for v in variables_of(layer.engine)] == names
    assert names[0] == "x/parameters:0"
    assert layer.engine.step.name == alone.engine.step.name == "step:0"
    assert list(layer.engine.states) == list(TABLES)
    assert sorted(layer.engine.optimizers) == sorted(TABLES)
    layer.engine.step.assign(5)
    steps = [engine.step.numpy() for engine in layer.engine._engines]
    assert steps == [5, 5]
    assert int(tf.convert_to_tensor(layer.engine.step)) == 5


def test_tables_can_be_assigned(strategy):
    layer = make_layer("mirrored", strategy)
    table = layer.embedding_tables["y"]
    table.assign(np.full((7, 3), 2.0))
    for copy in table._variables:
        np.testing.assert_array_equal(copy, np.full((7, 3), 2.0))
    with pytest.raises(ValueError, match=r"the shape \(7, 3\)"):
        table.assign(np.zeros((7, 4)))


def test_lookup_outside_of_replicas(strategy):
    layer = make_layer("mirrored", strategy, names="xy")
    reference = make_reference(layer)
    batches = make_steps(np.random.default_rng(9), reference, True, strategy)
    step = trainer(strategy, layer)
    reference.update(check_step(step, reference, batches))
    ids, weights, _ = batches[0]
    with strategy.scope(), tf.GradientTape() as tape:
        outputs = layer(tensors(ids), weights=tensors(weights), training=True)
        loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
    assert_outputs(outputs, reference.lookup(ids, weights))
    before = state_of_replicas(layer)
    with pytest.raises(RuntimeError, match=r"inside strategy\.run"):
        differentiate(tape, loss, layer.trainable_variables)
    assert_same(state_of_replicas(layer), before)
    with pytest.raises(tf.errors.InvalidArgumentError, match="id 7 is out"):
        layer({**tensors(ids), "y_ragged": tf.ragged.constant([[7]])})


def test_saved_model(strategy):
    if workers(strategy):
        pytest.skip("an export of sharded tables needs all of them here")
    layer = make_layer("combined", strategy, names="xy")
    randomize(layer)
    ids = {
        name: to_tf(make_ids(np.random.default_rng(10), "ragged", 7))
        for name in "xy"
    }
    signature = {k: tf.RaggedTensorSpec([None, None], tf.int64) for k in ids}
    module = tf.Module()
    module.layer = layer
    module.serve = tf.function(
        lambda ids: layer({f"{k}_ragged": v for k, v in ids.items()}),
        input_signature=[signature],
    )
    path = tempfile.mkdtemp()
    tf.saved_model.save(module, path)
    loaded = tf.saved_model.load(path)
    found = loaded.serve(ids)
    for name, vectors in module.serve(ids).items():
        np.testing.assert_array_equal(found[name], vectors)
