"""The cases: tables, ids and optimizers, and the contenders of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np

ALPHA = 1.05  # The ids' power law.
# An SGD step on these sums of squares would diverge with a larger one.
LEARNING_RATES = {
    "Adagrad": 0.01,
    "Adam": 0.001,
    "SGD": 1e-5,
    "RowWiseAdagrad": 0.01,
}
# Those of the table's shape, and those of a number for each row.
SLOTS = {"Adagrad": 1, "Adam": 2, "SGD": 0, "RowWiseAdagrad": 0}
ROW_SLOTS = {"RowWiseAdagrad": 1}
# Those of the case with one thread and two.
THREADS_OPTIMIZERS = ("Adagrad", "RowWiseAdagrad")
# What all contenders have.
OPTIMIZERS = ("Adagrad", "Adam", "SGD")
INITIAL_ACCUMULATOR = 0.1
EPSILON = 1e-7
WARM_UP_SECONDS = 0.05  # Of steps that are not timed, in each round.
NUMERICAL = 10  # Features beside the ids in a model with an MLP.

# The number of values of each categorical column of Criteo's display
# advertising challenge.
CRITEO = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683,
    8_351_593, 3_194, 27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18,
    15, 286_181, 105, 142_572,
)  # fmt: skip

OURS = ("ours", "ours-ops")
SINGLE_PEERS = (
    *OURS,
    "ours-keras3",
    "distributed",
    "distributed-ops",
    "tfrs",
    "tf_keras",
    "keras3",
    "keras_rs-tf",
    "keras_rs-xla",
    "keras_rs-jax",
    "torch",
    "fbgemm",
    "torchrec",
    "floor",
)
THREADS_PEERS = (
    "ours",
    "distributed",
    "torch",
    "fbgemm",
    "torchrec",
    "floor",
)
FEATURES_PEERS = (*OURS, "ours-keras3", "ours-default", "tfrs", "tf_keras")
DLRM_PEERS = (
    "ours",
    "ours-default",
    "distributed",
    "tfrs",
    "tf_keras",
    "keras_rs-tf",
    "keras_rs-xla",
    "torch",
    "fbgemm",
    "torchrec",
    "dense-tf",
    "dense-torch",
)
FULL_PEERS = ("ours", "distributed", "tfrs", "tf_keras", "torch", "fbgemm")
MODEL_PEERS = (
    *OURS,
    "ours-keras3",
    "distributed",
    "distributed-ops",
    "tfrs",
    "tf_keras",
    "keras3",
    "keras_rs-tf",
    "keras_rs-xla",
    "fbgemm",
    "torchrec",
    "dense-tf",
    "dense-torch",
)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows that features share by naming its index."""

    rows: int
    dim: int


@dataclasses.dataclass(frozen=True)
class Feature:
    """An input of as many ids a sample as its hotness, combined by sum."""

    table: int
    hotness: int


@dataclasses.dataclass(frozen=True)
class Case:
    """One column of a report's table.

    `kind` is "train", "forward" or "memory". With `mlp`, the widths of its
    layers, the step is that of a whole model; without, its loss is the sum of
    the squared activations. The ids of a `stacked` case go into the step as
    one tensor, or two if ragged: a thousand arguments would cost more than the
    step, and TensorFlow takes 0.15 ms for each RaggedTensor. With
    `all_forms`, this library is timed in each of its forms, not in one.

    With `bottom`, the widths of the layers of a second MLP, that one takes the
    numerical features, and `mlp` its output beside the activations. `numerical`
    is the number of these features. Ids of a table are drawn from
    `cardinalities`, where there are any, and hashed into its rows. `threads` is
    how many a contender has; None: as many as cores. `alone`: contenders don't
    take turns, for they don't fit in memory together. `costs`: the report has
    what each took before its steps.
    """

    group: str
    label: str
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    batch: int
    peers: tuple[str, ...]
    optimizer: str = "Adagrad"
    kind: str = "train"
    mlp: tuple[int, ...] = ()
    stacked: bool = False
    all_forms: bool = False
    bottom: tuple[int, ...] = ()
    numerical: int = NUMERICAL
    cardinalities: tuple[int, ...] = ()
    threads: int | None = None
    alone: bool = False
    costs: bool = False

    @property
    def name(self):
        return f"{self.group}/{self.label}"

    @property
    def learning_rate(self):
        return LEARNING_RATES[self.optimizer]

    @property
    def dims(self):
        """The width of each feature's activations."""
        return [self.tables[f.table].dim for f in self.features]

    @property
    def table_bytes(self):
        """Of the tables and, in training, their slots."""
        copies, more = 1, 0
        if self.kind != "forward":
            copies += SLOTS[self.optimizer]
            more = ROW_SLOTS.get(self.optimizer, 0)
        return 4 * sum(t.rows * (copies * t.dim + more) for t in self.tables)

    def ids(self, number):
        """The ids of a batch: [batch, hotness] int64 for each feature."""
        rng = np.random.default_rng(number)
        if self.cardinalities:
            return [
                hashed(
                    power_law(rng, c, (self.batch, f.hotness)),
                    self.tables[f.table].rows,
                )
                for c, f in zip(self.cardinalities, self.features, strict=True)
            ]
        draw = power_law if self.mlp else zipf
        return [
            draw(rng, self.tables[f.table].rows, (self.batch, f.hotness))
            for f in self.features
        ]

    def dense_inputs(self):
        """An MLP's numerical features and labels."""
        rng = np.random.default_rng(0)
        numerical = rng.random((self.batch, self.numerical), np.float32)
        labels = rng.integers(0, 2, (self.batch, 1)).astype(np.float32)
        return numerical, labels

    def mlp_weights(self):
        """Each layer's initial kernel and bias."""
        beside = self.bottom[-1] if self.bottom else self.numerical
        return layers([sum(self.dims) + beside, *self.mlp])

    def bottom_weights(self):
        """The same of the MLP on numerical features."""
        return layers([self.numerical, *self.bottom]) if self.bottom else []


def layers(widths):
    """Kernels and biases of layers of these widths."""
    rng = np.random.default_rng(0)
    for inputs, outputs in itertools.pairwise(widths):
        kernel = rng.normal(0, inputs**-0.5, (inputs, outputs))
        yield kernel.astype(np.float32), np.zeros(outputs, np.float32)


def zipf(rng, rows, shape):
    """Ids with a power law whose tail wraps around the table."""
    return (rng.zipf(ALPHA, shape) - 1) % rows


def power_law(rng, rows, shape):
    """Ids with a power law cut at the table's end."""
    gamma = 1 - ALPHA
    top = (rows + 1.0) ** gamma
    drawn = (rng.random(shape) * (top - 1) + 1) ** (1 / gamma)
    return np.minimum(drawn.astype(np.int64) - 1, rows - 1)


def hashed(ids, rows):
    """Ids as a hash function spreads them over a table's rows."""
    # Multiplied by an odd number whose bits are irregular.
    mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((mixed >> np.uint64(32)) % np.uint64(rows)).astype(np.int64)


def row_values(rows):
    """The initial value of these rows, in all columns; neighbours differ."""
    return (1 + rows % 127) * 1e-3


def _one_table(group, label, rows, dim, batch, peers=SINGLE_PEERS, **kwargs):
    return Case(
        group, label, (Table(rows, dim),), (Feature(0, 10),), batch, peers,
        **kwargs,
    )  # fmt: skip


def single(quick):
    rows, batch = (10_000, 256) if quick else (1_000_000, 8192)
    for name in OPTIMIZERS:
        yield _one_table(
            "single", name, rows, 64, batch, optimizer=name, all_forms=True
        )


def forward(quick):
    rows, batch = (10_000, 256) if quick else (1_000_000, 8192)
    yield _one_table(
        "forward", "forward", rows, 64, batch, kind="forward", all_forms=True
    )


def threads(quick):
    """The same step on one core and on two."""
    rows, batch = (10_000, 256) if quick else (1_000_000, 8192)
    for name in THREADS_OPTIMIZERS:
        for count in (1, 2):
            yield _one_table(
                "threads", f"{name}, {count} thread{'s' * (count > 1)}", rows,
                64, batch, THREADS_PEERS, optimizer=name, threads=count,
            )  # fmt: skip


def features(quick):
    """A hundred features, whose tracing takes longer than many steps."""
    count, rows, batch = (10, 100, 64) if quick else (100, 10_000, 512)
    for hotness in (1, 2):
        yield Case(
            "features",
            "one id" if hotness == 1 else "bags of two",
            (Table(rows, 16),) * count,
            tuple(Feature(i, hotness) for i in range(count)),
            batch,
            FEATURES_PEERS,
            stacked=True,
            all_forms=True,
            costs=True,
        )


def dlrm(quick):
    """DLRM in the configuration of DeepRec's modelzoo."""
    for name in ("Adagrad", "Adam"):
        for count in (1, 2):
            yield Case(
                "dlrm",
                f"{name}, {count} core{'s' * (count > 1)}",
                (Table(10_000, 16),) * len(CRITEO),
                tuple(Feature(i, 1) for i in range(len(CRITEO))),
                128 if quick else 512,
                DLRM_PEERS,
                optimizer=name,
                mlp=(512, 256, 1),
                bottom=(512, 256, 64, 16),
                numerical=13,
                cardinalities=CRITEO,
                threads=count,
                costs=count == 2,
            )


def tiny(quick):
    """The synthetic model "Tiny", with large tables a hundredth of theirs."""
    for case in _tiny(100, 128 if quick else 4096):
        yield dataclasses.replace(case, costs=True)


def full(quick):
    """The same with tables of their own size."""
    for case in _tiny(10_000 if quick else 1, 128 if quick else 65_536):
        yield dataclasses.replace(
            case, group="full", peers=FULL_PEERS, alone=True, costs=True
        )


def _tiny(divisor, batch):
    shape = [  # Tables, hotness of their inputs, rows, width.
        (1, (1, 10), 10_000, 8),
        (1, (1, 10), 1_000_000, 16),
        (1, (1, 10), 25_000_000, 16),
        (1, (1,), 25_000_000, 16),
        (16, (1,), 10, 8),
        (10, (1,), 1_000, 8),
        (4, (1,), 10_000, 8),
        (2, (1,), 100_000, 16),
        (19, (1,), 1_000_000, 16),
    ]
    tables, features = [], []
    for count, hotness, rows, dim in shape:
        for _ in range(count):
            features += [Feature(len(tables), h) for h in hotness]
            large = rows >= 10_000
            tables.append(
                Table(max(10, rows // divisor) if large else rows, dim)
            )
    yield Case(
        "tiny",
        "whole step",
        tuple(tables),
        tuple(features),
        batch=batch,
        peers=MODEL_PEERS,
        mlp=(256, 128, 1),
    )


def tables(quick):
    rows, lookups = (10_000, 1_000) if quick else (1_000_000, 80_000)
    for count in (10, 100) if quick else (10, 1000):
        yield Case(
            "tables",
            f"{count:,} tables",
            (Table(rows // count, 16),) * count,
            tuple(Feature(i, 1) for i in range(count)),
            batch=lookups // count,
            # Tracing a thousand tables in TensorFlow's ops takes minutes.
            peers=("ours", "fbgemm"),
            stacked=True,
        )


def vocabulary(quick):
    batch = 256 if quick else 8192
    sizes = [10**4, 10**5, 10**6, 10**7, 5 * 10**7]
    for rows in sizes[:2] if quick else sizes:
        yield _one_table(
            "vocabulary", f"{rows:,} rows", rows, 16, batch, (*OURS, "floor")
        )


def dims(quick):
    rows, batch = (10_000, 256) if quick else (1_000_000, 8192)
    for dim in (8, 16, 32, 64, 128, 256)[:: 3 if quick else 1]:
        yield _one_table(
            "dims", f"dim {dim}", rows, dim, batch,
            (*OURS, "tfrs", "fbgemm", "floor"),
        )  # fmt: skip


def row_wise(quick):
    rows, batch = (10_000, 256) if quick else (1_000_000, 8192)
    for name in ("RowWiseAdagrad", "Adagrad"):
        yield _one_table(
            "row_wise", name, rows, 64, batch, (*OURS, "fbgemm", "torchrec"),
            optimizer=name,
        )  # fmt: skip


def memory(quick):
    rows, batch = (10_000, 256) if quick else (1_000_000, 8192)
    for name in OPTIMIZERS:
        yield _one_table(
            "memory", name, rows, 64, batch, OURS, optimizer=name,
            kind="memory", all_forms=True,
        )  # fmt: skip


GROUPS = {
    make.__name__: make
    for make in (
        single,
        threads,
        row_wise,
        forward,
        features,
        tiny,
        dlrm,
        tables,
        vocabulary,
        dims,
        memory,
        full,
    )
}
# These take 14 GiB of memory, so they have to be asked for.
ON_REQUEST = ("full",)


@functools.cache
def group(name, quick):
    return list(GROUPS[name](quick))


def find(name, quick):
    return next(c for c in group(name.split("/")[0], quick) if c.name == name)
