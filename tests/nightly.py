"""What `make nightly` runs, and `make test` leaves out."""

import os

#: Whether to run what finds little that the rest does not: `make nightly`.
#: Whole tests and variants of them are marked, as pytest.mark.nightly; this is
#: for lists of what to run.
ALL = bool(os.environ.get("TFRS_EMBED_NIGHTLY"))

#: The seconds that one process's tests may take.
TIMEOUT_S = 7200 if ALL else 1800


def by_day(expression: str | None, nightly: str | None = None) -> str | None:
    """What to run of a file: one of pytest's expressions, or None, for all.

    Args:
        expression: that of `make test` and `make test-more`.
        nightly: that of `make nightly`.

    Returns:
        The one of this run.
    """
    return nightly if ALL else expression
