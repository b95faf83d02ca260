"""What the conformance tests go through: ids, optimizers, engines."""

import functools
import tempfile
from typing import Any, NamedTuple

import tensorflow as tf

import update_rules
from keras_under_test import keras, layers
from nightly_flag import ALL
from numpy_rows import ArrayStorage
from reference import Table
from tfrs_embed import DynamicKeys, FileStorage, TableConfig
from tfrs_embed.optimizers import Regularized, rules
from update_rules import CASES

tpu = tf.tpu.experimental.embedding
Hardware = tf.tpu.experimental.HardwareFeature.EmbeddingFeature

BATCH = 6
RATE = 0.3

#: Each kind of ids, and the options of a feature that takes them.
KINDS = {
    "scalar": {},
    "dense": {},
    "matrix": {},
    "combined": {"output_shape": (BATCH,)},
    "combined_cube": {"output_shape": (BATCH, 2)},
    "ragged": {},
    "sparse": {},
    "ragged_sequence": {"max_sequence_length": 3},
    "sparse_sequence": {"max_sequence_length": 3},
    "ragged_shaped": {"output_shape": (BATCH,)},
    "ragged_positions": {"output_shape": (BATCH, 4)},
    "ragged_uncombined": {"combiner": None},
    "sparse_uncombined": {"combiner": None},
}
#: The options of all kinds.
OPTIONS = {**KINDS, "bags": {"output_shape": (None,)}}
#: Those that batches of any size have: large bags are exchanged by vectors.
UNEVEN = ("dense", "bags", "ragged", "ragged_uncombined")
#: Four for all, where the kinds are not what is tested: tracing features is
#: what most of these tests' time goes to.
FEW = ("dense", "ragged", "sparse_sequence", "ragged_uncombined")


def on_tpu(kinds):
    """Those that a TPU's program takes."""
    return tuple(k for k in kinds if not k.endswith("_uncombined"))


def dense_shapes(batch=BATCH):
    """The shape of each dense kind's ids."""
    return {
        "scalar": (),
        "dense": (batch,),
        "matrix": (batch, 4),
        # So many that replicas exchange vectors instead of rows.
        "combined": (batch, 24),
        "combined_cube": (batch, 2, 3),
        "bags": (batch, 48),
    }


class Optimizer(NamedTuple):
    """An update rule, as TensorFlow has it and as the reference has it."""

    optimizer: Any
    rule: str
    settings: dict[str, Any]
    options: dict[str, Any] = {}  # noqa: RUF012


def optimizer_of(rule, settings):
    """An optimizer that becomes a rule: TensorFlow's, ours, else Keras's."""
    kind = getattr(rules, rule)
    own = kind.tpu or kind.declared
    if own is not None:
        return own(RATE, **settings)
    # Keras's have a variable, so each layer has one of its own: see `fresh`.
    return functools.partial(
        getattr(keras.optimizers, kind.keras), RATE, **settings
    )


def fresh(optimizer):
    """An optimizer of `OPTIMIZERS` for one layer."""
    if isinstance(optimizer, functools.partial):
        return optimizer()
    return optimizer


def _regularized(given, **options):
    made = Regularized(given.optimizer, **options)
    return given._replace(optimizer=made, options=made.options.given())


def _optimizer(rule, **settings):
    return Optimizer(optimizer_of(rule, settings), rule, settings)


OPTIMIZERS = {
    **{
        name: _optimizer(rule, **settings)
        for name, (rule, settings) in CASES.items()
    },
    "sgd_clipvalue_decay": _regularized(
        _optimizer("SGD"),
        clipvalue=(-0.5, 0.25),
        weight_decay=0.5,
    ),
    "adagrad_clipnorm_decay": _regularized(
        _optimizer("Adagrad"),
        clipnorm=0.5,
        weight_decay=0.5,
    ),
    "ftrl_row_clipnorm": _regularized(
        _optimizer("FTRL", beta=0.1), row_clipnorm=0.25
    ),
    "row_wise_adam_max_norm": _regularized(
        _optimizer("RowWiseAdam", epsilon=1e-2), max_norm=0.75
    ),
}
#: The last case of each update rule that TPUs have.
RULES = tuple(
    [*row.cases][-1]
    for rule, row in update_rules.RULES.items()
    if getattr(rules, rule).tpu
)


class Engine(NamedTuple):
    """A layer's class and options, and where they put two tables.

    Attributes:
        layer: the class.
        options: arguments of it.
        large: the place of the table of 50 rows.
        small: that of the table of 7 rows.
        keys: how the tables' keys come and go; None: ids are rows.
        places: the placements that tables ask for, in turns.
        hot: of which rows tables have copies, in turns: each third, for 3; 0:
            of none.
        storage: the class of the tables' storage; None: variables in memory.
        group: the replicas that exchange rows among themselves first; 1: all
            exchange with all.
    """

    layer: type
    options: dict[str, Any]
    large: str
    small: str
    keys: DynamicKeys | None = None
    places: tuple[str, ...] = ()
    hot: tuple[int, ...] = ()
    storage: type[FileStorage] | None = None
    group: int = 1


def _engine(layer, threshold, large, small, **options):
    return Engine(layer, {"size_threshold": threshold, **options}, large, small)


def _placed(layer, large, small, places, **options):
    """Tables that ask for their places: the first for "x", then for others."""
    engine = _engine(layer, 0, large, small, **options)
    return engine._replace(places=places)


def _by_key(layer, place):
    """All numbers of a vocabulary are keys, so that results are the same."""
    keys = DynamicKeys(eviction=None)
    return Engine(layer, {"size_threshold": None}, place, place, keys)


def _spilling(layer, place):
    """The same, with fewer rows in memory than keys."""
    keys = DynamicKeys(spill=FileStorage(tempfile.gettempdir()))
    return _by_key(layer, place)._replace(keys=keys)


_PARTIAL = layers.PartialTPUEmbedding
_DISTRIBUTED = layers.DistributedEmbedding

_SPARSE = {"embedding_feature": Hardware.V2}
_DENSE = {"embedding_feature": Hardware.UNSUPPORTED}
_ON_TPU = "replicated on TPU"
_CORE = "TPU embedding core"

#: By the names that tests give them.
ENGINES = {
    # On one device.
    "keras": _engine(_PARTIAL, None, "Keras", "Keras"),
    "partial": _engine(_PARTIAL, 0, "one device", "one device"),
    "partial_small": _engine(_PARTIAL, 20, "one device", "Keras"),
    "distributed": _engine(_DISTRIBUTED, 0, "one device", "one device"),
    "arrays": _engine(_PARTIAL, 0, "one device", "one device")._replace(
        storage=ArrayStorage
    ),
    "files": _engine(_PARTIAL, 0, "one device", "one device")._replace(
        storage=FileStorage
    ),
    "host": _placed(_PARTIAL, "host", "one device", ("host", "row")),
    "dynamic": _by_key(_PARTIAL, "one device, by key"),
    "spill": _spilling(_PARTIAL, "one device, by key"),
    "distributed_dynamic": _by_key(_DISTRIBUTED, "one device, by key"),
    # On several replicas.
    "dynamic_sharded": _by_key(_PARTIAL, "row, by key"),
    "spill_sharded": _spilling(_PARTIAL, "row, by key"),
    "sharded": _engine(_PARTIAL, 0, "row", "row"),
    "sharded_arrays": _engine(_PARTIAL, 0, "row", "row")._replace(
        storage=ArrayStorage
    ),
    "sharded_files": _engine(_PARTIAL, 0, "row", "row")._replace(
        storage=FileStorage
    ),
    "column_files": _placed(
        _PARTIAL, "column", "table", ("column", "table")
    )._replace(storage=FileStorage),
    "two_stages": _engine(_PARTIAL, 0, "row", "row")._replace(group=2),
    "dynamic_two_stages": _by_key(_PARTIAL, "row, by key")._replace(group=2),
    "hot_rows_two_stages": _engine(_PARTIAL, 0, "row", "row")._replace(
        hot=(3, 2), group=2
    ),
    "sharded_small": _engine(_PARTIAL, 20, "row", "Keras"),
    "distributed_sharded": _engine(_DISTRIBUTED, 0, "row", "row"),
    "distributed_both": _engine(_DISTRIBUTED, 20, "row", "replicated"),
    "distributed_mirrored": _engine(
        _DISTRIBUTED, None, "replicated", "replicated"
    ),
    "hot_rows": _engine(_PARTIAL, 0, "row", "row")._replace(hot=(3, 2, 0)),
    "distributed_hot_rows": _placed(
        _DISTRIBUTED, "row", "replicated", ("row", "replicated")
    )._replace(hot=(2, 0)),
    "columns": _placed(_PARTIAL, "column", "table", ("column", "table")),
    "distributed_columns": _placed(
        _DISTRIBUTED, "table", "column", ("table", "column")
    ),
    "columns_and_rows": _placed(_PARTIAL, "table", "row", ("table", "row")),
    "columns_and_copies": _placed(
        _DISTRIBUTED, "column", "replicated", ("column", "replicated")
    ),
    # On a slice.
    "sparse": _engine(_PARTIAL, 0, "sparsecore", "sparsecore", **_SPARSE),
    "sparse_small": _engine(_PARTIAL, 20, "sparsecore", "Keras", **_SPARSE),
    "dense": _engine(_PARTIAL, 0, _ON_TPU, _ON_TPU, **_DENSE),
    "dense_keras": _engine(_PARTIAL, None, "Keras", "Keras", **_DENSE),
    "distributed_sparse": _engine(
        _DISTRIBUTED, 20, "sparsecore", _ON_TPU, **_SPARSE
    ),
    "distributed_dense": _engine(_DISTRIBUTED, 20, _ON_TPU, _ON_TPU, **_DENSE),
    # Only while strategies.embedding_cores.EmbeddingCores are there.
    "cores": _engine(_PARTIAL, 0, _CORE, _CORE),
}


#: Of a table's keys, place, hot rows, storage and dtype; TensorFlow's class has
#: no others.
DEFAULTS = (None, "auto", 0, None, "float32")


class TableCase(NamedTuple):
    """A table, and the kinds of ids that features look up in it."""

    rows: int
    dim: int
    combiner: str = "mean"
    optimizer: str | None = None
    kinds: tuple[str, ...] = tuple(KINDS)
    seed: int = 0
    dtype: str = "float32"

    def config(
        self,
        name,
        optimizer=None,
        keys=None,
        place="auto",
        hot=0,
        storage=None,
    ):
        """The table's config in TensorFlow's class; with more in ours."""
        if (keys, place, hot, storage, self.dtype) != DEFAULTS:
            spills = keys is not None and keys.spill is not None
            return TableConfig(
                name,
                max(7, self.rows * 4 // 5) if spills else self.rows,
                self.dim,
                tf.random_normal_initializer(seed=self.seed),
                optimizer,
                self.combiner,
                place,
                keys=keys,
                hot_rows=range(0, self.rows, hot) if hot else (),
                dtype=self.dtype,
                # By random bits, strategies/test_table_dtypes.py has it.
                rounding="nearest",
                storage=storage,
            )
        return tpu.TableConfig(
            self.rows,
            self.dim,
            tf.random_normal_initializer(seed=self.seed),
            optimizer,
            self.combiner,
            name,
        )

    def reference(self, rows, trained=True):
        """The numpy table, of these rows; `trained` by the optimizer or not."""
        rule, settings, options = None, {}, {}
        if trained and self.optimizer:
            _, rule, settings, options = OPTIMIZERS[self.optimizer]
        return Table(
            rows,
            self.combiner,
            rule,
            settings,
            lambda step: RATE,
            dtype=self.dtype,
            options=options,
            optimizer=self.optimizer,
        )


def large_and_small(
    combiner="mean", optimizer=None, kinds=tuple(KINDS), dtype="float32"
):
    """The tables of most tests: "x" of 50 rows, and "y" of 7."""
    return {
        "x": TableCase(50, 5, combiner, optimizer, kinds, 1, dtype),
        "y": TableCase(7, 3, combiner, optimizer, kinds, 1, dtype),
    }


def _own_optimizers(names, *cases):
    return {
        f"t{i}": case._replace(optimizer=name, seed=i)
        for i, (name, case) in enumerate(zip(names, cases, strict=True))
    }


def _one_width(dim):
    kinds = ("dense", "combined", "ragged", "sparse_sequence")
    return _own_optimizers(
        ("adagrad", "sgd", "adagrad", "adagrad"),
        *(
            TableCase(9 + 30 * i, dim, ("sum", "mean")[i % 2], kinds=kinds)
            for i in range(4)
        ),
    )


def _kinds_of(i):
    """Kinds of ids of table number i: all at night, else each pair has one."""
    kinds = ("dense", "ragged")
    return kinds if ALL else (kinds[i // 2 % 2],)


def _needs_whole_rows(name):
    """Whether no table of an optimizer can be cut into columns."""
    given = OPTIMIZERS[name]
    options = {"row_clipnorm", "max_norm"} & {*given.options}
    return bool(options or update_rules.RULES[given.rule].by_row)


_COMBINERS = ("sum", "mean", "sqrtn")

#: Tables that have optimizers of their own.
TABLES = {
    # Three have one rule and rate: these are updated together.
    "width_4": _one_width(4),
    "width_40": _one_width(40),
    # One for each optimizer; those of a width travel together.
    "two_widths": _own_optimizers(
        OPTIMIZERS,
        *(
            TableCase(
                20 + i,
                (3, 5)[i % 2],
                _COMBINERS[i % 3],
                kinds=_kinds_of(i),
            )
            for i in range(len(OPTIMIZERS))
        ),
    ),
    # With fewer rows than replicas.
    "one_row": _own_optimizers(
        ("adagrad", "adagrad"),
        TableCase(1, 32, kinds=UNEVEN),
        TableCase(1, 5, "sum", kinds=UNEVEN),
    ),
    # Widths that are cut into slices, on up to four replicas; 5 is not cut.
    "even_widths": _own_optimizers(
        OPTIMIZERS,
        *(
            TableCase(
                20 + i,
                5 if _needs_whole_rows(name) else (16, 32)[i % 2],
                _COMBINERS[i % 3],
                kinds=_kinds_of(i),
            )
            for i, name in enumerate(OPTIMIZERS)
        ),
    ),
    # One for each rule, and two of one optimizer, which SparseCores stack.
    "stacked": _own_optimizers(
        ("adagrad", *RULES),
        *(
            TableCase(
                20 + 13 * i,
                5,
                _COMBINERS[i % 3],
                kinds=(("dense", "ragged")[i % 2],),
            )
            for i in range(1 + len(RULES))
        ),
    ),
}
