"""The command line: `python -m tfrs_embed` is `tfrs-embed`."""

import sys

from tfrs_embed_command import main

if __name__ == "__main__":
    sys.exit(main())
