"""The command line: `tfrs-embed`, and `python -m tfrs_embed`.

This module is outside the package because `tfrs-embed --help` must answer
without TensorFlow's import, which takes 5 seconds: importing any module of the
package imports TensorFlow. The module of a command is imported when that
command is given.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

#: By command, the module whose `add_options` adds its options, and its purpose.
COMMANDS = {
    "info": (
        "tfrs_embed.tools.commands.info",
        "show versions, devices and settings, for a bug report",
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
        "make a page of pictures of checkpoints, exported models or logs",
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the process's exit status.

    Args:
        arguments: the command line's arguments; None: the process's.
    """
    environment = dict(os.environ)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The arguments after "--" are those of a script that a command runs.
    end = given.index("--") if "--" in given else len(given)
    named = next((each for each in given[:end] if each[:1] != "-"), None)

    def work() -> int:
        if named in COMMANDS:  # TensorFlow is to log errors only.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
            if not _loads():
                return 1
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
    """Runs `work`, which returns the exit status; prints errors in one line."""
    try:
        status = work()
        sys.stdout.flush()
        return status
    except ImportError as error:  # A package is missing or damaged.
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # The reader, such as head, has read enough.
        # Python flushes stdout at its end, which must not fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("error: interrupted.", file=sys.stderr)
        return 130


def make_parser(commands: Collection[str]) -> argparse.ArgumentParser:
    """Returns the command line's parser.

    Args:
        commands: the commands whose modules are imported and add their options.
            The others have a line in the help.
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
        command = added.add_parser(name, help=summary)
        if name in commands:
            importlib.import_module(module).add_options(command)
    return parser


def _version() -> str:
    return str(_versions()["__version__"])


def _versions() -> dict[str, Any]:
    """Returns the package's versions, without importing the package."""
    spec = importlib.util.find_spec("tfrs_embed")
    assert spec is not None and spec.origin is not None
    path = pathlib.Path(spec.origin).with_name("compat") / "version.py"
    return runpy.run_path(str(path))


def _loads() -> bool:
    """Whether TensorFlow's wheel for TPUs can be imported; says why not.

    With a libtpu that doesn't fit, the import would abort this process.
    """
    found = {}
    for name in ("tensorflow", "tensorflow-tpu", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if "tensorflow-tpu" not in found:
        return True
    wheel = f"tensorflow-tpu {found['tensorflow-tpu']}"
    libtpu, known = found.get("libtpu", "0"), _versions()
    too_new = _numbers(libtpu) > _numbers(known["NEWEST_LIBTPU"])
    if both := "tensorflow" in found:
        problem = (
            f"warning: tensorflow {found['tensorflow']} and {wheel} are both "
            "installed and have the same files. Uninstall both, install one"
        )
    # The variable names a libtpu of another place.
    elif too_new and "TPU_LIBRARY_PATH" not in os.environ:
        problem = (
            f"error: {wheel} aborts with libtpu {libtpu} when it is imported: "
            f"pip install libtpu=={known['LIBTPU']}"
        )
    else:
        return True
    print(f"{problem}. docs/tpu.md has the commands.", file=sys.stderr)
    return both


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
