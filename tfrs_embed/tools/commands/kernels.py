"""The command `tfrs-embed kernels`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from tfrs_embed import kernels
from tfrs_embed.kernels import build
from tfrs_embed.tools.command_line import FAILED, FINE, add_command, describe


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    describe(
        parser,
        "Compiled kernels make CPUs several times faster, with the same "
        "numbers. They are optional, and fit one TensorFlow: compile them "
        "again after another one was installed.",
        "tfrs-embed kernels build",
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    builder = add_command(
        actions,
        "build",
        "compile them for the TensorFlow that is installed",
        "Compiles the kernels, in half a minute. It needs a C++17 compiler: "
        "$CXX, or g++, clang++ or c++. The result fits any processor of this "
        "kind. Nothing is done if there is a build already that fits.",
        "tfrs-embed kernels build --if-possible",
    )
    build.add_arguments(builder)
    builder.set_defaults(run=build.run)
    status = add_command(
        actions,
        "status",
        "tell whether they are in use, or why not",
        "Loads the kernels, and tells where they are and which instruction set "
        "of this processor they use. The exit status is 1 if they are not in "
        "use.",
        "tfrs-embed kernels status --json",
    )
    status.add_argument(
        "--json", action="store_true", help="print JSON instead of a sentence"
    )
    status.set_defaults(run=run_status)


def run_status(args: argparse.Namespace) -> int:
    """Tells whether the kernels are in use.

    Returns:
        The process's exit status: 1 if they are not in use.
    """
    status = kernels.status()
    if args.json:
        print(json.dumps(dataclasses.asdict(status), indent=2))
    else:
        print(status)
    return FINE if status.loaded else FAILED
