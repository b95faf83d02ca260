"""Workers make sure that they build the same tables in the same order.

If they didn't, their collectives would wait for each other forever, or give
one layer's rows to another.
"""

from __future__ import annotations

import json

from tfrs_embed.distribution import messages
from tfrs_embed.distribution.replicas import Replicas

#: Seconds that a worker waits for the others to build the same tables.
TIMEOUT_S = 300


def shake(replicas: Replicas, name: str, description: str) -> None:
    """Compares what this worker is about to build with what the others are.

    Args:
        replicas: the replicas.
        name: what is being built.
        description: its tables and features.

    Raises:
        RuntimeError: another worker builds something else, or nothing within
            `TIMEOUT_S` seconds.
        tf.errors.UnavailableError: another worker has ended.
    """
    if replicas.workers == 1:
        return
    # The coordination service of the workers keeps values by key.
    number = replicas.count_handshake()
    me, mine = replicas.worker, [name, description]
    prefix = f"tfrs_embed/{replicas.group}/{number}"
    messages.send(f"{prefix}/{me}", json.dumps(mine))
    for worker in range(replicas.workers):
        if worker == me:
            continue
        theirs = json.loads(_get(replicas, f"{prefix}/{worker}", worker, name))
        if theirs != mine:
            raise RuntimeError(
                "All workers must build the same tables in the same order. "
                f"Here, on worker {me}, number {number} is {_text(mine)}. On "
                f"worker {worker} it is {_text(theirs)}."
            )


def _get(replicas: Replicas, key: str, worker: int, name: str) -> str:
    try:
        return messages.receive(replicas, key, worker, TIMEOUT_S)
    except TimeoutError:
        raise RuntimeError(
            f"Worker {worker} has not built {name} within {TIMEOUT_S} s of "
            "this one. All workers must build the same tables in the same "
            "order."
        ) from None


def _text(built: list[str]) -> str:
    name, description = built
    return f"{name} ({description})"
