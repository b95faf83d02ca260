"""Saving that is killed at any moment, or fails, and files that are damaged.

What a killed process leaves is what was in the files at that moment. So the
files of one process, which is not killed, are copied at all moments of its
saving, and each copy has to have a complete checkpoint.
"""

import functools
import hashlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from crashes.job import EPOCHS, PLACEMENTS, ROWS, Job
from faults.kills import MODULES
from forked_scripts import ForkServer
from nightly_flag import ALL
from run_in_processes import TESTS, ForkedCluster, environment
from tfrs_embed.checkpoint import bundle, session, stored_pieces
from tfrs_embed.kernels import build

pytestmark = [pytest.mark.more, pytest.mark.xdist_group("crashes")]

CRASHES = TESTS / "crashes"
#: Seconds within which a worker notices that another has ended.
WITHIN_S = 20


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """What watches file operations, compiled."""
    compiler = build.find_compiler()
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no compiler, or not Linux")
    path = tmp_path_factory.mktemp("library") / "file_operations.so"
    subprocess.run(
        [
            *compiler.split(),
            *("-x", "c", "-O1", "-shared", "-fPIC", "-o", str(path)),
            *(str(CRASHES / "file_operations.c"), "-ldl", "-lpthread"),
        ],
        check=True,
    )
    return path


@pytest.fixture(scope="module")
def server(library):
    """Forks processes whose file operations are watched."""
    env = {**environment("one"), "LD_PRELOAD": str(library)}
    with ForkServer(MODULES, env) as server:
        server.env = env
        yield server


class Run:
    """A job in processes of its own, and what it leaves.

    Args:
        folder: where its files are; it goes on from those that are there.
        server: starts its processes.
        strategy: one, mirrored or workers.
        flags: the job's flags.
    """

    def __init__(self, folder, server, strategy, **flags):
        self.files, self.states = folder / "files", folder / "states"
        self.copies = folder / "copies"
        shutil.rmtree(self.copies, ignore_errors=True)
        for path in (self.files / "chief", self.states, self.copies):
            path.mkdir(parents=True, exist_ok=True)
        flags |= {"folder": self.files, "states": self.states}
        flags |= {"copies": self.copies, "strategy": strategy}
        command = [str(CRASHES / "job.py")]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        workers = 2 if strategy == "workers" else 1
        with ForkedCluster(server, command, workers, server.env) as cluster:
            self._wait(cluster)
            self.codes = [p.poll() for p in cluster.processes]
            self.outputs = [cluster.output(i) for i in range(workers)]

    def _wait(self, cluster):
        """Waits for all to end, in time once one has."""
        end, ended = time.monotonic() + 240, {}
        while len(ended) < len(cluster.processes) and time.monotonic() < end:
            for i, process in enumerate(cluster.processes):
                if i not in ended and process.poll() is not None:
                    ended[i] = time.monotonic()
                    end = min(end, ended[i] + WITHIN_S)
            time.sleep(0.1)

    def state(self, epoch):
        with np.load(self.states / f"{epoch}.npz") as state:
            return dict(state)


@pytest.fixture(scope="module")
def runs(server, tmp_path_factory):
    """Runs of jobs that nothing happens to, by their strategy and flags."""
    done = {}

    def get(strategy, save, placement="row"):
        key = strategy, save, placement
        if key not in done:
            folder = tmp_path_factory.mktemp("-".join(key))
            run = Run(folder, server, strategy, save=save, placement=placement)
            assert not any(run.codes), run.outputs[0][-3000:]
            done[key] = run
        return done[key]

    return get


@pytest.fixture(scope="module")
def jobs():
    """The same jobs on one device, to restore into, by their placement."""
    strategy = tf.distribute.get_strategy()
    return functools.cache(lambda placement: Job(strategy, placement))


@pytest.fixture
def job(jobs):
    return jobs("row")


def restored(job, path, restore):
    """The state after restoring a checkpoint over one of zeros."""
    for table in ROWS:
        variables = job.layer.tables[table].variables
        if "keys" in variables:
            # With its keys all that a table has goes.
            job.layer.tables[table].remove(variables["keys"].numpy())
            continue
        for variable in variables.values():
            variable.assign(tf.zeros_like(variable))
    for variable in [*job.model.weights, *job.model.optimizer.variables]:
        if variable.shape.rank:
            variable.assign(tf.zeros_like(variable))
    restore(job, path)
    return job.state()


def restore_checkpoint(job, path):
    job.done.assign(-1)
    job.checkpoint.restore(path).assert_consumed()


def restore_backup(job, path):
    checkpoint = tf.train.Checkpoint(model=job.model)
    status = checkpoint.restore(path).expect_partial()
    status.assert_existing_objects_matched()


def restore_weights(job, path):
    job.model.load_weights(path).assert_consumed()


def equal(state, other):
    return sorted(state) == sorted(other) and all(
        np.array_equal(state[name], value) for name, value in other.items()
    )


def contents(files):
    digest = hashlib.sha256()
    for path in sorted(files):
        data = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def copies(run, epoch, folder="."):
    """What was there at each moment of a save, in order, each once."""
    seen, number = set(), 0
    for copy in sorted((run.copies / str(epoch)).glob("[0-9]*")):
        number += 1
        found = contents((copy / folder).rglob("*"))
        if found not in seen:
            seen.add(found)
            yield copy / folder
    assert number > 100  # Otherwise nobody was watching.


@pytest.mark.parametrize(
    ("strategy", "placement", "save", "folder", "restore"),
    [
        ("one", "row", "manager", ".", restore_checkpoint),
        ("one", "dynamic", "deltas", ".", restore_checkpoint),
        ("one", "row", "keras", "models", restore_weights),
        *(
            pytest.param(
                *("workers", placement, "manager", ".", restore_checkpoint),
                # It has all ways in which rows are saved.
                marks=() if placement == "mixed" else pytest.mark.nightly,
            )
            for placement in PLACEMENTS
        ),
        *(
            pytest.param(*other, marks=pytest.mark.nightly)
            for other in (
                ("one", "dynamic", "manager", ".", restore_checkpoint),
                ("one", "row", "keras", "backup/chief", restore_backup),
                ("workers", "mixed", "deltas", ".", restore_checkpoint),
                ("mirrored", "row", "manager", ".", restore_checkpoint),
                ("mirrored", "row", "deltas", ".", restore_checkpoint),
                ("workers", "row", "deltas", ".", restore_checkpoint),
                ("workers", "dynamic", "deltas", ".", restore_checkpoint),
                ("mirrored", "mixed", "manager", ".", restore_checkpoint),
                ("workers", "row", "keras", "backup/chief", restore_backup),
                ("workers", "mixed", "keras", "backup/chief", restore_backup),
            )
        ),
    ],
)
def test_the_last_complete_checkpoint_restores(
    runs, jobs, strategy, placement, save, folder, restore
):
    run, job = runs(strategy, save, placement), jobs(placement)
    known = {}
    for epoch in range(2, EPOCHS + 1):
        found = []
        for copy in copies(run, epoch, folder):
            newest = tf.train.latest_checkpoint(copy)
            assert newest.startswith(str(copy)), copy
            name = os.path.basename(newest)
            key = (name, contents(copy.glob(f"{name}.*")))
            if ALL or key not in known:
                state = restored(job, newest, restore)
                before, after = run.state(epoch - 1), run.state(epoch)
                assert equal(state, before) or equal(state, after), copy
                known[key] = epoch if equal(state, after) else epoch - 1
            found.append(known[key])
        # Once there is the new one, the old one is not taken again.
        assert found == sorted(found)
        assert {epoch - 1, epoch} == set(found)


@pytest.mark.parametrize("placement", ["row", "dynamic"])
def test_a_compacted_chain_is_complete_or_not_there(runs, jobs, placement):
    run, job = runs("one", "compact", placement), jobs(placement)
    for epoch in (2, EPOCHS):
        known, outcomes = {}, []
        for copy in copies(run, epoch):
            path = copy / f"ckpt-{epoch}-full"
            outcomes.append(os.path.exists(f"{path}.index"))
            key = contents(copy.glob(f"{path.name}.*"))
            if outcomes[-1] and key not in known:
                state = restored(job, str(path), restore_checkpoint)
                known[key] = equal(state, run.state(epoch))
        assert outcomes == sorted(outcomes)
        assert {False, True} == set(outcomes)
        assert known and all(known.values())


def test_overwriting_a_checkpoint_is_never_a_mixture(runs, job):
    run = runs("one", "manager")
    known, outcomes = {}, []
    for copy in copies(run, 2):
        key = contents(copy.glob("same.*"))
        if ALL or key not in known:
            try:
                state = restored(job, str(copy / "same"), restore_checkpoint)
            except (tf.errors.OpError, IndexError) as error:
                check_named(copy / "same", error)
                known[key] = "error"
            else:
                of = [e for e in (1, 2) if equal(state, run.state(e))]
                [known[key]] = of
        outcomes.append(known[key])
    changes = [outcome for outcome, _ in itertools.groupby(outcomes)]
    assert changes == [1, "error", 2]


def test_what_a_killed_save_left_does_not_disturb_the_next(runs, job, tmp_path):
    run = runs("workers", "manager")
    expected = run.state(3)
    there = list(copies(run, 2))
    for i, copy in enumerate(there[5 :: len(there) // 8]):
        folder = tmp_path / str(i)
        shutil.copytree(copy, folder)
        manager = tf.train.CheckpointManager(
            job.checkpoint, str(folder), max_to_keep=1
        )
        restored(job, str(run.files / "chief" / "ckpt-3"), restore_checkpoint)
        path = manager.save(2)
        assert equal(restored(job, path, restore_checkpoint), expected)
        assert tf.train.latest_checkpoint(folder) == path
        # It is complete by itself, and nothing is left beside it.
        assert list(folder.glob("ckpt-2*_temp")) == []


def test_keras_goes_on_with_what_is_left(runs, job, tmp_path):
    run = runs("one", "keras")
    there = list(copies(run, 2, "backup"))
    folder = tmp_path / "backup"
    shutil.copytree(there[len(there) // 2], folder)
    job.fit(
        0,
        epochs=EPOCHS,
        callbacks=[tf_keras.callbacks.BackupAndRestore(str(folder))],
    )
    assert equal(job.state(), run.state(EPOCHS))


# Its last part: the chief has had all rows, and waits.
AT_ITS_END = "fwrite worker-1-1"


@pytest.mark.parametrize(
    ("placement", "worker", "moment"),
    [
        ("mixed", 1, "fwrite worker-1-0"),
        *(
            pytest.param(*other, marks=pytest.mark.nightly)
            for other in (
                ("row", 1, AT_ITS_END),
                ("row", 1, "fwrite worker-1-0"),
                ("row", 0, "rename .index"),
                ("row", 0, "rename checkpoint"),
                ("table", 1, "fwrite worker-1-0"),
                ("column", 1, "fwrite worker-1-0"),
                ("column", 0, "rename .index"),
                ("replicated", 0, "rename .index"),
                ("mixed", 0, "rename checkpoint"),
                ("dynamic", 1, "fwrite worker-1-0"),
                ("dynamic", 0, "rename .index"),
            )
        ),
    ],
)
def test_a_killed_worker_ends_the_others_and_the_job_goes_on(
    server, runs, tmp_path, placement, worker, moment
):
    run = Run(
        tmp_path,
        server,
        "workers",
        placement=placement,
        fault=f"kill {moment}",
        fault_worker=worker,
    )
    assert run.codes[worker] == -signal.SIGKILL
    other = 1 - worker
    assert run.codes[other] not in (0, None), run.outputs[other][-2000:]
    assert re.search(
        rf"UnavailableError(?s:.*)task:{worker}", run.outputs[other]
    ), run.outputs[other][-2000:]
    assert "saved 2" not in run.outputs[0]
    resumed = Run(tmp_path, server, "workers", placement=placement)
    assert resumed.codes == [0, 0], resumed.outputs[0][-3000:]
    assert re.search("restored .*ckpt-1$", resumed.outputs[0], re.MULTILINE)
    expected = runs("workers", "manager", placement).state(EPOCHS)
    assert equal(resumed.state(EPOCHS), expected)


@pytest.mark.parametrize(
    "worker", [pytest.param(0, marks=pytest.mark.nightly), 1]
)
def test_a_worker_that_cannot_write_tells_the_others(server, tmp_path, worker):
    run = Run(
        tmp_path,
        server,
        "workers",
        fault=f"fail fwrite worker-{worker}-0",
        fault_worker=worker,
    )
    assert run.codes == [1, 1]
    why = f"worker-{worker}-0.*No space left on device"
    for i, output in enumerate(run.outputs):
        message = f"Worker {worker} could not save its part: " * (i != worker)
        assert re.search(f"{message}.*{why}", output), output[-3000:]
    assert tf.train.latest_checkpoint(run.files / "chief").endswith("ckpt-1")


def test_a_disk_that_only_one_worker_sees(tmp_path):
    (tmp_path / "worker-1-0.index").touch()
    session.check_seen(1, [str(tmp_path / "worker-1-0")])
    with pytest.raises(RuntimeError, match=r"Worker 1 .*worker-1-1', which"):
        session.check_seen(1, [str(tmp_path / "worker-1-1")])


def check_named(path, error):
    """Checks that an error of a damaged file says which."""
    if str(path) in str(error):
        return
    # TensorFlow, which opens it before it restores anything, does not say.
    frames = traceback.extract_tb(error.__traceback__)
    assert any("checkpoint_reader" in f.filename for f in frames), str(error)
    with pytest.raises(tf.errors.OpError, match=re.escape(str(path))):
        reader = bundle.BundleReader(str(path))
        for name in reader.shapes:
            reader.read(name)


@pytest.fixture(params=["blocks", "pieces"])
def damaged(request, runs, job, tmp_path, monkeypatch):
    """Restores what is left of a checkpoint after something was done to it."""
    if request.param == "pieces":
        monkeypatch.setattr(stored_pieces, "LARGE_BYTES", 0)
    run = runs("workers", "manager")
    path = tmp_path / "ckpt-3"

    def restore(name, change):
        for file in (run.files / "chief").glob("ckpt-3.*"):
            shutil.copy(file, tmp_path)
        change(tmp_path / name)
        try:
            state = restored(job, str(path), restore_checkpoint)
        except (tf.errors.OpError, IndexError) as error:
            check_named(path, error)
            return "error"
        assert equal(state, run.state(3))
        return "equal"

    restore.files = sorted(
        f.name for f in (run.files / "chief").glob("ckpt-3.*")
    )
    restore.size = lambda name: (run.files / "chief" / name).stat().st_size
    return restore


def test_a_file_that_is_cut_off_or_missing(damaged):
    assert len(damaged.files) > 4
    for name in damaged.files:
        size = damaged.size(name)
        for left in (0, 1, size // 2, size - 1):
            outcome = damaged(name, lambda file, n=left: os.truncate(file, n))
            assert outcome == "error", (name, left)
        assert damaged(name, lambda file: file.unlink()) == "error", name


def test_a_byte_that_changed(damaged):
    rng = random.Random(0)
    outcomes = []
    for name in damaged.files:
        size = damaged.size(name)
        number = 30 if name.endswith(".index") else 8
        places = {0, size - 1, *(rng.randrange(size) for _ in range(number))}
        places |= set(range(size - 48, size)) if ALL else set()
        for place in places:

            def flip(file, place=place):
                data = bytearray(file.read_bytes())
                data[place] ^= 1 << rng.randrange(8)
                file.write_bytes(data)

            outcomes.append(damaged(name, flip))
    assert len(outcomes) > 60
    assert outcomes.count("error") > 0.8 * len(outcomes)
