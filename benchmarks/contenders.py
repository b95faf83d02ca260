"""A process of a benchmark's contender, which takes turns with others."""

import json
import os
import subprocess
import sys
import tempfile


class Contender:
    """A process that answers each line of its input with a line of JSON.

    Args:
        *arguments: of the program that makes it, which it is, too.
        python: the interpreter; None: this one.
        **environment: more variables of its environment.
    """

    def __init__(self, *arguments, python=None, **environment):
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python or sys.executable, sys.argv[0], *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        )
        self.pid = self._process.pid
        #: Why there is none.
        self.missing = ""

    def begin(self, function, *arguments):
        """Calls a function; if the process ends in it, it is missing."""
        try:
            return function(*arguments)
        except RuntimeError as error:
            self.missing = str(error)

    def send(self, line):
        print(line, file=self._process.stdin, flush=True)

    def ask(self, line):
        """Sends a line, and returns the answer."""
        try:
            self.send(line)
        except BrokenPipeError:  # It ended before.
            self._fail()
        return self.read()

    def read(self):
        """Returns the next answer.

        Raises:
            RuntimeError: the process has ended.
        """
        line = self._process.stdout.readline()
        return json.loads(line) if line else self._fail()

    def close(self):
        if not self.missing:
            self._process.communicate()
        self._log.close()

    def _fail(self):
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        last = lines[-1] if lines else ""
        raise RuntimeError(f"it ended with {code}: {last}")
