"""TensorFlow's TPUEmbeddingV2 under a TPUStrategy, with checks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import nest
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.tpu_inputs import require_given
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.ops.validation import require_valid
from tfrs_embed.sparsecore.host_kernels import require_kernels
from tfrs_embed.sparsecore.mid_level.inputs import parse
from tfrs_embed.sparsecore.mid_level.stacked_tables import unstack
from tfrs_embed.sparsecore.setup import check_config
from tfrs_embed.sparsecore.topology import Topology, of_strategy
from tfrs_embed.sparsecore.tpu_embedding import TPUEmbeddingV2InLoops


class TPUEmbeddingV2OnTPU(TPUEmbeddingV2InLoops):
    """TensorFlow's class; checks its configuration and its ids.

    The class has `TPUEmbeddingV2`'s arguments; every table needs an optimizer.
    Its name must begin as TensorFlow's does: checkpoints find the class by it.
    """

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        sparse_core_embedding_config: Any = None,
        *,
        topology: Any = None,
    ) -> None:
        strategy = tf.distribute.get_strategy()
        require_kernels(strategy)
        found = of_strategy(strategy)
        if topology is not None:
            asked = Topology.of(topology)
            if asked != found:
                raise ValueError(
                    f"topology={topology!r} is {asked.chips} chips x "
                    f"{asked.sparse_cores} SparseCores, but the strategy has "
                    f"{found.name}; leave it out."
                )
        setup = check_config(
            feature_config, optimizer, found, sparse_core_embedding_config
        )
        for name, rule in setup.rules.items():
            if rule is None:
                raise ValueError(
                    f"Stack '{name}': under a TPUStrategy every table needs an "
                    "optimizer."
                )
        super().__init__(
            setup.feature_config,
            optimizer,
            pipeline_execution_with_tensor_core,
            sparse_core_embedding_config,
        )
        # TensorFlow's checkpoints don't track it, as its class is a plain one.
        self._setup = setup

    def enqueue(
        self, features: Any, weights: Any = None, device: str | None = None
    ) -> Any:
        """See `TPUEmbeddingV2.enqueue`; refuses ids that a TPU computes."""
        for kind, given in (("ids", features), ("weights", weights)):
            if given is None:
                continue
            flat = self._setup.flatten(given, kind)
            for feature, each in zip(self._setup.features, flat, strict=True):
                require_given(f"{feature}: {kind}", each)
        return super().enqueue(features, weights, device)

    def _preprocess_features(self, **kwargs: Any) -> Any:
        # This runs on a host, which can read a TPU's ids.
        given = kwargs["flat_inputs"]
        weights = kwargs["flat_weights"] or [None] * len(given)
        checks = Checks()
        setup = self._setup
        parsed = parse(setup.features, setup.layout, given, weights, 1, checks)
        require_valid(parsed, checks, training=True)
        tensors = checks.guard(nest.flatten(given, expand_composites=True))
        kwargs["flat_inputs"] = nest.pack_sequence_as(
            given, tensors, expand_composites=True
        )
        return super()._preprocess_features(**kwargs)

    @property
    def unstacked_variables(self) -> dict[str, dict[str, tf.Tensor]]:
        devices = self._strategy.extended._tpu_devices.flatten()
        return unstack(
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
        return {k: v[PARAMETERS] for k, v in self.unstacked_variables.items()}
