"""What wrong calls and changed graphs do, in processes that may crash.

    python tests/isolated_calls.py [NAME...]

prints lists of outcomes by name: of a wrong call eagerly and in a graph.
"""

import json
import os
import resource
import signal
import sys

import numpy as np
import tensorflow as tf

import right_calls
from invalid_graphs import GRAPHS
from wrong_calls import CASES

#: Room for what right calls need, beside what the process has already.
MEMORY = 6 << 30
SECONDS = 120


def outcome(function):
    """What a call did, in words."""
    try:
        function()
    except (tf.errors.OpError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def make(name):
    """Makes a call, which must change nothing, and then a right one."""
    if name in GRAPHS:
        results = [outcome(GRAPHS[name][0])]
        right_calls.lookup().run_right()
        return results
    case, results = CASES[name], []
    for in_graph in (False, True):
        right = right_calls.CALLS[case.call]()
        before = right.read_state()
        wrong = case.arguments(right)
        run = right.run_in_graph if in_graph else right.run
        results.append(outcome(lambda run=run, wrong=wrong: run(wrong)))
        for value, old in zip(right.read_state(), before, strict=True):
            np.testing.assert_array_equal(value, old)
        right.run_right()
    return results


def _make_all(names, pipe):
    """Writes a line for each call, up to the first that ends the process."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in names:
        signal.alarm(SECONDS)
        try:
            found = make(name)
        except Exception as error:
            found = [f"then {type(error).__name__}: {error}"]
        os.write(pipe, json.dumps([name, found]).encode() + b"\n")


def make_all(names):
    """What the calls did, by name."""
    found, rest = {}, list(names)
    while rest:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            status = 1
            try:
                _make_all(rest, write)
                status = 0
            finally:
                os._exit(status)
        os.close(write)
        with os.fdopen(read) as lines:
            found.update(json.loads(line) for line in lines)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        rest = [name for name in rest if name not in found]
        if rest:
            end = signal.Signals(-code).name if code < 0 else f"exit {code}"
            found[rest.pop(0)] = [f"ended by {end}"]
    return found


if __name__ == "__main__":
    print(json.dumps(make_all(sys.argv[1:] or [*CASES, *GRAPHS])))
