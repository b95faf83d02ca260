"""The recipes of docs/clusters.md, on hosts with names and ports of their own.

`make test-clusters` runs them. Slurm's daemons are the real ones; pods are
processes, as there is no Kubernetes here.
"""

import contextlib
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import hosts
import pytest
import slurm

import documentation
import kubernetes_job
import movielens_files
from documentation import ROOT
from nightly_flag import ALL
from run_in_processes import environment

pytestmark = [
    pytest.mark.skipif(not ALL, reason="make test-clusters runs it"),
    pytest.mark.xdist_group("clusters"),
]

RECIPES = ROOT / "examples/clusters"
EPOCHS = 8
WITHIN_S = 300
EPOCH = re.compile(rf"^epoch (\d+)/{EPOCHS}: .* rmse (\S+), test", re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with what the recipes find in theirs, and with little data."""
    if reason := hosts.missing():
        pytest.skip(reason)
    for name, value in environment("").items():
        monkeypatch.setenv(name, value)
    movielens_files.write(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def flags(folder):
    return [
        *("--data", str(folder), "--epochs", str(EPOCHS)),
        *("--batch_size", "100", "--size_threshold", "50"),
    ]


def wait_for(condition, output):
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, output()[-3000:]
        time.sleep(0.2)


def check_resumed(output, replicas):
    """Each epoch was trained once, on all replicas, by two jobs."""
    found = re.findall(r"^replicas: (\d+)$", output, re.MULTILINE)
    assert found == [str(replicas)] * 2, output[-5000:]
    epochs = [int(number) for number, _ in EPOCH.findall(output)]
    # One may have been saved just before all ended, and not been reported.
    assert epochs == sorted(set(epochs)), output[-5000:]
    assert {1, EPOCHS} <= set(epochs)
    assert len(epochs) >= EPOCHS - 1
    assert re.search(r"^test_rmse=\d", output, re.MULTILINE)


def workers(folder, **variables):
    """The processes that have these variables, and train on this data."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environ = (process / "environ").read_bytes().split(b"\0")
            command = (process / "cmdline").read_bytes().split(b"\0")
            if (
                command[1:2] == [b"-u"]
                and str(folder).encode() in command
                and all(
                    f"{k}={v}".encode() in environ for k, v in variables.items()
                )
            ):
                found.append(int(process.name))
    return found


@contextlib.contextmanager
def slurm_job(folder, *options):
    """A Slurm cluster with a job of the recipe, and what it has written."""
    if reason := slurm.missing():
        pytest.skip(reason)
    files = folder / "slurm"
    files.mkdir()
    # Sorted as text, n10 comes before n9.
    nodes = ["n9", "n10"]
    with (
        hosts.Hosts([slurm.CONTROLLER, *nodes]) as network,
        slurm.Slurm(network, nodes, os.cpu_count(), files) as cluster,
    ):
        job = cluster.run(
            *("sbatch", "--parsable", "--cpus-per-task=1", *options),
            *(RECIPES / "slurm.sh", *flags(folder)),
            cwd=folder,
        ).strip()
        log = folder / f"train-{job}.log"

        def output():
            return log.read_text(errors="replace") if log.exists() else ""

        def state():
            text = cluster.run("scontrol", "show", "job", job)
            return re.search(r"JobState=(\S+)", text)[1]

        yield cluster, job, output, state


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_slurm_job_goes_on_when_a_task_dies_or_hangs(folder, number):
    with slurm_job(folder) as (cluster, job, output, state):
        wait_for(lambda: "epoch 2/" in output(), output)
        [task] = workers(folder, SLURM_JOB_ID=job, SLURM_PROCID="1")
        os.kill(task, number)
        wait_for(lambda: state() != "RUNNING", output)
        assert state() == "COMPLETED", output()[-3000:]
        assert "Attempt 1 failed." in output()
        # Two tasks on each of two hosts.
        check_resumed(output(), replicas=4)
        assert "Restarts=0" in cluster.run("scontrol", "show", "job", job)
        assert len(list((folder / "checkpoints").iterdir())) > 0


def test_slurm_starts_a_job_anew_when_a_host_fails(folder):
    options = ("--ntasks-per-node=1",)
    with slurm_job(folder, *options) as (cluster, job, output, state):
        wait_for(lambda: "epoch 2/" in output(), output)
        cluster.fail("n10")
        wait_for(lambda: state() == "PENDING", output)
        cluster.repair("n10")
        # It would wait for two minutes.
        cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_for(lambda: state() not in ("PENDING", "RUNNING"), output)
        assert state() == "COMPLETED", output()[-3000:]
        check_resumed(output(), replicas=2)
        assert "Restarts=1" in cluster.run("scontrol", "show", "job", job)


@pytest.mark.parametrize("backoff_s", [0.0, 5.0])
@pytest.mark.parametrize("victim", [0, 1])
def test_pods_go_on_together_when_one_dies(
    folder, monkeypatch, victim, backoff_s
):
    # Whether the others have noticed before it is there again, or not.
    monkeypatch.setattr(kubernetes_job, "BACKOFF_S", backoff_s)
    manifest = kubernetes_job.load(RECIPES / "kubernetes.yaml")
    job = manifest["Job"]
    # A pod may have one CPU of this machine.
    kubernetes_job.container(job)["resources"]["limits"]["cpu"] = "1"
    kubernetes_job.container(job)["args"] += flags(folder)
    names = [kubernetes_job.host_name(manifest, i) for i in range(2)]

    def change(text):
        return text.replace("/checkpoints", str(folder / "checkpoints"))

    with (
        hosts.Hosts(names) as network,
        kubernetes_job.Pods(
            job,
            folder,
            change,
            lambda index, *command: network.on(names[index], *command),
        ) as running,
    ):

        def output():
            return running.output(0)

        wait_for(lambda: running.manage() or "epoch 2/" in output(), output)
        running.processes[victim].kill()
        wait_for(running.manage, output)
        check_resumed(output(), replicas=2)
        assert max(running.failures) == 1, running.failures


def test_hosts_go_on_when_a_process_dies(folder):
    if shutil.which("numactl") is None:
        pytest.skip("there is no numactl")
    names = ["host0", "host1"]
    [script] = [
        code
        for code in documentation.code("docs/clusters.md", "bash")
        if "numa.py --hosts host0,host1" in code
    ]
    script = script.replace(
        "/shared/checkpoints",
        shlex.join([str(folder / "checkpoints"), *flags(folder)]),
    )
    with hosts.Hosts(names) as network, contextlib.ExitStack() as stack:
        launchers = []
        for name in names:
            log = stack.enter_context((folder / name).open("wb"))
            launchers.append(
                subprocess.Popen(
                    network.on(name, "bash", "-c", script),
                    cwd=folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
            stack.callback(launchers[-1].wait)
            stack.callback(launchers[-1].terminate)

        def output():
            return (folder / "host0").read_text(errors="replace")

        wait_for(lambda: "epoch 2/" in output(), output)
        second = [
            pid
            for pid in workers(folder)
            if b'"index": 1'
            in pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        ]
        os.kill(second[0], signal.SIGKILL)
        wait_for(lambda: None not in [p.poll() for p in launchers], output)
        check_resumed(output(), replicas=2)
