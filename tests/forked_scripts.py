"""Scripts in forks of a process that has imported TensorFlow already.

    python forked_scripts.py MODULE...

TensorFlow takes seconds to import; a fork has it at once. A fork runs a script
as `python SCRIPT ARGUMENTS` would, to the interpreter's own end: what a process
does when it exits is part of what is tested. Requests and replies are lines of
JSON on standard input and output; `ForkServer` writes and reads them.
"""

import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time


class ForkServer:
    """A process that has imported modules, and runs scripts in forks of itself.

    Args:
        modules: the modules. They must start no thread: a fork has only the one
            that forked, and locks that others held stay locked.
        env: environment variables on top of this process's, for all scripts.
    """

    def __init__(self, modules, env):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            # numpy's library would start threads.
            env={**os.environ, **env, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = self._process.stdout.readline()
        if ready != "ready\n":
            raise RuntimeError(f"No fork server: {ready or 'see its error'}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def ask(self, request):
        with self._lock:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())

    def start(self, command, env, log):
        """Runs a script in a fork.

        Args:
            command: the script's path and its arguments.
            env: the fork's environment variables.
            log: the file that it writes its output to.

        Returns:
            The fork.
        """
        # It is read before the fork has come to open it.
        pathlib.Path(log).touch()
        request = {"command": command, "env": env, "log": str(log)}
        return Fork(self, self.ask(request)["pid"])


class Fork:
    """A process of a fork server's; it has what tests use of a `Popen`."""

    def __init__(self, server, pid):
        self._server = server
        self.pid = pid
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})["code"]
        return self.returncode

    def wait(self, timeout=None):
        end = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        # One that has been waited for may have left its number to another.
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def _import(modules):
    # tf_keras imports it if it is there, and its Arrow starts threads.
    sys.modules["pandas"] = None
    for module in modules:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"{modules} have started {threads - 1} threads.")
    # The forks' searches for garbage would copy all memory.
    gc.collect()
    gc.freeze()


def _serve(requests, replies):
    """Forks when it is asked to.

    Returns:
        In a fork the request; in the server None, once nobody asks any more.
    """
    running = set()
    for line in iter(requests.readline, ""):
        request, code = json.loads(line), None
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            if pid:
                running.discard(pid)
                code = os.waitstatus_to_exitcode(status)
            reply = {"code": code}
        else:
            pid = os.fork()
            if not pid:
                return request
            running.add(pid)
            reply = {"pid": pid}
        print(json.dumps(reply), file=replies, flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return None


def redirect(log):
    """Has this process write to a file, and read nothing."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for stream, file in enumerate((null, output, output)):
        os.dup2(file, stream)


def _become(request):
    """Makes this fork the process that runs the script."""
    redirect(request["log"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["command"]
    # Before this file's folder, where modules are that scripts share.
    sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))


def main():
    # What modules print when they are imported is no reply.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import(sys.argv[1:])
    print("ready", file=replies, flush=True)
    request = _serve(sys.stdin, replies)
    if request is not None:
        replies.close()
        _become(request)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
