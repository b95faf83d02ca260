"""Tables on TPUs with embedding cores (v2, v3, v4), held by `TPUEmbedding`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.rows import scatter
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.tables.composite import CompositeTable
from tfrs_embed.engines.tpu.base import TPUEngine
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.samples import as_ragged
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.strategies import on_host


class _Embedding(tf.tpu.experimental.embedding.TPUEmbedding):
    """TensorFlow's class, fed with ids that were checked on the host."""

    def _raise_error_for_non_direct_inputs(self, features: Any) -> None:
        """Nothing: what the checks return comes from the host, as it must."""


class EmbeddingCoreEngine(TPUEngine):
    """Tables on the embedding cores of a slice.

    The hardware takes one layer's ids at the head of a step, so there can be
    one layer, looked up once in a step.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name.
        options: the other arguments.

    Raises:
        ValueError: a table has more rows than a TPU can number.
    """

    _options = ("clipvalue",)

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        super().__init__(features, optimizers, options)
        self._pipelined = options.pipelined
        self._embedding: Any = None
        self._calls = itertools.count()

    def _build(self) -> None:
        self._embedding = _Embedding(
            self._feature_configs(self._padded()), None, self._pipelined
        )
        try:
            self._embedding.build(
                [tf.TensorShape([samples, None]) for samples in self._padded()]
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._name}: the embedding cores of these TPUs serve one "
                "layer, and another one has them already. Put the features of "
                "all into one layer."
            ) from error
        tables = {
            name: {
                key: _HostTable(
                    f"{name}/{key}",
                    (state.spec.vocabulary_size, state.spec.dim),
                    variable,
                    self._strategy,
                    self._embedding._retrieve_variables,
                    self._embedding._load_variables,
                )
                for key, variable in self._embedding._variables[name].items()
            }
            for name, state in self.states.items()
        }
        for name, made in tables.items():
            for start, block in self._initial_blocks(self.states[name].spec):
                made[PARAMETERS].write_rows(start, block)
        self._embedding._load_variables()
        # Only now: a checkpoint that was read before restores them.
        for name, made in tables.items():
            for key, whole in made.items():
                self.states[name].add(key, whole)

    def _read(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        if not tf.executing_eagerly():
            raise NotImplementedError(
                f"{self._name}: its tables are on embedding cores, which a "
                "function outside of strategy.run can't read. Restore a "
                "checkpoint into a layer made without a TPUStrategy."
            )
        return tf.gather(self.states[name].table.read(), ids)

    def _lookup(
        self, bags: Sequence[BaggedIds], training: bool
    ) -> tuple[list[tf.Tensor], Any, tf.Tensor]:
        # The name ties the lookup to its update.
        name = f"{self._name}_{next(self._calls)}"
        rows = [
            on_host(as_ragged, each, samples)
            for each, samples in zip(bags, self._padded(), strict=True)
        ]
        ids, weights = [r[0] for r in rows], [r[1] for r in rows]
        self._embedding.enqueue(ids, weights, training=training, name=name)
        vectors = self._embedding.dequeue(name=name)
        return vectors, name, vectors[0]

    def _apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        self._embedding.apply_gradients(list(gradients), name=residuals)


class _HostTable(CompositeTable):
    """A table, or a slot, whose image on the hosts is copied from the cores.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim].
        variable: TensorFlow's variable, sharded over the hosts.
        strategy: the strategy it was made under.
        retrieve: copies all tables from the cores to the hosts.
        load: copies all tables from the hosts to the cores.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        variable: Any,
        strategy: tf.distribute.Strategy,
        retrieve: Callable[[], None],
        load: Callable[[], None],
    ) -> None:
        super().__init__(
            name, shape, getattr(variable, "variables", [variable]), strategy
        )
        self._retrieve = retrieve
        self._load = load

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """See the base class."""
        self._retrieve()
        yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """See the base class."""
        # The other tables' images would overwrite what the cores have.
        self._retrieve()
        yield
        self._load()

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """Rows of the image on the hosts."""
        self._require_values()
        found = [
            tf.gather(variable, tf.range(first, last))
            for variable, _, first, last in self._overlaps(start, size)
        ]
        return tf.concat(found, 0)

    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        """Sets rows of the image on the hosts."""
        for variable, skipped, first, last in self._overlaps(
            start, rows.shape[0]
        ):
            part = rows[skipped : skipped + last - first]
            scatter(variable, tf.range(first, last), part)

    def _overlaps(
        self, start: int, size: int
    ) -> Iterator[tuple[tf.Variable, int, int, int]]:
        """Yields the hosts that hold some of a block.

        Yields:
            A host's variable, the number of the block's rows that come before
            it, and which of the variable's rows are the block's.
        """
        offset = 0
        for variable in self._variables:
            first = max(start, offset)
            last = min(start + size, offset + variable.shape[0])
            if first < last:
                yield variable, first - start, first - offset, last - offset
            offset += variable.shape[0]
