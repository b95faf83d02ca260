"""What a worker does that ends because another worker has died.

TensorFlow's error names a worker that could not be reached. That may be a
survivor that ended for the same reason; if it is the first worker, the
coordination service ends with it, and nobody else learns who died. So a
survivor looks which workers are gone, prints it, tells the others, and stays
until they know.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import context
from tfrs_embed.distribution import heartbeats
from tfrs_embed.distribution.peer_health import is_there
from tfrs_embed.distribution.replicas import Replicas

# The errors that TensorFlow raises in survivors.
_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
)
# How long a worker stays. The service passes its report on immediately;
# without the service, others find out by heartbeats, about 5 s apart.
_TOLD_S, _UNTOLD_S = 1, 5
# The first worker stays up to this long, while others need the service.
_LAST_S = 10
_INTERVAL_S = 0.1
# The error contains this if the first worker answers no heartbeat.
_SILENT = "CoordinationService/Heartbeat"

_watching = False


def watch(replicas: Replicas) -> None:
    """Makes this process report dead workers, should it end because of one."""
    global _watching
    if not _watching:
        tasks = [replicas.task(w) for w in range(replicas.workers)]
        atexit.register(_end, replicas.worker, tasks)
    _watching = True


def _end(me: int, tasks: list[str]) -> None:
    # The exception that ends the program, if one does.
    error = getattr(sys, "last_value", None)
    if isinstance(error, _ERRORS):
        _tell(me, tasks, silent=me != 0 and _SILENT in str(error))


def _tell(me: int, tasks: list[str], silent: bool) -> None:
    """Prints which workers are gone, tells the others, and waits for them.

    `silent` says that the first worker may run, but does not answer.
    """
    others = {w: task for w, task in enumerate(tasks) if w != me}
    gone = {w: task for w, task in others.items() if not is_there(task)}
    timeout = f"{heartbeats.timeout():g} s"
    if gone:
        names = " and ".join(f"worker {w} ({task})" for w, task in gone.items())
        why = f"{names} can't be reached any more: a log of its own may say why"
    elif silent:
        why = (
            f"worker 0 ({tasks[0]}) has answered no heartbeat for {timeout}: "
            "it stands still, or the network is broken"
        )
    else:
        return
    text = (
        f"Worker {me} ends because {why}. If worker {me} itself stood still "
        f"for {timeout}, the others have ended for that reason: "
        "tfrs_embed.set_heartbeat_timeout sets that time. A job that is "
        "started again goes on after its last checkpoint."
    )
    print(text, file=sys.stderr, flush=True)
    service: Any = context.context()
    # This fails if all know already, or the first worker is gone.
    with contextlib.suppress(tf.errors.OpError):
        service.report_error_to_cluster(tf.errors.UNAVAILABLE, text)
    seconds = _LAST_S if me == 0 else _UNTOLD_S if 0 in gone else _TOLD_S
    # Until the others have ended too.
    waiting = [task for w, task in others.items() if w not in gone]
    end = time.monotonic() + seconds
    while waiting and time.monotonic() < end:
        time.sleep(_INTERVAL_S)
        waiting = [task for task in waiting if is_there(task)]
