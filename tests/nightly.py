"""What `make nightly` runs, and `make test` leaves out."""

import os

#: Whether to run what finds little that the rest does not: `make nightly`.
#: Whole tests and variants of them are marked, as pytest.mark.nightly; this is
#: for lists of what to run.
ALL = bool(os.environ.get("TFRS_EMBED_NIGHTLY"))
