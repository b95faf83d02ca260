"""A Slurm cluster of daemons on this machine, one host for each."""

import contextlib
import os
import pathlib
import secrets
import shutil
import signal
import subprocess
import time

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
CONTROLLER = "ctl"
CONFIG = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
SlurmdTimeout=20
ReturnToService=2
NodeName={nodes} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing():
    """Why Slurm can't run here, or None."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            return f"there is no {program}"
    return None


class Slurm:
    """Slurm's daemons.

    Args:
        hosts: the hosts, of which CONTROLLER is one.
        nodes: the hosts that jobs run on.
        cpus: the number of CPUs of each.
        folder: an empty folder, for their files.
    """

    def __init__(self, hosts, nodes, cpus, folder):
        self._hosts = hosts
        self._nodes = nodes
        self._cpus = cpus
        self._folder = folder
        self._daemons = contextlib.ExitStack()
        self._processes = {}

    def __enter__(self):
        config = self._folder / "slurm.conf"
        config.write_text(
            CONFIG.format(
                controller=CONTROLLER,
                folder=self._folder,
                nodes=",".join(self._nodes),
                cpus=self._cpus,
            )
        )
        # No cgroup is made: the plugin is there because slurmd loads one.
        (self._folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        with contextlib.ExitStack() as self._daemons:
            self._start(
                CONTROLLER,
                "munged",
                "--foreground",
                "--force",
                *(
                    f"--{kind}-file={self._folder}/munge.{kind}"
                    for kind in ("key", "pid", "log", "seed")
                ),
                f"--socket={self._folder}/munge.socket",
            )
            self._start(CONTROLLER, "slurmctld", "-D", "-i", "-f", config)
            for node in self._nodes:
                (self._folder / f"spool-{node}").mkdir()
                self.repair(node)
            self._wait_until_idle()
            self._daemons = self._daemons.pop_all()
        return self

    def __exit__(self, *_):
        self._daemons.close()

    def _start(self, host, *command):
        log = self._folder / f"{command[0]}-{host}.log"
        with log.open("ab") as file:
            process = subprocess.Popen(
                self._hosts.on(host, *command),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._processes[host] = process

        def stop():
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

        self._daemons.callback(stop)

    def repair(self, node):
        """Starts a node's daemon."""
        self._start(node, "slurmd", "-D", "-f", self._folder / "slurm.conf")

    def fail(self, node):
        """Kills all that runs on a node."""
        here = os.readlink(f"/proc/{self._processes[node].pid}/ns/net")
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(process / "ns/net") == here:
                    os.kill(int(process.name), signal.SIGKILL)
        self._processes[node].wait()

    def _wait_until_idle(self):
        end = time.monotonic() + 60
        while (states := self.run("sinfo", "-hNo", "%T", check=False)) != (
            "idle\n" * len(self._nodes)
        ):
            if time.monotonic() > end:
                raise TimeoutError(f"The nodes are {states!r}.\n{self.logs()}")
            time.sleep(0.5)

    def run(self, *command, check=True, **kwargs):
        """Runs one of Slurm's commands; returns what it prints."""
        done = subprocess.run(
            self._hosts.on(
                CONTROLLER,
                "env",
                f"SLURM_CONF={self._folder}/slurm.conf",
                *command,
            ),
            capture_output=True,
            text=True,
            **kwargs,
        )
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}\n{self.logs()}")
        return done.stdout

    def logs(self):
        """The ends of the daemons' logs."""
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self._folder.glob("*.log"))
        )
