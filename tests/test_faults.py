"""Workers that die, stop, come late or differ: no hang, no silent damage."""

import re
import signal
import socket
import sys
import time

import pytest
from tfrs_embed.testing import LocalCluster

import tfrs_embed
from faults.job import PLACEMENTS
from faults.kills import MODULES, WITHIN_S, phases
from faults.orders import FAULTS
from forked_scripts import ForkServer
from nightly_flag import ALL
from process_tiers import nightly
from run_in_processes import TESTS, ForkedCluster, environment
from tfrs_embed.tools.testing import local_cluster

pytestmark = [pytest.mark.more, pytest.mark.xdist_group("faults")]


@pytest.fixture(scope="module")
def server():
    with ForkServer(MODULES, environment("")) as server:
        yield server


@pytest.fixture(scope="module")
def start(server):
    """Starts a job of two workers, of which one misbehaves if told to."""

    def start(folder, fault="none", heartbeat=None, pause=0):
        command = [str(TESTS / "strategies/train_worker.py")]
        command += ["--folder", str(folder), "--fault", fault]
        if heartbeat:
            command += ["--heartbeat", str(heartbeat)]
        return ForkedCluster(server, command, 2, environment(""), pause)

    return start


def losses(output):
    return dict(re.findall(r"^step (\d+) loss (\S+)$", output, re.MULTILINE))


def wait_for(condition, timeout):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """The losses of a job in which nothing happens."""
    with start(tmp_path_factory.mktemp("undisturbed")) as cluster:
        assert cluster.wait(300) == [0, 0], cluster.output(0)
        assert "has waited" not in cluster.output(0) + cluster.output(1)
        found = losses(cluster.output(0))
        assert found == losses(cluster.output(1))
        assert len(found) == 6
        return found


@nightly(lambda fault: fault != "killed")
@pytest.mark.parametrize(
    "fault",
    [
        "killed",
        "worker 1 stops in a step",
        "raised",
    ],
)
def test_the_others_end_and_the_job_resumes(
    start, tmp_path, fault, undisturbed
):
    with start(tmp_path, fault) as cluster:
        wait_for(lambda: "step 2 loss" in cluster.output(1), 300)
        begin = time.monotonic()
        wait_for(lambda: cluster.processes[0].poll() is not None, WITHIN_S + 30)
        assert time.monotonic() - begin < WITHIN_S
        output = cluster.output(0)
        assert cluster.processes[0].returncode != 0
        assert "UnavailableError" in output
        # Its connection breaks, or its heartbeats end: which is seen first?
        assert re.search(
            r"(unhealthy.*\s.*|from remote target \S*/)task:1", output
        ), output[-2000:]
        assert losses(output) == {k: undisturbed[k] for k in ("0", "1", "2")}
        if fault == "killed":
            assert cluster.processes[1].wait(1) == -signal.SIGKILL
    if fault != "killed":
        return
    # Again, with a worker that comes late: the other waits.
    with start(tmp_path, pause=5) as cluster:
        assert cluster.wait(300) == [0, 0], cluster.output(0)
        resumed = losses(cluster.output(0))
    assert resumed == {k: undisturbed[k] for k in ("3", "4", "5")}


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_a_fit_of_keras_3_ends_and_resumes(tmp_path, fault):
    command = [sys.executable, str(TESTS / "strategies/fit3_worker.py")]
    command += ["--folder", str(tmp_path / fault)]
    found = {}
    with LocalCluster([*command, "--fault", fault], 2, environment("")) as job:
        wait_for(lambda: "step 2 loss" in job.output(1), 300)
        begin = time.monotonic()
        wait_for(lambda: job.processes[0].poll() is not None, WITHIN_S + 30)
        assert time.monotonic() - begin < WITHIN_S
        assert job.processes[0].returncode != 0
        assert "task:1" in job.output(0)
        found |= losses(job.output(0))
    assert list(found) == ["0", "1", "2"]
    with LocalCluster(command, 2, environment("")) as job:
        assert job.wait(300) == [0, 0], job.output(0)
        resumed = losses(job.output(0))
        assert resumed == losses(job.output(1))
    assert list(resumed) == ["3", "4", "5"]
    whole = [sys.executable, command[1], "--folder", str(tmp_path / "whole")]
    with LocalCluster(whole, 2, environment("")) as job:
        assert job.wait(300) == [0, 0], job.output(0)
        assert losses(job.output(0)) == found | resumed


def stop_for(cluster, seconds):
    """Lets worker 1 go on so long after it has stopped itself."""
    wait_for(lambda: "step 2 loss" in cluster.output(1), 300)
    time.sleep(seconds)
    cluster.signal(1, signal.SIGCONT)


@pytest.mark.nightly
def test_a_worker_may_stand_still_for_less_than_the_timeout(
    start, tmp_path, undisturbed
):
    # Longer than TensorFlow's own timeout.
    with start(tmp_path, "worker 1 stops in a step", heartbeat=60) as cluster:
        stop_for(cluster, 20)
        assert cluster.wait(60) == [0, 0], cluster.output(0)
        assert losses(cluster.output(0)) == undisturbed


@nightly(lambda fault: fault != "worker 1 stops in a save")
@pytest.mark.parametrize(
    ("fault", "stopped", "message"),
    [
        ("worker 1 stops in a step", 1, r"unhealthy.*\s.*task:1"),
        (
            "worker 0 stops in a step",
            0,
            r"Worker 1 ends because worker 0 \(/job:worker/replica:0/task:0\) "
            "has answered no heartbeat for 3 s",
        ),
        (
            "worker 1 stops in a save",
            1,
            r"Worker 1 \(/job:worker/replica:0/task:1\) counts as dead, while "
            "this one waited for it: .* heartbeat timeout",
        ),
        (
            "worker 0 stops in a save",
            0,
            "Worker 0, which has the coordination service, has not answered "
            "for 3 s",
        ),
    ],
    ids=["step", "first_step", "save", "first_save"],
)
def test_a_worker_that_stands_still_for_longer_ends_the_job(
    start, tmp_path, fault, stopped, message
):
    other = 1 - stopped
    with start(tmp_path, fault, heartbeat=3) as cluster:
        wait_for(lambda: "step 2 loss" in cluster.output(stopped), 300)
        begin = time.monotonic()
        wait_for(lambda: cluster.processes[other].poll() is not None, WITHIN_S)
        if fault == "worker 1 stops in a step":
            assert time.monotonic() - begin < 10
        output = cluster.output(other)
        assert re.search(message, output), output[-2000:]
        cluster.signal(stopped, signal.SIGCONT)
        wait_for(
            lambda: cluster.processes[stopped].poll() is not None, WITHIN_S
        )
        text = f"If worker {stopped} itself stood still for 3 s"
        output = cluster.output(stopped)
        assert text in output, output[-2000:]


def test_a_worker_without_its_port_is_named(start, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        [free] = local_cluster._free_ports(1)
        monkeypatch.setattr(
            local_cluster, "_free_ports", lambda _: [port, free]
        )
        with start(tmp_path) as cluster:
            wait_for(lambda: cluster.processes[0].poll() is not None, 120)
            with pytest.raises(
                TimeoutError,
                match=(
                    "(?s)Worker 1 still runs after 1 s.*Worker 0 has ended "
                    r"with exit code 1\. Its output ends:.*"
                    "Could not start gRPC server"
                ),
            ):
                cluster.wait(1)


@pytest.mark.parametrize("seconds", [0, -1, True, "5", float("inf"), None])
def test_bad_timeouts_are_refused(seconds):
    error = (TypeError, ValueError)
    with pytest.raises(error, match=re.escape(repr(seconds))):
        tfrs_embed.set_heartbeat_timeout(seconds)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "tables",
            "worker 1: Table 'items': vocabulary_size is 50 here, 51 there",
        ),
        ("order", r"Layer 'user'\. On worker 1 it is Layer 'item'"),
        ("missing", "Worker 1 has not built Layer 'item' within 5 s"),
    ],
    ids=["tables", "order", "missing"],
)
def test_workers_that_build_other_tables_are_noticed(
    start, tmp_path, fault, message
):
    with start(tmp_path, fault) as cluster:
        wait_for(lambda: cluster.processes[0].poll() is not None, 120)
        assert cluster.processes[0].returncode == 1
        assert re.search(f"RuntimeError: .*{message}", cluster.output(0))
        assert "step 0" not in cluster.output(0)
        waited = "Worker 0 has waited for 1 s to build Layer 'item'"
        assert (waited in cluster.output(0)) == (fault == "missing")


@nightly(lambda fault: fault != "saves alone")
@pytest.mark.parametrize(
    ("fault", "actions"),
    [
        ("saves alone", ["save sharded tables"]),
        ("reads alone", ["read 'items/parameters'"]),
        (
            "reads another",
            ["read 'items/parameters'", "read 'users/parameters'"],
        ),
    ],
    ids=["saves", "reads", "another"],
)
def test_a_worker_that_others_let_wait_says_for_what(
    start, tmp_path, fault, actions
):
    with start(tmp_path, fault) as cluster:
        wait_for(lambda: "step 2 loss" in cluster.output(0), 120)
        for worker, action in enumerate(actions):
            text = (
                f"Worker {worker} has waited for 1 s to {action}, which all "
                "workers must do together"
            )
            wait_for(lambda i=worker, text=text: text in cluster.output(i), 30)
        time.sleep(2)
        for worker in range(2):
            said = cluster.output(worker).count("has waited")
            assert said == (worker < len(actions))
        assert cluster.processes[0].poll() is None


# What each of the faults of worker 1 is told from: what worker 0 does then, and
# what worker 1 does.
LOOKUP = "a lookup(?: for training)? of Layer"
UPDATE = "an update of Layer"
DIFFERENT = {
    "builds in another order": ("Layer 'user'", "Layer 'item'"),
    "builds one more at first": ("Layer 'user'", "Layer 'more'"),
    "builds one more at last": (f"{LOOKUP} 'user'", "Layer 'more'"),
    "builds one less": ("Layer 'item'", f"{LOOKUP} 'user'"),
    "calls in another order": (f"{LOOKUP} 'user'", f"{LOOKUP} 'item'"),
    "calls one more at first": (f"{LOOKUP} 'user'", f"{LOOKUP} 'more'"),
    "calls one more at last": (f"{UPDATE} 'item'", f"{LOOKUP} 'more'"),
    "calls one less": (f"{LOOKUP} 'item'", f"{UPDATE} 'user'"),
    "calls the second in another order": (
        f"{LOOKUP} 'user'",
        f"{LOOKUP} 'item'",
    ),
    "looks up one more at last": (f"{LOOKUP} 'user'", f"{LOOKUP} 'more'"),
    "runs without kernels": ("true", "false"),
}
# Each fault with some placement, and each placement with some fault.
ORDERS = [
    (fault, placement, (2 + i % 2) if ALL else 2)
    for i, fault in enumerate(FAULTS)
    for placement in (PLACEMENTS if ALL else [PLACEMENTS[i % len(PLACEMENTS)]])
]
ORDERS.append(("builds one less", "variables", 2))


# By day one of each kind.
@nightly(
    lambda fault: (
        fault
        not in (
            "builds one more at first",
            "calls in another order",
            "calls one less",
            "runs without kernels",
        )
    )
)
@pytest.mark.parametrize(("fault", "placement", "workers"), ORDERS)
def test_another_order_of_layers_is_refused(server, fault, placement, workers):
    command = [str(TESTS / "faults/orders.py")]
    command += ["--fault", fault, "--placement", placement]
    with ForkedCluster(server, command, workers, environment("")) as cluster:
        codes = cluster.wait(120)
        ended = time.monotonic()
        outputs = [cluster.output(i) for i in range(workers)]
    assert 0 not in codes
    # What differs is the last thing that worker 1 began.
    assert ended - phases(outputs[1])[-1][1] < WITHIN_S
    for i, output in enumerate(outputs):
        here, there = DIFFERENT[fault][:: -1 if i == 1 else 1]
        assert named(output, here, there), output[-3000:]


def named(output, here, there):
    """Whether a worker's error says what it does, and what another does."""
    said = (
        rf"number \d+ is {here}\. On worker \d it is {there}\.",
        rf"program\.kernels is {here} here, {there} there",
        # Of the replicas' consensus, in the order of ranks.
        rf"rank 0 in {here}, that of rank 1 in {there}\.",
        rf"rank 0 in {there}, that of rank 1 in {here}\.",
    )
    errors = output[output.index("Error: ") :].replace("\\'", "'")
    return any(re.search(text, errors) for text in said)
