"""The rows of a table that score best with a query.

Each device finds the best of the rows that it holds, in blocks, and the best of
all devices are merged: no device gets the table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from tfrs_embed.checkpoint.rows import Rows
from tfrs_embed.compat import strategies
from tfrs_embed.compat.arguments import integer
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.ops import top_k as ops
from tfrs_embed.ops.backend import SERVED_TABLES
from tfrs_embed.ops.bags import concat
from tfrs_embed.ops.checks import Checks, message
from tfrs_embed.ops.key_inputs import as_int64
from tfrs_embed.ops.tensors import to_tensor
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.gathering import Gathering
from tfrs_embed.storage.sharded import Part

if TYPE_CHECKING:
    from tfrs_embed.storage.key_texts import KeyTexts
    from tfrs_embed.storage.keyed_shard import KeyedShard
    from tfrs_embed.storage.row_store import RowStore

#: Scores, [batch, k] float32, and ids, [batch, k] int64, or texts of keys.
Best = tuple[tf.Tensor, tf.Tensor]


class Retrievable(Protocol):
    """What retrieval needs of a table; see `TableState`."""

    spec: TableSpec
    saved: dict[str, Any]
    variables: dict[str, Any]
    strategy: tf.distribute.Strategy | None
    sources: Sequence[tuple[Part, Any]]
    exchange: Exchange | None
    hashed_by: str | None
    key_texts: KeyTexts | None

    def top_k(self, queries: Any, k: int, exclude: Any = None) -> Best: ...


class TopK:
    """Retrieves ids of a table, as the layers of TFRS and keras_rs do.

    TFRS's `FactorizedTopK`, and so its `Retrieval` task, take it as
    `candidates`. It has no variables: the table stays the layer's own, and is
    read as it is at each call.

    Args:
        table: a table of a layer, `layer.tables[name]`.
        k: how many ids to retrieve.

    Raises:
        ValueError: k isn't an integer of at least 1.
        TypeError: the table isn't a layer's.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
        ... )
        >>> layer.build()
        >>> best = tfrs_embed.TopK(layer.tables["movies"], k=5)
        >>> scores, ids = best(tf.random.normal([3, 8]))
        >>> scores.shape, ids.shape
        (TensorShape([3, 5]), TensorShape([3, 5]))
    """

    __slots__ = ("__weakref__", "_k", "_table")

    def __init__(self, table: Retrievable, k: int = 10) -> None:
        spec = getattr(table, "spec", None)
        if spec is None:
            raise TypeError(
                "TopK's table must be a table of a layer, "
                f"layer.tables[name], got {table!r}."
            )
        self._table = table
        self._k = integer(k, f"Table '{spec.name}': k")

    def __call__(self, queries: Any, k: int | None = None) -> Best:
        """Returns `table.top_k(queries, k)`.

        Args:
            queries: [batch, dim] floating.
            k: how many ids to retrieve; None: as many as declared.

        Returns:
            Scores, [batch, k] float32, and ids, [batch, k] int64; strings of a
            table that keeps the text of its keys.
        """
        return self._table.top_k(queries, self._k if k is None else k)

    def query_with_exclusions(
        self, queries: Any, exclusions: Any, k: int | None = None
    ) -> Best:
        """Returns `table.top_k(queries, k, exclusions)`.

        Args:
            queries: [batch, dim] floating.
            exclusions: [batch, m] ids, which are not retrieved.
            k: how many ids to retrieve; None: as many as declared.

        Returns:
            Scores, [batch, k] float32, and ids, [batch, k] int64; strings of a
            table that keeps the text of its keys.
        """
        k = self._k if k is None else k
        return self._table.top_k(queries, k, exclusions)

    def is_exact(self) -> bool:
        """Whether no row is left out.

        Returns:
            True.
        """
        return True


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows on one device.

    Attributes:
        device: the device; None: where TensorFlow places them.
        count: the number of rows, a scalar.
        read: returns rows, [size, dim], from a number on: f(start, size).
        ids_of: returns the ids of rows by their numbers, int64 of any shape.
        reading: returns a context for all reads.
    """

    device: str | None
    count: Any
    read: Callable[[Any, Any], tf.Tensor]
    ids_of: Callable[[tf.Tensor], tf.Tensor]
    reading: Callable[[], AbstractContextManager] = nullcontext

    def best(self, queries: tf.Tensor, k: Any) -> Best:
        """Returns the k best of these rows for [batch, dim] queries."""

        def scores_of(start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
            rows = tf.cast(self.read(start, size), tf.float32)
            # Nobody trains by retrieval.
            return tf.matmul(queries, tf.stop_gradient(rows), transpose_b=True)

        with tf.device(self.device), self.reading():
            scores, rows = ops.best_rows(
                scores_of, self.count, tf.shape(queries)[0], queries.shape[1], k
            )
            return scores, self.ids_of(rows)


class Exchange:
    """Finds the best rows of a table that several workers hold.

    Args:
        replicas: the replicas.
        parts: the table's parts by rank; None: each replica has some keys.
        name: the table's name.
    """

    def __init__(
        self, replicas: Replicas, parts: Mapping[int, Part] | None, name: str
    ) -> None:
        self._replicas = replicas
        self._where = f"Table '{name}': top_k"
        held = dict.fromkeys(range(replicas.world)) if parts is None else parts
        # The index of each local replica's rows among those of this process.
        mine = [i for i, r in enumerate(replicas.ranks) if r in held]
        self._place = {replica: i for i, replica in enumerate(mine)}
        #: Whether workers have columns of the same rows.
        self.is_cut = len({p and p.columns for p in held.values()}) > 1
        self._channel = replicas.allocate(4)
        self._gather = Gathering(replicas, f"retrieve from table '{name}'")

    def best(self, local: Sequence[_Rows], queries: tf.Tensor, k: Any) -> Best:
        """Returns the k best of all workers' rows; all must call together.

        In a replica the queries are the replica's own, else the same in all
        workers.
        """
        replica = self._replicas.current(self._where)
        if replica is not None:
            return self._in_replica(replica, local, queries, k)
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self._where}: {self._replicas.workers} workers hold the "
                "table. Call it in strategy.run, or eagerly between steps."
            )
        found = [
            [each.numpy() for each in self._of(local, i, queries, k)]
            for i in range(self._replicas.local)
        ]
        scores, ids = (
            tf.concat(self._gather(each), 1)
            for each in zip(*found, strict=True)
        )
        return ops.merge(scores, ids, k)

    def _of(
        self, local: Sequence[_Rows], replica: int, queries: tf.Tensor, k: Any
    ) -> Best:
        """Returns the best rows of one local replica."""
        if replica in self._place:
            return local[self._place[replica]].best(queries, k)
        shape = [tf.shape(queries)[0], k]
        return tf.fill(shape, ops.NONE), tf.zeros(shape, tf.int64)

    def _in_replica(
        self, replica: int, local: Sequence[_Rows], queries: tf.Tensor, k: Any
    ) -> Best:
        world, channel = self._replicas.world, self._channel
        batch, dim = tf.shape(queries)[0], queries.shape[1]
        sizes = tf.cast(batch, tf.int64)[None]
        most = tf.cast(self._replicas.max(replica, sizes, channel)[0], tf.int32)
        padded = tf.pad(queries, [[0, most - batch], [0, 0]])
        # All replicas' queries, and from each replica the best of its rows.
        gather = functools.partial(self._replicas.gather, replica)
        every = _sent(gather, tf.reshape(padded, [1, -1]), channel + 1)
        every = tf.ensure_shape(tf.reshape(every, [-1, dim]), [None, dim])
        swap = functools.partial(self._replicas.all_to_all, replica)
        found = []
        for i, each in enumerate(self._of(local, replica, every, k)):
            got = _sent(swap, tf.reshape(each, [world, -1]), channel + 2 + i)
            got = tf.reshape(got, [world, most, k])[:, :batch]
            got = tf.transpose(got, [1, 0, 2])
            found.append(tf.reshape(got, [batch, world * k]))
        scores, ids = found
        return ops.merge(scores, ids, k)


def _sent(
    collective: Callable[..., tf.Tensor], values: tf.Tensor, channel: int
) -> tf.Tensor:
    """Sends [m, n] values in messages of few sizes; returns them [world, n]."""
    size = tf.shape(values)[1]
    capacity, bucket = bucket_of(size)
    padded = tf.pad(values, [[0, 0], [0, capacity - size]])
    if values.shape[0] == 1:  # To all.
        padded = padded[0]
    got = collective(padded, channel, bucket)
    return tf.reshape(got, [-1, capacity])[:, :size]


def retrieve(state: Retrievable, queries: Any, k: int, exclude: Any) -> Best:
    """See `TableState.top_k`."""
    spec, checks = state.spec, Checks()
    where = f"Table '{spec.name}'"
    queries = _checked_queries(where, queries, spec.dim)
    rows = None if spec.keys is not None else spec.vocabulary_size
    k = integer(k, f"{where}: k")
    if rows is not None and k > rows:
        raise ValueError(f"{where} has {rows} rows: k must not be {k}.")
    wanted: Any = k
    if exclude is not None:
        exclude = _checked_ids(state, exclude, queries, checks)
        more = exclude.shape[1]
        wanted += tf.shape(exclude)[1] if more is None else more
        if rows is not None:
            least = tf.minimum if more is None else min
            wanted = least(wanted, rows)
    local = _rows_of(state)
    # An exported table is in one process.
    exchange = None if SERVED_TABLES.get() is not None else state.exchange
    if exchange is not None and not exchange.is_cut:
        scores, ids = exchange.best(local, queries, wanted)
    else:
        found = [each.best(queries, wanted) for each in local]
        scores, ids = found[0]
        if len(found) > 1:
            scores, ids = (concat(list(v), 1) for v in zip(*found, strict=True))
            scores, ids = ops.merge(scores, ids, wanted)
    if rows is None:
        enough = tf.reduce_all(scores[:, k - 1] > ops.NONE)

        def text() -> tf.Tensor:
            there = tf.reduce_sum(tf.cast(scores[:1] > ops.NONE, tf.int32))
            return message(where, " has rows for ", there, f" keys: k is {k}.")

        checks.require(enough, text)
    scores, ids = checks.guard([scores, ids])
    if exclude is not None:
        scores, ids = ops.leave_out(scores, ids, exclude, k)
    is_none = tf.equal(scores, ops.NONE)
    texts_of = _texts_of(state)
    if texts_of is None:
        ids = tf.where(is_none, tf.constant(-1, tf.int64), ids)
    else:
        ids = tf.where(is_none, tf.constant(""), texts_of(ids))
    shape = [queries.shape[0], k]
    return tf.ensure_shape(scores, shape), tf.ensure_shape(ids, shape)


def _texts_of(state: Retrievable) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns what finds the texts of keys; None: the table keeps none."""
    if state.key_texts is None:
        return None
    served = SERVED_TABLES.get()
    if served is None:
        return state.key_texts.lookup
    return served.of_state(state).texts_of


def _checked_queries(where: str, queries: Any, dim: int) -> tf.Tensor:
    queries = to_tensor(queries, f"{where}: queries")
    shape = getattr(queries, "shape", None)
    if not isinstance(queries, (tf.Tensor, tf.Variable)) or not (
        tf.TensorShape([None, dim]).is_compatible_with(shape)
    ):
        raise ValueError(
            f"{where}: queries must be a Tensor of shape [batch, {dim}], got "
            f"{type(queries).__name__} of shape {shape}."
        )
    if not queries.dtype.is_floating:
        raise TypeError(
            f"{where}: queries must be floating-point numbers, got "
            f"{queries.dtype.name}."
        )
    queries = tf.ensure_shape(queries, [None, dim])
    return tf.stop_gradient(tf.cast(queries, tf.float32))


def _checked_ids(
    state: Retrievable, ids: Any, queries: tf.Tensor, checks: Checks
) -> tf.Tensor:
    """Returns ids to exclude, [batch, m] int64."""
    spec = state.spec
    where = f"Table '{spec.name}': ids to exclude"
    if spec.keys is not None:
        ids = as_int64(where, spec.keys.dtype, ids, checks)
    else:
        ids = to_tensor(ids, where)
        if not ids.dtype.is_integer:
            raise TypeError(f"{where} must be integers, got {ids.dtype.name}.")
    shape = [queries.shape[0], None]
    given = getattr(ids, "shape", None)
    if not isinstance(ids, (tf.Tensor, tf.Variable)) or not (
        tf.TensorShape(shape).is_compatible_with(given)
    ):
        raise ValueError(
            f"{where} must be a Tensor of shape {shape}, got "
            f"{type(ids).__name__} of shape {given}."
        )
    return tf.ensure_shape(tf.cast(ids, tf.int64), shape)


def _rows_of(state: Retrievable) -> list[_Rows]:
    """Returns the rows of a table that this process holds.

    Raises:
        ValueError: the table isn't made yet, or its rows aren't ids.
        NotImplementedError: they can't be read here.
    """
    name, count = state.spec.name, state.spec.vocabulary_size
    where = f"Table '{name}': top_k"
    if not state.variables:
        raise ValueError(
            f"{where} has no rows yet: call or build the layer first."
        )
    if state.hashed_by is not None:
        raise ValueError(
            f"{where} would return rows, which several ids share by "
            f"the hashing of {state.hashed_by}. Score the vectors of ids that "
            "the layer returns."
        )
    if strategies.in_tpu_replica():
        raise NotImplementedError(f"{where} is part of no TPU's program.")
    served = SERVED_TABLES.get()
    if served is not None:
        return [_rows_of_served(served.of_state(state))]
    if state.spec.keys is not None:
        return [_rows_of_keys(store.shards[name]) for _, store in state.sources]
    cut = state.exchange is not None and state.exchange.is_cut
    if cut or (state.strategy and strategies.is_tpu(state.strategy)):
        if not tf.executing_eagerly() or strategies.in_replica(state.strategy):
            raise NotImplementedError(
                f"Table '{name}' is on TPUs, or workers have columns of its "
                "rows: call top_k eagerly, between steps and outside of "
                "strategy.run."
            )
        table: Rows = state.saved[PARAMETERS]

        def read(start: Any, size: Any) -> tf.Tensor:
            return table.read_rows(int(start), int(size))

        return [_Rows("CPU:0", count, read, tf.identity, table.reading)]
    if not state.sources:
        variable = state.variables[PARAMETERS]

        def gather(start: Any, size: Any) -> tf.Tensor:
            return tf.gather(variable, start + tf.range(size))

        return [_Rows(None, count, gather, tf.identity)]
    sources = [_of_part(name, *source) for source in state.sources]
    if len({part.columns for part, _ in state.sources}) == 1:
        return sources

    def columns(start: Any, size: Any) -> tf.Tensor:
        return concat([each.read(start, size) for each in sources], 1)

    return [dataclasses.replace(sources[0], read=columns)]


def _of_part(table: str, part: Part, store: RowStore) -> _Rows:
    def read(start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        with tf.device(store.device):
            numbers = part.offset + start + tf.range(size)
            return store.read(table, PARAMETERS, numbers)

    first, step = part.rows.start, part.rows.step
    return _Rows(
        store.device, len(part.rows), read, lambda rows: first + rows * step
    )


def _rows_of_served(table: Any) -> _Rows:
    """Returns the rows of a `ServedTable` in an exported model."""
    count, rows_at, ids_at = table.in_order()

    def read(start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        return table.stored.gather(rows_at(start + tf.range(size)))

    return _Rows(None, count, read, ids_at)


def _rows_of_keys(shard: KeyedShard) -> _Rows:
    """Returns a shard's rows that have keys, also those in a spill."""
    table = shard.key_table
    # Keys are sorted, so that among equal scores the lower key is first.
    keys = tf.sort(table.export().keys)

    def read(start: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
        found = table.lookup(keys[start : start + size])
        return shard.store.read_found(table, found)

    def ids_of(rows: tf.Tensor) -> tf.Tensor:
        # A shard without keys has none to gather.
        return tf.gather(tf.pad(keys, [[0, 1]]), rows)

    return _Rows(shard.store.device, tf.size(keys), read, ids_of)
