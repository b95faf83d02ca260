"""Times tfrs_embed beside other libraries, and writes a report.

Each contender of a case has a process of its own, which does nothing unless it
is asked for a round of steps. All are asked in turn, over several rounds, so
that a change in the machine's speed meets them all.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import cases
import numpy as np
import report
from peers import PEERS

WORKER = pathlib.Path(__file__).with_name("worker.py")
TRIAL_STEPS = 3
# Environment variables that contenders have of their own.
GIVEN = ("KERAS_BACKEND", "TF_USE_LEGACY_KERAS", "TFRS_EMBED_KERNELS")


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=cases.GROUPS,
        default=[g for g in cases.GROUPS if g not in cases.ON_REQUEST],
    )
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=PEERS,
        default=list(PEERS),
        help="of those that a case has",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="a round")
    parser.add_argument(
        "--batches", type=int, default=4, help="different ones, in turns"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small cases, to try this out"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help="report.md; its charts go beside it",
    )
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        help="a JSON file that keeps results: the report has all that are in "
        "it, and a case that is measured again takes its old one's place",
    )
    return parser.parse_args()


class Worker:
    """A process that runs a contender.

    Attributes:
        ready: its first message.

    Raises:
        RuntimeError: it can't take part; the message says why.
    """

    def __init__(self, case, name, form, args):
        command = [sys.executable, str(WORKER), case.name, name, form]
        command += ["--batches", str(args.batches)]
        command += ["--quick"] * args.quick
        cores = cores_of(case)
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env=environment(PEERS[name].env, len(cores)),
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.ready = self._receive()
        except RuntimeError:
            self.close()
            raise

    def round(self, steps):
        """Has it do steps; returns their times in seconds."""
        print(json.dumps({"steps": steps}), file=self._process.stdin)
        self._process.stdin.flush()
        return self._receive()["seconds"]

    def close(self):
        with contextlib.suppress(OSError):  # It may have died.
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _receive(self):
        line = self._process.stdout.readline()
        message = json.loads(line) if line else {}
        if line and "error" not in message:
            return message
        code = self._process.wait()
        self._log.seek(0)
        print(self._log.read()[-2000:], file=sys.stderr)
        raise RuntimeError(
            message.get("error", f"its process ended with exit code {code}")
        )


def cores_of(case):
    """The cores that a case's contenders have."""
    cores = sorted(os.sched_getaffinity(0))
    if case.threads and case.threads > len(cores):
        raise RuntimeError(f"it needs {case.threads} cores of {len(cores)}")
    return cores[: case.threads]


def environment(peer, threads):
    """A worker's environment: as many threads as cores for everyone."""
    threads = str(threads)
    given = {
        name: value for name, value in os.environ.items() if name not in GIVEN
    }
    return {
        **given,
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": threads,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": threads,
        "TF_NUM_INTEROP_THREADS": threads,
        **peer,
    }


def start(case, name, args):
    """Starts a contender, in each of its forms or in the fastest.

    Returns:
        Pairs of a worker, None if it can't take part, and its row.
    """
    peer = PEERS[name]
    if peer.all_forms or len(peer.forms) == 1:
        forms = peer.forms if case.all_forms else peer.forms[:1]
        return [launch(case, name, form, args) for form in forms]
    best = None
    for form in peer.forms:
        worker, row = launch(case, name, form, args)
        if worker:
            time_round(worker, row, TRIAL_STEPS)
            say(f"  {row.ms or math.nan:.1f} ms")
        slower = worker, row
        if best is None or (row.ms or math.inf) < (best[1].ms or math.inf):
            best, slower = slower, best
        # Two copies of each table may not fit.
        if slower and slower[0]:
            slower[0].close()
    best[1].seconds.clear()
    return [best]


def launch(case, name, form, args):
    """Starts a worker; returns it, or None, and its row."""
    say(f"{case.name}: {PEERS[name].title}, {form}")
    try:
        require_memory(case)
        worker = Worker(case, name, form, args)
    except RuntimeError as error:
        say(f"  missing: {error}")
        return None, report.Row(name, form, error=str(error))
    return worker, report.Row(name, form, worker.ready)


def require_memory(case):
    """Requires free memory for a case's tables, slots and a step.

    Raises:
        RuntimeError: there is less.
    """
    text = pathlib.Path("/proc/meminfo").read_text()
    free = 1024 * int(re.search(r"MemAvailable:\s+(\d+)", text)[1])
    # Some fill tables by way of a copy, and keep what a step computes.
    need = 1.5 * case.table_bytes
    if need > free:
        raise RuntimeError(
            f"it needs {need / 2**30:.0f} GiB of memory, {free / 2**30:.0f} "
            "are free"
        )


def run_alone(case, args):
    """As `run_case`, one contender after the other."""
    rows = []
    for name in case.peers:
        if name in args.contenders:
            one = dataclasses.replace(case, peers=(name,), alone=False)
            rows += run_case(one, args)
    compare(rows)
    return rows


def run_case(case, args):
    """Returns the rows of a case's column."""
    if case.alone:
        return run_alone(case, args)
    pairs = []
    try:
        for name in case.peers:
            if name in args.contenders:
                pairs += start(case, name, args)
        compare([row for _, row in pairs])
        for _ in range(0 if case.kind == "memory" else args.rounds):
            for worker, row in pairs:
                if not row.error:
                    time_round(worker, row, args.steps)
    finally:
        for worker, _ in pairs:
            if worker:
                worker.close()
    return [row for _, row in pairs]


def compare(rows):
    """Notes who trains another model than the first one does."""
    rows = [row for row in rows if row.ready.get("losses")]
    for row in rows[1:]:
        losses, expected = row.ready["losses"], rows[0].ready["losses"]
        number = min(len(losses), len(expected))
        if not np.allclose(losses[:number], expected[:number], rtol=1e-3):
            row.ready["differs"] = f"its losses are {losses}, not {expected}"


def time_round(worker, row, steps):
    try:
        row.seconds += worker.round(steps)
    except (OSError, RuntimeError) as error:
        row.error = str(error)
        say(f"{PEERS[row.peer].title}: {error}")


def say(text):
    print(text, file=sys.stderr, flush=True)


def main():
    args = parse()
    measured = {}
    if args.results and args.results.exists():
        measured = json.loads(args.results.read_text())
    for group in args.cases:
        for case in cases.group(group, args.quick):
            rows = run_case(case, args)
            measured[case.name] = [dataclasses.asdict(row) for row in rows]
            if args.results:  # After each: a later one may fail.
                args.results.write_text(json.dumps(measured))
    results = [
        (case, [report.Row(**row) for row in measured[case.name]])
        for group in cases.GROUPS
        for case in cases.group(group, args.quick)
        if case.name in measured
    ]
    text = report.markdown(results, args)
    print(text)
    if args.output:
        charts = report.plot(results, args.output)
        for group, chart in charts.items():
            heading = report.INTRODUCTIONS[group][0]
            text += f"\n\n![{heading}, times as ratios]({chart.name})"
        args.output.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
