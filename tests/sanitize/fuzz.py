"""Calls the kernels' operations with random inputs, and compares.

    python tests/sanitize/fuzz.py LIBRARY.so --seconds 30 --seed 0

Sizes, offsets, ids and dims are random, and some of the calls are wrong: those
must fail without changing anything. `draws.py` draws any inputs and attributes.
`run.py` gives it a library that has sanitizers.
"""

import argparse
import dataclasses
import itertools
import mmap
import os
import pathlib
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import key_table_comparison
import random_kernel_calls as cases
from sanitize import draws
from tfrs_embed import FileStorage, kernels
from tfrs_embed.kernels import files, handle_packs
from tfrs_embed.ops import compiled
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import (
    GradientContributions,
    JointRows,
    TableUpdate,
)
from tfrs_embed.storage.key_rules import FIRST_ROW, SPILLED, KeyRules, LiveKeys
from tfrs_embed.storage.key_table import KeyTable
from tfrs_embed.storage.spill import Spill

DIMS = [*range(1, 20), 31, 32, 64, 65, 128, 255, 256, 257, 300, 513, 1024]


def make_case(rng):
    """Tables, features and their gradients: mostly small, which are quick."""
    bits = 20 if rng.random() < 0.05 else 14
    dims = rng.choice(DIMS, rng.integers(1, 5)).tolist()
    rows = int(2 ** rng.uniform(0, bits - 8))
    size = int(2 ** rng.uniform(0, bits - np.log2(max(dims))))
    dtype = rng.choice([np.int32, np.int64])
    tables = cases.make_tables(rng, dims, rows)
    features = cases.make_features(rng, tables, size, dtype)
    return tables, features, cases.make_gradients(rng, features, tables)


def factors(feature):
    """Each id's bag, and the factor of its row."""
    bag = feature.bag_of_id()
    found = np.ones(len(feature.ids))
    if feature.weights is not None:
        found *= feature.weights
    if feature.scale is not None:
        found *= feature.scale[bag]
    return bag, found[:, None]


def assert_close(actual, expected):
    scale = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * scale)


def expected_vectors(table, feature):
    bag, factor = factors(feature)
    vectors = np.zeros((feature.count, table.shape[1]))
    np.add.at(vectors, bag, factor * table[feature.ids])
    return vectors


def expected_sums(table, features, gradients):
    sums = np.zeros(table.shape)
    for feature, gradient in zip(features, gradients, strict=True):
        bag, factor = factors(feature)
        np.add.at(sums, feature.ids, factor * gradient[bag])
    return sums


def try_lookups(rng, tables, features):
    dtype = [tf.float32, tf.bfloat16, tf.float16][rng.integers(3)]
    found = cases.lookup(tables, features, dtype)
    for vectors, feature in zip(found, features, strict=True):
        expected = expected_vectors(tables[feature.table], feature)
        if dtype == tf.float32:
            assert_close(vectors, expected)
        else:
            error = np.abs(tf.cast(vectors, tf.float32) - expected)
            assert (error <= 0.01 * np.abs(expected) + 0.01).all()


def try_columns(rng, tables, features):
    """A feature's vectors several times in a matrix, among others."""
    feature = features[rng.integers(len(features))]
    number = int(rng.integers(1, 5))
    others = [
        rng.normal(size=(feature.count, rng.integers(0, 9)))
        for _ in range(rng.integers(1, 3))
    ]
    parts = [expected_vectors(tables[feature.table], feature)] * number
    parts += others
    order = rng.permutation(len(parts)).tolist()
    found = cases.lookup_concat(tables, [feature] * number, order, others)
    assert_close(found, np.concatenate([parts[i] for i in order], 1))


def try_one_table(rng, tables, features, gradients):
    table = int(rng.integers(len(tables)))
    mine = [i for i, f in enumerate(features) if f.table == table]
    features = [features[i] for i in mine]
    gradients = [gradients[i] for i in mine]
    found = cases.combine(tables[table], features)
    for vectors, feature in zip(found, features, strict=True):
        assert_close(vectors, expected_vectors(tables[table], feature))
    sums = cases.sum_gradients_by_row(gradients, len(tables[table]), features)
    assert_close(sums, expected_sums(tables[table], features, gradients))
    half = [tf.bfloat16, tf.float16][rng.integers(2)]
    rounded = cases.sum_gradients_by_row(
        gradients, len(tables[table]), features, half
    )
    np.testing.assert_array_equal(rounded, tf.cast(sums, half))


def pack_some(rng, variables):
    """Packs some of all tables' variables, in any order, two times."""
    every = [v for of_table in variables for v in of_table.values()]
    some = rng.permutation(len(every))[: rng.integers(len(every) + 1)]
    cut = int(rng.integers(len(some) + 1))
    return [
        handle_packs.HandlePack([every[i] for i in s])
        for s in (some[:cut], some[cut:])
    ]


def try_update(rng, tables, features, gradients):
    every = list(cases.RULES.values())
    rules = [every[i] for i in rng.integers(len(every), size=9)]
    rules = rules[: len(tables)]
    dtype = [tf.float32, tf.bfloat16, tf.float16][rng.integers(3)]
    # Rows as the table holds them; then any of the numbers beside a new row.
    tables = [tf.cast(tf.cast(t, dtype), tf.float32).numpy() for t in tables]
    rtol = 2e-3 if dtype == tf.float32 else 1e-2
    sent = [tf.float32, tf.bfloat16, tf.float16][rng.integers(3)]
    given = [tf.cast(g, sent) for g in gradients]
    gradients = [tf.cast(g, tf.float32).numpy() for g in given]
    variables = cases.make_variables(tables, rules, dtype)
    kept = pack_some(rng, variables)
    stochastic = bool(rng.integers(2))
    # Only rows of float32 can decay, or have a max_norm.
    names = [
        n
        for n, o in cases.OPTIONS.items()
        if not (o.weight_decay or o.max_norm)
    ]
    names = list(cases.OPTIONS) if dtype == tf.float32 else names
    options = [cases.OPTIONS[rng.choice(names)] for _ in tables]
    cases.update(
        variables,
        rules,
        features,
        given,
        stochastic=stochastic,
        options=options,
    )
    del kept
    for number, (table, rule) in enumerate(zip(tables, rules, strict=True)):
        before = options[number]
        mine = [i for i, f in enumerate(features) if f.table == number]
        sums = expected_sums(
            table, [features[i] for i in mine], [gradients[i] for i in mine]
        )
        used = np.zeros(len(table), bool)
        for i in mine:
            used[features[i].ids] = True
        slots = {
            name: tf.fill([len(table), *slot.row(table.shape[1])], slot.initial)
            for name, slot in rule.slots().items()
        }
        after, slots = rule.update(
            tf.constant(0.3),
            before.clip_rows(tf.constant(sums, tf.float32)),
            table - np.float32(0.3 * before.weight_decay) * table,
            slots,
            tf.constant(cases.STEP, tf.int64),
        )
        after = before.limit_rows(after)
        found = {
            k: tf.cast(v, tf.float32).numpy()
            for k, v in variables[number].items()
        }
        np.testing.assert_array_equal(found["parameters"][~used], table[~used])
        # A sum that is nearly zero may round to another sign, which is a
        # step of full size for some rules.
        sure = used[:, None] & (np.abs(sums) > 1e-2)
        for name, value in {"parameters": after, **slots}.items():
            which = sure if np.ndim(value) == 2 else sure.all(1)
            np.testing.assert_allclose(
                found[name][which],
                np.asarray(value)[which],
                rtol=rtol,
                atol=rtol,
                err_msg=f"{rule} {name}",
            )


def try_joint(rng, tables):
    """Reads and updates tables by joint ids, and compares with one by one."""
    dim = min(t.shape[1] for t in tables)
    tables = [np.ascontiguousarray(t[:, :dim]) for t in tables]
    sizes = [len(t) for t in tables]
    count = int(rng.integers(60))
    bags = np.flatnonzero(rng.random(count) < 0.7)
    rows = rng.integers(sum(sizes), size=len(bags))
    gradient = tf.constant(rng.normal(size=[count, dim]), tf.float32)
    every = BaggedIds.of_rows(
        tf.constant(rows), tf.constant(bags, tf.int32), tf.constant(count)
    )
    joint = JointRows(sizes, every, gradient)
    module = compiled.CompiledOperations(cases.module())
    found = module.read_rows(
        [tf.Variable(t) for t in tables], every.ids, tf.float32
    )
    np.testing.assert_array_equal(found, np.concatenate(tables)[rows])
    results = []
    for shared in (joint, None):
        variables = cases.make_variables(
            tables, [cases.RULES["adagrad"]] * len(tables)
        )
        updates = []
        start = 0
        for of_table, size in zip(variables, sizes, strict=True):
            mine = (rows >= start) & (rows < start + size)
            own = BaggedIds.of_rows(
                tf.constant(rows[mine] - start),
                tf.constant(bags[mine], tf.int32),
                tf.constant(count),
            )
            contributions = GradientContributions(
                [own], [gradient], True, shared
            )
            rule = cases.RULES["adagrad"]
            updates.append(
                TableUpdate(of_table, rule, tf.constant(0.3), contributions)
            )
            start += size
        module._update(updates)
        results.append([v.numpy() for t in variables for v in t.values()])
    for mine, other in zip(*results, strict=True):
        np.testing.assert_array_equal(mine, other)


def break_one(rng, tables, features):
    """Features of which one has an id or a size that is wrong; None if none."""
    features = list(features)
    place = int(rng.integers(len(features)))
    f = features[place]
    n = len(f.ids)
    kind = rng.integers(4)
    if kind == 0 and n:
        ids = f.ids.copy()
        limits = np.iinfo(ids.dtype)
        rows = len(tables[f.table])
        ids[rng.integers(n)] = rng.choice(
            np.array([-1, rows, limits.min, limits.max], ids.dtype)
        )
        changed = {"ids": ids}
    elif kind == 1 and f.bag_ids is not None and n:
        end = rng.integers(2)
        bag = f.bag_ids.copy()
        bag[-end] = [-1, f.count][end]
        changed = {"bag_ids": bag, "splits": False}
        if rng.random() < 0.5:
            splits = np.searchsorted(f.bag_ids, np.arange(f.count + 1))
            splits[rng.integers(f.count + 1)] = rng.choice([-1, n + 1])
            changed = {"splits": splits}
    elif kind == 2:
        wrong = n - 1 if n and rng.random() < 0.5 else n + 1
        changed = {"weights": np.ones(wrong, np.float32)}
    else:
        changed = {"scale": np.ones(f.count + 1, np.float32)}
    features[place] = dataclasses.replace(f, **changed)
    return features


def try_wrong(rng, tables, features, gradients):
    features = break_one(rng, tables, features)
    rules = [cases.RULES["adam"]] * len(tables)
    variables = cases.make_variables(tables, rules)
    kept = pack_some(rng, variables)
    parameters = [of_table["parameters"] for of_table in variables]
    for call in (
        lambda: cases.lookup_handles(parameters, features),
        lambda: cases.update(variables, rules, features, gradients),
    ):
        try:
            call()
        except tf.errors.InvalidArgumentError:
            continue
        raise AssertionError("no error")
    del kept
    for of_table, table in zip(variables, tables, strict=True):
        np.testing.assert_array_equal(of_table["parameters"], table)
        np.testing.assert_array_equal(of_table["momenta"], np.zeros_like(table))


def try_keys(rng):
    """Keys that come and go, mostly of small tables."""
    capacity = int(2 ** rng.uniform(0, 12 if rng.random() < 0.2 else 6))
    key_table_comparison.run_random_stream(rng, capacity, 12)


def try_messages(rng):
    """Keys and bags sent to shards: what all have is what was sent."""
    world = int(rng.integers(1, 9))
    tables = int(rng.integers(1, 4))
    keys = rng.integers(-(2**62), 2**62, int(2 ** rng.uniform(0, 12)) - 1)
    table_of = rng.integers(tables, size=len(keys), dtype=np.int32)
    ops = cases.module()
    _, row, _, counts = ops.tfrs_embed_route(
        keys=keys, table_of=table_of, world=world, tables=tables
    )
    longest = np.max(np.sum(counts, 1))
    capacity = int(longest) + int(rng.integers(-1, 4))
    try:
        message, position = ops.tfrs_embed_write_keys(
            keys=row, counts=counts, capacity=capacity
        )
    except tf.errors.InvalidArgumentError:
        assert capacity < longest
    else:
        read, read_table_of, places = ops.tfrs_embed_read_keys(
            message=message, tables=tables
        )
        if tables > 1:
            np.testing.assert_array_equal(
                np.bincount(tf.gather(read_table_of, places), minlength=tables),
                np.sum(counts, 0),
            )
        np.testing.assert_array_equal(places, position)
        np.testing.assert_array_equal(tf.gather(read, places), row)
        broken = message.numpy()
        broken[rng.integers(world), 0] = rng.choice([-1, capacity + 1, 2**62])
        try:
            ops.tfrs_embed_read_keys(message=broken, tables=tables)
        except tf.errors.InvalidArgumentError:
            pass
        else:
            raise AssertionError("no error")
    count, size = int(2 ** rng.uniform(0, 10)) - 1, int(rng.integers(1, 70))
    weighted = bool(rng.random() < 0.5)
    # Any words may come as ids.
    width = size * (1 + weighted)
    words = rng.integers(-(2**31), 2**31, (count, width), np.int64)
    matrix = words.astype(np.int32).view(np.float32)
    total = 0
    for shard in range(world):
        [rows], [splits], _ = ops.tfrs_embed_ids_of_shard(
            matrix=matrix,
            bag_sizes=[size],
            weighted=[weighted],
            M=1,
            W=int(weighted),
            world=world,
            shards=[shard],
        )
        assert splits[-1] == len(rows)
        total += len(rows)
    ids = np.ascontiguousarray(matrix[:, :size])
    assert total == np.sum(ids.view(np.int32) >= 0)


def try_runs(rng):
    """Runs of rows, some of which aren't there, and the lengths of bags."""
    ops = cases.module()
    dtype = [tf.float32, tf.bfloat16, tf.float16][rng.integers(3)]
    rows = int(2 ** rng.uniform(0, 12)) - 1
    values = tf.cast(rng.normal(size=(rows, rng.integers(0, 9))), dtype)
    starts = rng.integers(0, rows + 1, rng.integers(0, 30))
    sizes = rng.integers(0, rows - starts + 1)
    parts = [values[a : a + n] for a, n in zip(starts, sizes, strict=True)]
    found = ops.tfrs_embed_copy_runs(
        values=values, starts=starts, sizes=sizes, capacity=0, padded=False
    )
    np.testing.assert_array_equal(found, tf.concat([values[:0], *parts], 0))
    capacity = int(sizes.max(initial=0)) + int(rng.integers(0, 4))
    found = ops.tfrs_embed_copy_runs(
        values=values,
        starts=starts,
        sizes=sizes,
        capacity=capacity,
        padded=True,
    )
    for block, part in zip(found, parts, strict=True):
        assert len(block) == capacity and not np.any(block[len(part) :])
        np.testing.assert_array_equal(block[: len(part)], part)
    shape = rng.integers(1, 5, 2)
    counts = rng.integers(0, 6, shape)
    has_lengths = rng.integers(0, 2, shape)
    lengths = [
        rng.integers(0, 5, n) if has else np.full(n, rng.integers(0, 5))
        for n, has in zip(counts.flat, has_lengths.flat, strict=True)
    ]
    numbers = np.reshape([each.sum() for each in lengths], shape)
    firsts = np.cumsum(counts).reshape(shape) - counts
    inputs = {
        "words": np.concatenate(lengths).astype(np.int32).view(np.float32),
        "starts": firsts,
        "has_lengths": has_lengths,
        "counts": counts,
        "numbers": numbers,
    }
    found = ops.tfrs_embed_read_splits(**inputs)
    expected = [
        np.cumsum([0, *np.concatenate(lengths[p : p + shape[1]])])
        for p in range(0, len(lengths), shape[1])
    ]
    np.testing.assert_array_equal(found, np.concatenate(expected))
    broken = dict(inputs)
    name = str(rng.choice(["starts", "counts", "numbers"]))
    place = tuple(rng.integers(0, shape))
    broken[name] = inputs[name].copy()
    has = has_lengths[place]
    broken[name][place] = 2**30 if has and rng.random() < 0.5 else -1
    # Where there are no lengths, no place of theirs is wrong.
    if name != "starts" or has:
        try:
            ops.tfrs_embed_read_splits(**broken)
        except tf.errors.InvalidArgumentError:
            pass
        else:
            raise AssertionError(f"no error: {name} of {place}")


def try_mapped(rng, folder):
    path = folder / "rows"
    rows, dim = (int(n) for n in rng.integers(0, 300, 2))
    values = rng.normal(size=[rows, dim]).astype(np.float32)
    values.tofile(path)
    ops, shared = kernels.operations("CPU"), bool(rng.integers(2))
    variable = tf.Variable(tf.zeros([0, dim]), shape=[None, dim])
    tf.raw_ops.AssignVariableOp(
        resource=variable.handle,
        value=ops.tfrs_embed_mapped_rows(
            path=str(path), T=tf.float32, shape=[rows, dim], shared=shared
        ),
    )
    np.testing.assert_array_equal(variable, values)
    if rows:
        variable.scatter_update(tf.IndexedSlices(tf.ones([1, dim]), [rows - 1]))
        values[-1] = 1
    np.testing.assert_array_equal(variable, values)
    ids = rng.integers(-9, rows + 9, rng.integers(0, 50))
    ops.tfrs_embed_read_ahead([variable.handle], ids)
    pages = {
        page
        for first in ids[(ids >= 0) & (ids < rows)] * 4 * dim
        for page in range(
            first // mmap.PAGESIZE, -(-(first + 4 * dim) // mmap.PAGESIZE)
        )
    }
    found = ops.tfrs_embed_pages_in_memory([variable.handle], ids)
    assert found.numpy().tolist() == [len(pages)] * 2  # Just written.
    try:
        ops.tfrs_embed_mapped_rows(
            path=str(path), T=tf.float32, shape=[rows + 1, dim + 1]
        )
    except tf.errors.InvalidArgumentError:
        pass
    else:
        raise AssertionError(f"no error: {rows + 1} rows of {dim + 1}")


def try_spill(rng, folder):
    """Keys that lose their rows to others, and have them again."""
    capacity, dim = int(rng.integers(1, 40)), int(2 ** rng.uniform(0, 11))
    policies = [{"policy": "lru"}, {"policy": "lfu", "ttl": 4}]
    policies.append({"policy": "decay", "half_life": 3, "ttl": 5})
    policies.append({"policy": "score"})
    rules = KeyRules(
        capacity,
        capacity,
        1,
        **rng.choice(policies),
        evicts=True,
        floor=int(rng.integers(capacity + 1)),
    )
    variables = {
        "parameters": tf.Variable(tf.zeros([FIRST_ROW + capacity, dim])),
        "sums": tf.Variable(tf.zeros([FIRST_ROW + capacity])),
    }
    spill = Spill("t", FileStorage(folder), variables, None)
    table = KeyTable(rules, None, spill)
    known = {}
    for step in range(1, 30):
        size = rng.integers(1, capacity + 1)
        keys = rng.choice(4 * capacity, size, False)
        given = table.commit(
            tf.constant(keys), None, tf.zeros([size], tf.int64), step
        )
        for variable in variables.values():
            shape = [len(given.new_rows), *variable.shape[1:]]
            variable.scatter_update(
                tf.IndexedSlices(tf.zeros(shape), given.new_rows)
            )
        spill.fetch(given.new_keys, given.new_rows, False)
        table.publish(given.versions)
        for name, variable in variables.items():
            found = tf.gather(variable, given.rows).numpy()
            for key, row in zip(keys.tolist(), found, strict=True):
                np.testing.assert_array_equal(row, known.get((key, name), 0))
            new = rng.normal(size=found.shape).astype(np.float32)
            variable.scatter_update(tf.IndexedSlices(new, given.rows))
            for key, row in zip(keys.tolist(), new, strict=True):
                known[key, name] = row
        if rules.scored:
            table.score(keys, rng.integers(-3, 3, size))
        if rng.random() < 0.1:
            gone = rng.choice(4 * capacity, 3).tolist()
            table.remove(gone)
            for key in gone:
                for name in variables:
                    known.pop((key, name), None)
        if rng.random() < 0.1:
            live = LiveKeys(*(each.numpy() for each in table.export()))
            order = rng.permutation(len(live.keys))
            spilled = [k for k in order if live.rows[k] >= SPILLED]
            rows = live.rows[spilled]
            for name in variables:
                for key, row in zip(
                    live.keys[spilled].tolist(),
                    spill.read(name, rows),
                    strict=True,
                ):
                    np.testing.assert_array_equal(row, known[key, name])
    assert table.numbers().size == len(known) // 2


def try_all(rng):
    """Calls each operation, with inputs of the right types."""
    case = make_case(rng)
    try_lookups(rng, *case[:2])
    try_columns(rng, *case[:2])
    try_one_table(rng, *case)
    try_update(rng, *case)
    try_joint(rng, case[0])
    try_wrong(rng, *case)
    try_keys(rng)
    try_messages(rng)
    try_runs(rng)
    with tempfile.TemporaryDirectory() as folder:
        try_mapped(rng, pathlib.Path(folder))
        try_spill(rng, folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument(
        "--last",
        type=pathlib.Path,
        default=pathlib.Path(os.devnull),
        help="file for what may crash next",
    )
    args = parser.parse_args()
    files.find_build = lambda: args.library
    assert kernels.status().loaded, kernels.status()
    tf.get_logger().setLevel("ERROR")  # Graphs are made again and again.
    end = time.monotonic() + args.seconds
    for seed in itertools.count(args.seed):
        rng = np.random.default_rng(seed)
        try:
            try_all(rng)
            for _ in range(20):
                draws.try_call(rng, lambda text: args.last.write_text(text))
        except BaseException:
            print(f"Failed with --seed {seed}", file=sys.stderr)
            raise
        if time.monotonic() > end:
            break
    print(f"{kernels.status().loops}: {seed + 1 - args.seed} cases")


if __name__ == "__main__":
    main()
