"""Batches of one chip for a model: from .npz files, or drawn.

In a file, a feature is an array of its name, [samples] or [samples, ids]. If
samples have different numbers of ids, it is two arrays as in a RaggedTensor,
`<name>.values` and `<name>.row_splits`.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.planner.model_file import Feature, Model
from tfrs_embed.tools.planner.usage import zipf_draws

_VALUES, _SPLITS = ".values", ".row_splits"
_Ids = tuple[NDArray, NDArray]


def read(
    paths: Sequence[str], model: Model, chips: int
) -> Iterator[dict[str, tf.RaggedTensor]]:
    """Yields a chip's batches from files.

    Samples without ids are added to batches smaller than the model's.

    Args:
        paths: the files, each with the batch of a chip or of all chips.
        model: the features, and a chip's batch size.
        chips: the number of chips.

    Raises:
        InputError: a file has a wrong format, or an id is outside its table.
    """
    rows = {table.name: table.rows for table in model.tables}
    told: set[str] = set()  # Arrays that a note was printed about.
    for path in paths:
        arrays = _arrays(path)
        batch = {
            f.name: _feature(arrays, f, rows[f.table], path)
            for f in model.features
        }
        names = [f.name for f in model.features]
        known = {n + end for n in names for end in ("", _VALUES, _SPLITS)}
        other = sorted(set(arrays) - known - told)
        if other:
            told.update(other)
            print(f"note: not read of '{path}': {other}", file=sys.stderr)
        yield from _of_chips(batch, model.batch_size, chips, path)


def _arrays(path: str) -> Mapping[str, NDArray]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it has one array without a name")
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"'{path}' can't be read as a file of numpy.savez: {error}"
        ) from None


def _feature(
    arrays: Mapping[str, NDArray], feature: Feature, rows: int, path: str
) -> _Ids:
    """Returns a feature's checked ids and row splits."""
    name, problem = feature.name, f"'{path}', feature '{feature.name}': "
    ragged = (name + _VALUES, name + _SPLITS)
    if name in arrays and not any(each in arrays for each in ragged):
        ids = arrays[name]
        if ids.ndim not in (1, 2):
            raise InputError(
                problem + "ids must have the shape [samples] or [samples, "
                f"ids], got {list(ids.shape)}."
            )
        width = 1 if ids.ndim == 1 else ids.shape[1]
        splits = np.arange(len(ids) + 1) * width
        ids = ids.ravel()
    elif name not in arrays and all(each in arrays for each in ragged):
        ids, splits = (arrays[each] for each in ragged)
        if (
            ids.ndim != 1
            or splits.ndim != 1
            or splits.dtype.kind not in "iu"
            or not splits.size
            or splits[0] != 0
            or splits[-1] != ids.size
            or (splits[1:] < splits[:-1]).any()
        ):
            raise InputError(
                problem + f"{ragged[1]} must be ascending integers from 0 to "
                f"the number of {ragged[0]}."
            )
    else:
        raise InputError(
            problem + f"there must be an array '{name}', or '{ragged[0]}' and "
            f"'{ragged[1]}'; the arrays are {sorted(arrays)}."
        )
    if ids.dtype.kind not in "iu":
        raise InputError(problem + f"ids must be integers, got {ids.dtype}.")
    outside = ids[(ids < 0) | (ids >= rows)]
    if outside.size:
        raise InputError(
            problem + f"id {outside[0]} is outside table '{feature.table}', "
            f"whose {rows} rows are 0 to {rows - 1}."
        )
    return ids.astype(np.int64), splits.astype(np.int64)


def _of_chips(
    batch: Mapping[str, _Ids], size: int, chips: int, path: str
) -> Iterator[dict[str, tf.RaggedTensor]]:
    """Yields the parts of a file's batch for each chip."""
    counts = {name: len(splits) - 1 for name, (_, splits) in batch.items()}
    samples = max(counts.values())
    if len(set(counts.values())) > 1:
        raise InputError(
            f"'{path}': features have different numbers of samples: {counts}."
        )
    if not 0 < samples <= size and samples != size * chips:
        raise InputError(
            f"'{path}' has {samples} samples: a chip's batch has batch_size="
            f"{size}, and the batch of {chips} chips {size * chips}."
        )
    for start in range(0, samples, size):
        yield {
            name: _padded(ids, splits[start : start + size + 1], size)
            for name, (ids, splits) in batch.items()
        }


def _padded(ids: NDArray, splits: NDArray, size: int) -> tf.RaggedTensor:
    values = ids[splits[0] : splits[-1]]
    splits = np.pad(splits - splits[0], (0, size + 1 - splits.size), "edge")
    return tf.RaggedTensor.from_row_splits(values, splits, validate=False)


def drawn(
    model: Model, number: int, seed: int
) -> Iterator[dict[str, tf.RaggedTensor]]:
    """Yields random batches of a chip.

    The mean number of ids in a sample is the feature's hotness.
    """
    generator = np.random.default_rng(seed)
    rows = {table.name: table.rows for table in model.tables}
    for _ in range(number):
        batch = {}
        for feature in model.features:
            least, more = divmod(feature.hotness, 1)
            lengths = least + (generator.random(model.batch_size) < more)
            splits = np.append(0, np.cumsum(lengths.astype(np.int64)))
            ids = zipf_draws(
                rows[feature.table],
                model.zipf_exponent,
                int(splits[-1]),
                generator,
            )
            batch[feature.name] = _padded(ids, splits, model.batch_size)
        yield batch
