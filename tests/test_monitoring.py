"""Statistics of tables: what numpy says of the same rows, and nothing else."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import on
from tfrs_embed import FeatureConfig, TableConfig, monitoring
from tfrs_embed.tools.monitoring import rows as row_statistics

pytestmark = pytest.mark.tools

ROWS, DIM = 500, 4


def make_layer(optimizer="adagrad", rows=ROWS, **arguments):
    features = {
        "large": FeatureConfig("large", TableConfig("large", rows, DIM)),
        "small": FeatureConfig("small", TableConfig("small", 20, DIM)),
    }
    return layers.PartialTPUEmbedding(
        features, optimizer, size_threshold=100, **arguments
    )


def make_model(layer, **arguments):
    inputs = {
        name: keras.Input([], dtype="int64", name=name)
        for name in ("large", "small")
    }
    found = layer(inputs)
    joined = keras.layers.Concatenate()([found["large"], found["small"]])
    model = keras.Model(inputs, keras.layers.Dense(1)(joined))
    model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
    return model


def batches(seed, steps=3, size=8):
    random = np.random.default_rng(seed)
    return [
        {
            "large": random.integers(0, ROWS, size),
            "small": random.integers(0, 20, size),
        }
        for _ in range(steps)
    ]


def train(layer, ids):
    with tf.GradientTape() as tape:
        found = layer({k: tf.constant(v) for k, v in ids.items()})
        loss = tf.add_n([tf.reduce_sum(v**2) for v in found.values()])
    weights = layer.trainable_variables
    for weight, gradient in zip(
        weights, tape.gradient(loss, weights), strict=True
    ):
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.convert_to_tensor(gradient)
        weight.assign(weight - 0.1 * gradient)


def values_of(layer):
    return {k: v.numpy().copy() for k, v in layer.embedding_tables.items()}


@pytest.mark.parametrize("optimizer", ["adagrad", "sgd"])
def test_numbers_are_those_of_numpy(optimizer):
    layer = make_layer(optimizer)
    layer.build(None)
    monitor = monitoring.TableMonitor(layer)
    first, before = monitor.measure(step=0), values_of(layer)
    [one, two, _] = batches(1)
    train(layer, one)
    second, middle = monitor.measure(step=1000), values_of(layer)
    train(layer, two)
    third, after = monitor.measure(step=3000), values_of(layer)
    for name, ids in (("large", "large"), ("small", "small")):
        norms = np.linalg.norm(after[name], axis=1)
        assert third[name].norms[0.5] == pytest.approx(np.median(norms))
        assert third[name].norms[1.0] == pytest.approx(norms.max())
        assert third[name].rows == third[name].rows_read == len(norms)
        moved = np.linalg.norm(after[name] - middle[name], axis=1)
        assert third[name].changed_share == np.mean(moved > 0)
        assert third[name].update_norms[0.5] == pytest.approx(
            np.median(moved[moved > 0]), rel=1e-4
        )
        touched = len(np.unique(np.concatenate([one[ids], two[ids]])))
        assert third[name].untouched_share == 1 - touched / len(norms)
        # Those that the second step left alone, 2,000 steps ago or more.
        idle = 1 - len(np.unique(two[ids])) / len(norms)
        assert third[name].idle_shares == {1000: pytest.approx(idle)}
    slots = optimizer == "adagrad"
    assert third["large"].untouched_by == ("slots" if slots else "values")
    assert first["large"].untouched_share == (1.0 if slots else None)
    assert first["large"].changed_share is None
    assert second["large"].bytes == ROWS * DIM * 4 * (2 if slots else 1)
    assert np.any(before["large"] != after["large"])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_counted_and_have_no_norm(bad):
    layer = make_layer()
    values = np.ones([ROWS, DIM], np.float32)
    values[7, 1] = bad
    values[9] = 3e38  # Its norm has no float32.
    layer.load_tables({"large": values})
    found = layer.statistics()["large"]
    assert found.nonfinite_rows == 1
    assert found.norms[0.99] == pytest.approx(2.0)


def test_a_sample_is_the_same_rows_each_time():
    layer = make_layer()
    layer.build(None)
    monitor = monitoring.TableMonitor(layer, ["large"], sample=50)
    assert monitor.measure()["large"].rows_read == 50
    again = monitor.measure()["large"]
    assert (again.rows, again.changed_share) == (ROWS, 0.0)


def test_changes_are_of_rows_that_are_kept(monkeypatch):
    monkeypatch.setattr(row_statistics, "KEPT_ROWS", 100)
    monkeypatch.setattr(row_statistics, "BLOCK_BYTES", 7 * DIM * 4)
    layer = make_layer()
    layer.build(None)
    monitor = monitoring.TableMonitor(layer, ["large"])
    assert monitor.measure()["large"].rows_read == ROWS
    values = values_of(layer)["large"]
    values[:250] += 1.0  # Of every five rows one is kept.
    layer.load_tables({"large": values})
    found = monitor.measure()["large"]
    assert found.changed_share == 0.5
    assert found.update_norms[0.5] == pytest.approx(2.0)


def test_rows_are_read_in_blocks(monkeypatch):
    layer = make_layer()
    layer.build(None)
    train(layer, batches(2)[0])
    whole = layer.statistics()
    monkeypatch.setattr(row_statistics, "BLOCK_BYTES", 7 * DIM * 4)
    assert layer.statistics() == whole


def test_lookups_of_batches_are_counted():
    layer = make_layer()
    given = [
        {"large": np.array([1, 1, 1, 1, 2, 3, -1, ROWS]), "small": np.zeros(8)}
    ]
    given[0]["small"] = given[0]["small"].astype(np.int64)
    found = monitoring.lookup_statistics(layer, given)
    large = found["large"]
    assert (large.ids, large.unique_share) == (8.0, 5 / 8)
    assert large.invalid_share == 2 / 8
    assert large.top_share == 1.0  # Five rows are a hundredth.
    assert found["small"].unique_share == 1 / 8
    assert layer.statistics(batches=given)["large"].lookups == large


@on("keras:3", tier="more")
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_a_run_is_logged(tmp_path, steps_per_execution):
    layer = make_layer()
    model = make_model(layer, steps_per_execution=steps_per_execution)
    data = tf.data.Dataset.from_tensor_slices(
        (
            {
                k: np.concatenate([b[k] for b in batches(3, 8)])
                for k in ("large", "small")
            },
            np.zeros(64, np.float32),
        )
    ).batch(8)
    callback = monitoring.TableStatistics(
        tmp_path, every=4, batches=batches(3, 2)
    )
    model.fit(data, epochs=2, callbacks=[callback], verbose=0)
    log = monitoring.read_log(tmp_path)
    assert [line["step"] for line in log] == [0, 4, 8, 12, 16]
    assert log[-1] == callback.reports[0].to_dict()
    seen = np.unique(np.concatenate([b["large"] for b in batches(3, 8)]))
    assert log[-1]["tables"][0]["untouched_share"] == 1 - len(seen) / ROWS
    # A later fit goes on where this one ended.
    model.fit(data, callbacks=[callback], verbose=0)
    assert callback.reports[0].step == 24

    tags = {}
    for path in tmp_path.glob("events*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                tags.setdefault(value.tag, {})[event.step] = value
    share = tags[f"tables/{layer.name}/large/untouched_share"]
    assert sorted(share) == [0, 4, 8, 12, 16, 20, 24]
    assert tf.make_ndarray(share[16].tensor) == pytest.approx(
        log[-1]["tables"][0]["untouched_share"]
    )
    for tag in ("norms/0.5", "lookups/top_shares/0.01", "bytes"):
        assert 24 in tags[f"tables/{layer.name}/large/{tag}"]


def test_steps_are_those_that_were_made(tmp_path):
    model = make_model(make_layer(), steps_per_execution=3)
    ids = {k: np.zeros(64, np.int64) for k in ("large", "small")}
    callback = monitoring.TableStatistics(
        tmp_path, every=4, batches=iter(batches(3, 2))
    )
    for _ in range(2):  # Eight steps are three executions.
        model.fit(
            ids, np.zeros(64), batch_size=8, callbacks=[callback], verbose=0
        )
    steps = [line["step"] for line in monitoring.read_log(tmp_path)]
    assert steps == [0, 6, 8, 8, 14, 16]


class TwoLayers(keras.Model):
    """A model of two layers, one of which it may not call."""

    def __init__(self, calls):
        super().__init__()
        self.all = [make_layer(), make_layer()]
        self.calls = calls
        self.dense = keras.layers.Dense(1)

    def build(self, shape):
        """Keras 3 wants one."""
        self.built = True

    def call(self, ids):
        found = [each(ids) for each in self.all[: self.calls]]
        return self.dense(tf.concat([x["small"] for x in found], -1))


@pytest.mark.parametrize("calls", [1, 2])
def test_two_layers_are_measured_if_they_are_called(tmp_path, calls):
    model = TwoLayers(calls)
    model.compile("sgd", "mse")
    callback = monitoring.TableStatistics(tmp_path, every=1)
    model.fit(batches(1)[0], np.zeros(8), callbacks=[callback], verbose=0)
    names = [layer.name for layer in model.all]
    assert [each.layer for each in callback.reports] == names[:calls]


def test_a_log_goes_on_after_a_line_that_was_cut_off(tmp_path):
    layer = make_layer()
    layer.build(None)
    report = monitoring.TableMonitor(layer).measure()
    path = tmp_path / "tables.jsonl"
    for cut in (1, 20, 0):
        monitoring.log.StatisticsLog(tmp_path).write(report)
        text = path.read_text("utf-8")
        path.write_text(text[: len(text) - cut], "utf-8")
    assert monitoring.read_log(tmp_path) == [report.to_dict()] * 2


def test_a_log_may_be_in_any_file_system():
    layer = make_layer()
    layer.build(None)
    log = monitoring.log.StatisticsLog("ram://logs/run")
    for _ in range(2):
        log.write(monitoring.TableMonitor(layer).measure())
    log.close()
    assert len(monitoring.read_log("ram://logs/run")) == 2
    names = tf.io.gfile.listdir("ram://logs/run")
    assert any(name.startswith("events") for name in names)


def test_ages_of_keys_in_time_are_days():
    table = TableConfig(
        "keys",
        64,
        DIM,
        keys=tfrs_embed.DynamicKeys(eviction=tfrs_embed.TimeToLive(days=9)),
    )
    layer = layers.PartialTPUEmbedding(
        {"key": FeatureConfig("key", table)}, "sgd"
    )
    days = [100]
    with tfrs_embed.testing.simulated_clock(lambda: 86_400 * days[-1]):
        for day, key in ((100, 1), (106, 2), (108, 3)):
            days.append(day)
            with tf.GradientTape() as tape:
                found = layer({"key": tf.constant([key])}, training=True)
                loss = tf.reduce_sum(found["key"])
            tape.gradient(loss, layer.trainable_variables)
        report = layer.statistics()["keys"]
    assert report.idle_shares == {}
    assert report.idle_days == {
        1: pytest.approx(2 / 3),
        7: pytest.approx(1 / 3),
        30: 0.0,
        90: 0.0,
    }


@pytest.mark.parametrize("eviction", ["lru", "score"])
def test_keys_that_come_and_go(eviction):
    table = TableConfig(
        "keys", 64, DIM, keys=tfrs_embed.DynamicKeys(eviction=eviction)
    )
    layer = layers.PartialTPUEmbedding(
        {"key": FeatureConfig("key", table)}, "sgd"
    )
    layer.build(None)
    monitor = monitoring.TableMonitor(layer)
    assert monitor.measure()["keys"].rows == 0

    def step(ids):
        with tf.GradientTape() as tape:
            found = layer({"key": tf.constant(ids, tf.int64)}, training=True)
            loss = tf.reduce_sum((found["key"] - 1.0) ** 2)
        tape.gradient(loss, layer.trainable_variables)

    step([5, 5, 900, 7])
    first = monitor.measure()["keys"]
    assert first.changed_share == 1.0  # All came since the table was empty.
    step([900, 11])
    found = monitor.measure(batches=[{"key": np.array([5, 1, 2, 11])}])["keys"]
    assert (found.keys.size, found.keys.admitted, found.keys.capacity) == (
        4,
        4,
        64,
    )
    assert found.changed_share == 0.5  # 900 and 11, which came.
    assert found.lookups.invalid_share == 0.5
    if eviction == "score":  # Which says nothing about lookups.
        assert not found.keys.top_shares
    else:
        assert found.keys.top_share == pytest.approx(2 / 6)


def test_a_sample_of_keys_is_of_keys_and_not_of_rows():
    keys = np.random.default_rng(0).integers(0, 1 << 62, 4000)
    sampled = []
    for order in (np.arange(4000), np.arange(4000)[::-1]):
        held = row_statistics.HeldRows(4000, 0, None, keys[order])
        sampled.append(set(keys[order][row_statistics.sample(held, 1000)]))
    assert sampled[0] == sampled[1]
    assert 850 < len(sampled[0]) < 1150


def test_all2all_is_measured():
    layer = layers.All2AllDenseEmbedding(100, 4, 1, 2)
    layer(tf.constant([[[3, 7]], [[3, 9]]], tf.int64))
    assert layer.statistics()["table"].dim == 4


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be an integer >= 1, got 0"),
        ({"every": 1.5}, ValueError, "every must be an integer >= 1, got 1.5"),
        ({"sample": 0}, ValueError, "sample must be an integer >= 1, got 0"),
        ({"tables": ["larg"]}, ValueError, "no table 'larg'; its tables are"),
        ({"labels": {"small": ["a"]}}, TypeError, "argument 'labels'"),
    ],
)
def test_bad_arguments_are_errors_before_training(
    tmp_path, arguments, error, text
):
    layer = make_layer()
    model = make_model(layer)
    before = values_of(layer)
    with pytest.raises(error, match=text):
        model.fit(
            batches(1)[0],
            np.zeros(8),
            callbacks=[monitoring.TableStatistics(tmp_path, **arguments)],
            verbose=0,
        )
    np.testing.assert_array_equal(before["large"], values_of(layer)["large"])
    assert not list(tmp_path.iterdir())


def test_what_has_no_tables_is_refused(tmp_path):
    layer = make_layer()
    with pytest.raises(ValueError, match="has no tables yet"):
        monitoring.TableMonitor(layer).measure()
    with pytest.raises(TypeError, match="got Dense"):
        monitoring.TableMonitor(keras.layers.Dense(1))
    with pytest.raises(FileNotFoundError, match=r"tables\.jsonl"):
        monitoring.read_log(tmp_path)
