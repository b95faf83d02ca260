"""The command `tfrs-embed limits`."""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import math
import textwrap
from collections.abc import Iterable
from typing import Any

from tfrs_embed import sparsecore
from tfrs_embed.compat.strategies import require_sparse_core_api
from tfrs_embed.tools.command_line import (
    FAILED,
    FINE,
    WRONG,
    InputError,
    add_command,
    checked,
    fail,
    integer,
)
from tfrs_embed.tools.commands import npz_batches
from tfrs_embed.tools.planner import model_file
from tfrs_embed.tools.planner.model_file import Model

# The fields of SparseCoreEmbeddingConfig that are computed.
_LIMITS = (
    "max_ids_per_table",
    "max_unique_ids_per_table",
    "max_ids_per_chip_per_sample",
)


def add_parser(commands: Any) -> None:
    """Adds the command to those of `add_subparsers`."""
    parser = add_command(
        commands,
        "limits",
        "find the limits that SparseCores of TPUs need",
        "SparseCores have room for a fixed number of ids, and training stops "
        "at a batch with more. This command finds the smallest limits for the "
        "batches in some files, times a safety factor, and prints the "
        "SparseCoreEmbeddingConfig to give to a layer. The model is the file "
        "of JSON that plan takes. Without files, batches are drawn from its "
        "hotness and zipf_exponent: a first guess. No TPU is needed. "
        "docs/command_line.md has the files' formats.",
        "tfrs-embed limits config.json --topology v5p-8 --batches "
        "'data/*.npz'\ntfrs-embed limits config.json --topology v6e-4 --json",
    )
    parser.add_argument("config", metavar="CONFIG.json", help="the model")
    parser.add_argument(
        "--topology",
        required=True,
        type=checked(sparsecore.Topology.of),
        metavar="SLICE",
        help="the slice, such as v5p-8 or v6e-4",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        metavar="FILE.npz",
        help="files of a batch each, or patterns of their names",
    )
    parser.add_argument(
        "--draw",
        type=integer(1),
        metavar="NUMBER",
        help="how many batches to draw where there are no files [100]",
    )
    parser.add_argument(
        "--seed",
        type=integer(0),
        metavar="NUMBER",
        help="the seed of the drawn batches [0]",
    )
    parser.add_argument(
        "--safety",
        type=checked(_safety),
        default=1.2,
        metavar="FACTOR",
        help="the factor on the smallest limits, at least 1 [1.2]",
    )
    parser.add_argument(
        "--size-threshold",
        type=integer(0),
        default=10_000,
        metavar="ROWS",
        help="leave out tables of at most so many rows, which "
        "PartialTPUEmbedding leaves to Keras; the layer's argument [10000]",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text"
    )
    parser.set_defaults(run=run)


def _safety(text: str) -> float:
    value = float(text)
    if not 1 <= value < math.inf:
        raise ValueError(f"must be a number >= 1, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Runs the command, and returns the process's exit status."""
    try:
        require_sparse_core_api()
    except RuntimeError as error:
        return fail(error, FAILED)
    try:
        model = model_file.read(args.config)
        batches, source = _batches(args, model)
        config, report = sparsecore.compute_limits(
            batches,
            model.feature_config(),
            args.topology,
            model.optimizer,
            args.safety,
            size_threshold=args.size_threshold,
        )
    except ValueError as error:
        return fail(error, WRONG)
    limits = {name: getattr(config, name) for name in _LIMITS}
    left = [t.name for t in model.tables if t.rows <= args.size_threshold]
    if args.json:
        found = {
            "report": dataclasses.asdict(report),
            "source": source,
            "safety": args.safety,
            "size_threshold": args.size_threshold,
            "left_out": left,
            "config": limits,
        }
        print(json.dumps(found, indent=2))
        return FINE
    print(f"{report}\n")
    if left:
        print(
            f"Left out, with at most {args.size_threshold:,} rows: "
            f"{', '.join(left)}."
        )
    print(f"Batches: {source}. Limits are these loads times {args.safety:g}:\n")
    # A dict of strings and integers is the same in JSON and Python.
    fields = [f"{k}={json.dumps(v, indent=4)},\n" for k, v in limits.items()]
    code = textwrap.indent("".join(fields), "    ")
    print(f"tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(\n{code})")
    return FINE


def _batches(
    args: argparse.Namespace, model: Model
) -> tuple[Iterable[Any], str]:
    """Returns a chip's batches, and a description of their source."""
    if args.batches is None:
        number, seed = args.draw or 100, args.seed or 0
        return (
            npz_batches.drawn(model, number, seed),
            f"drawn from hotness and zipf_exponent={model.zipf_exponent:g}, "
            f"seed {seed}; those of your data may need more",
        )
    if args.draw is not None or args.seed is not None:
        raise InputError("--draw and --seed are for a run without --batches.")
    paths: list[str] = []
    for pattern in args.batches:
        # The name of an existing file is not a pattern.
        found = glob.glob(glob.escape(pattern)) or sorted(glob.glob(pattern))
        if not found:
            raise InputError(f"--batches: there is no file '{pattern}'.")
        paths += found
    paths = list(dict.fromkeys(paths))
    source = f"{len(paths)} files" if len(paths) > 1 else f"'{paths[0]}'"
    return npz_batches.read(paths, model, args.topology.chips), source
