"""The recipes of docs/clusters.md: what workers are told, and that they train.

tests/clusters runs all of them, on hosts with names.
"""

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time

import kubernetes_validate
import pytest

import documentation
import kubernetes_job
import movielens_files
from documentation import ROOT
from run_in_processes import environment

PAGE = "docs/clusters.md"
RECIPES = ROOT / "examples/clusters"
MANIFEST = RECIPES / "kubernetes.yaml"
#: The first that counts each index's failures, and the newest here.
KUBERNETES = ["1.29", kubernetes_validate.latest_version()]

pytestmark = [pytest.mark.tools, pytest.mark.xdist_group("clusters")]


def load(path, monkeypatch):
    """Imports an example, with its own folder's modules."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def numa():
    """The launcher, imported once: so often may a program define its flags."""
    with pytest.MonkeyPatch.context() as patch:
        yield load(RECIPES / "numa.py", patch)


@pytest.fixture
def manifest():
    return kubernetes_job.load(MANIFEST)


def clusters(environments):
    return [json.loads(each["TF_CONFIG"]) for each in environments]


# NUMA nodes.


@pytest.fixture
def system(tmp_path):
    """A machine of three nodes, one of which has memory only."""
    for node, processors in {0: "0-3,8-11", 1: "4-7,12-15", 10: ""}.items():
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(f"{processors}\n")
    (tmp_path / "online").write_text("0-1,10\n")
    return tmp_path


@pytest.mark.parametrize(
    ("processors", "nodes"),
    [(range(16), [0, 1]), ([12], [1]), ([3, 4], [0, 1]), ([0, 11], [0])],
)
def test_nodes_are_those_whose_processors_may_be_used(
    numa, system, processors, nodes
):
    assert numa.find_nodes(system, set(processors)) == nodes


def test_no_nodes_are_an_error(numa, system):
    with pytest.raises(SystemExit, match="no NUMA nodes"):
        numa.find_nodes(system, {99})


def test_this_machine_has_nodes(numa):
    if not numa._SYSTEM.is_dir():
        pytest.skip("this kernel doesn't say")
    assert numa.find_nodes(numa._SYSTEM, os.sched_getaffinity(0))


@pytest.mark.parametrize("here", [0, 1, 2])
def test_each_host_tells_its_processes_one_cluster(numa, here):
    # Addresses for documentation, which are no machine's.
    hosts = ["198.51.100.1", "198.51.100.2", "198.51.100.3"]
    hosts[here] = "localhost"
    found = clusters(numa.make_environments(hosts, 2, 2222))
    workers = [f"{host}:{port}" for host in hosts for port in (2222, 2223)]
    assert [each["cluster"] for each in found] == [{"worker": workers}] * 2
    assert [each["task"] for each in found] == [
        {"type": "worker", "index": 2 * here + i} for i in range(2)
    ]


def test_a_host_knows_itself_by_its_name(numa, monkeypatch):
    addresses = {"host0": "198.51.100.1", "host1": "127.0.0.1"}
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **kw: resolve(addresses[host], *args, **kw),
    )
    [found] = clusters(numa.make_environments(["host0", "host1"], 1, 7))
    assert found["cluster"]["worker"] == ["host0:7", "host1:7"]
    assert found["task"]["index"] == 1


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (
            ["198.51.100.1", "198.51.100.2"],
            "198.51.100.1 198.51.100.2 .* 0 are",
        ),
        (["127.0.0.1", "127.0.0.2"], "2 are"),
        (["no-such.invalid"], "no-such.invalid: "),
    ],
)
def test_hosts_that_are_not_right_are_refused(numa, hosts, message):
    with pytest.raises(SystemExit, match=message):
        numa.make_environments(hosts, 1, 2222)


needs_numactl = pytest.mark.skipif(
    shutil.which("numactl") is None, reason="there is no numactl"
)


def start_on_nodes(numa, monkeypatch, nodes, *command):
    monkeypatch.setattr(numa, "find_nodes", lambda *_: nodes)
    monkeypatch.setattr(numa.signal, "signal", lambda *_: None)
    start(numa, monkeypatch, "--", *command)


def start(numa, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["numa.py", *arguments])
    try:
        numa.main(numa.FLAGS(sys.argv))
    finally:
        numa.FLAGS.unparse_flags()


@needs_numactl
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no program to start"),
        (["--"], "no program to start"),
        (["--hosts=a,b"], "no program to start"),
        (["--hosts", "host0", "host1", "--", "true"], "'host1' .* commas"),
    ],
)
def test_wrong_arguments_are_refused(numa, monkeypatch, arguments, message):
    with pytest.raises(SystemExit, match=message):
        start(numa, monkeypatch, *arguments)


@needs_numactl
def test_processes_are_bound_and_told(numa, monkeypatch, capfd):
    command = ("sh", "-c", 'echo "$TF_CONFIG" $(numactl --show)')
    start_on_nodes(numa, monkeypatch, [0, 0], *command)
    lines = sorted(capfd.readouterr().out.splitlines())
    assert len(lines) == 2
    for i, line in enumerate(lines):
        assert f'"index": {i}}}' in line
        assert "policy: bind" in line
        assert "nodebind: 0 membind: 0" in line


@needs_numactl
def test_a_process_that_fails_ends_the_others(numa, monkeypatch):
    # The first would not end by itself, nor by SIGTERM.
    monkeypatch.setattr(numa, "_SECONDS_TO_END", 1.0)
    program = """case "$TF_CONFIG" in *'"index": 1'*) sleep 1; exit 3;; esac
        trap '' TERM; for i in $(seq 60); do sleep 1; done"""
    begin = time.monotonic()
    with pytest.raises(SystemExit, match="node 0 ended with 3"):
        start_on_nodes(numa, monkeypatch, [0, 0], "sh", "-c", program)
    assert time.monotonic() - begin < 20


def test_the_page_spells_out_what_the_launcher_does(numa, tmp_path):
    [spelled] = [
        code
        for code in documentation.code(PAGE, "bash")
        if "TF_CONFIG=" in code
    ]
    stub = tmp_path / "numactl"
    stub.write_text('#!/bin/sh\necho $TF_CONFIG "$@"\n')
    stub.chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", f"{spelled}\nwait"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = sorted(done.stdout.splitlines(), key=lambda x: 'index": 3' in x)
    told = clusters(
        numa.make_environments(["198.51.100.1", "localhost"], 2, 2222)
    )
    for node, (line, cluster) in enumerate(zip(lines, told, strict=True)):
        config, _, train = line.partition(" --cpunodebind")
        names = {"198.51.100.1": "host0", "localhost": "host1"}
        for old, new in names.items():
            cluster = json.loads(json.dumps(cluster).replace(old, new))
        assert json.loads(config) == cluster
        assert train.startswith(f"={node} --membind={node} -- .venv/bin/python")


# Slurm.


@pytest.mark.parametrize(
    ("node", "local", "index"),
    # Slurm's order is n9, n10; that of the addresses is another.
    [("n10", 0, 0), ("n10", 1, 1), ("n9", 0, 2), ("n9", 1, 3)],
)
def test_a_slurm_task_finds_itself(monkeypatch, node, local, index):
    cluster = load(ROOT / "examples/cluster.py", monkeypatch)
    for name, value in {
        "SLURM_JOB_ID": "1025",
        "SLURM_LOCALID": str(local),
        "SLURM_PROCID": str((index + 2) % 4),
        "SLURM_STEP_NODELIST": "n[9-10]",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURMD_NODENAME": node,
    }.items():
        monkeypatch.setenv(name, value)
    # As the page says: 16384 + 16 (job mod 1024) + i.
    workers = ["n10:16400", "n10:16401", "n9:16400", "n9:16401"]
    assert cluster._slurm_cluster() == {
        "cluster": {"worker": workers},
        "task": {"type": "worker", "index": index},
    }


# Kubernetes.


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_manifest_is_of_kubernetes_schema(manifest, version):
    assert sorted(manifest) == ["Job", "Service"]
    for each in manifest.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_finds_mistakes(manifest):
    job = manifest["Job"]
    job["spec"]["backOffLimit"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="backOff"):
        kubernetes_validate.validate(job, KUBERNETES[0], strict=True)


def test_the_manifest_says_what_a_schema_does_not_know(manifest):
    service, job = (manifest[kind]["spec"] for kind in ("Service", "Job"))
    template = job["template"]["spec"]
    container = kubernetes_job.container(manifest["Job"])
    # The pods' names are those of the headless Service.
    assert service["clusterIP"] == "None"
    assert template["subdomain"] == manifest["Service"]["metadata"]["name"]
    [label] = service["selector"].values()
    assert label == manifest["Job"]["metadata"]["name"]
    # A worker for each index, all at once.
    workers = int(kubernetes_job.environment(manifest["Job"], 0)["WORKERS"])
    assert job["completions"] == job["parallelism"] == workers
    # What the two ways of counting failures ask for.
    assert job["completionMode"] == "Indexed"
    assert template["restartPolicy"] == "Never"
    assert job["maxFailedIndexes"] == 0
    # Guaranteed: requests are the limits, CPUs are whole.
    assert set(container["resources"]) == {"limits"}
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    int(container["resources"]["limits"]["cpu"])
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["volumes"]}


def told(manifest, workers):
    """What the manifest's command gives a program as TF_CONFIG."""
    job = manifest["Job"]
    found = []
    for index in range(workers):
        *shell, script, name = kubernetes_job.container(job)["command"]
        script = re.sub(r"exec .*", 'echo "$TF_CONFIG"', script)
        variables = kubernetes_job.environment(job, index) | {
            "WORKERS": str(workers)
        }
        done = subprocess.run(
            [*shell, script, name],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        found.append(json.loads(done.stdout))
    return found


@pytest.mark.parametrize("workers", [1, 2, 11])
def test_pods_are_told_one_cluster(manifest, workers):
    names = [kubernetes_job.host_name(manifest, i) for i in range(workers)]
    assert told(manifest, workers) == [
        {
            "cluster": {"worker": [f"{name}:2222" for name in names]},
            "task": {"type": "worker", "index": index},
        }
        for index in range(workers)
    ]


def test_pods_train(manifest, tmp_path, monkeypatch):
    """With the manifest's own commands, and loopback's ports for names."""
    for name, value in environment("").items():
        monkeypatch.setenv(name, value)
    movielens_files.write(tmp_path)
    job = manifest["Job"]
    kubernetes_job.container(job)["resources"]["limits"]["cpu"] = "1"
    kubernetes_job.container(job)["args"] += [
        "--data",
        str(tmp_path),
        "--epochs",
        "1",
    ]
    free = "localhost", 0
    with socket.create_server(free) as one, socket.create_server(free) as two:
        ports = [each.getsockname()[1] for each in (one, two)]
    changes = {
        "/checkpoints": str(tmp_path / "checkpoints"),
        ".venv/bin/python": sys.executable,
        "examples/": f"{ROOT}/examples/",
        '"train-%g.train:2222"\' 0 $((WORKERS - 1))': (
            f'"localhost:%g"\' {ports[0]} {ports[1] - ports[0]} {ports[1]}'
        ),
    }

    def change(text):
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    with kubernetes_job.Pods(job, tmp_path, change) as running:
        end = time.monotonic() + 240
        while not running.manage():
            assert time.monotonic() < end, running.output(0)[-3000:]
            time.sleep(0.1)
        assert running.failures == [0, 0], running.output(0)[-3000:]
        output = running.output(0)
    assert "replicas: 2\n" in output
    assert re.search(r"^epoch 1/1: .*\ntest_rmse=\d", output, re.MULTILINE)
    assert (tmp_path / "checkpoints").is_dir()


def test_the_scripts_are_of_bash():
    scripts = [
        (RECIPES / "slurm.sh").read_text(),
        *documentation.code(PAGE, "bash"),
    ]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert len(scripts) == 6
