"""The packages that only reports need."""

from __future__ import annotations

import importlib.util

_PACKAGES = ("jinja2", "matplotlib")


def check() -> None:
    """Checks that the packages are installed.

    Raises:
        ImportError: one is not.
    """
    missing = [p for p in _PACKAGES if importlib.util.find_spec(p) is None]
    if missing:
        raise ImportError(
            f"Reports need {' and '.join(missing)}, which {_is(missing)} not "
            'installed: pip install "tfrs_embed[report]"'
        )


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
