"""Permission to restore a table from a checkpoint of fewer rows."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

# Inside of `growing_tables` its argument, else None.
_shrink: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "growing_tables", default=None
)


@contextlib.contextmanager
def growing_tables(shrink: bool = False) -> Iterator[None]:
    """Lets tables be restored from checkpoints in which they have fewer rows.

    The rows beyond those are initialized: parameters by the table's
    initializer, slots as its optimizer begins them. Without it, another number
    of rows is an error; fewer rows than a checkpoint has are one for all tables
    but those with `DynamicKeys`, and another dim for all.

    It holds for what is restored inside of it, tables that are only built later
    included (these need TensorFlow 2.17).

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
        shrink: whether tables with `DynamicKeys` may take less keys than a
            checkpoint has: those stay that would be evicted last. It holds for
            tables that are there when they are restored. Tables that evict keys
            in steps do so anyhow, and warn.

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
    """Whether a table that is restored now may take less keys."""
    return bool(_shrink.get())
