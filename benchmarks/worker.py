"""One contender of one case, in a process of its own.

run.py starts it and talks to it in lines of JSON: {"steps": n} asks for the
times of n steps. The first line that it prints says that it is ready, or why it
can't be.
"""

import argparse
import gc
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
    runner = peer.make(case, args.form)
    batches = [case.ids(i) for i in range(args.batches)]
    inputs = [runner.prepare(batch) for batch in batches]
    report = {
        "info": without_folders(runner.info),
        "versions": {p: importlib.metadata.version(p) for p in peer.packages},
    }
    if case.kind == "memory":
        report["peak_bytes"] = peak_memory(runner.step, inputs)
    else:
        report["differs"] = check.difference(case, runner, batches[0])
        if case.mlp and runner.forward:
            report["losses"] = [runner.step(i) for i in inputs]
    return runner, inputs, report


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
