"""Metrics of rankings of all movies, as recommenders-team and Cornac have them.

A user without a relevant candidate doesn't count.
"""

from __future__ import annotations

import numpy as np


def places(counts: np.ndarray) -> np.ndarray:
    """Returns how many movies have more than each, [movies]."""
    return np.count_nonzero(counts > counts[:, None], axis=1)


def ranks(scores: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns how many movies have more than the chosen one, [choices].

    Args:
        scores: [choices, movies].
        chosen: the movie of each choice.
    """
    own = np.take_along_axis(scores, chosen[:, None], axis=1)
    return np.count_nonzero(scores > own, axis=1)


def ndcg(
    scores: np.ndarray,
    candidates: np.ndarray,
    relevant: np.ndarray,
    k: int = 10,
) -> float:
    """Returns the mean NDCG@k over users, with gains of 0 and 1.

    Args:
        scores: [users, movies].
        candidates: which movies are ranked, [users, movies].
        relevant: which movies should come first, [users, movies]. They count
            in the best possible ranking also where they are no candidates.
        k: the length of the list.
    """
    k = min(k, scores.shape[1])
    ranked = np.where(candidates, scores, -np.inf)
    best = np.argsort(-ranked, axis=1, kind="stable")[:, :k]
    hits = np.take_along_axis(relevant & candidates, best, axis=1)
    gains = 1 / np.log2(np.arange(k) + 2)
    number = relevant.sum(axis=1)
    asked = number > 0
    most = np.cumsum(gains)[np.minimum(number[asked], k) - 1]
    return float(np.mean((hits @ gains)[asked] / most))


def auc(
    scores: np.ndarray, candidates: np.ndarray, relevant: np.ndarray
) -> float:
    """Returns the mean area under the ROC curve over users.

    Args:
        scores: [users, movies].
        candidates: which movies are compared, [users, movies].
        relevant: which candidates should be above the others.
    """
    areas = []
    for score, candidate, right in zip(
        scores, candidates, relevant & candidates, strict=True
    ):
        wrong = np.sort(score[candidate & ~right])
        if right.any() and len(wrong):
            # Equal scores are no success, as in Cornac.
            below = np.searchsorted(wrong, score[right], "left")
            areas.append(np.mean(below) / len(wrong))
    return float(np.mean(areas))
