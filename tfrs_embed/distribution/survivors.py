"""What a worker does that ends because another worker has died.

TensorFlow's error names a worker that could not be reached. That may be a
survivor that ended for the same reason; if it is the first worker, the
coordination service ends with it, and nobody else learns who died. So a
survivor looks which workers are gone, prints it, tells the others, and stays
until they know.

A worker that was stopped for longer than the heartbeat timeout finds the others
gone. It prints that it stood still itself.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import context
from tfrs_embed.distribution import heartbeats, peers
from tfrs_embed.distribution.peers import is_there
from tfrs_embed.distribution.replicas import Replicas

# The errors that TensorFlow raises in survivors.
_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.DeadlineExceededError,
)
# How long a worker stays. The service passes its report on at once; without the
# service, others find out by heartbeats, about 5 s apart.
_TOLD_S, _UNTOLD_S = 1, 5
# The first worker stays up to this long, while others need the service.
_LAST_S = 10
_INTERVAL_S = 0.1
# A process stood still if its thread misses looks at the clock, and the process
# used little processor time: other busy threads would use all of a core. It
# notices the others' end within this many seconds afterwards.
_LOOK_S = 0.25
_IDLE = 0.5
_NOTICED_S = 60
# TensorFlow sends a heartbeat in each half of the timeout, so the last one
# before a process stands still may be that old.
_OVERDUE = 0.5
# Asking for a worker blocks all of Python for up to `peers.TIMEOUT_S`.
_ASKED_S = 1.25 * peers.TIMEOUT_S
# The error contains this if the first worker answers no heartbeat.
_SILENT = "CoordinationService/Heartbeat"

_watching = False
# How long this process last stood still, and when it went on.
_stood_s, _went_on = 0.0, 0.0


def watch(replicas: Replicas) -> None:
    """Makes this process report dead workers, should it end because of one."""
    global _watching
    if not _watching:
        tasks = [replicas.task(w) for w in range(replicas.workers)]
        atexit.register(_end, replicas.worker, tasks)
        threading.Thread(
            target=_watch_clock, args=[heartbeats.timeout()], daemon=True
        ).start()
    _watching = True


def _watch_clock(timeout: float) -> None:
    """Notes when the process has stood still for a heartbeat's time."""
    global _stood_s, _went_on
    overdue = max(_OVERDUE * timeout, _ASKED_S)
    looked, used = time.monotonic(), time.process_time()
    while True:
        time.sleep(_LOOK_S)
        before, used_before = looked, used
        looked, used = time.monotonic(), time.process_time()
        passed = looked - before
        if passed > overdue and used - used_before < _IDLE * passed:
            _stood_s, _went_on = passed, looked


def _end(me: int, tasks: list[str]) -> None:
    # The exception that ends the program, if one does.
    error = getattr(sys, "last_value", None)
    if isinstance(error, _ERRORS):
        # So that the thread looks at the clock after the main thread has
        # failed.
        time.sleep(2 * _LOOK_S)
        _tell(me, tasks, silent=me != 0 and _SILENT in str(error))


def _tell(me: int, tasks: list[str], silent: bool) -> None:
    """Prints which workers are gone, tells the others, and waits for them.

    `silent` says that the first worker may run, but does not answer.
    """
    others = {w: task for w, task in enumerate(tasks) if w != me}
    gone = {w: task for w, task in others.items() if not is_there(task)}
    names = " and ".join(f"worker {w} ({task})" for w, task in gone.items())
    # This may be why the others are gone.
    if _stood_s > 0 and time.monotonic() - _went_on < _NOTICED_S:
        text = (
            f"Worker {me} ends because it stood still for {_stood_s:.0f} s: a "
            "worker that sends no heartbeat for "
            f"{heartbeats.timeout():g} s counts as dead, and the others end. "
            "tfrs_embed.set_heartbeat_timeout sets that time."
        )
    elif gone:
        text = (
            f"Worker {me} ends because {names} can't be reached any more: a "
            "log of its own may say why."
        )
    elif silent:
        text = (
            f"Worker {me} ends because worker 0 ({tasks[0]}) has answered no "
            f"heartbeat for {heartbeats.timeout():g} s: it stands still, or "
            "the network is broken."
        )
    else:
        return
    text += " A job that is started again goes on after its last checkpoint."
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
