"""Writes reports."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

from tfrs_embed.tools.report import extra, page, sources

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
        paths: what to report on, see `render`.
        output: the file, which is replaced if it is there.

    Raises:
        ImportError: jinja2 or matplotlib is not installed.
        ValueError: a path is of no known kind, or its contents are wrong; or
            the output is a folder, in none, or one of the paths.
        OSError: a file can't be read or written.
        tf.errors.OpError: a checkpoint is damaged.
    """
    # Before tables are read for an hour.
    file = pathlib.Path(output)
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(
            f"The report can't be written to '{file}': it must be a file in a "
            "folder that is there."
        )
    if any(_same(path, file) for path in _listed(paths)):
        raise ValueError(
            f"'{file}' is to be read: the report needs another name."
        )
    file.write_text(render(paths), "utf-8")


def _same(path: str, file: pathlib.Path) -> bool:
    return file.exists() and os.path.exists(path) and file.samefile(path)


def _listed(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    return [os.fspath(path) for path in paths]


def render(paths: Paths) -> str:
    """Makes a report: one page of HTML that needs no other file.

    Tables are read in blocks, all values of them.

    Example:
        >>> batches = [{"movie": tf.range(64)}, {"movie": tf.range(64) * 16}]
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> features = {"movie": tfrs_embed.FeatureConfig("movie", table)}
        >>> config, limits = tfrs_embed.sparsecore.compute_limits(
        ...     batches, features, "v5p-8", "adagrad", progress=False
        ... )
        >>> import pathlib
        >>> written = pathlib.Path("limits.json").write_text(limits.to_json())
        >>> tfrs_embed.report.render("limits.json").splitlines()[0]
        '<!DOCTYPE html>'

    Args:
        paths: what to report on, each a checkpoint, or a folder of checkpoints;
            an exported model's folder; the JSON of a `Plan` or of a
            `LimitsReport`, whose name ends in ".json"; or a folder that
            `TableStatistics` writes. Checkpoints, if there are several, are of
            one run, and the report shows how it went.

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
    extra.check()
    return page.render(sources.read(given))
