"""Calls of the kernels: features' bags as the operations' inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.kernels import handle_packs
from tfrs_embed.ops import concat_gradients
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.parsed_ids import of_one_dtype
from tfrs_embed.ops.rounding import Rounding
from tfrs_embed.optimizers.options import UpdateOptions
from tfrs_embed.optimizers.rules import RULES, UpdateRule

# Room for a rule's settings in cc/rows.h.
_SETTINGS = 6

_OUTPUTS = (tf.float32, tf.bfloat16, tf.float16)


def has_rule(rule: UpdateRule) -> bool:
    """Whether the kernels have the update rule."""
    # A subclass has the loop of its parent, but another formula.
    return rule.loop is not None and type(rule) in RULES


def _features(
    ids: Sequence[tf.Tensor], bags: Sequence[BaggedIds], table_of: Sequence[int]
) -> dict[str, Any]:
    """The inputs and attributes that describe features."""

    def given(name: str) -> tuple[list[tf.Tensor], list[bool]]:
        values = [getattr(b, name) for b in bags]
        return (
            [v for v in values if v is not None],
            [v is not None for v in values],
        )

    groupings = [b.grouping for b in bags]
    weights, has_weights = given("weights")
    scales, has_scale = given("scale")
    return {
        "ids": of_one_dtype(ids),
        "bags": [g for g in groupings if g is not None],
        "weights": weights,
        "scales": scales,
        "counts": tf.stack([b.count for b in bags]),
        "table_of": list(table_of),
        "has_bag": [g is not None for g in groupings],
        "splits": [b.splits is not None for b in bags],
        "per_bag": [b.bag_size or 1 for b in bags],
        "has_weights": has_weights,
        "has_scale": has_scale,
    }


def lookup(
    module: Any,
    tables: Sequence[tf.Variable],
    table_of: Sequence[int],
    bags: Sequence[BaggedIds],
    dtype: tf.DType,
) -> list[tf.Tensor]:
    """Looks up features, each in one of the tables.

    Args:
        module: the kernels' operations.
        tables: each [rows, dim] float32, bfloat16 or float16.
        table_of: each feature's table.
        bags: each feature's bags.
        dtype: the dtype that the vectors will be cast to.

    Returns:
        Each feature's vectors: of the dtype, if it is float32, bfloat16 or
        float16, else float32. They have the shape of the bags' layout + [dim]
        if no more than one dimension of it is known only when running, else
        [count, dim].
    """
    dims = [tables[t].shape[1] for t in table_of]
    handles, places = handle_packs.arguments(tables)
    return lookup_handles(
        module,
        handles,
        dims,
        table_of,
        bags,
        dtype if dtype in _OUTPUTS else tf.float32,
        places,
    )


def shape_of_vectors(bags: BaggedIds, dim: int) -> tf.TensorShape:
    """A feature's vectors' shape as `lookup` gives them.

    Args:
        bags: the feature's bags.
        dim: the table's width.

    Returns:
        What is known of it when tracing: no more than one dimension isn't.
    """
    layout = bags.static_shape
    sizes = layout.as_list() if layout.rank is not None else [None, None]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) - 1 or (0 in known and None in sizes):
        sizes = [None]
    return tf.TensorShape([*sizes, dim])


def lookup_handles(
    module: Any,
    handles: Sequence[tf.Tensor],
    dims: Sequence[int],
    table_of: Sequence[int],
    bags: Sequence[BaggedIds],
    dtype: tf.DType = tf.float32,
    places: Sequence[int] = (),
) -> list[tf.Tensor]:
    """Looks up features, given their tables' handles.

    As `lookup`, for a dtype that the kernels write. Without places each handle
    is that of one table.
    """
    return module.tfrs_embed_lookup(
        tables=list(handles),
        dims=list(dims),
        T=dtype,
        shapes=[
            shape_of_vectors(b, dim) for b, dim in zip(bags, dims, strict=True)
        ],
        places=list(places),
        **_features([b.ids for b in bags], bags, table_of),
    )


def combine(
    module: Any,
    rows: tf.Tensor,
    places: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
) -> list[tf.Tensor]:
    """Looks up features among rows.

    Args:
        module: the kernels' operations.
        rows: [m, dim] float32, bfloat16 or float16.
        places: each feature's [n] int32, the rows of its ids.
        bags: each feature's bags.

    Returns:
        Each feature's vectors, [count, dim] float32.
    """
    return module.tfrs_embed_combine(
        rows=rows,
        dims=[rows.shape[1]] * len(bags),
        **_features(places, bags, [0] * len(bags)),
    )


def spread(
    module: Any,
    gradients: Sequence[tf.Tensor],
    places: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    num_rows: tf.Tensor,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Sums gradients of features' bags into rows.

    Args:
        module: the kernels' operations.
        gradients: each feature's [count, dim] float32.
        places: each feature's [n] int32, the rows of its ids.
        bags: each feature's bags.
        num_rows: scalar int32.
        dtype: the rows', float32, bfloat16 or float16.

    Returns:
        [num_rows, dim] of the dtype.
    """
    return module.tfrs_embed_spread(
        num_rows=num_rows,
        gradients=list(gradients),
        T=dtype,
        dim=gradients[0].shape[1],
        **_features(places, bags, [0] * len(bags)),
    )


def update(
    module: Any,
    variables: Sequence[dict[str, tf.Variable]],
    rules: Sequence[UpdateRule],
    rates: Sequence[tf.Tensor],
    bags: Sequence[Sequence[BaggedIds]],
    gradients: Sequence[Sequence[tf.Tensor]],
    roundings: Sequence[Rounding],
    step: tf.Tensor | int,
    options: Sequence[UpdateOptions],
    decays: Sequence[tf.Tensor | None],
) -> None:
    """Sums the gradients of each row of each table, and updates the rows.

    Args:
        module: the kernels' operations.
        variables: each table's parameters and slots, in the rule's order.
        rules: each table's update rule.
        rates: each table's learning rate, a scalar float32.
        bags: the bags of each table's features.
        gradients: their gradients, [count, dim] float32.
        roundings: how each table's new rows are rounded.
        step: the number of updates made before this one, a scalar int64.
        options: how each table's rows' gradients are clipped.
        decays: the share that each table's rows lose, a scalar float32; None:
            none. Rows of two bytes can't decay here.
    """
    settings: list[float] = []
    for rule in rules:
        values = rule.loop_settings()
        settings += values + [0.0] * (_SETTINGS - len(values))
    flat = [b for of_table in bags for b in of_table]
    found = concat_gradients.find(
        [g for of_table in gradients for g in of_table]
    )
    states, places = handle_packs.arguments(
        [v for of_table in variables for v in of_table.values()]
    )
    module.tfrs_embed_update(
        states=states,
        places=places,
        rates=tf.stack(rates),
        decays=_decays(decays),
        gradients=concat_gradients.before_casts(found.matrices),
        gradient_of=found.matrix_of,
        columns=found.first,
        rules=[rule.loop for rule in rules],
        settings=settings,
        clip_lows=[o.limits[0] for o in options],
        clip_highs=[o.limits[1] for o in options],
        row_norms=[o.row_clipnorm or math.inf for o in options],
        step=tf.convert_to_tensor(step, tf.int64),
        stochastic=[r.stochastic for r in roundings],
        seeds=[r.seed for r in roundings],
        first_rows=[r.first_row for r in roundings],
        row_strides=[r.row_stride for r in roundings],
        first_columns=[r.first_column for r in roundings],
        **_features(
            [b.ids for b in flat],
            flat,
            [t for t, of_table in enumerate(bags) for _ in of_table],
        ),
    )


def _decays(decays: Sequence[tf.Tensor | None]) -> tf.Tensor:
    """The share that each table's rows lose, [tables] or [0] if none does."""
    if all(decay is None for decay in decays):
        return tf.zeros([0])
    return tf.stack([0.0 if decay is None else decay for decay in decays])


def ids_of_shard(
    module: Any,
    matrix: tf.Tensor,
    columns: Sequence[tuple[int, bool, bool]],
    world: int,
    shards: Sequence[int],
) -> list[tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]]:
    """Reads the ids whose rows are on one shard; see `bag_matrix.of_shard`.

    Args:
        module: the kernels' operations.
        matrix: [count, columns] float32.
        columns: for each feature the ids of a bag, whether they take two
            columns each, and whether they have weights.
        world: the number of shards.
        shards: each feature's shard.

    Returns:
        For each feature the rows, [n] int64, the bags' splits, [count + 1]
        int32, and the weights, [n] float32 or None.
    """
    rows, splits, weights = module.tfrs_embed_ids_of_shard(
        matrix=matrix,
        bag_sizes=[size for size, _, _ in columns],
        wide=[wide for _, wide, _ in columns],
        weighted=[weighted for _, _, weighted in columns],
        M=len(columns),
        W=sum(weighted for _, _, weighted in columns),
        world=world,
        shards=list(shards),
    )
    given = iter(weights)
    return [
        (r, s, next(given) if weighted else None)
        for r, s, (_, _, weighted) in zip(rows, splits, columns, strict=True)
    ]
