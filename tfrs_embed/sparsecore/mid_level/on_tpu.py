"""TensorFlow's TPUEmbeddingV2 under a TPUStrategy, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import nest
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.tpu_inputs import require_given
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.sparsecore.host_kernels import require_kernels
from tfrs_embed.sparsecore.mid_level import inputs, stacked_tables
from tfrs_embed.sparsecore.setup import make_setup
from tfrs_embed.sparsecore.topology import Topology, of_strategy
from tfrs_embed.sparsecore.tpu_embedding import TPUEmbeddingV2InLoops


class TPUEmbeddingV2OnTPU(TPUEmbeddingV2InLoops):
    """TensorFlow's class, with its configuration and its ids checked.

    TF's checkpoints find the class by its name, which must begin as TF's does.

    It takes the arguments of `TPUEmbeddingV2`; every table needs an optimizer,
    and `topology` is None or the strategy's.

    Raises:
        ValueError, TypeError, NotImplementedError: see `TPUEmbeddingV2`.
        RuntimeError: this is not TensorFlow's wheel for TPUs.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any,
        pipelined: bool,
        config: Any,
        topology: Any,
    ) -> None:
        strategy = tf.distribute.get_strategy()
        require_kernels(strategy)
        found = of_strategy(strategy)
        if topology is not None:
            asked = Topology.of(topology)
            if asked != dataclasses.replace(found, name=asked.name):
                raise ValueError(
                    f"topology={topology!r} is {asked.chips} chips x "
                    f"{asked.sparse_cores} SparseCores, but the strategy has "
                    f"{found.name}; leave it out."
                )
        setup = make_setup(feature_config, optimizer, found, config)
        for name, rule in setup.rules.items():
            if rule is None:
                raise ValueError(
                    f"Stack '{name}': under a TPUStrategy every table needs an "
                    "optimizer."
                )
        super().__init__(setup.feature_config, optimizer, pipelined, config)
        # In plain classes, so that TF's checkpoints don't track it.
        self._setup = setup

    def enqueue(
        self, features: Any, weights: Any = None, device: str | None = None
    ) -> Any:
        """See `TPUEmbeddingV2.enqueue`.

        Raises:
            ValueError: ids or weights that the TPU's program computes, too.
        """
        for kind, given in (("ids", features), ("weights", weights)):
            if given is None:
                continue
            flat = self._setup.flatten(given, kind)
            for feature, each in zip(self._setup.features, flat, strict=True):
                require_given(f"{feature}: {kind}", each)
        return super().enqueue(features, weights, device)

    def _preprocess_features(self, **kwargs: Any) -> Any:
        # This runs on a host, where a TPU's ids can be read.
        given = kwargs["flat_inputs"]
        weights = kwargs["flat_weights"] or [None] * len(given)
        checks = Checks()
        inputs.parse(self._setup, given, weights, 1, checks)
        tensors = checks.guard(nest.flatten(given, expand_composites=True))
        kwargs["flat_inputs"] = nest.pack_sequence_as(
            given, tensors, expand_composites=True
        )
        return super()._preprocess_features(**kwargs)

    def drain(self) -> None:
        """Does nothing: the TPU makes all updates by the end of a loop."""

    @property
    def unstacked_variables(self) -> dict[str, dict[str, tf.Tensor]]:
        """By table, its parameters and slots, [vocabulary_size, dim] each."""
        devices = self._strategy.extended._tpu_devices.flatten()
        return stacked_tables.unstack(
            self._setup,
            {
                stack: {
                    key: tf.concat([v.read_from_device(d) for d in devices], 0)
                    for key, v in of_stack.items()
                }
                for stack, of_stack in self.variables.items()
            },
        )

    @property
    def unstacked_tables(self) -> dict[str, tf.Tensor]:
        """By table, its parameters, [vocabulary_size, dim]."""
        return {k: v[PARAMETERS] for k, v in self.unstacked_variables.items()}
