"""Random calls of the kernels' operations; as a script, their results.

    python tests/random_kernel_calls.py FILE.npz

Run with other instruction sets or numbers of threads it must give the same
bits.
"""

import dataclasses
import sys

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.kernels import handle_packs
from tfrs_embed.ops import compiled
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.rounding import Rounding
from tfrs_embed.ops.update import GradientContributions, TableUpdate
from tfrs_embed.optimizers import rules
from tfrs_embed.optimizers.options import UpdateOptions
from update_rules import CASES

STEP = 11  # Of updates, which their rounding depends on.
DIMS = [1, 3, 8, 16, 32, 64, 128, 255, 256, 300, 1024]

#: Each rule, with settings that take each way through its formula.
RULES = {
    name: getattr(rules, rule)(**settings)
    for name, (rule, settings) in CASES.items()
}

#: What may come before and after a rule in the kernels.
OPTIONS = {
    "none": UpdateOptions(),
    "clipvalue": UpdateOptions((-0.5, 0.25)),
    "clipvalue_below": UpdateOptions((-0.5, None)),
    "row_clipnorm": UpdateOptions(row_clipnorm=0.75),
    "weight_decay": UpdateOptions(weight_decay=0.5),
    "both": UpdateOptions((None, 0.25), weight_decay=0.5),
    "max_norm": UpdateOptions(max_norm=1.5),
    "all": UpdateOptions(row_clipnorm=0.75, weight_decay=0.5, max_norm=1.5),
}


@dataclasses.dataclass
class Feature:
    """A feature's inputs as the operations take them; None: ones.

    Without `bag_ids` every bag has `bag_size` ids. With `splits` the operations
    get these instead of `bag_ids`, or those that say the same.
    """

    table: int
    ids: np.ndarray
    count: int
    bag_ids: np.ndarray | None = None
    weights: np.ndarray | None = None
    scale: np.ndarray | None = None
    bag_size: int = 1
    splits: np.ndarray | bool = False

    def given_splits(self):
        if self.bag_ids is None or self.splits is False:
            return None
        if self.splits is True:
            starts = np.searchsorted(self.bag_ids, np.arange(self.count + 1))
            return tf.constant(starts, tf.int32)
        return tf.constant(self.splits, tf.int32)

    def bags(self):
        return BaggedIds(
            tf.constant(self.ids),
            None if self.bag_ids is None else tf.constant(self.bag_ids),
            None if self.weights is None else tf.constant(self.weights),
            None if self.scale is None else tf.constant(self.scale),
            tf.constant(self.count),
            tf.constant([self.count]),
            tf.TensorShape([self.count]),
            tf.TensorShape([self.bag_size if self.bag_ids is None else None]),
            splits=self.given_splits(),
        )

    def bag_of_id(self):
        if self.bag_ids is None:
            return np.arange(len(self.ids)) // self.bag_size
        return self.bag_ids

    def terms(self):
        """Each id with its bag and the factor of its row."""
        bag = self.bag_of_id().tolist()
        for i, row in enumerate(self.ids.tolist()):
            b = bag[i]
            factor = 1.0 if self.weights is None else float(self.weights[i])
            yield row, b, factor * (1 if self.scale is None else self.scale[b])


def make_feature(rng, table, rows, size, dtype=np.int64):
    """A feature of about `size` ids; any may be without bags, weights, scale.

    Some bags are empty, the first and the last among them.
    """
    weighted, scaled = rng.random(2) < 0.5
    # Few rows more often: they are what is summed.
    low = int(rng.integers(rows)) if rng.random() < 0.3 else 0
    bag_size = 1
    if rng.random() < 0.4:
        bag_size = int(rng.choice([1, 1, 2, 7]))
        count = size // bag_size
        n, bag = count * bag_size, None
    else:
        lengths = rng.integers(0, 6, max(2, size // 2))
        lengths[[0, rng.integers(len(lengths)), -1]] = 0
        count, n = len(lengths), int(lengths.sum())
        bag = np.repeat(np.arange(count, dtype=np.int32), lengths)
    return Feature(
        table,
        rng.integers(low, rows, n).astype(dtype),
        count,
        bag,
        rng.uniform(-0.5, 2, n).astype(np.float32) if weighted else None,
        rng.uniform(0.1, 2, count).astype(np.float32) if scaled else None,
        bag_size,
        bool(rng.random() < 0.5),
    )


def make_features(rng, tables, size, dtype=np.int64):
    """Two features a table, and for the last of them one without ids."""
    features = [
        make_feature(rng, t, len(table), size, dtype)
        for t, table in enumerate(tables)
        for _ in range(2)
    ]
    none = np.zeros(0, np.int32)
    last = len(tables) - 1
    return [*features, Feature(last, none.astype(dtype), 3, none)]


def make_tables(rng, dims, rows=50):
    return [rng.normal(size=(rows, d)).astype(np.float32) for d in dims]


def make_gradients(rng, features, tables):
    return [
        rng.normal(size=(f.count, tables[f.table].shape[1])).astype(np.float32)
        for f in features
    ]


def module():
    """The kernels' operations."""
    return kernels.operations("CPU:0")


def describe(features):
    """What describes features to all operations."""
    return compiled.describe(
        [tf.constant(f.ids) for f in features],
        [f.bags() for f in features],
        [f.table for f in features],
    )


def lookup(tables, features, dtype=tf.float32):
    return lookup_handles([tf.Variable(t) for t in tables], features, dtype)


def lookup_handles(variables, features, dtype=tf.float32, **limits):
    handles, places = handle_packs.arguments(variables)
    return module().tfrs_embed_lookup(
        tables=handles,
        places=places,
        **limits,
        dims=[
            variables[min(f.table, len(variables) - 1)].shape[1]
            for f in features
        ],
        T=dtype,
        **describe(features),
    )


def lookup_concat(tables, features, order, others, dtype=tf.float32):
    """Features of one count into a matrix; see TfrsEmbedLookupConcat."""
    return module().tfrs_embed_lookup_concat(
        tables=[tf.Variable(t).handle for t in tables],
        others=[tf.cast(o, dtype) for o in others],
        dims=[tables[f.table].shape[1] for f in features],
        order=order,
        **describe(features),
    )


def combine(rows, features):
    """Features of one table, which is given as a tensor."""
    places = [tf.constant(f.ids.astype(np.int32)) for f in features]
    bags = [f.bags() for f in features]
    return compiled.CompiledOperations(module()).combine(
        tf.constant(rows), places, bags
    )


def sum_gradients_by_row(gradients, num_rows, features, dtype=tf.float32):
    places = [tf.constant(f.ids.astype(np.int32)) for f in features]
    return compiled.CompiledOperations(module()).sum_gradients_by_row(
        [tf.constant(g) for g in gradients],
        [f.bags() for f in features],
        tf.concat(places, 0),
        tf.constant(num_rows),
        dtype,
    )


def make_variables(tables, rules, dtype=tf.float32):
    """Each table's parameters, of a dtype, and slots."""
    return [
        {
            "parameters": tf.Variable(tf.cast(table, dtype)),
            **{
                name: tf.Variable(
                    tf.fill(
                        [len(table), *slot.row(table.shape[1])], slot.initial
                    )
                )
                for name, slot in rule.slots().items()
            },
        }
        for table, rule in zip(tables, rules, strict=True)
    ]


def update(
    variables,
    rules,
    features,
    gradients,
    rate=0.3,
    stochastic=True,
    options=None,
):
    """Updates; the features are in the order of their tables."""
    options = options or [OPTIONS["none"]] * len(variables)
    updates = []
    for t, o in enumerate(options):
        mine = [i for i, f in enumerate(features) if f.table == t]
        contributions = GradientContributions(
            [features[i].bags() for i in mine],
            [tf.convert_to_tensor(gradients[i]) for i in mine],
        )
        updates.append(
            TableUpdate(
                variables[t],
                rules[t],
                tf.constant(rate),
                contributions,
                STEP,
                Rounding(stochastic, 7, 3, 2, 5),
                o,
                tf.constant(rate * o.weight_decay) if o.weight_decay else None,
            )
        )
    compiled.CompiledOperations(module())._update(updates)


def results():
    """What all operations give for the same random inputs, by name."""
    found = {}
    # So many ids that several threads take part, and so few rows that each is
    # summed from all over.
    for name, dims, rows, size in [
        ("small", DIMS, 50, 40),
        ("large", [8, 33], 3000, 40_000),
        # Sums of more terms than are added in float32.
        ("crowded", [8, 33], 3, 6000),
    ]:
        rng = np.random.default_rng(0)
        tables = make_tables(rng, dims, rows)
        features = make_features(rng, tables, size)
        gradients = make_gradients(rng, features, tables)
        for i, vectors in enumerate(lookup(tables, features)):
            found[f"{name}/lookup/{i}"] = vectors.numpy()
        mine = [i for i, f in enumerate(features) if f.table == 0]
        found[f"{name}/sum_gradients_by_row"] = sum_gradients_by_row(
            [gradients[i] for i in mine], rows, [features[i] for i in mine]
        ).numpy()
        for rule_name, rule in RULES.items():
            rules = [rule] * len(tables)
            variables = make_variables(tables, rules)
            update(variables, rules, features, gradients)
            for t, of_table in enumerate(variables):
                for slot, value in of_table.items():
                    found[f"{name}/{rule_name}/{t}/{slot}"] = value.numpy()
        rules = [RULES["adagrad"]] * len(tables)
        for option_name, options in OPTIONS.items():
            variables = make_variables(tables, rules)
            update(
                variables,
                rules,
                features,
                gradients,
                options=[options] * len(tables),
            )
            for t, of_table in enumerate(variables):
                value = of_table["parameters"]
                found[f"{name}/{option_name}/{t}"] = value.numpy()
        for dtype in (tf.bfloat16, tf.float16):
            for stochastic in (False, True):
                rules = [RULES["adagrad"]] * len(tables)
                variables = make_variables(tables, rules, dtype)
                sent = dtype if stochastic else tf.float32
                given = [tf.cast(g, sent) for g in gradients]
                update(variables, rules, features, given, stochastic=stochastic)
                parameters = [v["parameters"] for v in variables]
                for t, value in enumerate(parameters):
                    key = f"{name}/{dtype.name}/{stochastic}/{t}"
                    found[key] = tf.cast(value, tf.float32).numpy()
                for i, vectors in enumerate(
                    lookup_handles(parameters, features)
                ):
                    key = f"{name}/{dtype.name}/{stochastic}/lookup/{i}"
                    found[key] = vectors.numpy()
    return found


if __name__ == "__main__":
    np.savez(sys.argv[1], loops=kernels.status().loops, **results())
