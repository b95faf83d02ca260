"""The command line: `tfrs-embed tpu-check`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.command_line import (
    FAILED,
    FINE,
    WRONG,
    InputError,
    add_command,
    checked,
    fail,
)
from tfrs_embed.tools.tpu_check.checking import check
from tfrs_embed.tools.tpu_check.compiling import Compiler
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.report import Report

# What --json prints of a report and of a program.
_OF_REPORT = ("tensorflow", "compiler", "not_compiled", "ended", "ended_by")
_OF_PROGRAM = (
    "name",
    "argument_bytes",
    "buffer_bytes",
    "unknown_shapes",
    "collectives",
)


def add_parser(commands: Any) -> None:
    """Adds the command to a parser's commands."""
    parser = add_command(
        commands,
        "tpu-check",
        "check a training script's TPU programs without a TPU",
        "Runs a script that trains on TPUs, up to the second call "
        "of a function that runs there, on a machine without any. TensorFlow "
        "traces and lowers its programs for the slice, and libtpu, where it is "
        "installed, compiles them. The script finds the slice as usual, with "
        "tf.distribute.cluster_resolver.TPUClusterResolver. Its own arguments "
        "come last, behind --. The exit status is 1 if a program was refused, "
        "or the script failed.",
        "tfrs-embed tpu-check train.py --topology v5p-8 -- --epochs 3",
    )
    parser.add_argument(
        "program",
        metavar="FILE.py[:FUNCTION]",
        help="the script; with a function, that is called with the TPUStrategy "
        "instead",
    )
    parser.add_argument(
        "--topology",
        required=True,
        type=checked(Slice.of),
        metavar="SLICE",
        help="such as v5p:2x2x1, v5p-8 or v6e-4",
    )
    parser.add_argument(
        "--compiler",
        metavar="PYTHON",
        help="a Python that has jax and libtpu [this one, if it has them]",
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="FOLDER",
        help="where to write the programs' texts",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text"
    )
    parser.set_defaults(run=run, arguments=[])


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, 1 if a program was refused."""
    compiler = Compiler(args.compiler) if args.compiler else None
    try:
        report = check(
            _program(args.program, args.arguments),
            args.topology,
            compiler=compiler,
            output=args.output,
        )
    except InputError as error:
        return fail(error, WRONG)
    except CheckError as error:
        # The text may have several lines, which `fail` would join.
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except OSError as error:
        return fail(error, FAILED)
    except Exception:
        traceback.print_exc()
        return fail(f"{args.program} failed; see above", FAILED)
    print(json.dumps(_as_json(report), indent=2) if args.json else report)
    return FAILED if report.refused else FINE


def _as_json(report: Report) -> dict[str, Any]:
    """The report without the programs' texts, which --output writes."""
    functions = [
        {
            "name": function.name,
            "host_operations": function.host_operations,
            "programs": [
                {
                    **{name: getattr(p.program, name) for name in _OF_PROGRAM},
                    "compiled": p.compiled and dataclasses.asdict(p.compiled),
                }
                for p in function.programs
            ],
        }
        for function in report.functions
    ]
    return {
        "slice": report.slice.name,
        **{name: getattr(report, name) for name in _OF_REPORT},
        "functions": functions,
    }


def _program(program: str, arguments: Sequence[str]) -> Callable[[Any], Any]:
    """Returns a function of the strategy that runs the code to check."""
    path, _, name = program.rpartition(":")
    if not path.endswith(".py"):
        path, name = program, ""
    if not pathlib.Path(path).is_file():
        raise InputError(f"there is no file {path!r}")
    folder = str(pathlib.Path(path).resolve().parent)

    def call(strategy: Any) -> None:
        before = sys.argv[:], sys.path[:]
        sys.argv = [path, *arguments]
        sys.path.insert(0, folder)  # As if Python ran the script.
        try:
            if not name:
                _run_script(path)
                return
            module = runpy.run_path(path, run_name="tpu_check")
            if not callable(module.get(name)):
                raise InputError(f"{path} has no function {name!r}")
            module[name](strategy)
        finally:
            sys.argv[:], sys.path[:] = before

    return call


def _run_script(path: str) -> None:
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        # A script reports a failure by its exit status.
        if ended.code not in (None, 0):
            raise CheckError(f"{path} ended with {ended.code}") from None
