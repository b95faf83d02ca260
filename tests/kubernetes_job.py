"""The Job of a Kubernetes manifest, run as processes of this machine.

It does a part of what Kubernetes does: there is a pod for each index, with the
manifest's command, arguments and environment. A pod that fails is started anew,
by itself, up to `backoffLimitPerIndex` times.
"""

import os
import subprocess
import time

import yaml

#: Kubernetes begins with 10 s.
BACKOFF_S = 1.0


def load(path):
    """The objects of a manifest, by kind."""
    objects = list(yaml.safe_load_all(path.read_text()))
    return {each["kind"]: each for each in objects}


def container(job):
    """The one container of a Job's pods."""
    [found] = job["spec"]["template"]["spec"]["containers"]
    return found


def environment(job, index):
    """The variables that a pod has from Kubernetes."""
    limits = container(job)["resources"]["limits"]
    found = {"JOB_COMPLETION_INDEX": str(index)}
    for each in container(job)["env"]:
        if "value" in each:
            found[each["name"]] = each["value"]
        else:
            resource = each["valueFrom"]["resourceFieldRef"]["resource"]
            found[each["name"]] = str(limits[resource.removeprefix("limits.")])
    return found


def host_name(manifest, index):
    """A pod's name in the headless Service."""
    template = manifest["Job"]["spec"]["template"]["spec"]
    name = manifest["Job"]["metadata"]["name"]
    return f"{name}-{index}.{template['subdomain']}"


class Pods:
    """The pods of a Job.

    Args:
        job: the Job.
        folder: where logs go, which is also the containers' WORKDIR.
        change: changes a string of the command and the arguments.
        on: gives the command that runs a command in the pod of an index.
    """

    def __init__(self, job, folder, change, on=lambda index, *command: command):
        self._job = job
        self._folder = folder
        self._change = change
        self._on = on
        self._failures = [0] * job["spec"]["completions"]
        self._next_start = list(self._failures)
        self.processes = [self._start(i) for i in range(len(self._failures))]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in filter(None, self.processes):
            process.kill()
            process.wait()

    def _start(self, index):
        spec = container(self._job)
        command = [self._change(s) for s in spec["command"] + spec["args"]]
        with self._log(index).open("ab") as log:
            return subprocess.Popen(
                self._on(index, *command),
                cwd=self._folder,
                env={**os.environ, **environment(self._job, index)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _log(self, index):
        return self._folder / f"pod-{index}.log"

    def output(self, index):
        """The output of all pods that an index has had."""
        return self._log(index).read_text(errors="replace")

    def manage(self):
        """Starts pods anew; tells whether the Job is complete.

        Raises:
            RuntimeError: the Job has failed.
        """
        limit = self._job["spec"]["backoffLimitPerIndex"]
        now = time.monotonic()
        for i, process in enumerate(self.processes):
            if process is None:
                if now >= self._next_start[i]:
                    self.processes[i] = self._start(i)
            elif process.poll():
                self._failures[i] += 1
                if self._failures[i] > limit:
                    raise RuntimeError(f"Pod {i}:\n{self.output(i)[-3000:]}")
                self.processes[i] = None
                delay = BACKOFF_S * 2 ** (self._failures[i] - 1)
                self._next_start[i] = now + delay
        return all(p is not None and p.poll() == 0 for p in self.processes)

    @property
    def failures(self):
        """How many pods of each index have failed."""
        return list(self._failures)
