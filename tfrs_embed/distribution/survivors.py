"""What a worker does that ends because another one has died.

TensorFlow's error names the worker that this one could not reach. That may be a
survivor which has ended for the same reason: with it ends, if it is the first
worker, the service by which all others would have heard who died. So a survivor
looks who is gone, says so, tells the others, and stays until they have heard.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from typing import Any

import tensorflow as tf

from tfrs_embed._tensorflow import context
from tfrs_embed.distribution.peers import is_there
from tfrs_embed.distribution.replicas import Replicas

# What TensorFlow raises in the survivors.
_ERRORS = (tf.errors.UnavailableError, tf.errors.AbortedError)
# The service tells all at once what one has reported, or has told them what it
# has found itself. Without it they find out by heartbeats, some 5 s apart.
_TOLD_S, _UNTOLD_S = 1, 5
# The first worker stays for as long as others need the service, at most.
_LAST_S = 10
_INTERVAL_S = 0.1

_watching = False


def watch(replicas: Replicas) -> None:
    """Has this process tell of a dead worker, should it end because of one.

    Args:
        replicas: the workers' replicas.
    """
    global _watching
    if not _watching:
        tasks = [replicas.task(w) for w in range(replicas.workers)]
        atexit.register(_end, replicas.worker, tasks)
    _watching = True


def _end(me: int, tasks: list[str]) -> None:
    # The exception that ends the program, if one does.
    if isinstance(getattr(sys, "last_value", None), _ERRORS):
        _tell(me, tasks)


def _tell(me: int, tasks: list[str]) -> None:
    """Says who is gone, here and to the others, and waits until they know."""
    others = {w: task for w, task in enumerate(tasks) if w != me}
    gone = {w: task for w, task in others.items() if not is_there(task)}
    if not gone:
        return
    names = " and ".join(f"worker {w} ({task})" for w, task in gone.items())
    text = (
        f"Worker {me} ends because {names} can't be reached any more: a log of "
        "its own may say why. A job that is started again goes on after its "
        "last checkpoint."
    )
    print(text, file=sys.stderr, flush=True)
    service: Any = context.context()
    # It fails where all know already, or the first worker is gone.
    with contextlib.suppress(tf.errors.OpError):
        service.report_error_to_cluster(tf.errors.UNAVAILABLE, text)
    seconds = _LAST_S if me == 0 else _UNTOLD_S if 0 in gone else _TOLD_S
    _wait([task for w, task in others.items() if w not in gone], seconds)


def _wait(tasks: list[str], seconds: float) -> None:
    """Waits until workers have ended too, for a limited time."""
    end = time.monotonic() + seconds
    while tasks and time.monotonic() < end:
        time.sleep(_INTERVAL_S)
        tasks = [task for task in tasks if is_there(task)]
