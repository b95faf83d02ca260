"""The part of a page that an exported model has."""

from __future__ import annotations

from tfrs_embed.tools.conversion import reading
from tfrs_embed.tools.conversion.exported import FORMAT
from tfrs_embed.tools.report import values
from tfrs_embed.tools.report.measured import measure_tables
from tfrs_embed.tools.report.page import Part


def exported(path: str) -> Part:
    """Reads a SavedModel, and makes its part of a page.

    Args:
        path: the SavedModel's folder.

    Returns:
        The part.

    Raises:
        ValueError: it has no tables.
        tf.errors.OpError: it is damaged.
    """
    contents = reading.read(path)
    if not contents.tables:
        raise ValueError(
            f"'{path}' is a SavedModel without tables that can be read."
        )
    tables = measure_tables(contents)
    sections = [values.sizes(tables), values.norms(tables)]
    rest = values.others(contents)
    if rest is not None:
        sections.append(rest)
    return Part(
        "Exported model" if contents.format == FORMAT else "SavedModel",
        contents.path,
        (("written by", contents.format), *values.facts(tables)),
        tuple(sections),
        contents.notes,
    )
