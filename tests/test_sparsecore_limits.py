"""compute_limits: the limits that batches need, and why."""

import collections
import json

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from tfrs_embed import progress
from tfrs_embed.sparsecore import Topology, buffers, compute_limits
from tfrs_embed.sparsecore.layout import Layout
from training_helpers import sparse_core_config

tpu = tf.tpu.experimental.embedding


def feature(rows=64, samples=8, name="t", dim=8, **table):
    return tpu.FeatureConfig(
        tpu.TableConfig(rows, dim, name=name, **table), output_shape=[samples]
    )


def limits(batches, config, topology=(1, 2), **options):
    return compute_limits(batches, config, topology, progress=False, **options)


def brute_force(layout, samples):
    """Counts (ids, unique ids) of partitions and the buffer, id by id.

    `samples` has each feature's ids as a list of lists. Returns, by stack, the
    most ids and the most unique ids, and the padded size of the buffer.
    """
    cores, shards = layout.topology.sparse_cores, layout.topology.shards
    ids = collections.defaultdict(set)
    for index, (f, of_feature) in enumerate(
        zip(layout.features, samples, strict=True)
    ):
        for sample, its_ids in enumerate(of_feature):
            core = sample // (f.samples // cores)
            for i in its_ids:
                shard = (i + f.col_shift) % shards
                # A table and a row of it; and the sample that looks it up.
                ids[f.stack, core, shard].add(
                    ((f.config.table.name, i), (index, sample))
                )
    result = {name: [0, 0, 0] for name in layout.stacks}
    for (stack, _, _), entries in ids.items():
        most = result[stack]
        most[0] = max(most[0], len(entries))
        most[1] = max(most[1], len({row for row, _ in entries}))
        most[2] += -(-len(entries) // 8) * 8
    return result


def test_limits_are_those_of_the_fullest_partition():
    # Samples 0 to 3 are SparseCore 0's; even ids go to shard 0.
    ids = [0, 2, 2, 4, 1, 1, 1, 1]
    config, report = limits([{"f": ids}], {"f": feature()})
    assert config.max_ids_per_table == {"t": 4}
    assert config.max_unique_ids_per_table == {"t": 3}
    # Two partitions of 8 ids, padding included, for 8 samples.
    assert config.max_ids_per_chip_per_sample == 2
    (stack,) = report.stacks
    assert (stack.fullest_sparse_core, stack.load) == (0, 1.0)
    assert (stack.headroom_ids, stack.headroom_unique_ids) == (252, 253)


def test_an_id_twice_in_a_sample_is_one_id():
    ids = tf.ragged.constant([[2, 4, 2], [2, 2], [], []])
    config, report = limits([ids], feature(samples=4))
    assert config.max_ids_per_table == {"t": 3}
    assert config.max_unique_ids_per_table == {"t": 2}
    assert (report.tables[0].ids, report.tables[0].unique_ids) == (5, 2)


def test_limits_are_the_most_of_all_batches():
    few, many = [0, 1] * 4, [0] * 8
    for batches in ([few, many], [many, few]):
        config, _ = limits(batches, feature())
        assert config.max_ids_per_table == {"t": 4}
        assert config.max_unique_ids_per_table == {"t": 1}


def test_without_any_ids_limits_are_one():
    empty = tf.RaggedTensor.from_row_lengths(tf.zeros([0], tf.int64), [0] * 8)
    config, report = limits([empty], feature())
    assert config.max_ids_per_table == {"t": 1}
    assert config.max_unique_ids_per_table == {"t": 1}
    assert config.max_ids_per_chip_per_sample == 1
    assert "0" in str(report)


@pytest.mark.parametrize("topology", [(1, 2), (2, 4), (4, 2)])
def test_limits_equal_those_counted_id_by_id(topology):
    rng = np.random.default_rng(topology)
    shared = tpu.TableConfig(100, 8, name="b")
    config = {
        "y": tpu.FeatureConfig(shared, output_shape=[16]),
        "x": tpu.FeatureConfig(shared, output_shape=[8]),
        "w": feature(77, 24, "a"),
        "v": feature(50, 8, "wide", dim=16),
    }
    layout = Layout(config, Topology.of(topology))
    want = {name: [0, 0, 0] for name in layout.stacks}
    batches = []
    for _ in range(5):
        samples = {
            key: [
                rng.integers(0, f.table.vocabulary_size // 3, n).tolist()
                for n in rng.integers(0, 5, f.output_shape[0])
            ]
            for key, f in config.items()
        }
        batches.append({k: tf.ragged.constant(s) for k, s in samples.items()})
        counts = brute_force(layout, [samples[f.path] for f in layout.features])
        for name in want:
            want[name] = np.maximum(want[name], counts[name]).tolist()
    got, report = limits(batches, config, topology)
    assert got.max_ids_per_table == {n: w[0] for n, w in want.items()}
    assert got.max_unique_ids_per_table == {n: w[1] for n, w in want.items()}
    need = max(w[2] / layout.stacks[n].samples for n, w in want.items())
    assert got.max_ids_per_chip_per_sample == np.ceil(need)
    assert {t.stack for t in report.tables} == {"a_b", "wide"}


def test_the_limits_hold_the_batches_and_no_less_does():
    rng = np.random.default_rng(0)
    config = [feature(512, 32, "a"), feature(512, 32, "b")]
    batch = rng.integers(0, 512, (2, 32))
    ids = [
        buffers.Ids(np.arange(33, dtype=np.int32), row.astype(np.int32))
        for row in batch
    ]
    found, _ = limits([list(batch)], config, (2, 2))

    def fill(**changes):
        topology = Topology.of((2, 2))
        given = {**found.__dict__, **changes}
        layout = Layout(config, topology, sparse_core_config(**given))
        return buffers.preprocess(layout, ids)

    assert fill()["a_b"].sample_ids.size > 0
    for field in ("max_ids_per_table", "max_unique_ids_per_table"):
        less = {"a_b": getattr(found, field)["a_b"] - 1}
        with pytest.raises(ValueError, match="ids per sparse core"):
            fill(**{field: less})
    less = found.max_ids_per_chip_per_sample - 1
    with pytest.raises(ValueError, match="not going to fit"):
        fill(max_ids_per_chip_per_sample=less)


def test_safety_multiplies_and_rounds_up():
    config, _ = limits([[0] * 8], feature(samples=8), safety=1.3)
    assert config.max_ids_per_table == {"t": 6}
    assert config.max_unique_ids_per_table == {"t": 2}
    many = tf.ragged.constant([list(range(0, 200, 2))] * 2)
    config, _ = limits([many], feature(400, 2), safety=1.1)
    # Not 111, though 100 * 1.1 is a little more than 110 in floating point.
    assert config.max_ids_per_table == {"t": 110}


def test_capacity_divides_by_eight_for_every_stack():
    config = [feature(samples=6), feature(samples=10, name="wide", dim=16)]
    found, _ = limits([[[0] * 6, [0] * 10]], config)
    # 16 ids need 3 for each of 6 samples, but 18 is no multiple of 8.
    assert found.max_ids_per_chip_per_sample == 4


def as_forms(rows):
    """The same ids, as everything that a batch may hold."""
    ragged = tf.ragged.constant(rows, dtype=tf.int64)
    sparse = ragged.to_sparse()
    return {
        "ragged": ragged,
        "sparse": sparse,
        "ragged value": tf.compat.v1.ragged.constant_value(rows),
        "sparse value": tf.compat.v1.SparseTensorValue(
            sparse.indices.numpy(),
            sparse.values.numpy(),
            sparse.dense_shape.numpy(),
        ),
        "lists": rows,
    }


def test_every_form_of_ids_gives_the_same_limits():
    rows = [[1, 5], [], [3, 1, 3], [9]]
    found = {
        name: limits([form], feature(samples=4))
        for name, form in as_forms(rows).items()
    }
    first = found["ragged"]
    for name, result in found.items():
        assert result == first, name
    dense = [[1, 2], [3, 4], [5, 6], [7, 8]]
    for form in (dense, np.array(dense, np.uint8), tf.constant(dense)):
        want = limits([tf.ragged.constant(dense)], feature(samples=4))
        assert limits([form], feature(samples=4)) == want


def test_one_id_a_sample_comes_in_any_shape():
    config = feature(samples=8)
    assert limits([np.arange(8).reshape(2, 4)], config) == limits(
        [np.arange(8)], config
    )


def test_rows_are_samples_of_a_shape_of_two_dimensions():
    table = tpu.TableConfig(64, 8, name="t")
    rows = tf.ragged.constant([[1, 2], [], [3], [4]])
    found = limits([rows], tpu.FeatureConfig(table, output_shape=[2, 2]))
    assert found == limits([rows], feature(samples=4))
    with pytest.raises(ValueError, match="needs 4 rows of ids, got 2"):
        limits([rows[:2]], tpu.FeatureConfig(table, output_shape=[2, 2]))


def test_a_dataset_is_read_batch_by_batch():
    data = tf.data.Dataset.from_tensor_slices(
        {"f": np.arange(32) % 64, "g": np.zeros(32, np.int32)}
    ).batch(8)
    config = {"f": feature(), "g": feature(name="u")}
    _, report = limits(data, config)
    assert report.batches == 4
    assert [t.ids for t in report.tables] == [32, 32]
    assert [t.unique_ids for t in report.tables] == [32, 1]
    assert [t.share for t in report.tables] == [0.5, 0.5]


def test_without_output_shape_the_first_batch_says_the_samples():
    table = tfrs_embed.TableConfig("t", 64, 8)
    config = {
        "one": tfrs_embed.FeatureConfig("one", table),
        "rows": tfrs_embed.FeatureConfig("rows", table),
        "sequence": tfrs_embed.FeatureConfig(
            "sequence", table, max_sequence_length=2
        ),
    }
    batch = {
        "one": [8, 8, 8],
        "rows": [[], [4, 12], [1]],
        # The third is cut off.
        "sequence": [[4, 4, 4], [], [12]],
    }
    # Samples are shared by two SparseCores: 4 of "one" and "rows", padded, and
    # 6 positions of the sequence.
    found, report = limits([batch], config, (2, 2))
    # Rows 0, 4, 8 and 12 are in one of the four shards. The first SparseCore
    # has samples 0 and 1 of "one" and "rows", and 0 to 2 of the sequence.
    assert found.max_ids_per_table == {"t": 2 + 2 + 2}
    assert found.max_unique_ids_per_table == {"t": 3}
    assert report.tables[0].ids == 9


def test_a_later_batch_of_more_samples_is_an_error():
    config = tfrs_embed.FeatureConfig("f", tfrs_embed.TableConfig("t", 9, 8))
    limits([[1, 2], [1]], config)
    with pytest.raises(
        ValueError, match=r"batch 1: Feature 'f'.*: 3 samples, .*room for 2"
    ):
        limits([[1, 2], [1, 2, 3]], config)


def test_ids_outside_the_table_name_the_batch():
    config = tfrs_embed.FeatureConfig("f", tfrs_embed.TableConfig("t", 9, 8))
    with pytest.raises(ValueError, match=r"batch 1: Feature 'f'.*: id 9 is"):
        limits([[1, 2], [1, 9]], config)


def test_tables_of_different_optimizers_are_not_stacked():
    config = {
        "f": feature(optimizer=tpu.Adagrad(0.1)),
        "g": feature(name="u", optimizer=tpu.Adagrad(0.2)),
        "h": feature(name="v"),
    }
    batch = dict.fromkeys(config, [0] * 8)
    found, _ = limits([batch], config, optimizer=tpu.Adagrad(0.1))
    assert list(found.max_ids_per_table) == ["t_v", "u"]


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [(None, 1), ("sgd", 1), ("adagrad", 2), (tpu.Adam(0.1), 3), ("ftrl", 3)],
)
def test_bytes_count_padding_and_slots(optimizer, copies):
    # 65 rows of width 5 are padded to 96 (8 x 4 shards) of width 8.
    config = feature(65, dim=5)
    found, report = limits([[0] * 8], config, (2, 2), optimizer=optimizer)
    (stack,) = report.stacks
    assert stack.table_bytes == 96 * 8 * 4 * copies // 2
    capacity = found.max_ids_per_chip_per_sample * 8
    assert stack.buffer_bytes == capacity * 12 + 2 * 8 * 4


def test_small_tables_are_left_out():
    config = {"f": feature(rows=64), "g": feature(65, name="u")}
    batch = {"f": ["ignored"], "g": [0] * 8}
    found, report = limits([batch], config, size_threshold=64)
    assert list(found.max_ids_per_table) == ["u"]
    assert [t.table for t in report.tables] == ["u"]
    with pytest.raises(ValueError, match="size_threshold=65"):
        limits([batch], config, size_threshold=65)


def test_other_settings_are_kept_and_headroom_is_to_the_given_limits():
    given = sparse_core_config(
        disable_table_stacking=True,
        allow_id_dropping=True,
        max_ids_per_table={"t": 3},
    )
    config = [feature(), feature(name="u")]
    found, report = limits(
        [[[0] * 8] * 2], config, sparse_core_embedding_config=given
    )
    assert found.disable_table_stacking and found.allow_id_dropping
    assert found.max_ids_per_table == {"t": 4, "u": 4}
    assert [s.headroom_ids for s in report.stacks] == [-1, 252]
    assert given.max_ids_per_table == {"t": 3}


def test_the_report_prints_aligned():
    config = {"f": feature(), "g": feature(100_000, name="a_long_name")}
    _, report = limits([dict.fromkeys(config, [0] * 8)], config)
    lines = str(report).splitlines()
    assert lines[0] == "1 batches on 1 chips x 2 SparseCores"
    assert lines[4].split() == ["t", "0", "64", "8", "8", "1", "50%"]
    assert lines[5].split()[:3] == ["a_long_name", "0", "100,000"]
    assert len({len(line) for line in lines[2:6]}) == 1


def test_progress_is_told_on_stderr_only_if_wanted(capsys, monkeypatch):
    compute_limits([[0] * 8] * 3, feature(), (1, 2))
    assert capsys.readouterr() == ("", "")  # It takes no time.
    monkeypatch.setattr(progress, "_AFTER_S", 0)
    compute_limits([[0] * 8] * 3, feature(), (1, 2))
    assert "limits: done, 3 batches" in capsys.readouterr().err
    compute_limits([[0] * 8] * 3, feature(), (1, 2), progress=False)
    assert capsys.readouterr() == ("", "")


def unsorted():
    return tf.SparseTensor([[1, 0], [0, 0]], [1, 2], [8, 1])


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ({"g": [0] * 8}, ValueError, ["'g'", "'f'"]),
        ([0] * 8, TypeError, ["batch 1", "dict"]),
        ({"f": [0.5] * 8}, ValueError, ["'f'", "'t'", "0.5", "an integer"]),
        ({"f": [0] * 7}, ValueError, ["'f'", "'t'", "(7,)", "[8]"]),
        ({"f": [[0], [1, 2]]}, ValueError, ["'f'", "got 2", "[8]"]),
        ({"f": [0] * 7 + [64]}, ValueError, ["'f'", "'t'", "id 64", "0 to 63"]),
        ({"f": [0] * 7 + [-1]}, ValueError, ["'f'", "'t'", "id -1", "0 to 63"]),
        ({"f": np.full(8, 2**32)}, ValueError, ["id 4294967296", "batch 1"]),
        ({"f": unsorted()}, ValueError, ["'f'", "tf.sparse.reorder"]),
        ({"f": "ids"}, TypeError, ["'f'", "str"]),
        (
            {"f": tf.sparse.from_dense(tf.ones([9, 1], tf.int32))},
            ValueError,
            ["'f'", "got 9", "[8]"],
        ),
        (
            {"f": tf.ragged.constant([[[1]]] * 8)},
            ValueError,
            ["'f'", "rank 2"],
        ),
    ],
)
def test_bad_batches_name_batch_feature_and_value(batch, error, words):
    good = {"f": [0] * 8}
    with pytest.raises(error) as raised:
        limits([good, batch], {"f": feature()})
    for word in ["batch 1", *words]:
        assert word in str(raised.value)


def never():
    """Batches that must not be asked for."""
    pytest.fail("batches were read before the configuration was checked")
    yield


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (feature(samples=9), {}, ["'t'", "[9]", "multiple of 2"]),
        (feature(), {"safety": 0.9}, ["safety", "0.9"]),
        (feature(), {"safety": float("nan")}, ["safety", "nan"]),
        (feature(), {"topology": (3, 2)}, ["3 chips", "power of two"]),
    ],
)
def test_bad_configurations_are_refused_before_batches_are_read(
    config, options, words
):
    with pytest.raises(ValueError) as raised:
        limits(never(), config, **options)
    for word in words:
        assert word in str(raised.value)


def test_no_batches_are_an_error():
    with pytest.raises(ValueError, match="no batches"):
        limits([], feature())


def test_limits_as_json():
    _, report = limits([[0, 2, 2, 4, 1, 1, 1, 1]], feature())
    value = json.loads(report.to_json())
    read = tfrs_embed.sparsecore.LimitsReport.from_json
    assert read(json.dumps(value)).to_json() == json.dumps(value, indent=2)
    value["stacks"][0]["max_ids"] = "many"
    with pytest.raises(ValueError, match=r"stacks\[0\].max_ids must be an int"):
        read(json.dumps(value))
    value["tables"][0]["stack"] = "none"
    value["stacks"][0]["max_ids"] = 1
    with pytest.raises(ValueError, match="is in the stack 'none'; the report"):
        read(json.dumps(value))
