"""A chip's batch, in whatever form it comes, as checked ids in numpy.

`read` is for features whose configuration says how many samples there are.
`to_layer_bags` and `of_bags` are for the others: they follow a layer's rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.inputs import lookup_bags, to_bags
from tfrs_embed.ops.samples import as_ragged
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.layout import FeatureLayout

_DENSE: NDArray[np.int32] = np.zeros(0, np.int32)


def read(
    feature: FeatureSpec,
    layout: FeatureLayout,
    given: Any,
    where: str,
    padded: bool = False,
) -> Ids:
    """Turns a feature's ids into those that host ops take.

    Args:
        feature: the feature, named in errors.
        layout: its number of samples and its table's rows.
        given: a Tensor, RaggedTensor, SparseTensor or their values, an array,
            or nested lists. Dense ids are one a sample, or have one dimension
            more than output_shape, which is combined over.
        where: which batch it is, for errors.
        padded: whether there may be fewer samples, and dense ids are one a
            sample whatever their shape.

    Returns:
        The ids, without weights.

    Raises:
        ValueError: another number of samples, an id outside the table, or
            sparse indices that do not ascend.
        TypeError: ids that are no integers, or another kind of object.
    """
    problem = f"{where}: {feature}: "
    if isinstance(given, (tf.SparseTensor, tf.compat.v1.SparseTensorValue)):
        positions, values = _of_sparse(given, layout, problem, padded)
    elif isinstance(
        given, (tf.RaggedTensor, tf.compat.v1.ragged.RaggedTensorValue)
    ):
        positions, values = np.asarray(given.row_splits), given.values
        if not isinstance(values, (tf.Tensor, np.ndarray)) or values.ndim != 1:
            raise ValueError(
                problem + "ragged ids must have two dimensions, "
                f"[samples, None]; got {given.shape}."
            )
        values = np.asarray(values)
        _check_samples(positions.size - 1, layout, problem, padded)
    else:
        positions, values = _of_dense(given, layout, problem, padded)
    if values.dtype.kind not in "iu":
        raise TypeError(
            problem + f"ids must be integers, got {values.dtype.name}."
        )
    if values.size:
        low, high = values.min(), values.max()
        if low < 0 or high >= layout.vocabulary_size:
            raise ValueError(
                problem + f"id {low if low < 0 else high} is outside the "
                f"table's {layout.vocabulary_size} rows, 0 to "
                f"{layout.vocabulary_size - 1}."
            )
    if positions.ndim == 1 and positions.size:
        missing = layout.samples + 1 - positions.size
        if missing:
            positions = np.pad(positions, (0, missing), "edge")
    return Ids(positions.astype(np.int32), values.astype(np.int32))


def _of_sparse(
    given: Any, layout: FeatureLayout, problem: str, padded: bool
) -> tuple[NDArray, NDArray]:
    shape = np.asarray(given.dense_shape)
    if shape.size != 2:
        raise ValueError(
            problem + "sparse ids must have two dimensions, "
            f"[samples, None]; got {shape.tolist()}."
        )
    _check_samples(shape[0], layout, problem, padded)
    indices = np.asarray(given.indices)
    samples = indices[:, 0]
    if (samples[1:] < samples[:-1]).any():
        raise ValueError(
            problem + "the indices of sparse ids must ascend; use "
            "tf.sparse.reorder."
        )
    if samples.size and (samples[0] < 0 or samples[-1] >= layout.samples):
        wrong = samples[0] if samples[0] < 0 else samples[-1]
        raise ValueError(
            problem + f"the index of sample {wrong} is outside the "
            f"{layout.samples} samples of output_shape."
        )
    return indices, np.asarray(given.values)


def _of_dense(
    given: Any, layout: FeatureLayout, problem: str, padded: bool
) -> tuple[NDArray, NDArray]:
    is_list = isinstance(given, (list, tuple))
    if not is_list and not isinstance(given, (tf.Tensor, np.ndarray)):
        raise TypeError(
            problem + "ids must be a Tensor, RaggedTensor, SparseTensor, array "
            f"or list, got {type(given).__name__}."
        )
    try:
        values = np.asarray(given)
    except ValueError:
        # Lists of different lengths.
        return _of_rows(given, layout, problem, padded)
    if is_list and not values.size:
        values = values.astype(np.int32)
    if values.size == layout.samples and layout.samples:
        return _DENSE, values.ravel()
    if padded:
        _check_samples(values.size, layout, problem, padded)
        return np.arange(values.size + 1), values.ravel()
    shape = layout.config.output_shape.as_list()
    if values.ndim != len(shape) + 1 or list(values.shape[:-1]) != shape:
        raise ValueError(
            problem + f"ids of shape {list(values.shape)}, but output_shape="
            f"{shape} asks for {layout.samples} samples per chip; give ids of "
            "that shape, or change output_shape."
        )
    splits = np.arange(layout.samples + 1) * values.shape[-1]
    return splits, values.ravel()


def _of_rows(
    given: Any, layout: FeatureLayout, problem: str, padded: bool
) -> tuple[NDArray, NDArray]:
    try:
        rows = [np.asarray(row) for row in given]
    except ValueError:
        rows = []
    if not rows or any(row.ndim != 1 for row in rows):
        raise ValueError(
            problem + "lists of different lengths must be one list of ids for "
            "each sample."
        )
    _check_samples(len(rows), layout, problem, padded)
    rows = [row if row.size else row.astype(np.int32) for row in rows]
    splits = np.cumsum([0] + [row.size for row in rows])
    return splits, np.concatenate(rows)


def _check_samples(
    samples: int, layout: FeatureLayout, problem: str, padded: bool
) -> None:
    if padded:
        _check_room(samples, layout.samples, problem)
    elif samples != layout.samples:
        shape = layout.config.output_shape.as_list()
        raise ValueError(
            problem + f"ids of {samples} samples, but output_shape={shape} "
            f"asks for {math.prod(shape)} per chip; batches must have that "
            "many (drop the last, partial one), or change output_shape."
        )


def to_layer_bags(
    features: Sequence[FeatureSpec], given: Sequence[Any], where: str
) -> dict[FeatureSpec, BaggedIds]:
    """Turns features' ids into bags, as a layer does.

    Args:
        features: the features.
        given: each feature's ids, as `read` takes them.
        where: which batch it is, for errors.

    Returns:
        The bags of each of the features' lookups.

    Raises:
        ValueError: another shape, an id outside the table, or sparse indices
            that do not ascend.
        TypeError: ids that are no integers, or another kind of object.
    """
    try:
        bags = to_bags(
            features, [_to_tensor(g) for g in given], [None] * len(given)
        )
    except (ValueError, TypeError) as error:
        raise type(error)(f"{where}: {error}") from error
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(f"{where}: {error.message}") from error
    lookups = [each for feature in features for each in feature.lookups]
    return dict(zip(lookups, lookup_bags(features, bags), strict=True))


def of_bags(
    feature: FeatureSpec, bags: BaggedIds, samples: int, where: str
) -> Ids:
    """Returns a feature's bags as ids.

    Args:
        feature: the feature, named in errors.
        bags: its bags.
        samples: the number of samples that there is room for.
        where: which batch it is, for errors.

    Returns:
        The ids, without weights.

    Raises:
        ValueError: there are more samples.
    """
    _check_room(int(bags.count), samples, f"{where}: {feature}: ")
    ids, _ = as_ragged(bags, samples)
    return Ids(ids.row_splits.numpy(), ids.values.numpy())


def _check_room(samples: int, room: int, problem: str) -> None:
    if samples > room:
        raise ValueError(
            problem + f"{samples} samples, but the first batch has room for "
            f"{room}; begin with the largest."
        )


def _to_tensor(given: Any) -> Any:
    if isinstance(given, tf.compat.v1.SparseTensorValue):
        return tf.SparseTensor.from_value(given)
    if isinstance(given, tf.compat.v1.ragged.RaggedTensorValue):
        return tf.RaggedTensor.from_row_splits(given.values, given.row_splits)
    if isinstance(given, (list, tuple)):
        try:
            return np.asarray(given)
        except ValueError:
            # Lists of different lengths.
            return tf.ragged.constant(given, dtype=tf.int64)
    return given
