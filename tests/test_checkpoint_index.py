import os

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from tfrs_embed.checkpoint import bundle, index, listing, stored_pieces
from tfrs_embed.checkpoint.bundle import BundleReader, BundleWriter, merge
from tfrs_embed.checkpoint.index import Index
from tfrs_embed.checkpoint.stored_pieces import masked_crc32c
from tfrs_embed.compat.private_tensorflow import tensor_bundle_pb2, tensor_pb2
from training_helpers import assert_same, change_byte, state

VALUE = "v/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def large_from_1000_bytes(monkeypatch):
    monkeypatch.setattr(stored_pieces, "LARGE_BYTES", 1000)


@pytest.fixture
def saved(tmp_path):
    values = np.random.default_rng(0).random((300, 5), np.float32)
    path = tf.train.Checkpoint(v=tf.Variable(values)).write(str(tmp_path / "c"))
    return path, values


def read_in_blocks(reader, name, rows, size):
    return np.concatenate(
        [
            reader.read_rows(name, start, min(size, rows - start))
            for start in range(0, rows, size)
        ]
    )


def test_an_entry_has_the_checksum_of_its_bytes(saved):
    path, values = saved
    [entry] = Index(path).pieces[VALUE]
    assert (entry.start, entry.shape, entry.dtype) == (0, (300, 5), tf.float32)
    assert entry.masked_crc == masked_crc32c(google_crc32c.value(values))


def test_rows_of_large_tensors_are_read_from_the_file(
    saved, large_from_1000_bytes
):
    path, values = saved
    reader = BundleReader(path)
    np.testing.assert_array_equal(
        read_in_blocks(reader, VALUE, 300, 70), values
    )
    # In any order.
    np.testing.assert_array_equal(reader.read_rows(VALUE, 7, 3), values[7:10])
    np.testing.assert_array_equal(reader.read_rows(VALUE, 0, 2), values[:2])


@pytest.mark.parametrize("step", [300, 7, 1])
@pytest.mark.parametrize("first", [300, 20_000, 3_000_000])
def test_slices_of_rows_are_found(tmp_path, step, first):
    # The numbers' length in the index depends on their size.
    values = np.random.default_rng(0).random((300, 5), np.float32)
    shape = [first + 300, 5]
    name = "a\0\xff/é"
    writer = BundleWriter(str(tmp_path / "part"))
    for start in [*range(0, 300, step)]:
        rows = tf.constant(values[start : start + step])
        writer.add(name, rows, shape, first + start)
    merge(writer.finish(), str(tmp_path / "c"))
    reader = BundleReader(str(tmp_path / "c"))
    for start, size in [(6, 3), (0, 300)]:
        found = reader.read_array(name, first + start, size)
        np.testing.assert_array_equal(found, values[start : start + size])
    with pytest.raises(tf.errors.DataLossError, match=r"slices of .* missing"):
        reader.read_array(name, first - 1, 2)


def test_a_table_of_large_slices_is_read_from_the_files(
    tmp_path, large_from_1000_bytes
):
    values = np.random.default_rng(0).random((300, 5), np.float32)
    writer = BundleWriter(str(tmp_path / "part"))
    for start in range(0, 300, 100):
        rows = tf.constant(values[start : start + 100])
        writer.add(VALUE, rows, [300, 5], start)
        writer.flush()
    merge(writer.finish(), str(tmp_path / "c"))
    reader = BundleReader(str(tmp_path / "c"))
    np.testing.assert_array_equal(
        read_in_blocks(reader, VALUE, 300, 70), values
    )
    file = tmp_path / "c.data-00002-of-00003"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(tf.errors.DataLossError, match="00002-of-00003' is cut"):
        read_in_blocks(reader, VALUE, 300, 70)


def test_slices_may_name_all_columns(tmp_path):
    # As the variables of TPUs do.
    values = np.random.default_rng(0).random((6, 4), np.float32)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "c"),
        tensor_names=["v", "v"],
        shape_and_slices=["6 4 0,2:0,4", "6 4 2,4:0,4"],
        tensors=[values[:2], values[2:]],
    )
    reader = BundleReader(str(tmp_path / "c"))
    np.testing.assert_array_equal(reader.read_array("v", 1, 4), values[1:5])


def test_slices_may_be_of_columns(tmp_path):
    values = np.random.default_rng(0).random((3, 5), np.float32)
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "c"),
        tensor_names=["v", "v"],
        shape_and_slices=["3 5 -:0,3", "3 5 -:3,2"],
        tensors=[values[:, :3], values[:, 3:]],
    )
    reader = BundleReader(str(tmp_path / "c"))
    np.testing.assert_array_equal(reader.read_array("v", 1, 2), values[1:])


def data_file(path):
    return f"{path}.data-00000-of-00001"


def test_a_changed_byte_is_found(saved, large_from_1000_bytes):
    path, _ = saved
    [entry] = Index(path).pieces[VALUE]
    change_byte(entry.file, entry.offset + 5000)
    with pytest.raises(
        tf.errors.DataLossError, match=r"00000-of-00001' is dam"
    ):
        read_in_blocks(BundleReader(path), VALUE, 300, 70)
    with pytest.raises(tf.errors.DataLossError, match=f"checksum of '{VALUE}'"):
        BundleReader(path).read_array(VALUE, 7, 3)


def test_a_file_that_is_cut_off_is_named(saved, large_from_1000_bytes):
    path, _ = saved
    reader = BundleReader(path)
    with open(data_file(path), "r+b") as file:
        file.truncate(1000)
    with pytest.raises(
        tf.errors.DataLossError, match=r"00000-of-00001' is cut"
    ):
        read_in_blocks(reader, VALUE, 300, 70)


def test_a_damaged_index_is_named(saved):
    path, _ = saved
    with open(f"{path}.index", "rb") as file:
        whole = file.read()
    for damaged, why in [
        (whole[:-10], "not end as an index"),
        (b"", "not end as an index"),
        (bytes([whole[0] ^ 1]) + whole[1:], "a checksum is wrong"),
        (whole[30:], "is damaged"),
    ]:
        with open(f"{path}.index", "wb") as file:
            file.write(damaged)
        with pytest.raises(tf.errors.DataLossError, match=rf"c\.index.*{why}"):
            Index(path)


def test_restoring_tables_says_which_checkpoint_is_damaged(tmp_path):
    def make(value):
        by_id = tfrs_embed.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("x", tfrs_embed.TableConfig("t", 9, 4)),
            "adagrad",
            size_threshold=0,
        )
        by_key = tfrs_embed.All2AllDenseEmbedding(10, 4, 1, 1)
        by_id(tf.constant([1]))
        by_key(tf.constant([[[7]]], tf.int64), training=True)
        dense = tf.Variable([value, value])
        return by_id, by_key, dense

    by_id, by_key, dense = make(1.0)
    path = tf.train.Checkpoint(by_id=by_id, by_key=by_key, dense=dense).write(
        str(tmp_path / "c")
    )
    name = "by_id/tables/t/parameters"
    [piece] = Index(path).pieces[f"{name}/.ATTRIBUTES/VARIABLE_VALUE"]
    os.truncate(piece.file, piece.offset + 30)
    by_id, by_key, dense = make(2.0)
    before = [state(by_id), state(by_key)]
    with pytest.raises(tf.errors.DataLossError) as error:
        tf.train.Checkpoint(by_id=by_id, by_key=by_key, dense=dense).restore(
            path
        )
    assert f"'{path}" in error.value.message
    assert f"'{piece.file}' is missing or cut off" in error.value.message
    assert "Use an earlier checkpoint" in error.value.message
    assert "{{" not in error.value.message
    # Nothing has been restored.
    np.testing.assert_array_equal(dense, [2.0, 2.0])
    for layer, expected in zip((by_id, by_key), before, strict=True):
        assert_same(state(layer), expected)


# What somebody else may have written.


def number(value):
    """A number of 7 bits per byte."""
    *more, last = [(value >> at) & 127 for at in range(0, 64, 7)]
    while more and not last:
        last = more.pop()
    return bytes([*(each | 128 for each in more), last])


def block(data):
    """A block: its data, no compression, and a checksum."""
    crc = masked_crc32c(google_crc32c.value(data + b"\0"))
    return data + b"\0" + crc.to_bytes(4, "little")


def entries_of(pairs):
    """The data of a block with names that have no beginning in common."""
    data = b"".join(
        number(0) + number(len(key)) + number(len(value)) + key + value
        for key, value in pairs
    )
    return data + bytes(4) + (1).to_bytes(4, "little")


def index_of(data, places=None):
    """An index of one block of data; `places`: those of its blocks."""
    if places is None:
        places = [number(0) + number(len(data))]
    blocks = entries_of([(b"\xff%d" % i, p) for i, p in enumerate(places)])
    first = block(data)
    footer = number(0) * 2 + number(len(first)) + number(len(blocks))
    magic = (0xDB4775248B80FB57).to_bytes(8, "little")
    return first + block(blocks) + footer.ljust(40, b"\0") + magic


def rewrite(path, change):
    """Lets `change` have the index's entries by name, and writes them."""
    entries = {}
    header = None
    for key, value in Index(path)._entries():
        if key:
            entry = tensor_bundle_pb2.BundleEntryProto.FromString(value)
            entries[key] = entry
        else:
            header = value
    change(entries)
    pairs = [(b"", header)]
    pairs += [(k, e.SerializeToString()) for k, e in sorted(entries.items())]
    with open(f"{path}.index", "wb") as file:
        file.write(index_of(entries_of(pairs)))


def two_tensors(folder):
    values = np.arange(8, dtype=np.float32).reshape(4, 2)
    writer = BundleWriter(str(folder / "part"))
    writer.add("a", values)
    writer.add("b", values + 8)
    for start in (0, 2):
        writer.add("slices", tf.constant(values[:2]), [4, 2], start)
    writer.add("text", "hello")
    merge(writer.finish(), str(folder / "c"))
    return str(folder / "c")


def test_an_index_that_is_written_again_is_read(tmp_path):
    path = two_tensors(tmp_path)
    rewrite(path, lambda entries: None)
    reader = BundleReader(path)
    np.testing.assert_array_equal(
        reader.read("b"), np.arange(8, 16).reshape(4, 2)
    )
    assert reader.read("text") == b"hello"
    assert len(reader.pieces["slices"]) == 2


def _shape(name, *sizes):
    def change(entries):
        for dim, size in zip(entries[name].shape.dim, sizes, strict=True):
            dim.size = size

    return change


def _set(name, **values):
    def change(entries):
        for field, value in values.items():
            setattr(entries[name], field, value)

    return change


def _slices(change):
    def change_all(entries):
        [whole] = [e for k, e in entries.items() if k == b"slices"]
        parts = [e for k, e in sorted(entries.items()) if k[:1] == b"\0"]
        change(whole, parts)

    return change_all


def _string_of(size):
    def change(entries):
        entries[b"text"].shape.dim.add(size=size)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (_shape(b"a", 2**40, 4), r"'a', float32 \[1099511627776, 4\], has 32"),
        (_shape(b"a", -4, -2), r"'a', float32 \[-4, -2\], has 32 bytes at 0"),
        (_shape(b"a", 2**62, 2**62), "has 32 bytes"),
        (_set(b"a", size=-32), "has -32 bytes"),
        (_set(b"a", offset=-8), "has 32 bytes at -8"),
        (_set(b"a", offset=2**40), "is missing or cut off"),
        (_set(b"a", shard_id=7), "'.*00007-of-00001' is missing"),
        (_set(b"a", shard_id=-1), "is missing"),
        (_set(b"a", dtype=99), "TypeError"),
        (_set(b"a", dtype=9), "'a', int64 "),
        (_set(b"b", offset=28), r"'a' and 'b' have bytes of .* in common"),
        (_string_of(2**60), r"'text', string \[1152921504606846976\], has 10"),
        (
            _slices(lambda whole, parts: _shape(b"", 1, 2)({b"": whole})),
            "a slice of 'slices' is not within it",
        ),
        (
            _slices(lambda whole, parts: _shape(b"", -1, 2)({b"": whole})),
            "a slice of 'slices' is not within it",
        ),
        (
            _slices(lambda whole, parts: setattr(parts[0], "dtype", 3)),
            "a slice of 'slices' is not within it",
        ),
        (
            _slices(
                lambda whole, parts: setattr(
                    whole.slices[0].extent[0], "start", -1
                )
            ),
            "a slice of 'slices' is not within it",
        ),
        (
            _slices(lambda whole, parts: whole.slices.pop()),
            "a slice of 'slices' is missing",
        ),
    ],
)
def test_what_files_do_not_have_is_refused(change, message, tmp_path):
    path = two_tensors(tmp_path)
    rewrite(path, change)
    with pytest.raises(tf.errors.DataLossError, match=message):
        Index(path)


def test_slices_that_overlap_have_no_gaps(tmp_path):
    path = two_tensors(tmp_path)

    def twice(whole, parts):
        for each in whole.slices:
            each.extent[0].start = 0

    rewrite(path, _slices(twice))
    with pytest.raises(tf.errors.DataLossError, match="slices of 'slices' are"):
        BundleReader(path).read_array("slices", 0, 2)
    # Of rows that are large, none are allocated.
    rewrite(path, _slices(lambda whole, _: _shape(b"", 4, 2**45)({b"": whole})))
    with pytest.raises(tf.errors.DataLossError, match="slices of 'slices' are"):
        BundleReader(path).read_array("slices", 0, 2)


def test_rows_without_values_are_one_block():
    assert list(bundle.blocks([2**62, 0], tf.float32)) == [(0, 2**62)]
    assert list(bundle.blocks([0, 0], tf.float32)) == []


@pytest.mark.parametrize("length", [0, 4, 6, 127, 128, 2**31, 2**36, 2**63])
@pytest.mark.parametrize("kind", ["string", "strings", "variant"])
def test_strings_of_wrong_lengths_are_not_allocated(kind, length, tmp_path):
    # TensorFlow's own reader crashes.
    value = {
        "string": "hello",
        "strings": ["hello", "", "a" * 300],
        "variant": tf.raw_ops.TensorListFromTensor(
            tensor=[1.0], element_shape=tf.constant([], tf.int32)
        ),
    }[kind]
    writer = BundleWriter(str(tmp_path / "part"))
    writer.add("v", value)
    merge(writer.finish(), str(tmp_path / "c"))
    reader = BundleReader(str(tmp_path / "c"))
    assert reader.read("v").dtype == tf.convert_to_tensor(value).dtype
    [piece] = reader.pieces["v"]
    with open(piece.file, "r+b") as file:
        file.seek(piece.offset)
        file.write(number(length))
    with pytest.raises(tf.errors.DataLossError, match="the lengths of the val"):
        reader.read("v")
    with open(piece.file, "wb") as file:
        file.write(b"\xff" * (piece.offset + piece.size))
    with pytest.raises(tf.errors.DataLossError, match="the lengths of the val"):
        reader.read("v")


@pytest.mark.parametrize("shape", [[0], [3, 0], [], [200_000]])
def test_strings_are_read_however_many(shape, tmp_path):
    sizes = np.random.default_rng(0).choice([0, 3, 200, 20_000], shape)
    sizes = np.where(np.arange(sizes.size).reshape(shape) < 9, sizes, 3)
    text = np.array([b"x" * n for n in sizes.ravel()], object).reshape(shape)
    writer = BundleWriter(str(tmp_path / "part"))
    writer.add("v", tf.constant(text, tf.string))
    merge(writer.finish(), str(tmp_path / "c"))
    found = BundleReader(str(tmp_path / "c")).read("v").numpy()
    np.testing.assert_array_equal(found, text)


@pytest.mark.parametrize("nested", [False, True])
def test_tensors_of_variants_are_not_larger_than_their_bytes(nested, tmp_path):
    # TensorFlow makes a tensor of any shape from one value, or crashes.
    proto = tensor_pb2.VariantTensorDataProto(type_name="tensorflow::Tensor")
    tensor = proto.tensors.add(dtype=1, float_val=[1.0])
    tensor.tensor_shape.dim.add(size=2**40)
    if nested:
        outer = tensor_pb2.VariantTensorDataProto(type_name="outer")
        outer.tensors.add(dtype=21).variant_val.append(proto)
        proto = outer
    text = proto.SerializeToString()
    data = number(len(text)) + text + bytes(4)
    (tmp_path / "data").write_bytes(data)
    piece = stored_pieces.StoredPiece(
        name="v",
        file=str(tmp_path / "data"),
        offset=0,
        size=len(data),
        shape=(),
        dtype=tf.variant,
        masked_crc=0,
        starts=[],
    )
    message = f"'v' has {len(data)} bytes, and would have more than 67108864 in"
    with pytest.raises(tf.errors.DataLossError, match=message):
        index.check_lengths(piece)


@pytest.mark.parametrize("name", ["c.index", "checkpoint"])
def test_pipes_are_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(tf.errors.DataLossError, match="is no file"):
        if name == "checkpoint":
            listing.latest(str(tmp_path))
        else:
            BundleReader(str(tmp_path / "c"))


ENDLESS = index_of(b"\xff" * 10**6 + entries_of([]))
NINE_TIMES = index_of(entries_of([]), 9 * [number(0) + number(8)])
# Names of a MiB, in 3 bytes each.
LONG_NAMES = index_of(
    number(0)
    + number(1 << 20)
    + number(0)
    + b"a" * (1 << 20)
    + 10**5 * (number(1 << 20) + number(0) + number(0))
    + entries_of([])
)


@pytest.mark.parametrize(
    "data, message",
    [
        (ENDLESS, "more than 64 bits"),
        (NINE_TIMES, "blocks overlap"),
        (LONG_NAMES, "names are too long"),
        (index_of(entries_of([(b"a", b"")])), "KeyError"),
        (index_of(b""), "KeyError"),
    ],
    ids=["endless", "nine times", "long names", "no header", "empty"],
)
def test_an_index_takes_no_more_memory_than_its_size(data, message, tmp_path):
    (tmp_path / "c.index").write_bytes(data)
    with pytest.raises(tf.errors.DataLossError, match=rf"c\.index.*{message}"):
        Index(str(tmp_path / "c"))


def test_an_index_with_any_bytes_changed_is_read_or_refused(tmp_path):
    path = two_tensors(tmp_path)
    pairs = list(Index(path)._entries())
    data, random = entries_of(pairs), np.random.default_rng(0)
    read = refused = 0
    for _ in range(2000):
        changed = bytearray(data)
        for _ in range(random.integers(1, 4)):
            changed[random.integers(len(changed))] = random.integers(256)
        with open(f"{path}.index", "wb") as file:
            file.write(index_of(bytes(changed)))
        try:
            reader = BundleReader(path)
            for name, shape in reader.shapes.items():
                if shape and reader.dtypes[name].size:
                    reader.read_array(name, 0, min(4, shape[0]))
                elif reader.dtypes[name] == tf.string:
                    for piece in reader.pieces[name]:
                        index.check_lengths(piece)
            read += 1
        except tf.errors.OpError:
            refused += 1
    assert read > 100 and refused > 1000
