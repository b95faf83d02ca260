"""The command `tfrs-embed kernels status`."""

from __future__ import annotations

import argparse
import dataclasses
import json

from tfrs_embed import kernels
from tfrs_embed.tools.command_line import FAILED, FINE


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
