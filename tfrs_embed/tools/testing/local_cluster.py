"""A cluster of worker processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence


class LocalCluster:
    """Starts worker processes that find each other over loopback.

    Each worker gets its own `TF_CONFIG`, so a
    `tf.distribute.MultiWorkerMirroredStrategy()` in a worker joins the others.
    Each worker writes its output to a file.

    Example:
        >>> import json, sys
        >>> program = "import os; print(os.environ['TF_CONFIG'])"
        >>> command = [sys.executable, "-c", program]
        >>> with tfrs_embed.testing.LocalCluster(command, workers=2) as cluster:
        ...     codes = cluster.wait(timeout=60)
        ...     config = json.loads(cluster.output(1))
        >>> codes, config["task"]
        ([0, 0], {'type': 'worker', 'index': 1})

    Args:
        command: the command that each worker runs, with its arguments.
        workers: the number of workers.
        env: environment variables to add to this process's.

    Raises:
        ValueError: `workers` is less than 1.
    """

    def __init__(
        self,
        command: Sequence[str],
        workers: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}.")
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        addresses = [f"localhost:{port}" for port in _free_ports(workers)]
        self.processes = []
        for i in range(workers):
            task = {"type": "worker", "index": i}
            config = {"cluster": {"worker": addresses}, "task": task}
            process = self._start(
                list(command),
                {**os.environ, **(env or {}), "TF_CONFIG": json.dumps(config)},
                self.log(i),
            )
            self.processes.append(process)

    def _start(
        self, command: list[str], env: dict[str, str], log: pathlib.Path
    ) -> subprocess.Popen[bytes]:
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the workers that still run, and removes the logs."""
        for process in self.processes:
            # SIGKILL ends stopped processes as well.
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self.processes:
            process.wait()
        self._folder.cleanup()

    def wait(self, timeout: float | None = None) -> list[int]:
        """Waits until all workers have ended.

        Args:
            timeout: seconds; None: no limit.

        Returns:
            The workers' exit codes; a negative one is the signal that ended it.

        Raises:
            TimeoutError: a worker still runs. The error also has the output of
                workers that failed.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for i, process in enumerate(self.processes):
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                raise TimeoutError(
                    f"Worker {i} still runs after {timeout} s. Its output "
                    f"ends:\n{self.output(i)[-2000:]}{self._failures()}"
                ) from None
        return [process.returncode for process in self.processes]

    def _failures(self) -> str:
        """The text for workers that failed; the others may wait for them."""
        text = ""
        for i, process in enumerate(self.processes):
            code = process.poll()
            if code:
                text += (
                    f"\nWorker {i} has ended with exit code {code}. Its output "
                    f"ends:\n{self.output(i)[-2000:]}"
                )
        return text

    def signal(self, worker: int, number: signal.Signals) -> None:
        """Sends a signal to a worker.

        Args:
            worker: the worker's index.
            number: the signal.
        """
        self.processes[worker].send_signal(number)

    def log(self, worker: int) -> pathlib.Path:
        """The file with a worker's output; the cluster's end removes it.

        Args:
            worker: the worker's index.

        Returns:
            The file's path.
        """
        return pathlib.Path(self._folder.name) / f"worker-{worker}.log"

    def output(self, worker: int) -> str:
        """The output of a worker so far.

        Args:
            worker: the worker's index.

        Returns:
            The text of stdout and stderr.
        """
        return self.log(worker).read_text(errors="replace")


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for s in sockets:
            s.bind(("localhost", 0))
        return [s.getsockname()[1] for s in sockets]
