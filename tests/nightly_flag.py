"""Whether this is `make nightly`, which runs all tests in all variants."""

import os

ALL = bool(os.environ.get("TFRS_EMBED_NIGHTLY"))

#: The seconds that one process's tests may take.
TIMEOUT_S = 7200 if ALL else 1800
