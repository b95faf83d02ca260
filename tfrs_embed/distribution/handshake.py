"""Checks that workers build the same tables, and call them in one order.

If workers differed, their collectives would wait for each other forever, or
give one layer's rows to another, or train by different rules. Tables are
compared before they are made. A layer's first lookup and update are compared
when they are traced, before a worker waits for another in a collective.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.version import __version__
from tfrs_embed.distribution import dead_workers, key_value_store, long_waits
from tfrs_embed.distribution import replicas as replicas_lib
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.ops import backend

#: Seconds that a worker waits for the others to build the same tables.
TIMEOUT_S = 300
# For a first call a worker waits this long, then goes on: others may still load
# data, or call another layer, which `ReplicaConsensus` reports in the next
# step.
_CALL_TIMEOUT_S = 10
# A worker that found a difference stays this long, so that others find it: the
# first worker's process keeps all messages.
_LINGER_S = 5
# The most differences in an error.
_MOST_LISTED = 5

#: Facts that must be equal, as JSON: settings and their values, by their owner
#: ("Table 'movies'"; "" for the layer).
Facts = dict[str, dict[str, Any]]


# The owner of the facts about a worker's program.
_PROGRAM = "the program"


def program() -> dict[str, Any]:
    """Returns facts about this program that must be equal on all workers.

    Other versions may send other messages. Kernels and TensorFlow's operations
    round differently, so that copies of a table would drift apart.
    """
    return {
        "tfrs_embed": __version__,
        "tensorflow": tf.__version__,
        "kernels": backend.operations(None, training=True).compiled,
    }


def compare_workers(
    strategy: tf.distribute.Strategy, name: str, facts: Callable[[], Facts]
) -> None:
    """Compares what this worker is about to build with the other workers.

    Workers send a digest of `facts`, and the facts only if digests differ.
    Nothing happens unless the strategy has several workers.

    Raises:
        RuntimeError: another worker builds something else, or nothing within
            `TIMEOUT_S` seconds.
        tf.errors.UnavailableError: another worker has ended.
    """
    if not _has_several(strategy):
        return
    replicas = replicas_lib.get_replicas(strategy)
    dead_workers.watch(replicas)
    mine = {**facts(), _PROGRAM: program()}
    try:
        with tf.init_scope(), long_waits.together(replicas, f"build {name}"):
            _compare(replicas, name, mine, TIMEOUT_S)
    except key_value_store.WaitTimeoutError as late:
        raise RuntimeError(
            f"Worker {late.worker} has not built {name} within {TIMEOUT_S} s "
            "of this one. All workers must build the same layers in the same "
            "order."
        ) from None


def compare_actions(strategy: tf.distribute.Strategy, name: str) -> None:
    """Compares what this worker does for the first time with the others.

    Builds and first calls have one order on all workers. A late worker is
    waited for `_CALL_TIMEOUT_S` seconds. Raises as `compare_workers` does.
    """
    # Without timeouts, this would wait forever for a worker that never comes.
    if _has_several(strategy) and key_value_store.has_timeouts():
        with (
            tf.init_scope(),
            contextlib.suppress(key_value_store.WaitTimeoutError),
        ):
            _compare(
                replicas_lib.get_replicas(strategy), name, {}, _CALL_TIMEOUT_S
            )


def _has_several(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy may have several workers."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and (
        strategy.num_replicas_in_sync > 1
    )


def _compare(
    replicas: Replicas, name: str, facts: Facts, timeout: float
) -> None:
    me, number = replicas.worker, replicas.count("handshakes")
    prefix = f"tfrs_embed/{replicas.group}/{number}"
    ordered = json.dumps(facts, sort_keys=True)
    mine = [name, hashlib.sha256(ordered.encode()).hexdigest()]
    key_value_store.send(f"{prefix}/{me}", json.dumps(mine))
    for worker in range(replicas.workers):
        if worker == me:
            continue
        key = f"{prefix}/{worker}"
        theirs = json.loads(
            key_value_store.receive(replicas, key, worker, timeout)
        )
        if theirs == mine:
            continue
        # The other worker sees the difference too, and sends its facts.
        key_value_store.send(f"{prefix}/facts/{me}", ordered)
        if theirs[0] != name:
            _linger(replicas, prefix)
            raise RuntimeError(
                "All workers must build the same layers, and call them, in the "
                f"same order. Here, on worker {me}, number {number} is {name}. "
                f"On worker {worker} it is {theirs[0]}."
            )
        key = f"{prefix}/facts/{worker}"
        their_facts = json.loads(
            key_value_store.receive(replicas, key, worker, timeout)
        )
        _linger(replicas, prefix)
        differences = islice(_differences(facts, their_facts), _MOST_LISTED)
        raise RuntimeError(
            f"{name} must be the same on all workers. What differs here, on "
            f"worker {me}, and on worker {worker}: {'; '.join(differences)}."
        )


def _linger(replicas: Replicas, prefix: str) -> None:
    """Waits until all workers have seen that there is a difference."""
    key_value_store.send(f"{prefix}/seen/{replicas.worker}", "")
    end = time.monotonic() + _LINGER_S
    for worker in range(replicas.workers):
        left = max(0.0, end - time.monotonic())
        with contextlib.suppress(
            key_value_store.WaitTimeoutError, tf.errors.OpError
        ):
            key_value_store.receive(
                replicas, f"{prefix}/seen/{worker}", worker, left
            )


def _differences(mine: Any, theirs: Any) -> Iterator[str]:
    """Yields the differences between two workers' facts, with their paths."""
    here, there = dict(_leaves(mine)), dict(_leaves(theirs))
    for path in {**here, **there}:
        one, other = (
            json.dumps(leaves[path]) if path in leaves else "not there"
            for leaves in (here, there)
        )
        if one != other:
            # Only the begin of a long value.
            yield f"{path} is {one:.200} here, {other:.200} there"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the numbers, strings and empty lists of a value, with paths."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            # "Table 't': optimizer.rule.beta_1" is easier to read.
            dot = "" if not path else ": " if path.endswith("'") else "."
            yield from _leaves(each, f"{path}{dot}{key}")
    elif isinstance(value, list) and value:
        for i, each in enumerate(value):
            yield from _leaves(each, f"{path}[{i}]")
    else:
        yield path, value
