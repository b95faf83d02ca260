"""A strategy's replicas, and the collectives between them.

The collectives run in the group of Keras's own all-reduce, with its launchers'
keys, devices and ordering tokens. So all devices run all collectives in one
order; otherwise they would deadlock.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.graphs import TracedOnce
from tfrs_embed.compat.private_tensorflow import cross_device_ops
from tfrs_embed.distribution.traffic import Collective, Sent
from tfrs_embed.ops import backend
from tfrs_embed.ops.stock import Stock

# TensorFlow numbers its own collectives from 100 upwards, one per step and
# collective; ours have other keys.
_FIRST_INSTANCE_KEY = 1 << 30
#: An instance key is bound to one shape: a channel has a key for each bucket.
BUCKETS = 512
# TensorFlow numbers its own groups from 1 upwards.
_FIRST_GROUP_KEY = 1 << 20
# With more logical CPUs in one process, collectives return wrong data without
# an error.
_MAX_LOCAL_CPUS = 11

_of_strategy: Any = weakref.WeakKeyDictionary()

# Counts belong to the process, not to a strategy: strategies over the same
# devices have one group key, so that TensorFlow would confuse their
# collectives.
_numbers: Counter[str] = Counter()


def get_replicas(strategy: tf.distribute.Strategy) -> Replicas:
    """Returns the replicas of a strategy, the same object each time.

    The default strategy has one replica.

    Raises:
        NotImplementedError: the strategy lacks collectives for tables.
    """
    if strategy not in _of_strategy:
        _of_strategy[strategy] = Replicas(strategy)
    return _of_strategy[strategy]


class Collectives:
    """The collectives of a group of replicas, some of which this process runs.

    Attributes:
        world: the number of replicas.
        sent: what each local replica sends, while it is counted.
    """

    world: int
    sent: list[Sent]
    _launchers: Sequence[Any]
    # For each local replica its group's key, and the group's ranks in
    # TensorFlow's order, which on GPUs depends on their interconnect.
    _group_keys: list[int]
    _orders: list[list[int]]

    def all_to_all(
        self,
        replica: int,
        values: tf.Tensor,
        channel: int,
        bucket: Any = 0,
    ) -> tf.Tensor:
        """Sends values[r] to rank r; returns what each rank sent here.

        Values are [world, ...], of one shape on all replicas. A channel needs a
        `bucket` for each shape. `replica` is the local replica that calls.
        """
        op, order = tf.raw_ops.CollectiveAllToAllV2, self._orders[replica]
        ranks = list(range(self.world))
        if order == ranks:
            return self._move(op, replica, values, channel, bucket)
        values = tf.gather(values, order)
        sent = self._move(op, replica, values, channel, bucket)
        return tf.gather(sent, [order.index(rank) for rank in ranks])

    def max(self, replica: int, values: tf.Tensor, channel: int) -> tf.Tensor:
        """Returns the maximum of int64 or float32 values of a fixed shape."""
        return self._reduce(replica, values, channel, "Max")

    def sum(self, replica: int, values: tf.Tensor, channel: int) -> tf.Tensor:
        """Returns the sum of float32 values of a fixed shape; equal on all."""
        return self._reduce(replica, values, channel, "Add")

    def _reduce(
        self, replica: int, values: tf.Tensor, channel: int, merge: str
    ) -> tf.Tensor:
        """Reduces all replicas' values by TensorFlow's `merge_op`."""
        return self._launch(
            tf.raw_ops.CollectiveReduceV2,
            replica,
            values,
            channel,
            merge_op=merge,
            final_op="Id",
        )

    def gather(
        self,
        replica: int,
        values: tf.Tensor,
        channel: int,
        bucket: Any = 0,
    ) -> tf.Tensor:
        """Returns replicas' [n, ...] values as [world * n, ...], in rank order.

        The arguments are those of `all_to_all`.
        """
        op = tf.raw_ops.CollectiveGatherV2
        return self._move(op, replica, values, channel, bucket)

    def _move(
        self,
        op: Any,
        replica: int,
        values: tf.Tensor,
        channel: int,
        bucket: Any,
    ) -> tf.Tensor:
        """Launches a collective that moves values, and changes none."""
        number = values.shape.num_elements()
        size = tf.size(values, tf.int64) if number is None else number
        size = size * values.dtype.size
        kind = "all_gather"
        if op is tf.raw_ops.CollectiveAllToAllV2:
            # One message for each replica, this one too.
            kind, size = "all_to_all", size // self.world
        self.sent[replica].add(bytes=Collective(kind, size).sent(self.world))
        if values.dtype == tf.bfloat16:
            # TensorFlow has no bfloat16 collectives. Bits don't change, so
            # another dtype of that size serves.
            values = tf.bitcast(values, tf.float16)
            found = self._launch(op, replica, values, channel, bucket)
            return tf.bitcast(found, tf.bfloat16)
        return self._launch(op, replica, values, channel, bucket)

    def _launch(
        self,
        op: Any,
        replica: int,
        values: tf.Tensor,
        channel: int,
        bucket: Any = 0,
        **attributes: Any,
    ) -> tf.Tensor:
        launcher = self._launchers[replica]
        self.sent[replica].add(1)
        key = (
            _FIRST_INSTANCE_KEY + channel * BUCKETS + tf.cast(bucket, tf.int32)
        )
        with tf.device(launcher._device):
            return op(
                input=values,
                group_size=self.world,
                group_key=self._group_keys[replica],
                instance_key=key,
                ordering_token=[launcher._ordering_token.handle],
                communication_hint=launcher._options.implementation.value.lower(),
                # A nonzero timeout would leak a thread per collective.
                timeout_seconds=0,
                **attributes,
            )


class Replicas(Collectives):
    """The replicas of a strategy, some of which this process runs.

    A local replica is named by its index in this process. A replica's index
    among all is its rank, which may differ from TensorFlow's replica id.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.world = strategy.num_replicas_in_sync
        self._strategy = weakref.ref(strategy)
        self._ranks: list[int] | None = [0] if self.world == 1 else None
        self._ids_by_rank: list[int] = list(range(self.world))
        # A single replica has no collectives.
        self._launchers = [] if self.world == 1 else _launchers(strategy)
        self.local = max(1, len(self._launchers))
        self._group_keys = [each._group_key for each in self._launchers]
        self._orders = [list(range(self.world))] * self.local
        self.devices: list[str] = [each._device for each in self._launchers]
        #: The channel of all verdicts.
        self.verdict_channel = self.allocate(1)
        self.sent = [Sent() for _ in self._launchers]

    def operations(self, replica: int, training: bool) -> Stock:
        """Returns the operations of a local replica, as `backend` chooses."""
        return backend.operations(self.devices[replica], training)

    @property
    def workers(self) -> int:
        """The number of processes."""
        return self.world // self.local

    @property
    def worker(self) -> int:
        """The index of this process."""
        return self._ids()[0] // self.local

    def task(self, worker: int) -> str:
        """Returns TensorFlow's name for a worker."""
        strategy: Any = self._strategy()
        spec = strategy.cluster_resolver.cluster_spec()
        tasks = [
            f"/job:{job}/replica:0/task:{i}"
            for job in ("chief", "worker")
            if job in spec.jobs
            for i in spec.task_indices(job)
        ]
        return tasks[worker]

    @property
    def group(self) -> int:
        """The key of the replicas' collective group."""
        return self._group_keys[0]

    def count(self, what: str) -> int:
        """Counts an action that this process does together with others.

        `what` is "handshakes", "saves" or "layers".
        """
        _numbers[what] += 1
        return _numbers[what]

    def _ids(self) -> list[int]:
        """Returns the replica id of each local replica."""
        strategy: Any = self._strategy()
        extended = strategy.extended
        return [
            extended._get_replica_id_in_sync_group(i) for i in range(self.local)
        ]

    @property
    def ranks(self) -> list[int]:
        """The rank of each local replica.

        The first use is a collective: all workers must take part.
        """
        if self._ranks is None:
            # TensorFlow sorts ranks by tasks' names ("10" before "2"), and GPUs
            # by their interconnect.
            ids = self._ids()
            [self._ids_by_rank, *_] = self._gather_numbers(ids)
            self._ranks = [self._ids_by_rank.index(i) for i in ids]
        return self._ranks

    @functools.cached_property
    def on_host(self) -> int:
        """The replicas of a process, if their ranks are neighbours; else 1."""
        self.ranks  # noqa: B018 - all workers ask for it together.
        workers = [i // self.local for i in self._ids_by_rank]
        neighbours = all(
            workers[r] == workers[r - r % self.local] for r in range(self.world)
        )
        return self.local if neighbours else 1

    def _gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gathers one number of each local replica, between steps.

        Returns, for each local replica, its group's numbers in TensorFlow's
        order of ranks.
        """
        channel = self.allocate(1)

        def gather() -> list[tf.Tensor]:
            return [
                self.gather(i, tf.constant([number], tf.int64), channel)
                for i, number in enumerate(numbers)
            ]

        with tf.init_scope():
            return [found.numpy().tolist() for found in TracedOnce(gather)()]

    def split(self, size: int, *, neighbours: bool) -> Replicas:
        """Returns the replicas in groups of one size; each exchanges by itself.

        All workers must call together. A replica's rank is then its place in
        its group. A group has neighbouring ranks, or every (world / size)-th.
        """
        number = self.world // size
        first_key = _FIRST_GROUP_KEY + _numbers["groups"]
        _numbers["groups"] += number
        groups = copy.copy(self)
        groups.world = size
        places, keys = [], []
        for rank in self.ranks:
            group, place = (
                divmod(rank, size)
                if neighbours
                else (rank % number, rank // number)
            )
            places.append(place)
            keys.append(first_key + group)
        groups._ranks, groups._group_keys = places, keys
        groups._orders = groups._gather_numbers(places)
        return groups

    def allocate(self, channels: int) -> int:
        """Reserves `channels` collective channels; returns the first.

        Channels are unique in the process. All workers must ask in one order. A
        single replica reserves none.
        """
        if self.world == 1:
            return 0
        first = _numbers["channels"]
        _numbers["channels"] += channels
        assert _FIRST_INSTANCE_KEY + _numbers["channels"] * BUCKETS < 2**31
        return first

    def current(self, what: str) -> int | None:
        """Returns the local replica that is running; None: outside of any.

        `what` is about to run collectives; errors name it.

        Raises:
            NotImplementedError: collectives would hang here.
        """
        context = tf.distribute.get_replica_context()
        if context is None or context.strategy is not self._strategy():
            return None
        if self.local > 1:
            _check_nesting(what, self.local)
        # The public property is a tensor in a traced function.
        return int(context._local_replica_id)

    @contextlib.contextmanager
    def counting(self, replica: int, counters: tf.Variable) -> Iterator[None]:
        """Counts what a local replica sends inside, in [3] int64 `counters`."""
        sent = self.sent[replica] = Sent(tf.compat.v1.get_default_graph())
        try:
            yield
        finally:
            self.sent[replica] = Sent()
        added = sent.total()
        if added is not None:
            counters.assign_add(added)


def _check_nesting(what: str, local: int) -> None:
    """Refuses code that runs one local replica before another starts."""
    thread = threading.current_thread()
    if getattr(thread, "in_eager", tf.executing_eagerly()):
        raise NotImplementedError(
            f"{what} exchanges rows between {local} replicas of this "
            "process, which must run at the same time; executing eagerly, "
            "TensorFlow runs one after the other. Call strategy.run inside "
            "a tf.function, and compile models with run_eagerly=False."
        )
    if any("While" in type(g).__name__ for g in _graphs_of_replica()):
        raise NotImplementedError(
            f"{what} is called in a loop inside the function that "
            "strategy.run runs; with several replicas in one process "
            "TensorFlow's collectives hang there. Put the loop around "
            "strategy.run, as steps_per_execution does."
        )


def _graphs_of_replica() -> Iterator[Any]:
    """Yields the graphs being traced inside of strategy.run."""
    outermost = getattr(threading.current_thread(), "graph", None)
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not outermost:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def bucket_of(count: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Rounds a count up to one of eight capacities per power of two.

    Collectives leak some memory per shape, and padding is sent too: shapes are
    few, and padding is below an eighth. Returns the capacity, at least 8, and
    its number, below 512; scalars int32.
    """
    n = tf.cast(tf.maximum(count, 8), tf.float64)
    exponent = tf.floor(
        tf.math.log(n + 0.5) / tf.math.log(2.0 * tf.ones_like(n))
    )
    unit = tf.pow(2.0 * tf.ones_like(n), exponent - 3)
    units = tf.math.ceil(n / unit)
    number = exponent * 9 + units - 8
    return tf.cast(units * unit, tf.int32), tf.cast(number, tf.int32)


def _launchers(strategy: tf.distribute.Strategy) -> Sequence[Any]:
    """Returns the launchers of Keras's collectives, one per local replica."""
    kind, extended = type(strategy).__name__, strategy.extended
    ops = getattr(extended, "_cross_device_ops", None)
    if not isinstance(ops, cross_device_ops.CollectiveAllReduce):
        chosen = type(ops).__name__
        raise NotImplementedError(
            f"Tables sharded over replicas need a {kind} whose "
            f"cross_device_ops are TensorFlow's collectives (the default, on "
            f"devices of one kind), got {chosen}: its transfers have no order "
            "among the tables'."
        )
    launchers = ops._launchers
    devices = [launcher._device for launcher in launchers]
    if len(devices) > _MAX_LOCAL_CPUS and all("CPU" in d for d in devices):
        raise NotImplementedError(
            f"Tables can be sharded over at most {_MAX_LOCAL_CPUS} logical "
            f"CPUs in one process, got {len(devices)}: TensorFlow's "
            "collectives return wrong data from 12 on. Use several processes."
        )
    return launchers
