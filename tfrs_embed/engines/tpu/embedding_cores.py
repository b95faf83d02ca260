"""Tables on embedding cores (TPU v2, v3, v4), held by `TPUEmbedding`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.rows import HeldRows
from tfrs_embed.engines.tpu.base import TPUEngine, as_samples, new_rows
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.sharded import Part, ShardedVariable


class _Embedding(tf.tpu.experimental.embedding.TPUEmbedding):
    """TensorFlow's class for ids that were checked on the host."""

    def _raise_error_for_non_direct_inputs(self, features: Any) -> None:
        """Does nothing: the ids come from checks on the host."""


class EmbeddingCoreEngine(TPUEngine):
    """Tables of one layer on embedding cores, looked up once in a step."""

    _options = ("clipvalue",)

    def _make_tables(self) -> dict[str, dict[str, Any]]:
        self._calls = itertools.count()
        self._embedding = _Embedding(
            self._feature_configs(), None, self._pipelined
        )
        try:
            self._embedding.build(
                [tf.TensorShape([samples, None]) for samples in self._padded()]
            )
        except RuntimeError as error:
            raise RuntimeError(
                f"{self._name}: the embedding cores of these TPUs serve one "
                "layer, and another layer uses them. Put the features of "
                "all into one layer."
            ) from error
        made: dict[str, dict[str, Any]] = {}
        for name, state in self.states.items():
            made[name] = {
                key: _HostTable(
                    f"{name}/{key}",
                    (state.spec.vocabulary_size, state.spec.dim),
                    variable,
                    self._strategy,
                    self._embedding,
                )
                for key, variable in self._embedding._variables[name].items()
            }
            made[name][PARAMETERS].write_blocks(
                new_rows(state.spec, self._strategy)
            )
        self._embedding._load_variables()
        return made

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
        # The name connects the lookup with its update.
        name = f"{self._name}_{next(self._calls)}"
        ids, weights = as_samples(self.features, bags, self._padded())
        self._embedding.enqueue(ids, weights, training=training, name=name)
        vectors = self._embedding.dequeue(name=name)
        return vectors, name, vectors[0]

    def _apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        self._embedding.apply_gradients(list(gradients), name=residuals)


class _HostTable(ShardedVariable):
    """A table or a slot, whose image on the hosts is copied from the cores.

    `variable` is TensorFlow's, sharded over the hosts; `embedding` is
    TensorFlow's object, which copies all tables together.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        variable: Any,
        strategy: tf.distribute.Strategy,
        embedding: _Embedding,
    ) -> None:
        held, first = [], 0
        for of_host in getattr(variable, "variables", [variable]):
            end = first + of_host.shape[0]
            held.append((Part(range(first, end)), of_host))
            first = end
        super().__init__(name, shape, held, strategy)
        self._embedding = embedding

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        self._embedding._retrieve_variables()
        yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        # Loading overwrites all tables, so all images must be up to date.
        self._embedding._retrieve_variables()
        yield
        self._embedding._load_variables()

    def held(self) -> list[HeldRows]:
        """Nothing: the image on the hosts may be out of date."""
        return []
