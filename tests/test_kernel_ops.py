"""The kernels' operations against the numpy reference, and among themselves."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorflow as tf

import random_kernel_calls as cases
import tfrs_embed
from random_kernel_calls import DIMS, RULES, Feature
from reference import Reference, Table
from tfrs_embed import kernels
from tfrs_embed.optimizers.rules import SGD, Adagrad
from training_helpers import differentiate, operations_run

pytestmark = pytest.mark.usefixtures("needs_kernels")

BOTH_WIDTHS = pytest.mark.parametrize("dtype", [np.int32, np.int64])


def expected_vectors(table, feature):
    vectors = np.zeros((feature.count, table.shape[1]))
    for row, bag, factor in feature.terms():
        vectors[bag] += factor * table[row].astype(np.float64)
    return vectors


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16])
@pytest.mark.parametrize("shape", [[0, 4], [7], [5_000_000, 2]])
def test_filled_tables_are_those_of_tensorflow(shape, dtype):
    value = tf.constant(0.1, dtype)
    found = cases.module().tfrs_embed_fill(dims=shape, value=value)
    assert (found.shape, found.dtype) == (shape, dtype)
    np.testing.assert_array_equal(found, tf.fill(shape, value))


@pytest.mark.parametrize("dims, value", [([-1], 0.0), ([2], [0.0, 1.0])])
def test_a_fill_of_a_wrong_shape_is_an_error(dims, value):
    with pytest.raises(tf.errors.InvalidArgumentError):
        cases.module().tfrs_embed_fill(dims=dims, value=value)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rows_of_integers_are_looked_up_as_floats(kind, dim, dtype):
    rng = np.random.default_rng(dim)
    most = 127 if kind == "int8" else 7
    steps = rng.integers(-most, most + 1, [50, dim])
    scale = rng.normal(size=[50, 1]).astype(np.float32)
    rows = steps.astype(np.int8)
    if kind == "int4":
        biased = np.pad(steps + 8, [(0, 0), (0, dim % 2)]).astype(np.uint8)
        lower, upper = np.split(biased, 2, 1)
        rows = lower + upper * np.uint8(16)
    features = cases.make_features(rng, [steps], 300, np.int32)
    variables = [tf.Variable(rows), tf.Variable(scale)]
    found = cases.module().tfrs_embed_lookup(
        tables=[v.handle for v in variables],
        dims=[dim] * len(features),
        scale_of=[1],
        T=dtype,
        **cases.describe(features),
    )
    floats = steps.astype(np.float32) * scale
    expected = cases.lookup([floats], features, dtype)
    for vectors, each in zip(found, expected, strict=True):
        np.testing.assert_array_equal(vectors, each)
    ids = Feature(0, rng.integers(0, 50, 200), 200)
    matrix = cases.module().tfrs_embed_lookup_concat(
        tables=[v.handle for v in variables],
        others=[tf.ones([200, 3], dtype)],
        dims=[dim],
        order=[1, 0],
        scale_of=[1],
        **cases.describe([ids]),
    )
    np.testing.assert_array_equal(
        matrix[:, 3:], tf.cast(floats[ids.ids], dtype)
    )


def expected_sums(features, gradients):
    """The rows' gradients, by table and row."""
    sums = {}
    for feature, gradient in zip(features, gradients, strict=True):
        of_table = sums.setdefault(feature.table, {})
        for row, bag, factor in feature.terms():
            term = factor * gradient[bag].astype(np.float64)
            of_table[row] = of_table.get(row, 0.0) + term
    return sums


def make_reference(tables, rules, options=cases.OPTIONS["none"]):
    """Tables by number, trained by the same rules at a rate of 0.3."""
    by_name = {}
    for number, (table, rule) in enumerate(zip(tables, rules, strict=True)):
        by_name[number] = Table(
            table,
            "sum",
            rule.name,
            vars(rule),
            lambda step: 0.3,
            options=options.given(),
        )
    return Reference({}, by_name)


def assert_close(actual, expected, name):
    np.testing.assert_allclose(
        actual, expected, rtol=2e-4, atol=2e-5, err_msg=name
    )


def assert_tables(variables, reference):
    for number, of_table in enumerate(variables):
        table = reference.tables[number]
        wanted = {"parameters": table.rows, **table.slots}
        assert sorted(of_table) == sorted(wanted)
        for name, variable in of_table.items():
            assert_close(variable, wanted[name], f"{number}/{name}")


@BOTH_WIDTHS
@pytest.mark.parametrize("seed", range(3))
def test_lookup(seed, dtype):
    rng = np.random.default_rng(seed)
    tables = cases.make_tables(rng, DIMS)
    features = cases.make_features(rng, tables, 40, dtype)
    found = cases.lookup(tables, features)
    for i, (vectors, feature) in enumerate(zip(found, features, strict=True)):
        expected = expected_vectors(tables[feature.table], feature)
        np.testing.assert_allclose(
            vectors, expected, rtol=1e-5, atol=1e-5, err_msg=str(i)
        )


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.float16])
@pytest.mark.parametrize("count", [1, 63, 64, 500])
def test_lookup_into_columns(count, dtype):
    rng = np.random.default_rng(count)
    tables = cases.make_tables(rng, DIMS)
    features = []
    while len(features) < 12:
        # Whatever bags there are, as if the last of them were empty.
        table = int(rng.integers(len(tables)))
        made = cases.make_feature(rng, table, 50, count, np.int64)
        if made.bag_ids is not None and made.count <= count:
            extra = count - made.count
            if made.scale is not None:
                made.scale = np.r_[made.scale, np.ones(extra, np.float32)]
            made.count = count
        if made.count == count:
            features.append(made)
    none = np.zeros(0, np.int32)
    features.append(Feature(1, none.astype(np.int64), count, none))
    others = [rng.normal(size=(count, w)).astype(np.float32) for w in (5, 0)]
    parts = [*cases.lookup(tables, features, dtype), *others]
    order = rng.permutation(len(parts)).tolist()
    found = cases.lookup_concat(tables, features, order, others, dtype)
    expected = tf.concat([tf.cast(parts[i], dtype) for i in order], 1)
    np.testing.assert_array_equal(
        tf.cast(found, tf.float32), tf.cast(expected, tf.float32)
    )


@pytest.mark.parametrize("count", [2, 4])
def test_columns_that_do_not_fit_are_errors(count):
    tables = [np.ones((9, 3), np.float32)]
    features = [
        Feature(0, np.arange(3), 3),
        Feature(0, np.arange(count), count),
    ]
    with pytest.raises(tf.errors.InvalidArgumentError, match="beside"):
        cases.lookup_concat(tables, features, [0, 1], [np.ones((3, 1))])
    others = [np.ones((count, 2), np.float32)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="beside"):
        cases.lookup_concat(tables, features[:1], [0, 1], others)
    with pytest.raises(tf.errors.InvalidArgumentError, match="order"):
        cases.lookup_concat(tables, features[:1], [0, 2], others)


@pytest.mark.parametrize("dim", DIMS)
def test_combine_and_spread(dim):
    rng = np.random.default_rng(dim)
    tables = cases.make_tables(rng, [dim])
    features = cases.make_features(rng, tables, 40)
    found = cases.combine(tables[0], features)
    for vectors, feature in zip(found, features, strict=True):
        np.testing.assert_allclose(
            vectors, expected_vectors(tables[0], feature), rtol=1e-5, atol=1e-5
        )
    gradients = cases.make_gradients(rng, features, tables)
    expected = np.zeros((60, dim))  # More rows than are used.
    for row, gradient in expected_sums(features, gradients)[0].items():
        expected[row] = gradient
    sums = cases.sum_gradients_by_row(gradients, 60, features)
    np.testing.assert_allclose(sums, expected, rtol=1e-5, atol=1e-5)
    for half in (tf.bfloat16, tf.float16):
        rounded = cases.sum_gradients_by_row(gradients, 60, features, half)
        assert rounded.dtype == half
        np.testing.assert_array_equal(rounded, tf.cast(sums, half))


@pytest.mark.parametrize("threaded", [False, True])
def test_sums_of_millions_lose_no_more_than_short_ones(threaded):
    # A running sum in float32 loses 1.5 %.
    n, dim = 2_000_000, 9
    table = np.full([3, dim], 0.1, np.float32)
    ids = np.ones(n, np.int32)
    bag = Feature(0, ids, 1, np.zeros(n, np.int32))
    half = Feature(0, ids[:9], 1, np.zeros(9, np.int32))
    expected = n * float(table[0, 0])
    [vector] = cases.lookup([table], [bag])
    np.testing.assert_allclose(vector, np.full([1, dim], expected), rtol=1e-5)
    # A second table makes the first one small enough for one thread alone.
    tables = [table, table] if threaded else [table]
    features = [bag, dataclasses.replace(bag, table=1), half][: len(tables)]
    rules = [SGD()] * len(tables)
    variables = cases.make_variables([np.zeros_like(t) for t in tables], rules)
    gradients = [table[:1]] * len(tables)
    cases.update(variables, rules, features, gradients, rate=-1.0)
    for each in variables:
        np.testing.assert_allclose(
            each["parameters"][1], np.full([dim], expected), rtol=1e-5
        )


@pytest.mark.parametrize("half", [tf.bfloat16, tf.float16], ids=str)
@pytest.mark.parametrize(("rows", "size"), [(50, 40), (3000, 9000)])
def test_gradients_of_fewer_bits_are_read_as_they_are(rows, size, half):
    rng = np.random.default_rng(2)
    tables = cases.make_tables(rng, DIMS, rows)
    rules = [RULES["adagrad"]] * len(tables)
    features = cases.make_features(rng, tables, size)
    narrow = [
        tf.cast(g, half) for g in cases.make_gradients(rng, features, tables)
    ]
    wide = [tf.cast(g, tf.float32) for g in narrow]
    trained = []
    for gradients in (narrow, wide):
        variables = cases.make_variables(tables, rules)
        cases.update(variables, rules, features, gradients)
        trained.append(variables)
    for found, expected in zip(*trained, strict=True):
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value)


@BOTH_WIDTHS
@pytest.mark.parametrize("name", RULES)
def test_update(name, dtype):
    rng = np.random.default_rng(1)
    tables = cases.make_tables(rng, DIMS)
    rules = [RULES[name]] * len(tables)
    variables = cases.make_variables(tables, rules)
    reference = make_reference(tables, rules)
    for _ in range(2):  # The second step starts from slots of its own.
        features = cases.make_features(rng, tables, 40, dtype)
        gradients = cases.make_gradients(rng, features, tables)
        cases.update(variables, rules, features, gradients)
        reference.update(expected_sums(features, gradients), cases.STEP)
    assert_tables(variables, reference)


@pytest.mark.parametrize("rows", [50, 3000], ids=["few", "many"])
@pytest.mark.parametrize("name", [n for n in cases.OPTIONS if n != "none"])
def test_what_comes_before_and_after_a_rule(name, rows):
    rng = np.random.default_rng(1)
    tables = cases.make_tables(rng, [3, 64, 300], rows)
    rules = [RULES["adam"], RULES["adagrad"], RULES["ftrl"]]
    options = [cases.OPTIONS[name]] * len(tables)
    variables = cases.make_variables(tables, rules)
    reference = make_reference(tables, rules, cases.OPTIONS[name])
    for _ in range(2):
        features = cases.make_features(rng, tables, 400)
        gradients = cases.make_gradients(rng, features, tables)
        cases.update(variables, rules, features, gradients, options=options)
        reference.update(expected_sums(features, gradients), cases.STEP)
    assert_tables(variables, reference)


def test_options_of_one_table_leave_another_alone():
    rng = np.random.default_rng(4)
    tables = cases.make_tables(rng, [8, 8])
    rules = [RULES["sgd"]] * 2
    features = cases.make_features(rng, tables, 30)
    gradients = cases.make_gradients(rng, features, tables)
    with_options = cases.make_variables(tables, rules)
    without = cases.make_variables(tables, rules)
    options = [cases.OPTIONS["both"], cases.OPTIONS["none"]]
    cases.update(with_options, rules, features, gradients, options=options)
    cases.update(without, rules, features, gradients)
    differ = [
        not np.array_equal(a["parameters"], b["parameters"])
        for a, b in zip(with_options, without, strict=True)
    ]
    assert differ == [True, False]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["clipvalue", "row_clipnorm"])
def test_clips_of_a_bad_gradient_are_those_of_tensorflows_operations(bad, name):
    gradient = np.array([[1.0, bad, -2.0]], np.float32)
    options = cases.OPTIONS[name]
    table = np.zeros((1, 3), np.float32)
    variables = cases.make_variables([table], [SGD()])
    cases.update(
        variables,
        [SGD()],
        [Feature(0, np.array([0]), 1)],
        [gradient],
        rate=-1.0,
        options=[options],
    )
    expected = options.clip_rows(tf.constant(gradient))
    np.testing.assert_array_equal(variables[0]["parameters"], expected)


@pytest.mark.parametrize("name", ["weight_decay", "max_norm"])
def test_rows_of_two_bytes_that_are_rounded_twice_are_an_error(name):
    table = np.ones((1, 3), np.float32)
    variables = cases.make_variables([table], [SGD()], tf.bfloat16)
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"only rows of float32 can (decay|have a max_norm)",
    ):
        cases.update(
            variables,
            [SGD()],
            [Feature(0, np.array([0]), 1)],
            [table],
            options=[cases.OPTIONS[name]],
        )


def test_tables_of_one_update_may_have_different_rules():
    rng = np.random.default_rng(2)
    rules = list(RULES.values())
    tables = cases.make_tables(rng, [5] * len(rules))
    features = cases.make_features(rng, tables, 30)
    gradients = cases.make_gradients(rng, features, tables)
    variables = cases.make_variables(tables, rules)
    reference = make_reference(tables, rules)
    cases.update(variables, rules, features, gradients)
    reference.update(expected_sums(features, gradients), cases.STEP)
    assert_tables(variables, reference)


@pytest.mark.parametrize("most", [1, 5, 3000])
def test_update_where_most_ids_are_in_few_rows(most):
    # More than one thread updates together, yet each row is one thread's.
    rng = np.random.default_rng(5)
    rows, dim, n = 300_000, 8, 60_000
    ids = rng.integers(0, rows, n)
    crowded = rng.random(n) < 0.8
    ids[crowded] = rng.integers(0, most, crowded.sum()) + rows // 2
    gradient = rng.normal(size=(n, dim)).astype(np.float32)
    table = np.zeros((rows, dim), np.float32)
    rules = [SGD()]
    variables = cases.make_variables([table], rules)
    cases.update(variables, rules, [Feature(0, ids, n)], [gradient], rate=-1.0)
    expected = np.zeros((rows, dim))
    np.add.at(expected, ids, gradient)
    np.testing.assert_allclose(
        variables[0]["parameters"], expected, rtol=1e-4, atol=1e-2
    )


def test_a_table_without_ids_is_left_as_it_is():
    rng = np.random.default_rng(3)
    tables = cases.make_tables(rng, [4, 4])
    rules = [Adagrad(), Adagrad()]
    variables = cases.make_variables(tables, rules)
    none = np.zeros(0, np.int32)
    features = [Feature(0, none, 0), Feature(1, none, 2, none)]
    for vectors in cases.lookup(tables, features):
        np.testing.assert_array_equal(vectors, np.zeros(vectors.shape))
    cases.update(
        variables, rules, features, [np.ones((0, 4), "f"), np.ones((2, 4), "f")]
    )
    for of_table, table in zip(variables, tables, strict=True):
        np.testing.assert_array_equal(of_table["parameters"], table)


# What must be the same to the last bit.


def lowered(dtype, **tables_and_features):
    """Looks up in float32, and in another dtype."""
    tables, features = tables_and_features.values()
    wanted = [tf.cast(v, dtype) for v in cases.lookup(tables, features)]
    return wanted, cases.lookup(tables, features, dtype)


def bits(tensor):
    """The bits, of which a NaN's sign and payload mean nothing."""
    values = tf.where(
        tf.math.is_nan(tensor), tensor.dtype.as_numpy_dtype("nan"), tensor
    )
    return tf.bitcast(values, tf.uint16).numpy()


def special_values(rng):
    """Bit patterns of all kinds: denormals, infinities, NaNs, ties."""
    patterns = rng.integers(0, 2**32, 40_000, dtype=np.uint64)
    patterns = patterns.astype(np.uint32)
    # A tie of bfloat16, a tie of float16, and what is a bit beside them.
    for place, low_bits in ((10_000, 16), (20_000, 13)):
        part = slice(place, place + 10_000)
        tie = 1 << (low_bits - 1)
        near = rng.integers(tie - 1, tie + 2, 10_000).astype(np.uint32)
        patterns[part] = patterns[part] >> low_bits << low_bits | near
    # The exponents that float16 has, its denormals' too.
    exponents = rng.integers(127 - 26, 127 + 18, 20_000).astype(np.uint32)
    patterns[::2] = patterns[::2] & 0x807FFFFF | exponents << 23
    patterns[:9] = np.array(
        [0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.996, 65520, 1e-45], "f"
    ).view(np.uint32)
    return patterns.view(np.float32).reshape(-1, 64)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_half_precision_is_the_cast_of_float32(dtype):
    rng = np.random.default_rng(4)
    table = special_values(rng)
    every = Feature(0, np.arange(len(table), dtype=np.int64), len(table))
    wanted, found = lowered(dtype, tables=[table], features=[every])
    np.testing.assert_array_equal(bits(found[0]), bits(wanted[0]))


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_half_precision_of_bags_is_the_cast_of_float32(dtype):
    rng = np.random.default_rng(5)
    tables = cases.make_tables(rng, DIMS)
    features = cases.make_features(rng, tables, 40)
    wanted, found = lowered(dtype, tables=tables, features=features)
    for i, (mine, other) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_array_equal(bits(mine), bits(other), str(i))


@pytest.mark.more
@pytest.mark.parametrize(
    ("loops", "threads"),
    [
        ("baseline", 1),
        ("avx2", 3),
        # Other tests run with these, where the machine has them.
        pytest.param("avx512", 8, marks=pytest.mark.nightly),
    ],
)
def test_no_instruction_set_or_number_of_threads_changes_a_bit(
    loops, threads, here, tmp_path
):
    file = tmp_path / "results.npz"
    root = pathlib.Path(tfrs_embed.__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, cases.__file__, str(file)],
        env={
            **os.environ,
            "PYTHONPATH": path,
            "TFRS_EMBED_LOOPS": loops,
            "TF_NUM_INTRAOP_THREADS": str(threads),
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    there = np.load(file)
    if there["loops"] != loops:
        pytest.skip(f"this machine runs {there['loops']} only")
    assert sorted(there) == sorted([*here, "loops"])
    for name, value in here.items():
        np.testing.assert_array_equal(there[name], value, err_msg=name)


@pytest.fixture(scope="module")
def here():
    return cases.results()


# Threads that use the same tables.


def test_no_update_is_lost_among_threads():
    threads, steps, rows, dim = 4, 15, 3000, 8
    table = tf.Variable(tf.zeros([rows, dim]))
    other = tf.Variable(tf.zeros([rows, dim]))
    variables = [{"parameters": table}, {"parameters": other}]
    rules = [SGD()] * 2
    ones = [np.ones((2 * rows, dim), np.float32)] * 2
    failures = []

    def work(number):
        rng = np.random.default_rng(number)
        try:
            for _ in range(steps):
                # Each row twice, in an order of its own.
                ids = [rng.permutation(2 * rows) % rows for _ in range(2)]
                features = [Feature(t, ids[t], 2 * rows) for t in range(2)]
                cases.update(variables, rules, features, ones, rate=-1.0)
                # Under a lock the rows of one table change together.
                every = Feature(0, np.arange(rows), rows)
                [seen] = cases.lookup_handles([table], [every])
                assert np.ptp(seen.numpy()) == 0
        except BaseException as error:
            failures.append(error)
            raise

    workers = [threading.Thread(target=work, args=[i]) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for variable in (table, other):
        np.testing.assert_array_equal(variable, np.full((rows, dim), 2.0 * 60))


# Errors, which come before anything has changed.


BAD_IDS = [
    (np.int32, -1),
    (np.int32, 50),
    (np.int32, -(2**31)),
    (np.int64, -1),
    (np.int64, 50),
    (np.int64, 2**32),
    (np.int64, -(2**63)),
]


@pytest.mark.parametrize(("dtype", "bad"), BAD_IDS)
@pytest.mark.parametrize("place", [0, 3, 5])
def test_an_id_that_is_in_no_table_changes_nothing(place, dtype, bad):
    rng = np.random.default_rng(6)
    tables = cases.make_tables(rng, [4, 300, 4])
    rules = [RULES["adam"], RULES["ftrl"], RULES["sgd"]]
    variables = cases.make_variables(tables, rules)
    features = cases.make_features(rng, tables, 40, dtype)
    gradients = cases.make_gradients(rng, features, tables)
    ids = features[place].ids
    ids[len(ids) // 2] = bad
    before = [{k: v.numpy() for k, v in t.items()} for t in variables]
    message = f"feature {place}: id {bad} is out of range; the table has 50"
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        cases.update(variables, rules, features, gradients)
    for of_table, old in zip(variables, before, strict=True):
        for name, value in old.items():
            np.testing.assert_array_equal(of_table[name], value)
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        cases.lookup(tables, features)


def feature(**changes):
    """Two bags of three ids, as they should be but for the changes."""
    fields = {
        "table": 0,
        "ids": np.array([1, 2, 3], np.int32),
        "count": 2,
        "bag_ids": np.array([0, 0, 1], np.int32),
        "weights": np.ones(3, np.float32),
        "scale": np.ones(2, np.float32),
    }
    return Feature(**{**fields, **changes})


WRONG = {
    "too few bags": {"bag_ids": np.array([0, 1], np.int32)},
    "a bag beyond the last": {"bag_ids": np.array([0, 1, 2], np.int32)},
    "a bag before the first": {"bag_ids": np.array([-1, 0, 1], np.int32)},
    "bags that are not ascending": {
        "bag_ids": np.array([0, 1000, 1], np.int32)
    },
    "ids without bags": {"bag_ids": None},
    "too few splits": {"splits": np.array([0, 3])},
    "too many splits": {"splits": np.array([0, 1, 2, 3])},
    "splits that begin late": {"splits": np.array([1, 2, 3])},
    "splits that end early": {"splits": np.array([0, 1, 2])},
    "splits that end late": {"splits": np.array([0, 1, 4])},
    "splits that are not ascending": {"splits": np.array([0, 4, 3])},
    "too few weights": {"weights": np.ones(2, np.float32)},
    "too many weights": {"weights": np.ones(4, np.float32)},
    "too few scales": {"scale": np.ones(1, np.float32)},
    "too many scales": {"scale": np.ones(3, np.float32)},
    "a table that isn't there": {"table": 1},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_sizes_that_do_not_fit_are_errors(wrong):
    table = np.ones((5, 4), np.float32)
    bad = feature(**WRONG[wrong])
    with pytest.raises(tf.errors.InvalidArgumentError):
        cases.lookup([table], [feature(), bad])
    if bad.table:
        return
    with pytest.raises(tf.errors.InvalidArgumentError):
        cases.combine(table, [feature(), bad])
    gradients = [np.ones((2, 4), np.float32)] * 2
    with pytest.raises(tf.errors.InvalidArgumentError):
        cases.sum_gradients_by_row(gradients, 5, [feature(), bad])
    variables = cases.make_variables([table], [RULES["sgd"]])
    with pytest.raises(tf.errors.InvalidArgumentError):
        cases.update(variables, [RULES["sgd"]], [feature(), bad], gradients)
    np.testing.assert_array_equal(variables[0]["parameters"], table)


@pytest.mark.parametrize("shape", [(1, 4), (3, 4), (2, 3)])
def test_gradients_that_do_not_fit_are_errors(shape):
    table = np.ones((5, 4), np.float32)
    wrong = [np.ones(shape, np.float32)]
    variables = cases.make_variables([table], [RULES["sgd"]])
    with pytest.raises(tf.errors.InvalidArgumentError, match="gradient"):
        cases.update(variables, [RULES["sgd"]], [feature()], wrong)
    np.testing.assert_array_equal(variables[0]["parameters"], table)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("adagrad", [4, 4]),
        ("adagrad", [5]),
        ("row_wise_adagrad", [5, 4]),
        ("row_wise_adagrad", [5, 1]),
        ("row_wise_adagrad", [4]),
        ("row_wise_adam", [5, 4]),
        ("row_wise_adam", [4]),
    ],
)
def test_a_slot_of_another_shape_is_an_error(name, shape):
    table = np.ones((5, 4), np.float32)
    rule = RULES[name]
    variables = cases.make_variables([table], [rule])
    variables[0][[*variables[0]][-1]] = tf.Variable(tf.ones(shape))
    gradients = [np.ones((2, 4), np.float32)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="slot's shape"):
        cases.update(variables, [rule], [feature()], gradients)
    np.testing.assert_array_equal(variables[0]["parameters"], table)


def test_a_table_of_rank_one_is_an_error():
    rule = RULES["row_wise_adagrad"]
    names = "parameters", "accumulators"
    variables = [{n: tf.Variable(tf.ones([5])) for n in names}]
    gradients = [tf.ones((2, 4))]
    with pytest.raises(tf.errors.InvalidArgumentError, match="of rank 2"):
        cases.update(variables, [rule], [feature()], gradients)


def test_the_loops_are_named():
    assert kernels.status().loops in ("baseline", "avx2", "avx512")


@pytest.mark.parametrize("training", [False, True])
def test_where_ragged_rows_begin_is_all_that_is_needed(training):
    table = tfrs_embed.TableConfig("table", 100, 8, combiner="mean")
    layer = tfrs_embed.PartialTPUEmbedding(
        [tfrs_embed.FeatureConfig("feature", table)],
        "sgd",
        size_threshold=0,
    )
    layer.build()
    ids = tf.ragged.constant([[1, 2], [], [3, 4, 5], [6]])

    @tf.function(autograph=False)
    def step(ids):
        with tf.GradientTape() as tape:
            [vectors] = layer([ids], training=training)
            loss = tf.reduce_sum(vectors)
        if training:
            differentiate(tape, loss, layer.trainable_variables)
        return loss

    # Which row each id is in takes some of TensorFlow's operations to say.
    rows = tf.function(lambda ids: ids.value_rowids())
    kinds = operations_run(rows, ids) - {"_Arg", "_Retval", "Const", "Cast"}
    assert "Where" in kinds or "Range" in kinds
    found = operations_run(step, ids)
    assert not found & {"Where", "Range", "Tile", "GatherV2"}
    assert "TfrsEmbedLookup" in found
