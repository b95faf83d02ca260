"""The server of MovieLens's models, and its clients.

It is serve/server.cc, which a compiler makes, or serve/server.py.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

SOURCES = pathlib.Path(__file__).resolve().parent / "serve"


class Refused(Exception):
    """The server's answer is an error."""


def start_compiling(output: pathlib.Path) -> subprocess.Popen[str] | None:
    """Starts the compiler, which works while the model is trained."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return None
    libraries = tf.sysconfig.get_lib()
    return subprocess.Popen(
        [
            *(compiler, "-std=c++17", "-w", *tf.sysconfig.get_compile_flags()),
            *(str(SOURCES / "server.cc"), "-o", str(output), f"-L{libraries}"),
            *("-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2"),
            f"-Wl,-rpath,{libraries}",
        ],
        stderr=subprocess.PIPE,
        text=True,
    )


def finish_compiling(compiling: subprocess.Popen[str] | None) -> list[str]:
    """Returns the server's command."""
    plain = [sys.executable, str(SOURCES / "server.py")]
    if compiling is None:
        print("no C++ compiler: a Python process serves")
        return plain
    _, errors = compiling.communicate()
    if compiling.returncode:
        print(f"server.cc doesn't compile: a Python process serves\n{errors}")
        return plain
    print("TensorFlow's C++ loader serves")
    arguments = compiling.args
    assert isinstance(arguments, list)
    return [arguments[arguments.index("-o") + 1]]


@contextlib.contextmanager
def serving(command: Sequence[str], path: pathlib.Path) -> Iterator[int]:
    """Serves a model; yields the port."""
    with (
        # Each start has TensorFlow's first lines, which count if one fails.
        tempfile.TemporaryFile("w+", errors="replace") as log,
        subprocess.Popen(
            [*command, str(path)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        try:
            assert server.stdout is not None
            yield int(server.stdout.readline())
        except Exception:
            log.seek(0)
            sys.stderr.write(log.read())
            raise
        finally:
            server.kill()


class Client:
    """A connection to a server on this machine.

    Args:
        port: the server's.
    """

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._stream = self._connection.makefile("rw", newline="\n")

    def ask(
        self, signature: str = "serving_default", **inputs: Any
    ) -> dict[str, np.ndarray]:
        """Calls a signature with vectors of numbers, or scalar strings.

        Args:
            signature: its name.
            **inputs: the inputs by name.

        Returns:
            The outputs, scalars or vectors of float64, by name.

        Raises:
            Refused: the server's answer is an error.
        """
        lines = [f"@{signature}"]
        for name, value in inputs.items():
            if isinstance(value, str):
                lines.append(f"{name} scalar {value}")
            else:
                numbers = " ".join(map(str, value.tolist()))
                lines.append(f"{name} {len(value)} {numbers}")
        self._stream.write("\n".join([*lines, "\n"]))
        self._stream.flush()
        outputs = {}
        for line in iter(self._stream.readline, "\n"):
            name, shape, *values = line.split(" ")
            if name == "error":
                raise Refused(line.strip())
            found = np.array(values, np.float64)
            outputs[name] = found[0] if shape == "scalar" else found
        return outputs

    def close(self) -> None:
        """Closes the connection."""
        self._stream.close()
        self._connection.close()
