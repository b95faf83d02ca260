"""Runs the command line."""

import sys

from tfrs_embed.checkpoint.conversion.command import main

if __name__ == "__main__":
    sys.exit(main())
