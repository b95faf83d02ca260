"""The text of string keys in checkpoints, files of rows and exported models."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import tfrs_embed
from dynamic_layers import fingerprint
from keras_under_test import keras
from process_tiers import on
from text_layers import inputs_of, make, require_texts, step_of
from tfrs_embed.checkpoint import DeltaManager, bundle
from tfrs_embed.serving import export, export_delta, export_rows, import_rows
from training_helpers import save_tensors

pytestmark = on("keras:3", tier="nightly")

TEXT = "layer/tables/items/text/.ATTRIBUTES/VARIABLE_VALUE"
WORDS = [b"a", b"b\xff", b"c" * 3000, "Größe 3".encode()]


@pytest.fixture
def trained():
    layer = make(rows=8)
    step_of(layer)(inputs_of(WORDS[:2], [WORDS[2:]]))
    return layer


def items(layer):
    return layer.tables["items"]


def rows_of(layer, words=WORDS):
    return layer(inputs_of(words, [["a"]]), training=False)["word"].numpy()


def save(layer, folder):
    return tf.train.Checkpoint(layer=layer).write(str(folder / "saved"))


def restored(path, **options):
    layer = make(**{"rows": 8, **options})
    tf.train.Checkpoint(layer=layer).restore(path)
    return layer


def test_a_checkpoint_has_texts_in_the_order_of_keys(trained, tmp_path):
    reader = tf.train.load_checkpoint(save(trained, tmp_path))
    keys = reader.get_tensor(TEXT.replace("text", "keys", 1))
    texts = reader.get_tensor(TEXT).tolist()
    assert sorted(texts) == sorted(WORDS)
    assert [*map(fingerprint, texts)] == keys.tolist()


@pytest.mark.parametrize("built", [True, False])
def test_texts_come_back_from_a_checkpoint(trained, tmp_path, built):
    path = save(trained, tmp_path)
    layer = make(rows=8)
    if not built:
        layer = type(layer).from_config(layer.get_config())
    tf.train.Checkpoint(layer=layer).restore(path)
    layer.build(None)
    require_texts(items(layer), WORDS)
    np.testing.assert_array_equal(rows_of(layer), rows_of(trained))


def test_a_table_that_keeps_no_text_restores_one_that_does(trained, tmp_path):
    path = save(trained, tmp_path)
    plain = restored(path, keep_text=False)
    assert items(plain).keys().tolist() == sorted(map(fingerprint, WORDS))
    before = save(plain, tmp_path)
    layer = restored(before)
    require_texts(items(layer), [])
    assert items(layer).statistics()["text"]["unknown"] == 4
    step_of(layer)(inputs_of(["a", "new"], [["a"]]))
    require_texts(items(layer), [b"a", b"new"])
    require_texts(items(restored(save(layer, tmp_path))), [b"a", b"new"])


def test_fewer_rows_keep_the_texts_of_their_keys(trained, tmp_path):
    path = save(trained, tmp_path)
    with tfrs_embed.checkpoint.growing_tables(shrink=True):
        layer = restored(path, rows=2)
    assert len([*filter(None, items(layer).keys())]) == 2
    require_texts(items(layer), WORDS)


def test_tables_without_keys_and_weights_of_keras(trained, tmp_path):
    empty = make()
    require_texts(items(restored(save(empty, tmp_path))), [])
    names = [v.name for v in trained.weights]
    assert not any("text" in name for name in names)
    inputs = {
        "word": keras.Input([], dtype=tf.string),
        "words": keras.Input([1], dtype=tf.string),
    }
    before, after = (
        keras.Model(inputs, layer(inputs)) for layer in (trained, empty)
    )
    path = str(tmp_path / "m.weights.h5")
    before.save_weights(path)
    after.load_weights(path)
    require_texts(items(empty), [])
    assert items(empty).statistics()["text"]["unknown"] == 4


def changed_texts(texts):
    texts[1] = b"other"
    return texts


BAD = {
    "another key's": (changed_texts, r"the text b'other' is not of its key"),
    "too few": (lambda texts: texts[:3], r"strings of shape \[4\].*\[3\]"),
    "numbers": (lambda texts: np.arange(4), "text must be strings.*int64"),
}


@pytest.mark.parametrize("bad", BAD)
def test_wrong_texts_change_nothing(trained, tmp_path, bad):
    path, (change, text) = save(trained, tmp_path), BAD[bad]
    reader = tf.train.load_checkpoint(path)
    names = reader.get_variable_to_shape_map()
    tensors = {name: reader.get_tensor(name) for name in names}
    tensors[TEXT] = change(tensors[TEXT])
    save_tensors(tmp_path / "bad", tensors)
    layer = make(rows=8)
    step_of(layer)(inputs_of(["x"], [["y"]]))
    with pytest.raises(ValueError, match=text):
        tf.train.Checkpoint(layer=layer).restore(str(tmp_path / "bad"))
    require_texts(items(layer), [b"x", b"y"])


def test_damaged_lengths_are_an_error(trained, tmp_path):
    path = save(trained, tmp_path)
    files = tmp_path.glob("saved.data-*")
    [file] = [f for f in files if b"c" * 3000 in f.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(b"c" * 3000) - 1] ^= 1  # Within texts or their lengths.
    file.write_bytes(data)
    layer = make(rows=8)
    with pytest.raises(tf.errors.OpError):
        tf.train.Checkpoint(layer=layer).restore(path)
    require_texts(items(layer), [])


@pytest.mark.parametrize("background", [True, False])
def test_deltas_have_the_texts_of_new_keys(tmp_path, background):
    layer = make(rows=8)
    step = step_of(layer)
    manager = DeltaManager(
        tf.train.Checkpoint(layer=layer),
        tmp_path,
        full_every=3,
        background=background,
    )
    seen = []
    for i in range(8):
        seen += [b"%d" % i, b"%d" % (i + 3), b"same"]
        step(inputs_of(seen[-3:-1], [seen[-1:]]))
        if i == 4:
            items(layer).remove(["4"])
        path = manager.save()
        manager.wait()
        copy = restored(path)
        assert items(copy).size == items(layer).size
        require_texts(items(copy), seen)
        assert not items(copy).statistics()["text"]["unknown"]
    # A delta has changed rows only.
    delta = tf.train.load_checkpoint(manager.checkpoints[-1])
    shape = delta.get_variable_to_shape_map()
    there = TEXT.replace("text", "delta/text", 1)
    assert shape[there] == shape[there.replace("text", "keys", 1)] < [8]


def test_a_chain_whose_first_file_has_no_texts(trained, tmp_path):
    plain = restored(save(trained, tmp_path), keep_text=False)
    folder = tmp_path / "chain"
    DeltaManager(tf.train.Checkpoint(layer=plain), folder).save()
    layer = make(rows=8)
    manager = DeltaManager(tf.train.Checkpoint(layer=layer), folder)
    manager.restore_or_initialize()
    step_of(layer)(inputs_of(["a", "new"], [["a"]]))
    copy = restored(manager.save())
    require_texts(items(copy), [b"a", b"new"])
    assert items(copy).size == 5


def test_rows_are_exported_and_imported_with_texts(trained, tmp_path):
    since = export_rows(trained, tmp_path / "0")
    table = f"{trained.name}/items"
    file = pq.read_table(str(tmp_path / "0" / table))
    assert file.schema.names[:2] == ["key", "fingerprint"]
    assert file.schema.field("key").type == pa.binary()
    assert sorted(file["key"].to_pylist()) == sorted(WORDS)
    assert [*map(fingerprint, file["key"].to_pylist())] == file[
        "fingerprint"
    ].to_pylist()
    layer = make(rows=8)
    import_rows(items(layer), tmp_path / "0" / table)
    require_texts(items(layer), WORDS)
    np.testing.assert_array_equal(rows_of(layer), rows_of(trained))
    plain = make(rows=8, keep_text=False)
    import_rows(items(plain), tmp_path / "0" / table)
    np.testing.assert_array_equal(rows_of(plain), rows_of(trained))

    items(trained).remove(["a"])
    step_of(trained)(inputs_of(["new"], [["b"]]))
    export_rows(trained, tmp_path / "1", since)
    import_rows(items(layer), tmp_path / "1" / table)
    require_texts(items(layer), [*WORDS[1:], b"b", b"new"])
    assert items(layer).size == 5


def test_unknown_texts_are_null_in_files_of_rows(trained, tmp_path):
    layer = restored(
        save(restored(save(trained, tmp_path), keep_text=False), tmp_path)
    )
    step_of(layer)(inputs_of(["a"], [["a"]]))
    export_rows(layer, tmp_path / "rows")
    file = tmp_path / "rows" / layer.name / "items"
    keys = pq.read_table(str(file))["key"].to_pylist()
    assert sorted(keys, key=bool) == [None] * 3 + [b"a"]
    copy = make(rows=8)
    import_rows(items(copy), file)
    require_texts(items(copy), [b"a"])
    assert items(copy).size == 4


def test_files_of_rows_with_wrong_fingerprints_change_nothing(tmp_path):
    layer = make(rows=8)
    items(layer).variables["keys"].assign(np.array([fingerprint(b"a")]))
    rows = {
        "key": [b"a", b"b"],
        "fingerprint": [fingerprint(b"a"), 7],
        "row": [[1.0, 2.0]] * 2,
    }
    pq.write_table(pa.table(rows), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match="key b'b' of table 'items' has the"):
        import_rows(items(layer), tmp_path / "bad.parquet")
    require_texts(items(layer), [])
    rows["fingerprint"][1] = fingerprint(b"b")
    pq.write_table(pa.table(rows), tmp_path / "good.parquet")
    import_rows(items(layer), tmp_path / "good.parquet")
    require_texts(items(layer), [b"a", b"b"])


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_top_k_returns_texts(trained, both_implementations, graph):
    table = items(trained)
    table.assign(WORDS, [[1, 0], [2, 0], [3, 0], [4, 0]])
    best = tfrs_embed.TopK(table, k=3)
    ask = (
        tf.function(best.query_with_exclusions)
        if graph
        else (best.query_with_exclusions)
    )
    scores, texts = ask(tf.constant([[1.0, 0.0], [-1.0, 0.0]]), [["a"], ["zz"]])
    assert scores.numpy().tolist() == [[4, 3, 2], [-1, -2, -3]]
    assert texts.numpy().tolist() == [WORDS[:0:-1], WORDS[:3]]
    _, texts = table.top_k([[1.0, 0.0]], 3, tf.constant([WORDS[:2]]))
    assert texts.numpy().tolist() == [[WORDS[3], WORDS[2], b""]]


class Model(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self({"word": tf.constant(["a"])})

    def call(self, inputs):
        return self.layer(inputs, partial=True)["word"]

    def best(self, queries):
        scores, texts = items(self.layer).top_k(queries, 2)
        return {"scores": scores, "texts": texts}


SPEC = {"word": tf.TensorSpec([None], tf.string, "word")}
BEST = [tf.TensorSpec([None, 2], tf.float32, "queries")]


def small_blocks(monkeypatch):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 16)  # Two rows.


def stored_names(path):
    reader = tf.train.load_checkpoint(str(path / "variables" / "variables"))
    return [n for n in reader.get_variable_to_shape_map() if "/text/" in n]


@pytest.mark.parametrize("updatable", [False, True])
def test_an_exported_model_answers_texts(
    trained, tmp_path, monkeypatch, updatable
):
    small_blocks(monkeypatch)
    model = Model(trained)
    items(trained).assign(WORDS, [[1, 0], [2, 0], [3, 0], [4, 0]])
    if updatable:
        items(trained).track_changes()
    path = tmp_path / "model"
    export(
        model,
        path,
        SPEC,
        signatures={"best": (model.best, BEST)},
        updatable=updatable,
    )
    assert len(stored_names(path)) == 1
    served = tf.saved_model.load(str(path))
    best = served.signatures["best"]
    found = best(queries=tf.constant([[1.0, 0.0]]))
    assert found["texts"].numpy().tolist() == [WORDS[3:1:-1]]
    np.testing.assert_array_equal(
        served.serve({"word": tf.constant(WORDS)}),
        items(trained)
        .variables["parameters"]
        .collect_rows(np.array([*map(fingerprint, WORDS)])),
    )
    if not updatable:
        return
    for number, words in enumerate(([b"new", b"a"], [b"n2", b"n3", b"n4"])):
        items(trained).remove([WORDS[2], WORDS[3]])
        items(trained).assign(words, [[9 + i, 0] for i in range(len(words))])
        delta, path = tmp_path / f"delta-{number}", path
        export_delta(model, delta, since=path)
        path = delta
        served.apply_delta(str(delta))
        found = best(queries=tf.constant([[1.0, 0.0], [-1.0, 0.0]]))
        expected = model.best(tf.constant([[1.0, 0.0], [-1.0, 0.0]]))
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


def test_an_export_that_answers_no_texts_holds_none(trained, tmp_path):
    export(Model(trained), tmp_path / "model", SPEC)
    assert not stored_names(tmp_path / "model")


def test_an_exported_table_with_unknown_texts(trained, tmp_path):
    layer = restored(
        save(restored(save(trained, tmp_path), keep_text=False), tmp_path)
    )
    model = Model(layer)
    signatures = {"serving_default": (model.best, BEST)}
    export(model, tmp_path / "model", signatures=signatures)
    served = tf.saved_model.load(str(tmp_path / "model"))
    best = served.signatures["serving_default"](queries=tf.zeros([1, 2]))
    assert best["texts"].numpy().tolist() == [[b"", b""]]
