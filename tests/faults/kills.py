"""Workers that are killed at random moments, and what becomes of their jobs."""

import dataclasses
import itertools
import pathlib
import random
import re
import signal
import time

import numpy as np
import tensorflow as tf

from faults.job import STEPS, STEPS_PER_SAVE, WITH_FILES
from run_in_processes import TESTS, ForkedCluster, environment

#: Seconds within which the others end.
WITHIN_S = 30
WORKERS = (2, 3)
#: What a fork server of these jobs imports.
MODULES = ("tensorflow", "tf_keras", "tfrs_embed")
_JOB = str(TESTS / "faults/job.py")
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_POLL_S = 0.005
# A kill that comes when the worker is done is moved forward so often.
_TRIES = 6
# A job that nobody ends is ended after this long.
_BOUND_S = 150


@dataclasses.dataclass(frozen=True)
class Kill:
    """Which worker of a job dies, and when.

    Attributes:
        placement: the job's.
        workers: how many it has.
        victim: the worker that is killed.
        since: what begins before: "building" is until the first step is done,
            "training" from there to the end.
        share: after this share of the time that it takes.
        deltas: whether the job saves deltas between full checkpoints.
    """

    placement: str
    workers: int
    victim: int
    since: str
    share: float
    deltas: bool = False


def draw(number, seed, placement=None, workers=None):
    """A kill; those of neighbouring numbers are of different placements.

    Args:
        number: the kill's number.
        seed: the seed of all kills.
        placement: the placement; None: any.
        workers: the number of workers; None: any.
    """
    rng = random.Random(f"{seed}/{number}")
    turn, index = divmod(number, len(WITH_FILES))
    placement = placement or WITH_FILES[index]
    # One process is enough for files to differ from memory.
    some = (1, *WORKERS) if placement == "files" else WORKERS
    workers = workers or some[turn % len(some)]
    return Kill(
        placement=placement,
        workers=workers,
        victim=rng.randrange(workers),
        since=rng.choice(["building", "training", "training"]),
        share=rng.random(),
        deltas=rng.random() < 0.5,
    )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a kill did.

    Attributes:
        phase: what the victim was at.
        seconds: what the others took to end.
        restored: the step after which the next job went on.
        errors: what was not as it should be.
        outputs: the workers'.
    """

    phase: str
    seconds: float
    restored: int
    errors: list[str]
    outputs: list[str]


@dataclasses.dataclass(frozen=True)
class _Undisturbed:
    """A job that nothing happens to: its last state, and what it takes."""

    state: dict[str, np.ndarray]
    seconds: dict[str, float]


def read(folder):
    """The values of the last complete checkpoint, by their names.

    Where keys come and go, a table's rows are in the order of its keys: any
    other order is the same table.
    """
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(folder))
    values = {
        key.removesuffix(_SUFFIX): np.asarray(reader.get_tensor(key))
        for key in reader.get_variable_to_shape_map()
        # A restore makes the counter, which `DeltaManager` doesn't need.
        if key.endswith(_SUFFIX) and key != f"save_counter{_SUFFIX}"
    }
    for name in [n for n in values if n.endswith("/keys")]:
        table = name.removesuffix("keys")
        order = np.argsort(values[name])
        for other in values:
            of_rows = other.startswith(table) and values[other].shape
            if of_rows and other == f"{table}candidates":
                by_key = np.argsort(values[other][:, 0])
                values[other] = values[other][by_key]
            elif of_rows and other == f"{table}removed":
                values[other] = np.sort(values[other])
            elif of_rows:
                values[other] = values[other][order]
    return values


def phases(output):
    """What a worker was at, with the times when it began."""
    found = re.findall(r"^at (\S+) (.+)$", output, re.MULTILINE)
    return [(phase, float(begin)) for begin, phase in found]


def _begin(output, since):
    """When the worker began what the kill counts from; None: not yet."""
    found = phases(output)
    names = [phase for phase, _ in found]
    if since == "training" and "first step" in names:
        found = found[names.index("first step") + 1 :]
    elif since == "training":
        return None
    else:
        found = [p for p in found if p[0] == since]
    return found[0][1] if found else None


class Killer:
    """Runs jobs in a fork server's forks.

    Args:
        server: the fork server.
        folder: where the jobs' files go.
    """

    def __init__(self, server, folder):
        self._server = server
        self._folder = pathlib.Path(folder)
        self._known = {}
        self._numbers = itertools.count()

    def _cluster(self, folder, placement, workers, deltas):
        command = [_JOB, "--folder", str(folder), "--placement", placement]
        command += ["--deltas"] * deltas
        return ForkedCluster(self._server, command, workers, environment(""))

    def _new_folder(self):
        folder = self._folder / str(next(self._numbers))
        folder.mkdir()
        return folder

    def undisturbed(self, placement, workers, deltas=False):
        """A job that nothing happens to; it runs once."""
        if (placement, workers, deltas) not in self._known:
            folder = self._new_folder()
            with self._cluster(folder, placement, workers, deltas) as cluster:
                codes = cluster.wait(_BOUND_S)
                output = cluster.output(0)
            assert codes == [0] * workers, output[-3000:]
            end = phases(output)[-1][1]
            training = _begin(output, "training")
            self._known[placement, workers, deltas] = _Undisturbed(
                read(folder / "chief"),
                {
                    "building": training - _begin(output, "building"),
                    "training": end - training,
                },
            )
        return self._known[placement, workers, deltas]

    def run(self, kill):
        """Kills a worker, and starts the job again.

        Args:
            kill: which one, and when.

        Returns:
            What happened; a kill that came when the worker was done is moved
            forward.
        """
        job = kill.placement, kill.workers, kill.deltas
        expected = self.undisturbed(*job)
        delay = kill.share * expected.seconds[kill.since]
        while True:
            folder = self._new_folder()
            with self._cluster(folder, *job) as cluster:
                if self._kill(cluster, kill, delay):
                    seconds, errors = self._survivors(cluster, kill.victim)
                    outputs = [cluster.output(i) for i in range(kill.workers)]
                    break
            delay /= 2
        phase = phases(outputs[kill.victim])[-1][0]
        restored = _last_saved(folder, kill.deltas, outputs[0], errors)
        with self._cluster(folder, *job) as cluster:
            try:
                codes = cluster.wait(_BOUND_S)
            except TimeoutError as error:
                errors.append(f"the next job hangs: {error}")
                codes = None
            again = [cluster.output(i) for i in range(kill.workers)]
        if codes is not None and any(codes):
            errors.append(f"the next job ends with {codes}")
        for i, output in enumerate(again):
            if f"continues after step {restored}\n" not in output:
                errors.append(f"worker {i} does not go on after {restored}")
        if not errors:
            errors += _differences(read(folder / "chief"), expected.state)
        return Outcome(phase, seconds, restored, errors, [*outputs, *again])

    def _kill(self, cluster, kill, delay):
        """Kills the victim in time; returns whether it was at work still."""
        victim = cluster.processes[kill.victim]
        end = time.monotonic() + _BOUND_S
        begin = None
        while begin is None:
            assert time.monotonic() < end, cluster.output(kill.victim)[-3000:]
            if victim.poll() is not None:
                # On a busy machine all may be over before it is looked at.
                output = cluster.output(kill.victim)
                assert victim.returncode == 0, output[-3000:]
                return False
            time.sleep(_POLL_S)
            begin = _begin(cluster.output(kill.victim), kill.since)
        time.sleep(max(0, begin + delay - time.monotonic()))
        if victim.poll() is None:
            victim.kill()
        victim.wait(10)
        return phases(cluster.output(kill.victim))[-1][0] != "ending"

    def _survivors(self, cluster, victim):
        """Waits for the others to end."""
        begin, seconds, errors = time.monotonic(), 0.0, []
        assert cluster.processes[victim].returncode == -signal.SIGKILL
        for i, process in enumerate(cluster.processes):
            if i == victim:
                continue
            while process.poll() is None:
                if time.monotonic() - begin > WITHIN_S:
                    errors.append(f"worker {i} hangs")
                    break
                time.sleep(_POLL_S)
            seconds = time.monotonic() - begin
            output = cluster.output(i)
            if process.returncode == 0:
                # All that is left to do may need nobody else.
                if f"saved {STEPS}\n" not in output:
                    errors.append(f"worker {i} ends as if it were done")
            elif victim not in named(output):
                errors.append(f"worker {i} does not name worker {victim}")
        return seconds, errors


def named(output):
    """The workers that a worker's error names, beside itself."""
    last = output[output.rindex("Error: ") :] if "Error: " in output else ""
    # Which one reported it is not what it says.
    last = re.sub(r"reported from \S+task:\d", "", last)
    return {int(task) for task in re.findall(r"/task:(\d+)", last)}


def _last_saved(folder, deltas, output, errors):
    """The step of the last complete checkpoint."""
    newest = tf.train.latest_checkpoint(folder / "chief")
    step = int(newest.rpartition("-")[2]) if newest else 0
    step *= STEPS_PER_SAVE if deltas else 1
    said = [0, *map(int, re.findall(r"^saved (\d+)$", output, re.MULTILINE))]
    # It may be complete before the chief says so.
    if not said[-1] <= step <= said[-1] + 2:
        errors.append(f"checkpoint {step} after 'saved {said[-1]}'")
    return step


def _differences(found, expected):
    """What is not equal to the bit."""
    if found.keys() != expected.keys():
        return [f"keys differ: {sorted(found.keys() ^ expected.keys())}"]
    return [
        f"{key} differs"
        for key, value in found.items()
        if value.tobytes() != expected[key].tobytes()
    ]
