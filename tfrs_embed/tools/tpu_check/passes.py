"""Runs TensorFlow's passes over MLIR modules, in another process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import IO

from tfrs_embed.tools.tpu_check import pass_process
from tfrs_embed.tools.tpu_check.errors import CheckError, ending

_PLACE = re.compile(r"^-:\d+:\d+: ")
_LONGEST = 500


class _Process:
    """A process that runs passes; it ends with this one, or in a crash."""

    def __init__(self) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, pass_process.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            encoding="utf-8",
            # The passes log a line per operation. A fatal error is logged
            # whatever the level.
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    def ask(self, **request: object) -> str | None:
        """The reply; None if the process has crashed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The process writes to the same open file.
        self._log.seek(0)
        self._log.truncate()
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        reply = self._process.stdout.readline()
        return json.loads(reply) if reply else None

    def crash(self) -> str:
        """How the process has ended, and the last of what it logged."""
        self._process.communicate()
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        return ending(self._process.returncode, log)


_process: _Process | None = None


def start() -> None:
    """Starts the process, which takes seconds, unless it runs."""
    global _process
    if _process is None:
        _process = _Process()


def run_passes(
    text: str, pipeline: str, what: str, stage: str, sparse_cores: int = 0
) -> str:
    """Returns an MLIR module after a pipeline of passes.

    Args:
        text: the module.
        pipeline: the passes.
        what: the module's name in errors.
        stage: the pipeline's name in errors.
        sparse_cores: the number of SparseCores of a chip.

    Raises:
        CheckError: a pass refuses the module, or crashes.
    """
    global _process
    start()
    # After an interrupt it would have a reply that nobody has read.
    process, _process = _process, None
    assert process is not None
    result = process.ask(
        text=text, pipeline=pipeline, sparse_cores=sparse_cores
    )
    if result is None:
        raise CheckError(
            f"{what}: {stage} crashed ({process.crash()}): the program could "
            "not be checked, so whether a TPU takes it is unknown."
        )
    _process = process
    # A failure returns or raises only a message, which may contain the whole
    # program.
    if result.startswith("module"):
        return result
    raise CheckError(f"{what}: {_shortened(result)}", _operations(result))


def _operations(message: str) -> list[str]:
    """The kinds of operations that an error names."""
    head = message.partition(" = ")[0]
    found = re.findall(r"'tf\.(\w+)' op", head)
    return [kind for kind in found if not kind.startswith("_")]


def _shortened(message: str) -> str:
    """A pass's error, without the operations that it prints."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    said = [
        _PLACE.sub("", line)
        for line in lines
        if "see current operation" not in line and "called from" not in line
    ]
    return "; ".join(line[:_LONGEST] for line in said[:3]) or "a pass failed"
