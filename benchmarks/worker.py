"""One contender of one case, in a process of its own.

run.py starts it and talks to it in lines of JSON: {"steps": n} asks for the
times of n steps. The first line that it prints says that it is ready, or why it
can't be.
"""

import argparse
import dataclasses
import gc
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import sys
import time

import cases
import check
from peers import PEERS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case")
    parser.add_argument("peer")
    parser.add_argument("form")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    # Libraries' output must not get between the messages.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message):
        print(json.dumps(message), file=channel, flush=True)

    try:
        case = cases.find(args.case, args.quick)
        runner, inputs, report = begin(case, PEERS[args.peer], args)
    except Exception as error:
        say(error=reason(error))
        raise
    say(**report)
    forward = case.kind == "forward" and runner.forward
    run = runner.forward if forward else runner.step
    gc.disable()
    for line in sys.stdin:
        say(seconds=times(run, inputs, json.loads(line)["steps"]))


def begin(case, peer, args):
    """Makes the tables, and does the steps that are not timed."""
    start = time.perf_counter()
    importlib.import_module(f"peers.{peer.module}")
    imported = time.perf_counter() - start
    runner = peer.make(case, args.form)
    batches = [case.ids(i) for i in range(args.batches)]
    inputs = [runner.prepare(batch) for batch in batches]
    report = {
        "info": without_folders(runner.info),
        "versions": {p: version(p) for p in peer.packages},
    }
    if case.kind == "memory":
        report["peak_bytes"] = peak_memory(runner.step, inputs)
    else:
        first = First(runner.step)
        runner = dataclasses.replace(runner, step=first)
        report["differs"] = check.difference(case, runner, batches[0])
        if case.mlp and runner.forward:
            # Keras's Adam moves rows that a step doesn't touch, from the
            # second step on.
            known = 2 if case.optimizer == "Adam" else len(inputs)
            report["losses"] = [runner.step(i) for i in inputs[:known]]
        if case.costs:
            if first.seconds is None:
                runner.step(inputs[0])
            report |= {
                "import_seconds": imported,
                "first_seconds": first.seconds,
                "peak": memory("VmHWM"),
            }
        runner = dataclasses.replace(runner, step=first.call)
    return runner, inputs, report


class First:
    """A function, and how long its first call took, with its tracing.

    Attributes:
        call: the function.
        seconds: of the first call, or None.
    """

    def __init__(self, call):
        self.call = call
        self.seconds = None

    def __call__(self, inputs):
        """Calls the function."""
        start = time.perf_counter()
        result = self.call(inputs)
        if self.seconds is None:
            self.seconds = time.perf_counter() - start
        return result


def version(package):
    """A package's version; of one that is on the path, its own word."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return importlib.import_module(package).__version__


def times(run, inputs, steps):
    """Seconds of each step, on the batches in turn."""
    # Brings the process back into the caches, and idle cores up to their speed,
    # which takes more than one of the shortest steps.
    end = time.perf_counter() + cases.WARM_UP_SECONDS
    for i in itertools.count():
        run(inputs[i % len(inputs)])
        if time.perf_counter() > end:
            break
    seconds = []
    for i in range(steps):
        start = time.perf_counter()
        run(inputs[i % len(inputs)])
        seconds.append(time.perf_counter() - start)
    return seconds


def peak_memory(step, inputs):
    """Bytes that steps need at once, beside what was there before."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # From here on VmHWM is that of the steps.
    before = memory("VmRSS")
    for one in inputs:
        step(one)
    return memory("VmHWM") - before


def memory(field):
    with open("/proc/self/status") as file:
        return 1024 * int(re.search(rf"{field}:\s+(\d+)", file.read())[1])


def reason(error):
    """An error in a line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = without_folders(" ".join(lines)[:200])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def without_folders(text):
    """Reports are read on other machines."""
    return re.sub(r"/\S*/", "", text)


if __name__ == "__main__":
    main()
