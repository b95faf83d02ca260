"""The order in which a table's keys lose their rows, between steps."""

from __future__ import annotations

import numpy as np

from tfrs_embed.configs import TableSpec
from tfrs_embed.dynamic_keys import TimeToLive


def eviction_order(
    table: TableSpec,
    keys: np.ndarray,
    frequency: np.ndarray,
    last_used: np.ndarray,
) -> np.ndarray:
    """The places of keys, [n] int64, from the first that goes to the last.

    Without an eviction rule they are in the order of "lru".

    Args:
        table: the table.
        keys: [n] int64.
        frequency: [n] int64, how often each was used.
        last_used: [n] int64, the step of its last use.

    Raises:
        ValueError: a function that is the rule returned something else than a
            number for each key.
    """
    rule = table.keys.eviction  # type: ignore[union-attr]
    if rule is None or rule == "lru" or isinstance(rule, TimeToLive):
        return np.lexsort((keys, last_used))
    if rule == "lfu":
        return np.lexsort((keys, last_used, frequency))
    where = f"Table '{table.name}': its eviction rule returned"
    scores = np.asarray(rule(keys, last_used, frequency))  # type: ignore[operator]
    if scores.shape != keys.shape or scores.dtype.kind not in "iufb":
        raise ValueError(
            f"{where} {scores.dtype} of shape {list(scores.shape)}, not a "
            f"number for each of {len(keys)} keys."
        )
    if np.isnan(scores).any():
        raise ValueError(f"{where} NaN for key {keys[np.isnan(scores)][0]}.")
    return np.lexsort((keys, scores))
