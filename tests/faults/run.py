"""Kills workers of training jobs at random moments, and has the jobs go on.

    python tests/faults/run.py [--runs 200] [--seed 1] [--first 0] [--jobs 2]
    python tests/faults/run.py --placement files --workers 1

Each run trains with tables of one placement on two or three workers, or with
tables in files on one, kills one of them, and starts the job again. The others
must end within 30 seconds with an error that names the one that died, and the
next job must end with the same tables and slots, to the bit, as one that
nothing happens to.
"""

import argparse
import collections
import os
import pathlib
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from faults.job import WITH_FILES  # noqa: E402
from faults.kills import MODULES, Killer, Outcome, draw  # noqa: E402
from forked_scripts import ForkServer  # noqa: E402
from run_in_processes import environment  # noqa: E402


def report(kill, outcome):
    """A line about a run, and what its workers said if it failed."""
    print(
        f"{kill.placement:10} {kill.workers} workers, {kill.victim} killed"
        f" {outcome.phase:10} others end in {outcome.seconds:4.1f} s, goes on"
        f" after {outcome.restored}: {'; '.join(outcome.errors) or 'equal'}",
        flush=True,
    )
    if outcome.errors:
        print(kill)
        for output in outcome.outputs:
            print(f"--- {output[-3000:]}", flush=True)


def outcome_of(run):
    """A run's outcome, whatever became of it: the others go on."""
    try:
        return run.result()
    except Exception:
        return Outcome("unknown", 0.0, 0, [traceback.format_exc()], [])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of a run")
    parser.add_argument("--placement", choices=WITH_FILES, help="[any]")
    parser.add_argument("--workers", type=int, help="[any]")
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        help="at a time: one that waits for a heartbeat takes no processor",
    )
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    kills = [
        draw(args.first + i, args.seed, args.placement, args.workers)
        for i in range(args.runs)
    ]
    outcomes = []
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        ForkServer(MODULES, environment("")) as server,
        ThreadPoolExecutor(args.jobs) as pool,
    ):
        killer = Killer(server, folder)
        for kill in kills:
            killer.undisturbed(kill.placement, kill.workers, kill.deltas)
        runs = {pool.submit(killer.run, kill): kill for kill in kills}
        for run in as_completed(runs):
            outcomes.append(outcome_of(run))
            report(runs[run], outcomes[-1])
    phases = collections.Counter(o.phase for o in outcomes)
    failures = sum(bool(o.errors) for o in outcomes)
    print(
        f"runs={len(outcomes)} seed={args.seed}",
        *(f"{phase.replace(' ', '-')}={n}" for phase, n in phases.items()),
        f"longest={max(o.seconds for o in outcomes):.1f} s",
        f"wall={time.monotonic() - begin:.0f} s failures={failures}",
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
