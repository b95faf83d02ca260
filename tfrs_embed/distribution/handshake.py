"""A comparison of the tables that workers build, and of their order.

If they differed, the workers' collectives would wait for each other forever, or
give one layer's rows to another, or each worker would train by its own rules.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.distribution import key_value_store, survivors
from tfrs_embed.distribution import replicas as replicas_lib
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.version import __version__

#: Seconds that a worker waits for the others to build the same tables.
TIMEOUT_S = 300
# A worker that has found a difference stays this long, for the others to find
# it: the first worker's process keeps all messages.
_LINGER_S = 5
# An error lists so many differences, with so many characters of a value.
_MOST_LISTED = 5
_MOST_CHARACTERS = 200

#: Facts that must be equal, in values that JSON holds: settings and their
#: values by their owner ("Table 'movies'"), which is "" for the layer itself.
Facts = dict[str, dict[str, Any]]


# The owner of the facts about a worker's program.
_PROGRAM = "the program"


def program() -> dict[str, Any]:
    """The facts about this program that its workers must share.

    Other versions may send other messages. With and without kernels numbers are
    rounded otherwise, and the workers' copies of a table would drift apart.
    """
    return {
        "tfrs_embed": __version__,
        "tensorflow": tf.__version__,
        "kernels": kernels.operations(None, training=True) is not None,
    }


def compare_workers_under(
    strategy: tf.distribute.Strategy, name: str, facts: Callable[[], Facts]
) -> None:
    """Compares what a strategy's workers are about to build, if several do.

    Args:
        strategy: the strategy.
        name: what is being built.
        facts: returns what it is.

    Raises:
        RuntimeError: see `compare_workers`.
        tf.errors.UnavailableError: another worker has ended.
    """
    several = isinstance(
        strategy, tf.distribute.MultiWorkerMirroredStrategy
    ) and (strategy.num_replicas_in_sync > 1)
    if several:
        with tf.init_scope():
            compare_workers(replicas_lib.of(strategy), name, facts)


def compare_workers(
    replicas: Replicas, name: str, facts: Callable[[], Facts]
) -> None:
    """Compares what this worker is about to build with what the others are.

    Only a digest is sent, unless there is a difference to be named.

    Args:
        replicas: the replicas.
        name: what is being built.
        facts: returns what it is.

    Raises:
        RuntimeError: another worker builds something else, or nothing within
            `TIMEOUT_S` seconds.
        tf.errors.UnavailableError: another worker has ended.
    """
    if replicas.workers == 1:
        return
    survivors.watch(replicas)
    number, me = replicas.count_handshake(), replicas.worker
    # The coordination service of the workers keeps values by key.
    prefix = f"tfrs_embed/{replicas.group}/{number}"
    built = {**facts(), _PROGRAM: program()}
    ordered = json.dumps(built, sort_keys=True)
    mine = [name, hashlib.sha256(ordered.encode()).hexdigest()]
    key_value_store.send(f"{prefix}/{me}", json.dumps(mine))
    for worker in range(replicas.workers):
        if worker == me:
            continue
        theirs = json.loads(_get(replicas, f"{prefix}/{worker}", worker, name))
        if theirs == mine:
            continue
        # The other one will see it too, as all that differ from any do: so
        # its facts are under way.
        key_value_store.send(f"{prefix}/facts/{me}", json.dumps(built))
        their_facts = json.loads(
            _get(replicas, f"{prefix}/facts/{worker}", worker, name)
        )
        _linger(replicas, prefix)
        if theirs[0] != name:
            raise RuntimeError(
                "All workers must build the same tables in the same order. "
                f"Here, on worker {me}, number {number} is {name}. On worker "
                f"{worker} it is {theirs[0]}."
            )
        differences = _differences(built, their_facts)
        raise RuntimeError(
            f"{name} must be the same on all workers. What differs here, on "
            f"worker {me}, and on worker {worker}: {_listed(differences)}."
        )


def _linger(replicas: Replicas, prefix: str) -> None:
    """Waits until all workers have seen that there is a difference."""
    key_value_store.send(f"{prefix}/seen/{replicas.worker}", "")
    end = time.monotonic() + _LINGER_S
    for worker in range(replicas.workers):
        left = max(0.0, end - time.monotonic())
        with contextlib.suppress(TimeoutError, tf.errors.OpError):
            key_value_store.receive(
                replicas, f"{prefix}/seen/{worker}", worker, left
            )


def _differences(mine: Any, theirs: Any) -> Iterator[str]:
    """Yields the differences between two workers' facts, each with its path."""
    here, there = dict(_leaves(mine)), dict(_leaves(theirs))
    for path in {**here, **there}:
        one, other = (
            json.dumps(leaves[path]) if path in leaves else "not there"
            for leaves in (here, there)
        )
        if one != other:
            yield f"{path} is {_cut(one)} here, {_cut(other)} there"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers, strings and empty lists in a value, with their paths."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            # "Table 't': optimizer.rule.beta_1" is easier on the eye.
            dot = "" if not path else ": " if path.endswith("'") else "."
            yield from _leaves(each, f"{path}{dot}{key}")
    elif isinstance(value, list) and value:
        for i, each in enumerate(value):
            yield from _leaves(each, f"{path}[{i}]")
    else:
        yield path, value


def _cut(text: str) -> str:
    cut = len(text) > _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]}..." if cut else text


def _listed(differences: Iterator[str]) -> str:
    found = list(differences)
    text = "; ".join(found[:_MOST_LISTED])
    more = len(found) - _MOST_LISTED
    return f"{text}; and {more} more" if more > 0 else text


def _get(replicas: Replicas, key: str, worker: int, name: str) -> str:
    try:
        return key_value_store.receive(replicas, key, worker, TIMEOUT_S)
    except TimeoutError:
        raise RuntimeError(
            f"Worker {worker} has not built {name} within {TIMEOUT_S} s of "
            "this one. All workers must build the same tables in the same "
            "order."
        ) from None
