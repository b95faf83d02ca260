"""SparseCore's host ops where TensorFlow has no kernels for them.

TensorFlow for TPUs has kernels that run on any machine; elsewhere the numpy
functions that equal them bit for bit take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.sparsecore.csr import padded_sizes
from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.testing import host_ops

_Output = tuple[tf.DType, Sequence[int | None]]

_COO = (tf.int32, tf.int32, tf.float32)


def missing() -> dict[str, Callable[..., Any]]:
    """Returns replacements for `gen_xla_ops`, of ops without kernels."""
    if has_kernels():
        return {}
    return {
        "convert_to_list_of_sparse_core_coo_tensors": _convert,
        "sort_list_of_sparse_core_coo_tensors": _sort,
        "convert_to_sparse_core_csr_wrapped_coo_tensor": _wrap,
        "get_stats_from_list_of_sparse_core_coo_tensors": _stats,
    }


def _convert(
    indices_or_row_splits: Any,
    values: Any,
    weights: Any,
    num_sc_per_chip: int,
    **attributes: Any,
) -> tuple[list[tf.Tensor], ...]:
    def function(*inputs: Any) -> list[Any]:
        lists = host_ops.convert_to_coo(
            *inputs, num_sc_per_chip=num_sc_per_chip, **attributes
        )
        return [array for arrays in lists for array in arrays]

    outputs = _call(
        function,
        [indices_or_row_splits, values, weights],
        [(t, [None]) for t in _COO for _ in range(num_sc_per_chip)],
    )
    rows, cols, gains = (
        outputs[i * num_sc_per_chip :][:num_sc_per_chip] for i in range(3)
    )
    return rows, cols, gains


def _sort(
    row_ids_list: Sequence[Any],
    col_ids_list: Sequence[Any],
    gains_list: Sequence[Any],
    num_replica: int,
    num_sc_per_chip: int,
    table_vocab_size: int,
    feature_width: int,
    **attributes: Any,
) -> list[tf.Tensor]:
    del table_vocab_size, feature_width
    return _call_on_lists(
        host_ops.sort_coo,
        [row_ids_list, col_ids_list, gains_list],
        [(t, [None]) for t in _COO]
        + [(tf.int32, [num_replica * num_sc_per_chip + 1])],
        num_replica=num_replica,
        num_sc_per_chip=num_sc_per_chip,
        **attributes,
    )


def _wrap(
    sorted_row_ids_list: Sequence[Any],
    sorted_col_ids_list: Sequence[Any],
    sorted_gains_list: Sequence[Any],
    id_counts_list: Sequence[Any],
    splits: Any,
    sample_count_per_sc: int,
    num_replica: int,
    max_minibatches_per_sc: int,
    max_ids_per_chip_per_sample: int,
    table_vocab_size: int,
    feature_width: int,
    table_name: str,
    allow_id_dropping: bool,
) -> list[tf.Tensor]:
    # TPUEmbeddingV2 never splits a batch.
    del splits, table_vocab_size, feature_width, table_name
    num_sc = len(id_counts_list)
    pointers = num_sc * padded_sizes(num_replica * num_sc)
    capacity = max_ids_per_chip_per_sample * sample_count_per_sc * num_sc
    return _call_on_lists(
        host_ops.wrap_coo,
        [
            sorted_row_ids_list,
            sorted_col_ids_list,
            sorted_gains_list,
            id_counts_list,
        ],
        [(tf.int32, [pointers * max_minibatches_per_sc])]
        + [(t, [capacity]) for t in _COO]
        + [(tf.int32, [])] * 3,
        sample_count_per_sc=sample_count_per_sc,
        num_replica=num_replica,
        max_minibatches_per_sc=max_minibatches_per_sc,
        max_ids_per_chip_per_sample=max_ids_per_chip_per_sample,
        allow_id_dropping=allow_id_dropping,
    )


def _stats(
    row_ids_list: Sequence[Any],
    col_ids_list: Sequence[Any],
    gains_list: Sequence[Any],
    col_offset_list: Sequence[int],
    num_replica: int,
    num_sc_per_chip: int,
    **_: Any,
) -> list[tf.Tensor]:
    return _call_on_lists(
        host_ops.coo_stats,
        [row_ids_list, col_ids_list, gains_list],
        [(tf.int32, [])] * 2,
        col_offset_list=col_offset_list,
        num_replica=num_replica,
        num_sc_per_chip=num_sc_per_chip,
    )


def _call_on_lists(
    function: Callable[..., Any],
    lists: Sequence[Sequence[Any]],
    outputs: Sequence[_Output],
    **attributes: Any,
) -> list[tf.Tensor]:
    """Calls a function of lists of arrays, all of one length."""
    length = len(lists[0])

    def on_arrays(*arrays: Any) -> Any:
        parts = range(0, len(arrays), length)
        return function(*[arrays[i : i + length] for i in parts], **attributes)

    return _call(on_arrays, [x for values in lists for x in values], outputs)


def _call(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[_Output],
) -> list[tf.Tensor]:
    """Calls a numpy function; its ValueErrors are InvalidArgumentErrors."""
    try:
        tensors = tf.numpy_function(function, inputs, [t for t, _ in outputs])
    except ValueError as error:
        if not tf.executing_eagerly():
            raise
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from error
    for tensor, (_, shape) in zip(tensors, outputs, strict=True):
        tensor.set_shape(shape)
    return tensors
