"""Runs the command line."""

import sys

from tfrs_embed.tools.conversion.command import main
from tfrs_embed_command import finish

if __name__ == "__main__":
    sys.exit(finish(main))
