"""The command line: `tfrs-embed`, and `python -m tfrs_embed`.

It is no part of the package, whose import takes the seconds that TensorFlow's
does: what it says of itself it says at once, and TensorFlow's log is quiet
before TensorFlow is there. A command's module is imported where that command is
given.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import pathlib
import re
import runpy
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

#: Each command's module, whose `add_parser` adds it, and what it is for, as
#: its own `help` says.
COMMANDS = {
    "info": (
        "tfrs_embed.tools.commands.info",
        "show versions, devices and settings, for a bug report",
    ),
    "plan": (
        "tfrs_embed.tools.planner.command",
        "plan where tables go, and what a step will cost",
    ),
    "limits": (
        "tfrs_embed.tools.commands.limits",
        "find the limits that SparseCores of TPUs need",
    ),
    "tpu-check": (
        "tfrs_embed.tools.tpu_check.command",
        "check a training script's TPU programs without a TPU",
    ),
    "checkpoint": (
        "tfrs_embed.tools.conversion.command",
        "show what a checkpoint holds, and convert others'",
    ),
    "report": (
        "tfrs_embed.tools.report.command",
        "make a page of pictures of checkpoints, plans, limits or logs",
    ),
    "kernels": (
        "tfrs_embed.tools.commands.kernels",
        "compile the kernels for the CPU, and tell whether they are in use",
    ),
}

_EPILOG = """\
example:
  tfrs-embed info

exit status: 0: all is well. 1: the work failed, or a check found something.
2: the command line or an input is wrong.

tfrs-embed COMMAND --help says more.
"""
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# Information, and what says that it is not in a file.
_STARTING = re.compile(rb"I\d{4} |WARNING: All log messages before absl::")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: those of the command line; None: the process's.

    Returns:
        The process's exit status.
    """
    environment = dict(os.environ)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Behind it are the arguments of a script that a command runs.
    end = given.index("--") if "--" in given else len(given)
    named = next((each for each in given[:end] if each[:1] != "-"), None)

    def work() -> int:
        if named in COMMANDS and _LOG_LEVEL not in environment:
            _import_quietly()
        parser = make_parser([named] if named in COMMANDS else [])
        if not given:
            parser.print_help()
            return 0
        args = parser.parse_args(given[:end])
        if "arguments" in args:
            args.arguments = given[end + 1 :]
        elif end < len(given):
            parser.error(f"{named} runs no script that takes arguments.")
        args.environment = environment
        return int(args.run(args))

    return finish(work)


def finish(work: Callable[[], int]) -> int:
    """Does a command's work, and says in a line what ends it early.

    Args:
        work: does it, and returns the process's exit status.

    Returns:
        The process's exit status.
    """
    try:
        status = work()
        sys.stdout.flush()
        return status
    except ImportError as error:  # TensorFlow's, or of what a command needs.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # Of head, say, which has read enough.
        # What is still to be written would be an error at the process's end.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("error: interrupted.", file=sys.stderr)
        return 130


def make_parser(commands: Collection[str]) -> argparse.ArgumentParser:
    """Makes the command line's parser.

    Args:
        commands: the commands whose modules are imported. The others have
            their line in the help, and no options.

    Returns:
        The parser.
    """
    parser = argparse.ArgumentParser(
        prog="tfrs-embed",
        description="Tools for models with embedding tables.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action="version", version=f"%(prog)s {_version()}"
    )
    added = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        if name in commands:
            importlib.import_module(module).add_parser(added)
        else:
            added.add_parser(name, help=summary)
    return parser


def _import_quietly() -> None:
    """Imports TensorFlow, without what it always says as it starts."""
    os.environ[_LOG_LEVEL] = "3"
    if "tensorflow" in sys.modules or not hasattr(os, "fork"):
        return
    # The variable doesn't reach some lines of TensorFlow 2.21. A process takes
    # them out, rather than this one: what a library says before it aborts this
    # one is still passed on.
    read, write = os.pipe()
    stderr = os.dup(2)
    child = os.fork()
    if not child:
        os.close(write)
        _pass_on(read, stderr)
    os.close(read)
    os.dup2(write, 2)
    os.close(write)
    try:
        importlib.import_module("tensorflow")
    finally:
        os.dup2(stderr, 2)  # The pipe's end, unless a process has it too.
        os.close(stderr)
        for _ in range(100):
            if os.waitpid(child, os.WNOHANG)[0]:
                break
            time.sleep(0.01)


def _pass_on(source: int, target: int) -> NoReturn:
    """Copies lines but those that say that TensorFlow starts, and exits."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Until the pipe's end.
        with os.fdopen(source, "rb") as lines:
            for line in lines:
                if not _STARTING.match(line):
                    os.write(target, line)
    finally:
        os._exit(0)


def _version() -> str:
    """The package's version, without importing it."""
    spec = importlib.util.find_spec("tfrs_embed")
    assert spec is not None and spec.origin is not None
    path = pathlib.Path(spec.origin).with_name("compat") / "version.py"
    return str(runpy.run_path(str(path))["__version__"])
