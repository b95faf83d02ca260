"""The command line: `tfrs-embed`, and `python -m tfrs_embed`.

This module is outside the package because help and errors of the command line
must come without TensorFlow's import, which takes 5 seconds: importing any
module of the package imports TensorFlow. The module of a command is imported
when the arguments are known to be right.
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
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

EXIT_STATUS = """\
exit status: 0: all is well. 1: the work failed, or a check found something.
2: the command line or an input is wrong.
"""
_WIDTH = 78
_INT64_MAX = 2**63 - 1
_SOURCE = (
    "a checkpoint; a folder of checkpoints (its latest), of a SavedModel or of "
    "SOK's files; or a file of Keras"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command, and returns the process's exit status.

    Args:
        arguments: the command line's arguments; None: the process's.
    """
    environment = dict(os.environ)
    given = list(sys.argv[1:] if arguments is None else arguments)
    # The arguments after "--" are those of a script that a command runs.
    end = given.index("--") if "--" in given else len(given)

    def work() -> int:
        parser = make_parser()
        if not given:
            parser.print_help()
            return 0
        args = parser.parse_args(given[:end])
        if "arguments" in args:
            args.arguments = given[end + 1 :]
        elif end < len(given):
            parser.error(f"{given[0]} runs no script that takes arguments.")
        # TensorFlow is to log errors only.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        if not _loads():
            return 1
        args.environment = environment
        module, _, function = args.run.partition(":")
        return int(getattr(importlib.import_module(module), function)(args))

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


def make_parser() -> argparse.ArgumentParser:
    """Returns the command line's parser: the list of all commands.

    A command's `run` is "module:function"; the module may import TensorFlow.
    """
    parser = argparse.ArgumentParser(
        prog="tfrs-embed",
        description="Tools for models with embedding tables.",
        epilog=(
            f"example:\n  tfrs-embed info\n\n{EXIT_STATUS}\n"
            "tfrs-embed COMMAND --help says more.\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"%(prog)s {_versions()['__version__']}",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_command(
        commands,
        "info",
        "show versions, devices and settings, for a bug report",
        "Shows the settings that others need to reproduce a bug: versions, "
        "processor, memory, devices, which Keras tf.keras is, whether compiled "
        "kernels are in use, and environment variables that this package or "
        "TensorFlow reads. TF_CONFIG has the names of a cluster's hosts. It "
        "shows no other variables, whatever their names begin with. It prints "
        "JSON.",
        "tfrs-embed info > info.json",
        run="tfrs_embed.tools.commands.info:run",
    )
    _add_tpu_check(commands)
    _add_checkpoint(commands)
    _add_report(commands)
    _add_kernels(commands)
    return parser


def _add_tpu_check(commands: Any) -> None:
    command = _add_command(
        commands,
        "tpu-check",
        "check a training script's TPU programs without a TPU",
        "Runs a script that trains on TPUs, up to the second call "
        "of a function that runs there, on a machine without any. TensorFlow "
        "traces and lowers its programs for the slice, and libtpu, where it is "
        "installed, compiles them. The script finds the slice as usual, with "
        "tf.distribute.cluster_resolver.TPUClusterResolver. Its own arguments "
        "come last, behind --. The exit status is 1 if a program was refused "
        "or could not be checked, or the script failed.",
        "tfrs-embed tpu-check train.py --topology v5p-8 -- --epochs 3",
        run="tfrs_embed.tools.tpu_check.command:run",
        arguments=[],
    )
    add = command.add_argument
    add("program", metavar="FILE.py", help="the script")
    add(
        "--topology",
        required=True,
        metavar="SLICE",
        help="such as v5p:2x2x1, v5p-8 or v6e-4",
    )
    add(
        "--compiler",
        metavar="PYTHON",
        help="a Python that has jax and libtpu [this one, if it has them]",
    )
    add("--json", action="store_true", help="print JSON instead of text")


def _add_checkpoint(commands: Any) -> None:
    command = _add_command(
        commands,
        "checkpoint",
        "show what a checkpoint holds, and convert others'",
        "Looks into checkpoints of embedding tables: of this package, of "
        "TensorFlow's TPU embeddings (TensorFlow Recommenders' too), of "
        "keras_rs and Keras; SavedModels, files of Keras, and files of "
        "SparseOperationKit.",
        "tfrs-embed checkpoint inspect checkpoints/",
        run="tfrs_embed.tools.conversion.command:run",
    )
    actions = command.add_subparsers(
        required=True, metavar="COMMAND", dest="action"
    )
    inspect = _add_command(
        actions,
        "inspect",
        "show tables, slots, sizes and norms",
        "Shows a checkpoint's tables, with norms and with counts of what "
        "should not be there. It reads all values, some MiB at a time. The "
        "exit status is 1 if a file is damaged. A delta is shown as the full "
        "checkpoint that it stands for, with its chain.",
        "tfrs-embed checkpoint inspect checkpoints/ckpt-10 --json",
    )
    inspect.add_argument("source", metavar="path", help=_SOURCE)
    inspect.add_argument(
        "--json", action="store_true", help="print JSON instead of tables"
    )
    _add_convert(actions)
    compact = _add_command(
        actions,
        "compact",
        "merge a delta and its chain into one full checkpoint",
        "Writes the full checkpoint that a delta stands for, without the model "
        "and in bounded memory. The chain stays as it is.",
        "tfrs-embed checkpoint compact checkpoints/ckpt-10 full/ckpt-10",
    )
    compact.add_argument(
        "source", metavar="path", help="a delta, or a folder: its latest one"
    )
    compact.add_argument("destination", help="the checkpoint to write")


def _add_convert(actions: Any) -> None:
    command = _add_command(
        actions,
        "convert",
        "write another checkpoint's tables as one of this package's",
        "Writes a checkpoint that this package's layers restore, tables and "
        "slots by name. What is not taken over is said on stderr.",
        "tfrs-embed checkpoint convert old/ckpt-10 new/ckpt --layer embedding",
    )
    add = command.add_argument
    add("source", help=_SOURCE)
    add("destination", help="the checkpoint to write")
    add(
        "--layer",
        action="append",
        default=[],
        metavar="[OLD=]NEW",
        help="the layer's path among the objects of the checkpoint to write, "
        'e.g. "model/embedding"; without OLD there must be one layer',
    )
    add(
        "--table",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="another name for a table; a variable of SOK's, or a layer of one "
        "table, becomes a table of this name of the layer that --layer says",
    )
    add(
        "--ids",
        action="store_true",
        help="make tables of ids of SOK's variables whose keys are 0, 1, 2 ...",
    )
    add(
        "--step",
        type=_count,
        help="the number of updates made, where the source doesn't tell it",
    )


def _add_report(commands: Any) -> None:
    command = _add_command(
        commands,
        "report",
        "make a page of pictures of checkpoints, exported models or logs",
        "Makes one page of HTML with the tables' sizes, norms, dead and hot "
        "rows, and their growth over checkpoints. docs/reports.md shows one.",
        "tfrs-embed report checkpoints/ logs/ --output report.html",
        run="tfrs_embed.tools.report.command:run",
    )
    command.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="a checkpoint, a folder of some, or several of one run; an "
        "exported model; or a folder of tfrs_embed.monitoring",
    )
    command.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("report.html"),
        metavar="REPORT.html",
        help="where to write the page [report.html]",
    )


def _add_kernels(commands: Any) -> None:
    command = _add_command(
        commands,
        "kernels",
        "compile the kernels for the CPU, and tell whether they are in use",
        "Compiled kernels make CPUs several times faster, with the same "
        "numbers. They are optional, and fit one TensorFlow: compile them "
        "again after another one was installed.",
        "tfrs-embed kernels build",
    )
    actions = command.add_subparsers(required=True, metavar="ACTION")
    build = _add_command(
        actions,
        "build",
        "compile them for the TensorFlow that is installed",
        "Compiles the kernels, in a minute or two. It needs a C++17 compiler: "
        "$CXX, or g++, clang++ or c++. The result fits any processor of this "
        "kind. Nothing is done if there is a build already that fits.",
        "tfrs-embed kernels build --if-possible",
        run="tfrs_embed.kernels.build:run",
    )
    build.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="PATH",
        help="file to write, or folder [where it is found]",
    )
    build.add_argument(
        "--force", action="store_true", help="even if there is a build already"
    )
    build.add_argument(
        "--if-possible",
        action="store_true",
        help="succeed if they can't be compiled, having said so",
    )
    status = _add_command(
        actions,
        "status",
        "tell whether they are in use, or why not",
        "Loads the kernels, and tells where they are and which instruction set "
        "of this processor they use. The exit status is 1 if they are not in "
        "use.",
        "tfrs-embed kernels status --json",
        run="tfrs_embed.tools.commands.kernels:run_status",
    )
    status.add_argument(
        "--json", action="store_true", help="print JSON instead of a sentence"
    )


def _add_command(
    commands: Any,
    name: str,
    summary: str,
    description: str,
    example: str,
    **defaults: Any,
) -> argparse.ArgumentParser:
    """Adds a command, and returns its parser.

    Args:
        commands: the result of `add_subparsers`.
        name: the command's name.
        summary: its purpose in a few words.
        description: its work, in one paragraph.
        example: a command line.
        **defaults: values of the parsed arguments: `run`, and others.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description, _WIDTH),
        epilog=f"example:\n  {example}\n\n{EXIT_STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(**defaults)
    return parser


def _count(text: str) -> int:
    """Returns the int64 that an argument gives, at least 0."""
    valid = text.isascii() and text.isdigit()
    if not valid or not 0 <= int(text) <= _INT64_MAX:
        # argparse doesn't show the text of a ValueError.
        raise argparse.ArgumentTypeError(
            f"must be an integer from 0 to {_INT64_MAX}, got {text!r}"
        )
    return int(text)


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
