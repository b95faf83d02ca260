"""Permission to restore a table from a checkpoint of fewer rows."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

# The argument of the `growing_tables` that is active, or None.
_shrink: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "growing_tables", default=None
)


@contextlib.contextmanager
def growing_tables(shrink: bool = False) -> Iterator[None]:
    """Lets tables be restored from checkpoints in which they have fewer rows.

    The rows beyond those are initialized: parameters by the table's
    initializer, slots with the optimizer's initial values. Without this context
    another number of rows is an error. Fewer rows than in the checkpoint stay
    an error, except for tables with `DynamicKeys`; another dim always is one.

    It applies to restores that begin inside the context, also of tables that
    are built later (with TensorFlow 2.17 and newer).

    Example:
        >>> def make_layer(rows):
        ...     table = tfrs_embed.TableConfig("movie", rows, 8)
        ...     feature = tfrs_embed.FeatureConfig("movie", table)
        ...     layer = tfrs_embed.PartialTPUEmbedding(feature, "adagrad")
        ...     layer.build()
        ...     return layer
        >>> small, large = make_layer(20_000), make_layer(30_000)
        >>> path = tf.train.Checkpoint(layer=small).save("checkpoints/small")
        >>> with tfrs_embed.checkpoint.growing_tables():
        ...     _ = tf.train.Checkpoint(layer=large).restore(path)
        >>> before = small.embedding_tables["movie"]
        >>> after = large.embedding_tables["movie"]
        >>> bool(tf.reduce_all(after[:20_000] == before[:]))
        True

    Args:
        shrink: whether tables with `DynamicKeys` may take fewer keys than a
            checkpoint has: the keys stay that would be evicted last. It applies
            to tables that are built before the restore. Tables that evict keys
            in steps drop keys anyway, and warn.

    Yields:
        Nothing.
    """
    token = _shrink.set(shrink)
    try:
        yield
    finally:
        _shrink.reset(token)


def allowed() -> bool:
    """Whether a restore that begins now may grow tables."""
    return _shrink.get() is not None


def may_shrink() -> bool:
    """Whether a table that is restored now may take fewer keys."""
    return bool(_shrink.get())
