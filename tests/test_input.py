"""Datasets of Parquet and TFRecord files."""

import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from tfrs_embed.data import parquet_dataset

import tfrs_embed
from keras_under_test import NUMBER, keras, layers
from process_tiers import on
from run_in_processes import TESTS, environment
from tfrs_embed.checkpoint import FitPosition, SaveCallback

pytestmark = pytest.mark.tools

ROWS = 29


def table(first=0, rows=ROWS):
    numbers = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(numbers, pa.int32()),
            "key": pa.array([2**64 - 1 - i for i in numbers], pa.uint64()),
            "price": pa.array([i / 2 for i in numbers], pa.float32()),
            "click": [i % 2 == 0 for i in numbers],
            "word": [f"Zürich {i % 3}" for i in numbers],
            "kind": pa.array([f"k{i}" for i in numbers]).dictionary_encode(),
            "raw": [b"\xff%d" % i for i in numbers],
            "seen": pa.array(
                [[i] * (i % 3) for i in numbers], pa.list_(pa.int64())
            ),
            "words": [[f"w{i}", "x"][: i % 3] for i in numbers],
            "vector": pa.array(
                [[i, -i] for i in numbers], pa.list_(pa.float32(), 2)
            ),
        }
    )


COLUMNS = table().schema.names


@pytest.fixture
def files(tmp_path):
    """Two files of several row groups, and between them one without rows."""
    paths = [str(tmp_path / f"{name}.parquet") for name in "abc"]
    pq.write_table(table(0, 20), paths[0], row_group_size=6)
    pq.write_table(table().slice(0, 0), paths[1])
    pq.write_table(table(20, 9), paths[2], row_group_size=7)
    return paths


def rows(dataset, column):
    """A column's rows in all batches, as lists."""
    return [
        row
        for batch in dataset
        for row in (
            batch[column].to_list()
            if isinstance(batch[column], tf.RaggedTensor)
            else batch[column].numpy().tolist()
        )
    ]


def expected(column):
    def encode(value):
        if isinstance(value, list):
            return [encode(each) for each in value]
        return value.encode() if isinstance(value, str) else value

    return [encode(value) for value in table()[column].to_pylist()]


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("seed", [None, 5])
def test_rows_are_those_of_the_files(column, seed, files):
    dataset = parquet_dataset(
        files, ["id", column][column == "id" :], 8, shuffle_seed=seed
    )
    order = rows(dataset, "id") if seed is None else None
    assert order in (None, list(range(ROWS)))
    wanted = expected(column)
    for batch in dataset:
        numbers = batch["id"].numpy()
        assert rows([batch], column) == [wanted[i] for i in numbers]


def test_batches_cross_files_and_groups(files):
    dataset = parquet_dataset(files, ["id", "seen"], 8)
    assert int(dataset.cardinality()) == 4
    assert [len(batch["id"]) for batch in dataset] == [8, 8, 8, 5]
    dataset = parquet_dataset(files, ["id", "seen"], 8, drop_remainder=True)
    assert int(dataset.cardinality()) == 3
    assert dataset.element_spec["id"].shape == [8]
    assert dataset.element_spec["seen"].shape == [8, None]
    assert rows(dataset, "id") == list(range(24))
    # A batch of more than a whole file.
    assert rows(parquet_dataset(files, ["id"], 99), "id") == list(range(ROWS))


def test_dtypes(files):
    spec = parquet_dataset(files, COLUMNS, 8).element_spec
    wanted = (
        "int64 uint64 float32 bool string string string int64 string float32"
    )
    assert [spec[c].dtype.name for c in COLUMNS] == wanted.split()
    assert spec["vector"].shape == [None, 2]
    assert spec["words"] == tf.RaggedTensorSpec([None, None], tf.string, 1)


def test_each_iteration_has_an_order_of_its_own(files):
    def orders():
        tf.random.set_seed(1)
        dataset = parquet_dataset(files, ["id"], 8, shuffle_seed=3)
        return [rows(dataset, "id") for _ in range(3)]

    first, second, third = orders()
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second != third != first
    assert orders() == [first, second, third]
    tf.random.set_seed(1)
    repeated = parquet_dataset(files, ["id"], 8, shuffle_seed=3).repeat(2)
    assert rows(repeated, "id") == first + second


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("pipelines", [2, 3, 5])
def test_workers_share_rows(pipelines, seed, drop, files):
    parts = []
    for i in range(pipelines):
        tf.random.set_seed(1)
        context = tf.distribute.InputContext(pipelines, i, pipelines)
        dataset = parquet_dataset(
            files,
            ["id"],
            2,
            shuffle_seed=seed,
            drop_remainder=drop,
            input_context=context,
        )
        parts.append(rows(dataset, "id"))
    sizes = [len(part) for part in parts]
    together = [row for part in parts for row in part]
    assert len(set(together)) == len(together)
    assert max(sizes) - min(sizes) <= (not drop)
    assert sum(sizes) == ROWS - (ROWS % (2 * pipelines)) * drop


def test_an_iterator_is_restored(files, tmp_path):
    def begin():
        tf.random.set_seed(1)
        dataset = parquet_dataset(files, ["id"], 4, shuffle_seed=3).repeat(3)
        dataset = dataset.map(dict).prefetch(2)
        iterator = iter(dataset)
        return iterator, tf.train.Checkpoint(iterator=iterator)

    for steps in (0, 3, 8, 17):
        iterator, checkpoint = begin()
        for _ in range(steps):
            next(iterator)
        path = checkpoint.write(f"{tmp_path}/c")
        wanted = rows(iterator, "id")
        iterator, checkpoint = begin()
        checkpoint.restore(path)
        assert rows(iterator, "id") == wanted
        assert len(wanted) == 3 * ROWS - (steps // 8 * ROWS + steps % 8 * 4)


def test_other_file_systems(files):
    for i, path in enumerate(files):
        tf.io.gfile.copy(path, f"ram://input/{i}.parquet", overwrite=True)
    dataset = parquet_dataset("ram://input/*.parquet", ["id"], 8)
    assert rows(dataset, "id") == list(range(ROWS))


# Wrong files.


def write(path, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return str(path)


@pytest.mark.parametrize(
    ("values", "default"),
    [
        ([1, 2, 3, None], 7),
        (["a", "b", "c", None], "z"),
        ([[], [1], [2], [5, None]], 7),
        ([["a"], [], [], ["b", None]], b"z"),
        (pa.array([[1, 2]] * 3 + [[3, None]], pa.list_(pa.int64(), 2)), 7),
    ],
)
def test_nulls(values, default, tmp_path):
    path = write(tmp_path / "f.parquet", c=values)
    for seed in (None, 3):
        dataset = parquet_dataset(path, ["c"], 4, shuffle_seed=seed)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=rf"Column 'c' of '{path}' has a null in row 3\.",
        ):
            list(dataset)
    dataset = parquet_dataset(path, ["c"], 4, default_values={"c": default})
    last = rows(dataset, "c")[-1]
    if isinstance(default, str):
        default = default.encode()
    assert (last[-1] if isinstance(last, list) else last) == default


def test_a_null_in_place_of_a_list(tmp_path):
    path = write(tmp_path / "f.parquet", c=[[1], [2], None])
    dataset = parquet_dataset(path, ["c"], 4, default_values={"c": 7})
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="in place of a list in row 2"
    ):
        list(dataset)


@pytest.mark.parametrize("in_list", [False, True])
def test_text_that_is_not_utf_8(in_list, tmp_path):
    offsets = pa.py_buffer(np.array([0, 1, 2, 3, 4], np.int32))
    buffers = [None, offsets, pa.py_buffer(b"ab\xffc")]
    words = pa.Array.from_buffers(pa.string(), 4, buffers)
    if in_list:
        words = pa.ListArray.from_arrays(pa.array([0, 0, 1, 4]), words)
    path = write(tmp_path / "f.parquet", c=words)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"'{path}' has text that is not UTF-8 in row 2\.",
    ):
        list(parquet_dataset(path, ["c"], 4))


def test_other_types_are_an_error(tmp_path):
    paths = [
        write(tmp_path / "a.parquet", c=[1]),
        write(tmp_path / "b.parquet", c=["x"]),
    ]
    with pytest.raises(
        ValueError,
        match=rf"Column 'c' of '{paths[1]}' is of text or bytes, and of "
        rf"'{paths[0]}' of int64\.",
    ):
        parquet_dataset(paths, ["c"], 4)
    path = write(tmp_path / "c.parquet", c=[{"x": 1}], d=[[[1]]])
    for name in "cd":
        with pytest.raises(
            ValueError,
            match=rf"Column '{name}' of '{path}' is of (struct|list)",
        ):
            parquet_dataset(path, [name], 4)


def test_files_that_cannot_be_read(files, tmp_path):
    with pytest.raises(ValueError, match=r"No file matches '.*x\*'"):
        parquet_dataset(f"{tmp_path}/x*", ["id"], 4)
    with pytest.raises(ValueError, match=r"'.*missing' can't be read"):
        parquet_dataset([files[0], f"{tmp_path}/missing"], ["id"], 4)
    with pytest.raises(ValueError, match=r"'ram://missing' can't be read"):
        parquet_dataset(["ram://missing"], ["id"], 4)
    (tmp_path / "text").write_text("no Parquet file")
    with pytest.raises(ValueError, match=r"text' can't be read: .*magic"):
        parquet_dataset(f"{tmp_path}/text", ["id"], 4)
    with pytest.raises(
        ValueError, match=r"a.parquet' has no column 'ids', but"
    ):
        parquet_dataset(files, ["id", "ids"], 4)
    with pytest.raises(
        ValueError, match=r"0 rows of '.*b.parquet' are too few"
    ):
        parquet_dataset(files[1], ["id"], 4)
    with pytest.raises(ValueError, match=r"29 rows of .* and 2 more files"):
        parquet_dataset(files, ["id"], 30, drop_remainder=True)


@pytest.mark.parametrize("change", ["other rows", "damaged", "removed"])
def test_files_that_change_later(change, files):
    dataset = parquet_dataset(files, ["id"], 4)
    if change == "other rows":
        pq.write_table(table(0, 21), files[0])
    elif change == "damaged":
        with open(files[0], "r+b") as file:
            file.write(bytes(300))
    else:
        os.remove(files[0])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"a.parquet' (has|c)"
    ):
        list(dataset)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"files": []}, ValueError, "empty list"),
        ({"columns": "id"}, TypeError, "list of names, got 'id'"),
        ({"columns": []}, ValueError, "different names"),
        ({"columns": ["id", "id"]}, ValueError, "different names"),
        ({"batch_size": 0}, ValueError, "batch_size must be"),
        ({"shuffle_seed": -1}, ValueError, "shuffle_seed must be"),
        ({"default_values": {"x": 1}}, ValueError, "'x', which is none of"),
        ({"default_values": {"id": "a"}}, TypeError, "'id' must be of int64"),
    ],
)
def test_wrong_arguments(arguments, error, words, files):
    wanted = {"files": files, "columns": ["id"], "batch_size": 4}
    with pytest.raises(error, match=words):
        parquet_dataset(**{**wanted, **arguments})


def test_without_pyarrow(tmp_path):
    (tmp_path / "pyarrow.py").write_text("raise ImportError('none')")
    code = "import tfrs_embed; tfrs_embed.data.parquet_dataset(['f'], ['c'], 1)"
    env = {**environment(""), "PYTHONPATH": f"{tmp_path}:{TESTS.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True
    )
    assert "pip install 'tfrs_embed[parquet]'" in done.stderr


# Training.


def click_model():
    keras.utils.set_random_seed(1)
    start = keras.initializers.RandomUniform(seed=1)
    words = tfrs_embed.TableConfig("words", 50, 4, start)
    keys = tfrs_embed.TableConfig(
        "keys",
        40,
        4,
        start,
        keys=tfrs_embed.DynamicKeys(dtype=tf.string),
    )
    inner = layers.PartialTPUEmbedding(
        {
            "word": tfrs_embed.FeatureConfig(
                "word", words, hashing=tfrs_embed.Hash()
            ),
            "kind": tfrs_embed.FeatureConfig("kind", keys),
            "words": tfrs_embed.FeatureConfig(
                "words", words, hashing=tfrs_embed.Hash()
            ),
        },
        "adagrad",
        size_threshold=0,
    )

    class Clicks(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = inner
            self.dense = keras.layers.Dense(1, kernel_initializer=start)

        def call(self, batch):
            return self.dense(sum(self.embedding(batch).values()))

    model = Clicks()
    model.compile("adam", "mse")
    return model


def clicks(files, batch_size=4, **options):
    def split(batch):
        click = tf.cast(batch.pop("click"), tf.float32)
        return batch, click

    columns = ["click", "word", "kind", "words"]
    return parquet_dataset(files, columns, batch_size, **options).map(split)


class Stop(Exception):
    pass


def fit(files, folder, stop_after=None, epochs=3):
    class After(keras.callbacks.Callback):
        left = stop_after

        def on_train_batch_end(self, batch, logs=None):
            if self.left is not None:
                self.left -= 1
                if not self.left:
                    raise Stop

    tf.random.set_seed(1)
    model = click_model()
    if NUMBER == 3:
        # It restores models that were called.
        model(next(iter(clicks(files)))[0])
    position = FitPosition()
    checkpoint = tf.train.Checkpoint(model=model, position=position)
    manager = tf.train.CheckpointManager(checkpoint, folder, 2)
    manager.restore_or_initialize()
    tf.random.set_seed(1)
    train = clicks(files, shuffle_seed=3).prefetch(2)
    save = SaveCallback(manager, position, every_steps=2)
    history = model.fit(
        train,
        epochs=epochs,
        validation_data=clicks(files, 16),
        callbacks=[After(), save],
        verbose=0,
    )
    return model, history


@on("keras:3", tier="nightly")
def test_a_fit_that_was_stopped_equals_an_undisturbed_one(files, tmp_path):
    wanted, history = fit(files, tmp_path / "whole")
    assert len(history.history["val_loss"]) == 3
    for stop in (3, 7):
        with pytest.raises(Stop):
            fit(files, tmp_path / "parts", stop_after=stop)
    found, _ = fit(files, tmp_path / "parts")
    [batch] = clicks(files, ROWS)
    np.testing.assert_array_equal(found(batch[0]), wanted(batch[0]))
    keys = [m.embedding.tables["keys"].keys() for m in (found, wanted)]
    assert sorted(keys[0]) == sorted(keys[1])
    assert len(keys[0]) == ROWS


def test_tf_records(tmp_path):
    """The recipe of docs/input.md, and text that is hashed alike."""
    path = str(tmp_path / "f.tfrecord")
    with tf.io.TFRecordWriter(path) as writer:
        for row in table().to_pylist():
            words = [word.encode() for word in row["words"]]
            feature = {
                "id": tf.train.Feature(
                    int64_list=tf.train.Int64List(value=[row["id"]])
                ),
                "words": tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=words)
                ),
            }
            features = tf.train.Features(feature=feature)
            example = tf.train.Example(features=features)
            writer.write(example.SerializeToString())
    spec = {
        "id": tf.io.FixedLenFeature([], tf.int64),
        "words": tf.io.RaggedFeature(tf.string, row_splits_dtype=tf.int64),
    }
    dataset = tf.data.TFRecordDataset(path).batch(8)
    dataset = dataset.map(lambda r: tf.io.parse_example(r, spec))
    assert rows(dataset, "words") == expected("words")
    assert rows(dataset, "id") == expected("id")
