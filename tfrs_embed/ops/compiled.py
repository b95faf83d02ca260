"""A step's operations as compiled kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.kernels import handle_packs, portable_call
from tfrs_embed.ops import concat_gradients
from tfrs_embed.ops.bag_matrix import BagColumns
from tfrs_embed.ops.bags import BaggedIds, of_one_dtype, split_by_bags
from tfrs_embed.ops.id_range import RangeCheck
from tfrs_embed.ops.messages import Route
from tfrs_embed.ops.stock import Salt, Stock
from tfrs_embed.ops.stored_table import StoredTable
from tfrs_embed.ops.update import PARAMETERS, TableUpdate, features_of
from tfrs_embed.optimizers.rules import RULES, UpdateRule

# Room for a rule's settings in cc/rows.h.
_SETTINGS = 6

_OUTPUTS = (tf.float32, tf.bfloat16, tf.float16)

# The tensors of bags in an exported lookup's inputs.
_FIELDS = ("ids", "grouping", "weights", "scale")

_STOCK = Stock()


class CompiledOperations(Stock):
    """The kernels' operations, on a CPU, in graphs that are not exported."""

    compiled = True
    checks_ids = True

    def __init__(self, module: Any) -> None:
        self._module = module
        self.fill = module.tfrs_embed_fill
        self.read_keys = module.tfrs_embed_read_keys
        self.read_splits = module.tfrs_embed_read_splits
        self.copy_runs = functools.partial(
            module.tfrs_embed_copy_runs, capacity=0, padded=False
        )

    def inside(self, check: RangeCheck) -> tf.Tensor:
        return self._module.tfrs_embed_inside(ids=check.parts, rows=check.sizes)

    def require(
        self, features: Sequence[FeatureSpec], ids: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        return self._module.tfrs_embed_require(
            ids=ids,
            rows=[feature.table.vocabulary_size for feature in features],
            names=[str(feature) for feature in features],
        )

    def hash_ids(
        self, ids: tf.Tensor, buckets: int, salts: Sequence[Salt]
    ) -> list[tf.Tensor]:
        numbers = [number for salt in salts for number in salt or ()]
        return self._module.tfrs_embed_hash(
            ids=ids, N=len(salts), buckets=buckets, salts=numbers
        )

    def lookup(
        self,
        tables: Sequence[tf.Variable],
        table_of: Sequence[int],
        bags: Sequence[BaggedIds],
        dtype: tf.DType,
    ) -> list[tf.Tensor]:
        if not bags:
            return []
        handles, places = handle_packs.arguments(tables)
        dims = [tables[t].shape[1] for t in table_of]
        dtype = dtype if dtype in _OUTPUTS else tf.float32
        return _lookup(
            self._module, handles, dims, table_of, bags, dtype, places
        )

    def read_rows(
        self, tables: Sequence[tf.Variable], rows: tf.Tensor, dtype: tf.DType
    ) -> tf.Tensor | None:
        handles, places = handle_packs.arguments(tables)
        dim = tables[0].shape[1]
        return self._module.tfrs_embed_read_rows(
            tables=handles, rows=rows, T=dtype, dim=dim, places=places
        )

    def combine(
        self,
        rows: tf.Tensor,
        index: Sequence[tf.Tensor],
        bags: Sequence[BaggedIds],
    ) -> list[tf.Tensor]:
        if not bags:
            return []
        dims = [rows.shape[1]] * len(bags)
        return self._module.tfrs_embed_combine(
            rows=rows,
            dims=dims,
            shapes=_shapes_of_vectors(bags, dims),
            **describe(index, bags, [0] * len(bags)),
        )

    def sum_gradients_by_row(
        self,
        gradients: Sequence[tf.Tensor],
        bags: Sequence[BaggedIds],
        index: tf.Tensor,
        num_rows: tf.Tensor,
        dtype: tf.DType | None = None,
    ) -> tf.Tensor:
        if gradients[0].dtype != tf.float32:
            return Stock.sum_gradients_by_row(
                gradients, bags, index, num_rows, dtype
            )
        places = split_by_bags(index, bags)
        return self._module.tfrs_embed_sum_gradients_by_row(
            num_rows=num_rows,
            gradients=list(gradients),
            T=dtype or tf.float32,
            dim=gradients[0].shape[1],
            **describe(places, bags, [0] * len(bags)),
        )

    def update(self, updates: Sequence[TableUpdate]) -> None:
        able = [u for u in updates if _has_kernel(u)]
        if able:
            self._update(able)
        super().update([u for u in updates if not _has_kernel(u)])

    def _update(self, updates: Sequence[TableUpdate]) -> None:
        settings: list[float] = []
        for u in updates:
            values = u.rule.loop_settings()
            settings += values + [0.0] * (_SETTINGS - len(values))
        bags, gradients, table_of, spans = zip(
            *features_of(updates), strict=True
        )
        found = concat_gradients.find_matrices(gradients)
        variables = []
        for u in updates:
            variables += [u.variables[n] for n in (PARAMETERS, *u.rule.slots())]
            if u.marks is not None:
                variables.append(u.marks.variable)
        states, places = handle_packs.arguments(variables)
        marked = [u.marks for u in updates if u.marks is not None]
        decays = tf.zeros([0])  # No table decays.
        if any(u.decay is not None for u in updates):
            shares = [0.0 if u.decay is None else u.decay for u in updates]
            decays = tf.stack(shares)
        self._module.tfrs_embed_update(
            states=states,
            places=places,
            rates=tf.stack([u.rate for u in updates]),
            decays=decays,
            gradients=found.matrices,
            gradient_of=found.matrix_of,
            spans=spans,
            columns=found.columns,
            rules=[u.rule.loop for u in updates],
            settings=settings,
            clip_lows=[u.options.limits[0] for u in updates],
            clip_highs=[u.options.limits[1] for u in updates],
            row_norms=[u.options.row_clipnorm or math.inf for u in updates],
            max_norms=[u.options.max_norm or 0.0 for u in updates],
            mark=marked[0].mark if marked else tf.constant(0, tf.uint8),
            marked=[u.marks is not None for u in updates],
            step=tf.convert_to_tensor(updates[0].step, tf.int64),
            stochastic=[u.rounding.stochastic for u in updates],
            seeds=[u.rounding.seed for u in updates],
            first_rows=[u.rounding.first_row for u in updates],
            row_strides=[u.rounding.row_stride for u in updates],
            first_columns=[u.rounding.first_column for u in updates],
            **describe([b.ids for b in bags], bags, table_of),
        )

    def ids_of_shard(
        self,
        matrix: tf.Tensor,
        columns: Sequence[BagColumns],
        world: int,
        shards: Sequence[int],
    ) -> list[BaggedIds]:
        weighted = [c.weighted for c in columns]
        count = tf.shape(matrix)[0]
        rows, splits, weights = self._module.tfrs_embed_ids_of_shard(
            matrix=matrix,
            bag_sizes=[c.bag_size for c in columns],
            weighted=weighted,
            M=len(columns),
            W=sum(weighted),
            world=world,
            shards=list(shards),
        )
        given = iter(weights)
        return [
            BaggedIds.in_one_row(
                r, count, splits=s, weights=next(given) if has_weights else None
            )
            for r, s, has_weights in zip(rows, splits, weighted, strict=True)
        ]

    def route(
        self,
        keys: tf.Tensor,
        world: int,
        table_of: tf.Tensor | None = None,
        tables: int = 1,
    ) -> Route:
        found = self._module.tfrs_embed_route(
            keys=keys,
            table_of=tf.zeros([0], tf.int32) if table_of is None else table_of,
            world=world,
            tables=tables,
        )
        return Route(*found)

    def write_keys(
        self, routed: Route, capacity: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return self._module.tfrs_embed_write_keys(
            keys=routed.row, counts=routed.counts, capacity=capacity
        )

    def pad_runs(
        self, values: tf.Tensor, lengths: tf.Tensor, capacity: tf.Tensor
    ) -> tf.Tensor:
        return self._module.tfrs_embed_copy_runs(
            values=values,
            starts=tf.cumsum(lengths, exclusive=True),
            sizes=lengths,
            capacity=capacity,
            padded=True,
        )


class Portable(Stock):
    """TensorFlow's operations, which kernels replace when the graph runs.

    It is for graphs that may be exported to machines without kernels.

    Args:
        module: the kernels' operations; None: no kernels replace any.
    """

    checks_ids = True

    def __init__(self, module: Any) -> None:
        self._kernels = None if module is None else CompiledOperations(module)

    def require(
        self, features: Sequence[FeatureSpec], ids: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        return self._call(
            lambda operations, *ids: operations.require(features, ids), ids
        )

    def hash_ids(
        self, ids: tf.Tensor, buckets: int, salts: Sequence[Salt]
    ) -> list[tf.Tensor]:
        return self._call(
            lambda operations, ids: operations.hash_ids(ids, buckets, salts),
            [ids],
        )

    def lookup(
        self,
        tables: Sequence[tf.Variable],
        table_of: Sequence[int],
        bags: Sequence[BaggedIds],
        dtype: tf.DType,
    ) -> list[tf.Tensor]:
        stored = [StoredTable(t.handle, t.dtype, t.shape[1]) for t in tables]
        return self.lookup_stored(stored, table_of, bags)

    def lookup_stored(
        self,
        tables: Sequence[StoredTable],
        table_of: Sequence[int],
        bags: Sequence[BaggedIds],
    ) -> list[tf.Tensor]:
        if not bags:
            return []
        dims = [tables[t].dim for t in table_of]
        shapes = _shapes_of_vectors(bags, dims)
        scales = [t.scale for t in tables if t.scale is not None]
        places = iter(range(len(tables), len(tables) + len(scales)))
        scale_of = [-1 if t.scale is None else next(places) for t in tables]
        handles = [*(t.rows for t in tables), *scales]
        # The kernel takes ids of one dtype, and splits without `bag_ids`.
        ids = of_one_dtype([b.ids for b in bags])
        bags = [
            b._replace(ids=i, bag_ids=b.bag_ids if b.splits is None else None)
            for b, i in zip(bags, ids, strict=True)
        ]

        def find(operations: Stock, *inputs: tf.Tensor) -> list[tf.Tensor]:
            given = inputs[: len(handles)]
            unpacked = _unpack(inputs[len(handles) :], bags)
            if isinstance(operations, CompiledOperations):
                factors = scale_of if scales else ()
                return _lookup(
                    operations._module,
                    given,
                    dims,
                    table_of,
                    unpacked,
                    scale_of=factors,
                )
            vectors = operations.lookup_stored(
                [
                    t._replace(rows=given[i], scale=None if s < 0 else given[s])
                    for i, (t, s) in enumerate(
                        zip(tables, scale_of, strict=True)
                    )
                ],
                table_of,
                unpacked,
            )
            for i, shape in enumerate(shapes):
                if shape.rank != 2:
                    sizes = [-1 if size is None else size for size in shape]
                    vectors[i] = tf.reshape(vectors[i], sizes)
            return vectors

        vectors = self._call(find, [*handles, *_pack(bags)])
        for vector, shape in zip(vectors, shapes, strict=True):
            vector.set_shape(shape)
        return vectors

    def _call(
        self,
        function: Callable[..., list[tf.Tensor]],
        inputs: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Calls a function of operations and inputs."""
        kernels = self._kernels
        if kernels is None:
            return function(_STOCK, *inputs)
        return portable_call.call(
            lambda *given: function(_STOCK, *given),
            lambda *given: function(kernels, *given),
            inputs,
        )


def has_rule(rule: UpdateRule) -> bool:
    """Whether the kernels have the update rule."""
    # A subclass inherits `loop`, but has another formula.
    return rule.loop is not None and type(rule) in RULES


def describe(
    ids: Sequence[tf.Tensor], bags: Sequence[BaggedIds], table_of: Sequence[int]
) -> dict[str, Any]:
    """Returns the inputs and attributes that describe features to kernels."""

    def given(name: str) -> tuple[list[tf.Tensor], list[bool]]:
        values = [getattr(b, name) for b in bags]
        return (
            [v for v in values if v is not None],
            [v is not None for v in values],
        )

    groupings, has_bag = given("grouping")
    weights, has_weights = given("weights")
    scales, has_scale = given("scale")
    return {
        "ids": of_one_dtype(ids),
        "bags": groupings,
        "weights": weights,
        "scales": scales,
        "counts": tf.stack([b.count for b in bags]),
        "table_of": list(table_of),
        "has_bag": has_bag,
        "splits": [b.splits is not None for b in bags],
        "per_bag": [b.bag_size or 1 for b in bags],
        "has_weights": has_weights,
        "has_scale": has_scale,
    }


def _lookup(
    module: Any,
    handles: Sequence[tf.Tensor],
    dims: Sequence[int],
    table_of: Sequence[int],
    bags: Sequence[BaggedIds],
    dtype: tf.DType = tf.float32,
    places: Sequence[int] = (),
    scale_of: Sequence[int] = (),
) -> list[tf.Tensor]:
    """Looks up features by tables' handles.

    `places` has each table's position in the handle packs; empty: the
    handles are those of single variables. `scale_of` has the position of
    each table's factors among the handles, -1 for none; empty: none has
    factors.
    """
    return module.tfrs_embed_lookup(
        tables=list(handles),
        dims=list(dims),
        T=dtype,
        shapes=_shapes_of_vectors(bags, dims),
        places=list(places),
        scale_of=list(scale_of),
        **describe([b.ids for b in bags], bags, table_of),
    )


def _shapes_of_vectors(
    bags: Sequence[BaggedIds], dims: Sequence[int]
) -> list[tf.TensorShape]:
    """Returns the shapes of features' vectors, with at most one unknown size.

    Each is the bags' layout + [dim] if that has at most one, else [count, dim].
    """
    shapes = []
    for b, dim in zip(bags, dims, strict=True):
        layout = b.static_shape
        sizes = layout.as_list() if layout.rank is not None else [None, None]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) - 1 or (0 in known and None in sizes):
            sizes = [None]
        shapes.append(tf.TensorShape([*sizes, dim]))
    return shapes


def _has_kernel(table_update: TableUpdate) -> bool:
    """Whether the kernels can do an update."""
    # Kernels would round rows of two bytes twice.
    twice = table_update.decay is not None or table_update.options.max_norm
    wide = table_update.parameters.dtype == tf.float32
    return has_rule(table_update.rule) and (wide or not twice)


def _pack(bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
    """Returns the tensors of bags in the order of the kernel's inputs."""
    fields = [getattr(b, name) for name in _FIELDS for b in bags]
    # -1: it follows from the other inputs, without operations.
    counts = [-1 if b.even or b.splits is not None else b.count for b in bags]
    return [*(f for f in fields if f is not None), tf.stack(counts)]


def _unpack(
    inputs: Sequence[tf.Tensor], bags: Sequence[BaggedIds]
) -> list[BaggedIds]:
    """Returns bags with other tensors, in the order of `_pack`."""
    rest = iter(inputs)
    fields = [
        [None if getattr(b, name) is None else next(rest) for b in bags]
        for name in _FIELDS
    ]
    counts = tf.unstack(next(rest), num=len(bags))
    unpacked = []
    for b, count, ids, grouping, weights, scale in zip(
        bags, counts, *fields, strict=True
    ):
        if b.even:
            count = tf.size(ids) // (b.bag_size or 1)
        elif b.splits is not None:
            count = tf.size(grouping) - 1
        # A tensor of the outer graph would be another input.
        given = {"splits" if b.splits is not None else "bag_ids": grouping}
        unpacked.append(
            b._replace(
                ids=ids, weights=weights, scale=scale, count=count, **given
            )
        )
    return unpacked
