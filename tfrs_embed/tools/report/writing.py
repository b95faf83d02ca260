"""Writes reports."""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Sequence

from tfrs_embed.tools.report import page, sources

#: A path, or several.
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def write(paths: Paths, output: str | os.PathLike[str] = "report.html") -> None:
    """Writes a report to a file.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> layer.build()
        >>> saved = tf.train.Checkpoint(layer=layer).save("run/checkpoint")
        >>> tfrs_embed.report.write("run", "report.html")

    Args:
        paths: the sources of the report, see `render`.
        output: the file to write; an existing file is replaced.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: a path is of no known kind, or its contents are wrong; or
            the output is a folder, in no folder, or one of the paths.
        OSError: a file can't be read or written.
        tf.errors.OpError: a checkpoint is damaged.
    """
    # Checked before tables are read, which may take an hour.
    file = pathlib.Path(output)
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(
            f"The report can't be written to '{file}': it must be a file in an "
            "existing folder."
        )
    if file.exists() and any(
        os.path.exists(path) and file.samefile(path) for path in _listed(paths)
    ):
        raise ValueError(
            f"'{file}' is to be read: the report needs another name."
        )
    file.write_text(render(paths), "utf-8")


def render(paths: Paths) -> str:
    """Returns a report: one page of HTML that needs no other file.

    All values of the tables are read, in blocks.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> layer.build()
        >>> saved = tf.train.Checkpoint(layer=layer).save("run/checkpoint")
        >>> tfrs_embed.report.render(saved).splitlines()[0]
        '<!DOCTYPE html>'

    Args:
        paths: a path or several, each of a checkpoint, or a folder of
            checkpoints; an exported model's folder; or a folder that
            `TableStatistics` writes. Several checkpoints must be of one run:
            the report shows their growth.

    Returns:
        The HTML.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: a path is of no known kind, or its contents are wrong.
        OSError: a file can't be read.
        tf.errors.OpError: a checkpoint is damaged.
    """
    given = _listed(paths)
    if not given:
        raise ValueError("There are no paths to report on.")
    try:
        for package in ("jinja2", "matplotlib"):
            importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            "Reports need jinja2 and matplotlib: pip install "
            f'"tfrs_embed[report]" ({error}).'
        ) from error
    return page.render(sources.read(given))


def _listed(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    return [os.fspath(path) for path in paths]
