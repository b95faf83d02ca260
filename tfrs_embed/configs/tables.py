"""Declarations of tables and features, and their checked, immutable form.

`configs/parsing.py` makes an `EmbeddingSpec` of declarations, which the rest of
the library trusts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.arguments import (
    MOST,
    as_int,
    choice,
    convert_fields,
    dtype_name,
    integer,
    padding,
    text,
)
from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.dynamic_keys import DynamicKeys
from tfrs_embed.configs.file_storage import FileStorage
from tfrs_embed.configs.hashing import Hashing
from tfrs_embed.configs.structure import Structure
from tfrs_embed.configs.types import Combiner, Optimizer, Rounding, TablePlace
from tfrs_embed.optimizers import conversion

COMBINERS: tuple[str, ...] = get_args(Combiner)
# The placements of tables spread by row or by key.
_BY_ROW = ("auto", "row", "sharded")
#: The types that a table's rows may have.
DTYPES: tuple[str, ...] = ("float32", "bfloat16", "float16")

_tpu = tf.tpu.experimental.embedding


@dataclasses.dataclass(frozen=True, eq=False)
class TableConfig:
    """Declares an embedding table of shape `[vocabulary_size, embedding_dim]`.

    Features share a table only by sharing one `TableConfig` object.

    Example:
        >>> table = tfrs_embed.TableConfig("movies", 1000, 16)
        >>> table.combiner
        'mean'

    Attributes:
        name: the table's name, unique within a layer.
        vocabulary_size: number of rows; valid ids are 0 to one less, except
            with `keys`.
        embedding_dim: width of a row.
        initializer: a Keras initializer instance, a callable taking `(shape,
            dtype)`, or a name that `keras.initializers.get` knows. None:
            `VarianceScaling(mode="fan_out")`, one instance per table, so that
            tables of one shape start with different values.
        optimizer: the table's own optimizer, in any form that a layer's
            `optimizer` has. None: the layer's.
        combiner: how several ids of one sample become one vector: "sum", "mean"
            = sum(w x) / sum(w), or "sqrtn" = sum(w x) / sqrt(sum(w^2)).
        placement: "auto" leaves the choice to the layer. On several replicas
            "row" spreads the rows over all, "column" the columns over some,
            "table" puts the whole table on one, and "replicated" copies it to
            each. "host" keeps a table in the host's memory and the rest of the
            model on a GPU, on one replica. "sparsecore" demands SparseCores.
            "sharded" and "default_device" are other names of "row" and
            "replicated".
        max_ids_per_partition: SparseCore's limit of ids, ignored elsewhere.
        max_unique_ids_per_partition: SparseCore's limit of unique ids, ignored
            elsewhere.
        keys: a `DynamicKeys`, which gives rows to keys of any value as they
            occur. None: an id is its row's number.
        hot_rows: the ids of rows that each replica copies, if the table is
            spread by row over several replicas: looking them up sends nothing.
            Results stay the same, except the `rounding` of rows of two bytes.
            Or the number of such rows: `tfrs_embed.hot_rows` or
            `tfrs_embed.plan` find the most frequent. Only with the placements
            "auto" and "row", and without `keys`; ignored on one replica, on
            TPUs, and for small tables.
        dtype: the rows' type: "float32", "bfloat16" or "float16", or
            TensorFlow's or NumPy's object of that name. Rows of two bytes are
            held, saved and sent in this type. Lookups sum and updates compute
            in float32, with float32 slots.
        rounding: how new rows of two bytes are rounded. With "stochastic" a
            value becomes one of the two neighbouring numbers, with the
            probabilities that make it the mean: small updates accumulate. The
            random bits depend on the table's name, the update's number, and the
            row and column: training again gives the same table. Copies of
            `hot_rows` have other bits, the same on all replicas. With "nearest"
            an update of less than half a step between the type's numbers
            changes nothing.
        storage: a `FileStorage`, for a table larger than memory. None: memory.
            Such a table is never a Keras layer's, whatever its size; TPUs don't
            have it.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong kind.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = None
    optimizer: Optimizer = None
    combiner: Combiner = "mean"
    placement: TablePlace = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    keys: DynamicKeys | None = None
    hot_rows: Sequence[int] | int = dataclasses.field(default=(), repr=False)
    dtype: Any = "float32"
    rounding: Rounding = "stochastic"
    storage: FileStorage | None = None

    def __post_init__(self) -> None:
        text(self.name, "A table's name")
        where = f"Table '{self.name}'"
        convert_fields(
            self,
            where,
            vocabulary_size=integer,
            embedding_dim=integer,
            max_ids_per_partition=integer,
            max_unique_ids_per_partition=integer,
            dtype=lambda dtype, what: dtype_name(dtype, DTYPES, what),
        )
        most = MOST // self.embedding_dim
        integer(self.vocabulary_size, f"{where}: vocabulary_size", most=most)
        choice(self.combiner, COMBINERS, f"{where}: combiner")
        choice(self.placement, get_args(TablePlace), f"{where}: placement")
        choice(self.rounding, get_args(Rounding), f"{where}: rounding")
        initializer = self.initializer
        if isinstance(initializer, (str, dict)):
            initializer = keras_versions.default().initializers.get(initializer)
            object.__setattr__(self, "initializer", initializer)
        if isinstance(initializer, type) or not (
            initializer is None or callable(initializer)
        ):
            raise TypeError(
                f"{where}: initializer must be an instance, a function, a name "
                f"or None, got {initializer!r}."
            )
        conversion.convert(self.optimizer, where)
        hot_rows = as_hot_rows(self.hot_rows, self.vocabulary_size, where)
        object.__setattr__(self, "hot_rows", hot_rows)
        if self.storage is not None:
            self._check_storage(where)
        if self.keys is not None:
            self._check_keys(self.keys, where)
        elif hot_rows != () and self.placement not in _BY_ROW:
            raise ValueError(
                f"{where}: hot_rows need a table that is spread by row, not "
                f"placement='{self.placement}'."
            )

    def _check_storage(self, where: str) -> None:
        if not isinstance(self.storage, FileStorage):
            raise TypeError(
                f"{where}: storage must be a FileStorage or None, got "
                f"{self.storage!r}."
            )
        if self.keys is not None:
            raise ValueError(
                f"{where}: storage is not available to a table with keys; "
                "DynamicKeys(spill=...) keeps evicted rows in a file."
            )

    def _check_keys(self, keys: DynamicKeys, where: str) -> None:
        if not isinstance(keys, DynamicKeys):
            raise TypeError(
                f"{where}: keys must be a DynamicKeys or None, got {keys!r}."
            )
        if self.dtype != "float32":
            raise ValueError(
                f"{where}: dtype='{self.dtype}' is not available to a table "
                "with keys; it must be float32."
            )
        if keys.max_rows is not None and keys.max_rows < self.vocabulary_size:
            raise ValueError(
                f"{where}: max_rows={keys.max_rows} is below vocabulary_size="
                f"{self.vocabulary_size}, the rows that it begins with."
            )
        if self.placement not in _BY_ROW:
            raise ValueError(
                f"{where}: placement='{self.placement}' is not available to a "
                "table with keys, whose rows are always spread by key."
            )
        if self.hot_rows != ():
            raise ValueError(
                f"{where}: hot_rows are not available to a table with keys, "
                "whose rows have no fixed numbers."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureConfig:
    """Declares a feature: ids that are looked up in a table.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 1000, 16)
        >>> history = tfrs_embed.FeatureConfig(
        ...     "history", movies, max_sequence_length=5
        ... )
        >>> history.table.name
        'movies'

    Attributes:
        name: the feature's name. None: the key that it has in a dict of
            features, or its place in a list; in nested ones "user/id".
        table: its `TableConfig`, which must be given.
        input_shape: shape of the ids, batch first, or None.
        output_shape: shape of the activations, batch first and the table's
            `embedding_dim` last (several times that if hashing sets rows side
            by side), or None: decided by the ids. Dense ids with one dimension
            more than `output_shape[:-1]` are combined over it.
        max_sequence_length: if positive, ids are not combined: each id of a
            ragged, sparse or dense row becomes a position of a `[batch,
            max_sequence_length, embedding_dim]` sequence, zero padded, cut at
            that length. Its Keras mask marks positions with an id.
        hashing: a `Hash`, a `QuotientRemainder` or a `Multiplex`, which turns
            ids of any range, or strings, into rows of a smaller table; or
            `PrefixNGrams`, which turns ids into the rows of their items' codes.
            None: an id is its row's number.
        combiner: "table": the table's combiner makes one vector of a row of
            ragged or sparse ids. None: each id has a vector of its own. Ragged
            and sparse ids then give a RaggedTensor `[batch, None,
            embedding_dim]` without padding, dense ids give their shape +
            `[embedding_dim]`, and weights multiply the vectors. It excludes
            `output_shape` and `max_sequence_length`. TPUs take dense ids only.
        padding_value: the id that stands for none in padded batches, an integer
            or, of keys that are strings, a string. Its vector is zeros, it has
            no share of a mean, no row is read or changed for it, no key gets a
            row, and masks have False for it. Vectors `[batch, ...,
            embedding_dim]` then have a Keras mask, as behind Keras's
            `Embedding(mask_zero=True)`. It may be in the table's range, as 0.
            None: every id is one. `hashing` has a padding_value of its own.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong kind.
    """

    name: str | None = None
    table: TableConfig = None  # type: ignore[assignment]
    input_shape: Sequence[int | None] | None = None
    output_shape: Sequence[int | None] | None = None
    max_sequence_length: int = 0
    hashing: Hashing | None = None
    combiner: Literal["table"] | None = "table"
    padding_value: int | str | None = None

    def __post_init__(self) -> None:
        where = "A feature"
        if self.name is not None:
            text(self.name, "A feature's name")
            where = f"Feature '{self.name}'"
        check_table(self.table, where)
        if self.name is None:
            where = f"A feature of table '{self.table.name}'"
        convert_fields(
            self,
            where,
            input_shape=_as_shape,
            output_shape=_as_shape,
            max_sequence_length=functools.partial(integer, least=0),
            padding_value=padding,
        )
        choice(self.combiner, ("table", None), f"{where}: combiner")
        for setting in ("output_shape", "max_sequence_length"):
            value = getattr(self, setting)
            if self.combiner is None and value:
                raise ValueError(
                    f"{where}: combiner=None gives each id a vector, and "
                    f"excludes {setting}={value}."
                )
        if self.hashing is not None:
            self._check_hashing(where)
        if self.padding_value is not None:
            self._check_padding(where)
        table: Any = self.table
        of_tpu = isinstance(table, _tpu.TableConfig)
        dim = table.dim if of_tpu else table.embedding_dim
        dim = hashings.width(self.hashing, dim)
        if self.output_shape is not None and (
            len(self.output_shape) < 2 or self.output_shape[-1] != dim
        ):
            several = "" if self.hashing is None else ", by its hashing"
            raise ValueError(
                f"{where}: output_shape must be [batch, ..., {dim}], with the "
                f"embedding_dim{several}, got {list(self.output_shape)}."
            )

    def _check_padding(self, where: str) -> None:
        value, keys = self.padding_value, getattr(self.table, "keys", None)
        where = f"{where} (table '{self.table.name}'): padding_value={value!r}"
        if self.hashing is not None:
            raise ValueError(f"{where} is to be given to its hashing.")
        dtype = tf.int64 if keys is None else keys.dtype
        if isinstance(value, str) != (dtype == tf.string) or (
            not isinstance(value, str) and not dtype.min <= value <= dtype.max
        ):
            raise ValueError(f"{where} is no id of {dtype.name}.")

    def _check_hashing(self, where: str) -> None:
        where = f"{where} (table '{self.table.name}')"
        hashings.check(self.hashing, self.table.vocabulary_size, where)
        if getattr(self.table, "keys", None) is not None:
            raise ValueError(
                f"{where}: the table has DynamicKeys, which give rows to ids "
                "of any range and to strings: leave hashing out."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class TableSpec(TableConfig):
    """A checked table: the fields of its `TableConfig`, and these.

    Its initializer is a callable taking (shape, dtype).

    Attributes:
        source: the user's own config object; for one of keras_rs's, an equal
            one of ours.
        ranks: the replicas that hold it by "table" or "column", from the first
            column on; empty: the engine chooses.
        owner: its layer's name, if all layers of the class give their table
            this name; else empty.
    """

    hot_rows: tuple[int, ...] | int = ()
    source: Any = None
    ranks: tuple[int, ...] = ()
    owner: str = ""

    def __post_init__(self) -> None:
        """Checks nothing: its `TableConfig` is checked."""

    @property
    def dim(self) -> int:
        """The width of a row."""
        return self.embedding_dim

    @property
    def num_rows(self) -> int:
        """The number of rows, with the fallback rows of a table with keys."""
        shared = 0 if self.keys is None else self.keys.fallback_rows or 0
        return self.vocabulary_size + shared

    @property
    def on_host(self) -> bool:
        """Whether rows are in the host's memory, beside a GPU."""
        return self.placement == "host"

    @property
    def has_files(self) -> bool:
        """Whether rows are in files: all, or those of evicted keys."""
        spills = self.keys is not None and self.keys.spill is not None
        return spills or self.storage is not None


def require_float32(table: TableSpec, where: str) -> None:
    """Raises a ValueError if a table's rows aren't float32."""
    if table.dtype != "float32":
        raise ValueError(
            f"Table '{table.name}': dtype='{table.dtype}' is not available "
            f"{where}; its rows must be float32 there."
        )


def by_optimizer(
    tables: Iterable[TableSpec], optimizer: Any = None
) -> list[list[TableSpec]]:
    """Groups tables that share an optimizer object; equal names don't count.

    `optimizer` is the optimizer of tables without one.
    """
    groups: dict[int, list[TableSpec]] = {}
    for table in tables:
        given = optimizer if table.optimizer is None else table.optimizer
        alone = isinstance(table.optimizer, str)
        groups.setdefault(id(table) if alone else id(given), []).append(table)
    return list(groups.values())


def bytes_of(table: TableSpec) -> int:
    """Returns the bytes of one number in a table's rows."""
    return tf.as_dtype(table.dtype).size


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureSpec:
    """A checked feature.

    Attributes:
        name: its name in errors and reports: its path in the configuration,
            else its own name.
        table: the table of its ids.
        max_sequence_length: the length of its sequences, or 0.
        output_shape: its activations' shape without the embedding dim, batch
            first, None for any size; or None: decided by the ids.
        source: its config, with a name; see `TableSpec`.
        batch_size: the largest batch of one replica, or None: not declared.
        sequences: whether a row of ragged or sparse ids is a sequence if
            output_shape is [batch, length], or one of batch * length bags;
            None: decided by the number of rows.
        hashing: turns ids into rows; None: ids are rows' numbers.
        by_sample: whether dense ids of the output's shape are samples of one id
            each, which the combiner takes; else they aren't combined.
    """

    name: str
    table: TableSpec
    max_sequence_length: int = 0
    output_shape: tuple[int | None, ...] | None = None
    source: Any = None
    batch_size: int | None = None
    sequences: bool | None = None
    hashing: Hashing | None = None
    by_sample: bool = False

    def __str__(self) -> str:
        return f"Feature '{self.name}' (table '{self.table.name}')"

    @property
    def input_shape(self) -> tuple[int | None, ...] | None:
        """The declared shape of its ids, or None."""
        return getattr(self.source, "input_shape", None)

    @property
    def combined(self) -> bool:
        """Whether a row of ids becomes one vector; else each id does."""
        return getattr(self.source, "combiner", "table") is not None

    @property
    def padding_value(self) -> int | str | None:
        """The id that stands for none, or None."""
        given = self.source if self.hashing is None else self.hashing
        return getattr(given, "padding_value", None)

    @property
    def num_ids(self) -> int | None:
        """The number of ids, from 0; None: integers and strings are ids.

        Of a table with keys, the number of rows, which says nothing of its ids.
        """
        return hashings.num_ids(self.hashing, self.table.vocabulary_size)

    @property
    def id_dtype(self) -> tf.DType:
        """The type of its ids: that of keys; strings if padding is one."""
        if self.table.keys is not None:
            return self.table.keys.dtype
        return tf.string if isinstance(self.padding_value, str) else tf.int64

    @property
    def may_mask(self) -> bool:
        """Whether vectors with positions get a mask of those with an id."""
        return self.max_sequence_length > 0 or self.padding_value is not None

    @property
    def width(self) -> int:
        """The width of its vectors."""
        return hashings.width(self.hashing, self.table.dim)

    @functools.cached_property
    def lookups(self) -> tuple[FeatureSpec, ...]:
        """The features looked up in tables: itself, or one per row of an id."""
        if self.hashing is None:
            return (self,)
        names = hashings.lookups(self.hashing)
        if len(names) == 1:
            return (self,)
        part = dataclasses.replace(self, hashing=None)
        if hashings.multiplies(self.hashing):
            # Each id alone; the products are combined later.
            ids = self.input_shape
            part = dataclasses.replace(
                part,
                max_sequence_length=0,
                output_shape=ids and (None, *ids[1:]),
                sequences=None,
            )
        return tuple(
            dataclasses.replace(part, name=f"{self.name}/{name}")
            for name in names
        )

    @property
    def bagged(self) -> tuple[FeatureSpec, ...]:
        """The features whose ids are grouped: lookups, and their product."""
        if hashings.multiplies(self.hashing):
            return (self, *self.lookups)
        return self.lookups


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingSpec:
    """A checked configuration of a layer.

    Attributes:
        structure: the features' nesting.
        features: the features, in the structure's order.
        tables: the tables, in the order of their first feature.
    """

    structure: Structure
    features: tuple[FeatureSpec, ...]
    tables: tuple[TableSpec, ...]


def is_of_keras_rs(config: Any, own: type) -> bool:
    """Whether a config is keras_rs's class of the same name as one of ours."""
    return any(
        kind.__name__ == own.__name__
        and kind.__module__.partition(".")[0] == "keras_rs"
        for kind in type(config).__mro__
    )


def is_table(value: Any) -> bool:
    """Whether a value is a table's declaration, ours, TF's or keras_rs's."""
    return isinstance(value, (TableConfig, _tpu.TableConfig)) or is_of_keras_rs(
        value, TableConfig
    )


def check_table(table: Any, where: str) -> None:
    """Raises a TypeError unless a value is a table's declaration."""
    if not is_table(table):
        raise TypeError(
            f"{where}: table must be a TableConfig, got {type(table).__name__}."
        )


def as_hot_rows(value: Any, rows: int, where: str) -> tuple[int, ...] | int:
    """Returns the ids of rows with copies, ascending, or their number.

    Raises:
        ValueError: an id is out of range, or there are too many.
        TypeError: they are not integers.
    """
    number = as_int(value)
    if number is not None:
        if not 1 <= number < rows:
            raise ValueError(
                f"{where}: hot_rows must be ids, or their number, from 1 to "
                f"below vocabulary_size={rows}, got {value!r}."
            )
        return number
    try:
        empty = not isinstance(value, str) and not len(value)
        ids = np.unique(np.asarray(list(value), int if empty else None))
    except (TypeError, ValueError):
        ids = np.empty([0])
    if ids.dtype.kind not in "iu":
        raise TypeError(
            f"{where}: hot_rows must be integers, or their number, got "
            f"{value!r}."
        )
    for wrong in ids[[0, -1]] if ids.size else ():
        if not 0 <= wrong < rows:
            raise ValueError(
                f"{where}: hot_rows has the id {wrong}, not in [0, {rows})."
            )
    if ids.size == rows:
        raise ValueError(
            f"{where}: hot_rows has all {rows} rows; use "
            "placement='replicated'."
        )
    return tuple(ids.tolist())


def _as_shape(shape: Any, what: str) -> tuple[int | None, ...] | None:
    if isinstance(shape, tf.TensorShape):
        shape = None if shape.rank is None else shape.as_list()
    if shape is None:
        return None
    try:
        dims = tuple(shape)
    except TypeError:
        dims = (shape,)
    # Values of other types become 0, which is refused.
    sizes = tuple(None if d is None else as_int(d) or 0 for d in dims)
    if any(size is not None and size < 1 for size in sizes):
        raise ValueError(
            f"{what} must hold positive integers or None, got {shape!r}."
        )
    return sizes
