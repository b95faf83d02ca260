"""Files of Keras that a stranger wrote: what they hold must be in them."""

import zipfile

import h5py
import numpy as np
import pytest

from keras_under_test import NUMBER, keras, layers
from tfrs_embed import FeatureConfig, TableConfig
from training_helpers import checkpoint_command as main

VARIABLE = "layers/embedding/vars/0"
SHAPE = (4, 2)
SECRET = b"TOP-SECRET-KEY-0123456789abcdefg"


def external(file, secret):
    file.create_dataset(VARIABLE, SHAPE, "<f4", external=[(secret, 0, 32)])


def virtual(file, secret):
    with h5py.File(f"{secret}.h5", "w") as other:
        other["x"] = np.frombuffer(SECRET, "<f4").reshape(SHAPE)
    layout = h5py.VirtualLayout(SHAPE, "<f4")
    layout[...] = h5py.VirtualSource(f"{secret}.h5", "x", SHAPE)
    file.create_virtual_dataset(VARIABLE, layout)


def external_link(file, secret):
    with h5py.File(f"{secret}.h5", "w") as other:
        other["vars/0"] = np.frombuffer(SECRET, "<f4").reshape(SHAPE)
    file["layers/embedding"] = h5py.ExternalLink(f"{secret}.h5", "/")


def soft_link(file, secret):
    file["there"] = np.zeros(SHAPE, "f4")
    file[VARIABLE] = h5py.SoftLink("/there")


def two_names(file, secret):
    file[VARIABLE] = np.zeros(SHAPE, "f4")
    file["layers/embedding_1/vars/0"] = file[VARIABLE]


def a_circle(file, secret):
    file[VARIABLE] = np.zeros(SHAPE, "f4")
    file["layers/embedding/again"] = file["layers"]


def a_deep_group(file, secret):
    group = file
    for _ in range(3000):
        group = group.create_group("g")


def inflated(file, secret):
    file.create_dataset(VARIABLE, data=np.zeros(SHAPE), compression="gzip")


def not_stored(file, secret):
    file.create_dataset(VARIABLE, (2**40, 4), "f4")


def chunks_not_stored(file, secret):
    file.create_dataset(VARIABLE, (2**40, 4), "f4", chunks=(1024, 4))


def without_a_shape(file, secret):
    file[VARIABLE] = h5py.Empty("f4")


MAKERS = {
    external: "'layers/embedding/vars/0' are in other files",
    virtual: "'layers/embedding/vars/0' are in other files",
    external_link: "'layers/embedding' is a link (ExternalLink)",
    soft_link: "'layers/embedding/vars/0' is a link (SoftLink)",
    two_names: "is also under another name",
    a_circle: "'layers/embedding/again' is also under another name",
    a_deep_group: "has more than 4096 letters",
    inflated: "'layers/embedding/vars/0' are compressed or filtered",
    not_stored: "declares 17592186044416 bytes, shape [1099511627776, 4], and "
    "stores 0",
    chunks_not_stored: "declares 17592186044416 bytes",
    without_a_shape: "'layers/embedding/vars/0' has no shape",
}


def refused(arguments, capsys):
    """Runs a command that ends with one line of an error; returns the line."""
    assert main([*map(str, arguments)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("in_archive", [False, True])
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_values_that_are_not_in_a_file_are_refused(
    make, in_archive, tmp_path, capsys
):
    secret, path = tmp_path / "id_ed25519", tmp_path / "bad.weights.h5"
    secret.write_bytes(SECRET)
    with h5py.File(path, "w") as file:
        make(file, str(secret))
    if in_archive:
        with zipfile.ZipFile(tmp_path / "bad.keras", "w") as archive:
            archive.write(path, "model.weights.h5")
        path = tmp_path / "bad.keras"
    (tmp_path / "out").mkdir()
    for command in (
        ["inspect", path],
        ["convert", path, tmp_path / "out/new", "--layer", "emb"],
    ):
        err = refused(command, capsys)
        assert f"'{path}' can't be read: " in err and MAKERS[make] in err
    assert not [*(tmp_path / "out").iterdir()]


def test_datasets_of_one_place_are_no_larger_than_the_file(tmp_path, capsys):
    path, values = tmp_path / "bad.weights.h5", np.ones([3000, 2], "f4")
    with h5py.File(path, "w") as file:
        file[VARIABLE] = values
        place = file[VARIABLE].id.get_offset()
        for i in range(1, 8):  # Without a place.
            file.create_dataset(f"layers/embedding_{i}/vars/0", (3000, 2), "f4")
    nowhere = b"\xff" * 8 + values.nbytes.to_bytes(8, "little")
    there = place.to_bytes(8, "little") + nowhere[8:]
    path.write_bytes(path.read_bytes().replace(nowhere, there))
    with h5py.File(path) as file:
        np.testing.assert_array_equal(file["layers/embedding_7/vars/0"], values)
    err = refused(["inspect", path], capsys)
    assert "declare 192000 bytes, more than the file has" in err


def leaves(file):
    found = []
    file.visititems(
        lambda _, item: (
            found.append(item) if isinstance(item, h5py.Dataset) else None
        )
    )
    return found


def test_a_name_that_is_no_short_text_is_not_taken(tmp_path, capsys):
    path = tmp_path / "model.weights.h5"
    for name in (
        np.zeros(1000),
        np.bytes_("x" * 5000),
        np.array(["a", "b"], h5py.string_dtype()),
    ):
        with h5py.File(path, "w") as file:
            file[VARIABLE] = np.zeros(SHAPE, "f4")
            file["layers/embedding/vars"].attrs["name"] = name
        assert main(["inspect", str(path)]) == 0
        assert "embedding" in capsys.readouterr().out


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.keras"
    ids = keras.Input([2], dtype="int64")
    model = keras.Model(ids, keras.layers.Embedding(9, 4)(ids))
    model.save(path)
    return path


def rewrite(path, compression, change=lambda content: content):
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in contents.items():
            file.writestr(name, change(content))


def test_a_compressed_archive_is_read(saved, capsys):
    assert main(["inspect", str(saved), "--json"]) == 0
    expected = capsys.readouterr().out
    rewrite(saved, zipfile.ZIP_DEFLATED)
    assert main(["inspect", str(saved), "--json"]) == 0
    assert capsys.readouterr().out == expected


def test_what_inflates_twentyfold_is_not_inflated(saved, capsys, monkeypatch):
    rewrite(saved, zipfile.ZIP_DEFLATED, lambda _: bytes(65 << 20))
    reads = []
    monkeypatch.setattr(
        zipfile.ZipExtFile, "read", lambda self, n=-1: reads.append(n)
    )
    err = refused(["inspect", saved], capsys)
    assert "would inflate to 68157440" in err
    assert not reads


@pytest.mark.parametrize(
    "place, bits",
    [(6, 1), (8, 99), (4, 200)],
    ids=["encrypted", "other compression", "newer version"],
)
def test_archives_that_python_cannot_read_are_named(place, bits, saved, capsys):
    data = bytearray(saved.read_bytes())
    for magic, offset in ((b"PK\3\4", 0), (b"PK\1\2", 2)):
        at = data.find(magic)
        while at >= 0:
            data[at + offset + place] = bits
            at = data.find(magic, at + 4)
    saved.write_bytes(data)
    assert f"'{saved}' can't be read: " in refused(["inspect", saved], capsys)


def test_layers_load_no_values_of_other_files(tmp_path):
    def make():
        ids = {
            name: keras.Input([1], dtype="int64", name=name) for name in "ls"
        }
        features = {
            "l": FeatureConfig("l", TableConfig("large", 30, 2)),
            "s": FeatureConfig("s", TableConfig("small", 4, 2)),
        }
        layer = layers.PartialTPUEmbedding(features, "sgd", size_threshold=20)
        return keras.Model(ids, layer(ids))

    secret = tmp_path / "id_ed25519"
    secret.write_bytes(SECRET * 8)
    model = make()
    path = str(tmp_path / "model.weights.h5")
    for rows in (30, 4):  # The table of the engine, and Keras's.
        model.save_weights(path)
        with h5py.File(path, "r+") as file:
            [there] = [d.name for d in leaves(file) if d.shape == (rows, 2)]
            del file[there]
            file.create_dataset(
                there, (rows, 2), "<f4", external=[(secret, 0, rows * 8)]
            )
        loaded = make()
        before = weights_of(loaded, rows)
        # Keras 3 tries other paths, and shows their error of its own layers.
        own = NUMBER == 3 and rows == 4
        match = "could not be loaded" if own else "in other files"
        with pytest.raises(ValueError, match=match):
            loaded.load_weights(path)
        np.testing.assert_array_equal(weights_of(loaded, rows), before)


def weights_of(model, rows):
    [table] = [w for w in model.get_weights() if w.shape == (rows, 2)]
    return np.array(table)
