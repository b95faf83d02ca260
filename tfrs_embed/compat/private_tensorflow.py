"""TensorFlow's private API: all of this library's uses, with reasons.

A new TensorFlow may move or change any of it, and breaks this file first. The
names were tried on the oldest and the newest TensorFlow in `version.py`, those
of TPUs on the tensorflow-tpu wheel as well.

No other module imports from `tensorflow.python`, `tensorflow.core` or
`tf.__internal__`; `tests/test_private_api.py` checks that, and uses each name.
"""

# ruff: noqa: F401
# mypy: implicit-reexport

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.compat.version import (
    NEWEST_TENSORFLOW,
    OLDEST_TENSORFLOW,
    __version__,
)

try:
    # Protocol buffers, as they are on disk and in graphs. TensorFlow publishes
    # few of them.
    from tensorflow.core.framework import attr_value_pb2, tensor_pb2
    from tensorflow.core.protobuf import (
        tensor_bundle_pb2,
        trackable_object_graph_pb2,
    )
    from tensorflow.core.protobuf.tpu import topology_pb2

    # How SparseCore checkpoints say which table is where in which stack.
    from tensorflow.core.tpu.kernels import sparse_core_layout_pb2

    # `tpu_check`: TensorFlow's importer, the first stage of its bridge.
    from tensorflow.python import pywrap_mlir

    # `EmulatedTPUStrategy.run` converts functions as TPUStrategy does.
    from tensorflow.python.autograph.core import ag_ctx
    from tensorflow.python.autograph.impl import api as autograph

    # The file that names a folder's latest checkpoint, written at once.
    from tensorflow.python.checkpoint import checkpoint_management

    # `tpu_check`: devices without a machine that has them.
    from tensorflow.python.client import session as client_session

    # The batch size that a strategy would cut into its replicas' parts.
    from tensorflow.python.data.experimental.ops import (
        distribute as distribute_data,
    )

    # A strategy that reduces otherwise has no collectives to order tables' by;
    # the emulated slice reduces on one device.
    from tensorflow.python.distribute import (
        cross_device_ops,
        # Which CPU is the host of a TPU.
        device_util,
        # The emulated slice: replicas' values as one, threads per replica, and
        # the classes that it stands for.
        distribute_utils,
        mirrored_run,
        mirrored_strategy,
        tpu_strategy,
        tpu_util,
        values_util,
    )

    # `tpu_check`: a TPUStrategy that looks for no TPUs.
    from tensorflow.python.distribute.cluster_resolver.tpu import (
        tpu_cluster_resolver,
    )

    # The key-value store that the workers of a cluster share; the runtime that
    # `tpu_check` imports functions from.
    from tensorflow.python.eager import (
        context,
        # `EmulatedTPUStrategy.run` refuses what TPUStrategy refuses.
        def_function,
        # Whether a tape records: such a call of a layer is a training step.
        record,
    )

    # `tpu_check` catches calls of functions that have TPU programs; loops whose
    # steps TPUs pipeline trace functions once more in their bodies.
    from tensorflow.python.eager.polymorphic_function import (
        concrete_function,
        function_context,
    )

    # Handles of many variables as one argument stay in order with reads and
    # writes of each.
    from tensorflow.python.framework import (
        auto_control_deps,
        func_graph,
        op_def_registry,
        # The graph that is being built, and the registry of gradients.
        ops,
    )
    from tensorflow.python.framework import (
        # Which operations this TensorFlow has kernels for.
        kernels as kernel_registry,
    )

    # Whether XLA will compile what is traced, and whether it is a loop's body.
    from tensorflow.python.ops import (
        control_flow_util,
        control_flow_v2_func_graphs,
        # The shapes of variables behind handles, for `tpu_check`.
        handle_data_util,
        # Initializers that can make a part of a table: those of TF itself; and
        # the base of those of TensorFlow 1.
        init_ops,
        init_ops_v2,
    )

    # Variables that no strategy makes, and variables without memory.
    from tensorflow.python.ops.resource_variable_ops import (
        ResourceVariable,
        UninitializedVariable,
    )

    # Exported models: whether one is being traced, tables that save themselves,
    # and the fingerprint of what was written in parts.
    from tensorflow.python.saved_model import (
        fingerprinting_utils,
        registration,
        save_context,
    )

    # TPU embeddings: TF's classes, and how they stack tables and fill buffers.
    from tensorflow.python.tpu import (
        tpu_embedding_v2,
        tpu_embedding_v2_utils,
        tpu_embedding_v3,
        tpu_embedding_v3_utils,
        tpu_hardware_feature,
        # `outside_compilation` knows the host that belongs to a replica.
        tpu_replication,
        tpu_system_metadata,
    )
    from tensorflow.python.tpu.ops import gen_xla_ops
    from tensorflow.python.tpu.tpu_embedding_v3 import (
        PartitionedCsrFormatTensor,
    )

    # Tables whose parts are on several devices restore from one tensor.
    from tensorflow.python.training.saving.saveable_object import SaveSpec

    # `tf.nest` with paths, and over composite tensors' components.
    from tensorflow.python.util import nest
except ImportError as error:
    raise ImportError(
        f"tfrs_embed {__version__} works with TensorFlow {OLDEST_TENSORFLOW} "
        f"to {NEWEST_TENSORFLOW}; this is {tf.__version__}, which lacks what "
        f"it needs: {error}. Install one of those, or see 'A new TensorFlow' "
        "in CONTRIBUTING.md."
    ) from error

#: Objects with children by name, as checkpoints hold them.
Trackable = tf.__internal__.tracking.Trackable
AutoTrackable = tf.__internal__.tracking.AutoTrackable
#: A tensor with a value, also where a function is traced.
EagerTensor = tf.__internal__.EagerTensor
#: Keeps a decorated function's signature for AutoGraph.
make_decorator = tf.__internal__.decorator.make_decorator

try:
    from tensorflow.python.tpu.embedding_context_utils import (
        embedding_pipelining_state,
    )
except ImportError:
    # Before TensorFlow 2.20 nothing switches pipelining off.
    embedding_pipelining_state = types.SimpleNamespace(enabled=True)


def traces_shapes() -> bool:
    """Whether tf_keras is calling a model with placeholders, for its shapes.

    `Model.build`, also of loaded models, makes floats of all shapes in a graph
    named "build_graph".
    """
    return not tf.executing_eagerly() and any(
        getattr(graph, "name", "") == "build_graph" for graph in graphs.traced()
    )
