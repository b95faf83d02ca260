"""The rows of tables that are looked up most often, of a stream of batches."""

from __future__ import annotations

from typing import Any

from tfrs_embed.compat import progress as tasks
from tfrs_embed.configs import tables as configs
from tfrs_embed.tools.planner.counting import count_hot_rows
from tfrs_embed.tools.planner.inputs import read_batches


def hot_rows(
    feature_config: Any, batches: Any, *, progress: bool = True
) -> dict[str, tuple[int, ...]]:
    """Finds the most frequent rows of tables, to have copies on each replica.

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
        feature_config: a `FeatureConfig`, or a nesting of them, as layers have
            it. Tables whose `hot_rows` is a number want so many rows.
        batches: a list, or a dataset, of batches, all of which are read: each
            has the configuration's nesting, its leaves arrays, tensors (dense,
            ragged or sparse), lists of ids, or lists of samples' lists of ids.
            Memory is taken for each different id, not for each batch.
        progress: whether to show how many batches were read, as
            `tfrs_embed.progress.set_mode` says.

    Returns:
        For each of these tables its most frequent ids by the table's name, the
        most frequent first, of equally frequent ones the lower. They are fewer
        than wanted if no more occur.

    Raises:
        ValueError: no table says how many rows it wants; there are no batches;
            or an id is out of its table, or a batch is nested in another way.
        TypeError: a value is of the wrong kind.
    """
    spec = configs.parse(feature_config)
    if not any(isinstance(table.hot_rows, int) for table in spec.tables):
        raise ValueError(
            "No table says how many hot rows it wants: give at least one of "
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
