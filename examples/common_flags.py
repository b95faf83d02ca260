"""Flags that several examples have, and how all examples read theirs.

A program calls the functions for the flags it has, with defaults of its own,
and starts with

    app.run(main, flags_parser=common_flags.parse)
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags, logging

FLAGS = flags.FLAGS

# They are the program's, so that its --help lists them.
flags.disclaim_key_flags()


def parse(argv: Sequence[str]) -> list[str]:
    """Reads a command line of flags alone, as `app.run` wants it.

    Args:
        argv: the program's name and the flags. Dashes in names of flags are
            taken for underscores.

    Returns:
        The program's name.

    Raises:
        SystemExit: a flag is wrong, or something is no flag.
    """
    try:
        name, *rest = FLAGS([_with_underscores(each) for each in argv])
    except flags.Error as error:
        raise SystemExit(f"{error} (--help lists the flags)") from None
    if rest:
        raise SystemExit(
            f"'{rest[0]}' belongs to no flag (--help lists the flags)"
        )
    if FLAGS["verbosity"].using_default_value:
        # app.run would have libraries tell of what is as it should be.
        logging.set_verbosity(logging.WARNING)
    return [name]


def _with_underscores(argument: str) -> str:
    match = re.match(r"--[a-z][a-z0-9-]*", argument)
    if match is None:
        return argument
    name = match[0][2:].replace("-", "_")
    return f"--{name}{argument[match.end() :]}"


# Kinds of flags.


class _Parser(flags.ArgumentParser):
    """Reads a flag by a function that raises ValueError."""

    def __init__(self, function: Callable[[str], Any], what: str) -> None:
        super().__init__()
        self.function = function
        self.syntactic_help = what

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):
            return argument  # A default.
        try:
            return self.function(argument)
        except ValueError:
            raise ValueError(f"must be {self.syntactic_help}") from None


def count(name: str, default: int | None, what: str) -> None:
    """Defines a flag that is a positive number.

    Args:
        name: the flag's.
        default: its value if it isn't given.
        what: the help.
    """
    flags.DEFINE_integer(name, default, what, lower_bound=1)


def path(name: str, what: str) -> None:
    """Defines a flag that is a path; without it the path is None.

    Args:
        name: the flag's.
        what: the help.
    """

    def read(text: str) -> pathlib.Path:
        if not text:
            raise ValueError
        return pathlib.Path(text)

    flags.DEFINE(_Parser(read, "a path"), name, None, what)


def _rows_or_none(text: str) -> int | None:
    if text == "none":
        return None
    if int(text) < 0:
        raise ValueError
    return int(text)


# What several programs have.


def data() -> None:
    """Defines the flag that says where MovieLens-100K is."""
    path("data", "folder of the files ml-100k.*; if not given, recbole's")


def seed() -> None:
    """Defines the flag --seed."""
    flags.DEFINE_integer(
        "seed", 0, "of initial values and shuffling", lower_bound=0
    )


def training(epochs: int, size_threshold: int, batch_size: int = 1000) -> None:
    """Defines the flags of programs that train on MovieLens-100K.

    Args:
        epochs: the default of --epochs.
        size_threshold: the default of --size_threshold.
        batch_size: the default of --batch_size.
    """
    data()
    count("epochs", epochs, "passes over the ratings")
    count("batch_size", batch_size, "ratings per step, of all replicas")
    flags.DEFINE(
        _Parser(_rows_or_none, "a number of rows, or none"),
        "size_threshold",
        size_threshold,
        "tables with more rows are large; none: no table is",
    )
    seed()


def row_dtype(name: str, what: str) -> None:
    """Defines a flag that is a dtype that rows may have; else float32.

    Args:
        name: the flag's.
        what: the help.
    """
    dtypes = ["float32", "bfloat16", "float16"]
    flags.DEFINE_enum(name, "float32", dtypes, what)


def strategy() -> None:
    """Defines the flag --strategy: the replicas of `cluster.of_strategy`."""
    flags.DEFINE_string(
        "strategy",
        "none",
        "none, or mirrored:N for N replicas: GPUs, or without any, parts of "
        "the CPU",
    )
    flags.register_validator(
        "strategy",
        lambda text: re.fullmatch(r"none|mirrored:[1-9]\d*", text) is not None,
        "must be none or mirrored:N",
    )


def workers(default: int | None = None) -> None:
    """Defines the flags of workers, which `cluster` reads.

    Args:
        default: that of --workers, how many to start; None: no cluster.
    """
    count(
        "workers",
        default,
        "worker processes to start on this machine, if neither TF_CONFIG nor "
        "--slurm gives a cluster",
    )
    flags.DEFINE_boolean("slurm", False, "join the tasks of this Slurm job")
