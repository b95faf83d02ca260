"""The command line: `tfrs-embed tpu-check`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.command_line import (
    FAILED,
    FINE,
    WRONG,
    fail,
    show,
)
from tfrs_embed.tools.tpu_check.checking import check
from tfrs_embed.tools.tpu_check.compiling import Compiler
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.report import Report

# What --json prints of a report and of a program.
_OF_REPORT = (
    "tensorflow",
    "compiler",
    "not_compiled",
    "ended",
    "ended_by",
    "warnings",
)
_OF_PROGRAM = (
    "name",
    "argument_bytes",
    "buffer_bytes",
    "unknown_shapes",
    "collectives",
)


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns the exit status, 1 if a program was refused."""
    if not os.path.isfile(args.program):
        return fail(f"there is no file {args.program!r}", WRONG)
    try:
        tpu_slice = Slice.of(args.topology)
    except ValueError as error:
        return fail(f"--topology: {error}", WRONG)
    compiler = Compiler(args.compiler) if args.compiler else None
    try:
        report = check(
            lambda strategy: _run_script(args.program, args.arguments),
            tpu_slice,
            compiler=compiler,
        )
    except CheckError as error:
        # The text may have several lines, which `fail` would join.
        show(*f"error: {error}".split("\n"), file=sys.stderr)
        return FAILED
    except OSError as error:
        return fail(error, FAILED)
    except Exception:
        traceback.print_exc()
        return fail(f"{args.program} failed; see above", FAILED)
    text = json.dumps(_as_json(report), indent=2) if args.json else str(report)
    show(*text.split("\n"))
    return FAILED if report.refused or report.not_checked else FINE


def _as_json(report: Report) -> dict[str, Any]:
    """The report without the programs' texts."""
    return {
        "slice": report.slice.name,
        **{name: getattr(report, name) for name in _OF_REPORT},
        "programs": [
            {
                **{name: getattr(p.program, name) for name in _OF_PROGRAM},
                "compiled": p.compiled and dataclasses.asdict(p.compiled),
            }
            for p in report.programs
        ],
    }


def _run_script(path: str, arguments: Sequence[str]) -> None:
    before = sys.argv[:], sys.path[:]
    sys.argv = [path, *arguments]
    # As if Python ran the script.
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ended:
        # A script reports a failure by its exit status.
        if ended.code not in (None, 0):
            raise CheckError(f"{path} ended with {ended.code}") from None
    finally:
        sys.argv[:], sys.path[:] = before
