"""Finds the most frequent rows of tables in a stream of batches."""

from __future__ import annotations

from typing import Any

from tfrs_embed.compat import progress as tasks
from tfrs_embed.configs.parsing import parse
from tfrs_embed.tools.planner.batches import count_hot_rows, read_batches


def hot_rows(
    feature_config: Any, batches: Any, *, progress: bool = True
) -> dict[str, tuple[int, ...]]:
    """Finds the most frequent rows of tables, for copies on each replica.

    Example:
        >>> def make_features(hot_rows):
        ...     movies = tfrs_embed.TableConfig(
        ...         "movies", 1000, 16, placement="row", hot_rows=hot_rows
        ...     )
        ...     return {"movie": tfrs_embed.FeatureConfig("movie", movies)}
        >>> batches = [{"movie": [7, 42, 7]}, {"movie": [42, 3, 42]}]
        >>> found = tfrs_embed.hot_rows(make_features(2), batches)
        >>> found
        {'movies': (42, 7)}
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     make_features(found["movies"]), "adagrad"
        ... )

    Args:
        feature_config: a `FeatureConfig`, or a nesting of them, as for layers.
            Rows are found for tables whose `hot_rows` is a number.
        batches: a list or dataset of batches, all of which are read. Each is
            nested as the configuration, and its leaves are arrays, tensors
            (dense, ragged or sparse), lists of ids, or lists of samples' lists
            of ids. Counting takes 8 bytes of memory for each row of the tables.
        progress: whether to show how many batches were read, as
            `tfrs_embed.progress.set_mode` says.

    Returns:
        For each of these tables, by name, the `hot_rows` most frequent ids, the
        most frequent first, of equally frequent ids the lower first; fewer if
        fewer occur.

    Raises:
        ValueError: no table's `hot_rows` is a number; there are no batches; an
            id is out of its table; or a batch is nested in another way.
        TypeError: a value is of the wrong kind.
    """
    spec = parse(feature_config)
    if not any(isinstance(table.hot_rows, int) for table in spec.tables):
        raise ValueError(
            "No table has a number of hot rows: give at least one of "
            f"{[table.name for table in spec.tables]} a TableConfig with "
            "hot_rows=n."
        )
    with tasks.Task(
        "Reading",
        "batches for hot rows",
        tasks.size_of(batches),
        "batches",
        show=progress,
    ) as task:
        read = read_batches(spec, batches, "batches")
        return count_hot_rows(spec, task.count(read))
