"""TensorFlow's bridge: turns a traced function into the programs of the TPUs.

The runtime runs the same passes before a TPUStrategy's function. They take
out the operations of the host, move reads and writes of variables out of the
programs, and split pipelined loops into stages.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    context,
    handle_data_util,
    pywrap_mlir,
)
from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.tpu_check import offline
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.passes import run_passes
from tfrs_embed.tools.tpu_check.recording import RecordedFunction

_PIPELINE = "tf-replicated-clustering-bridge-v2"
_PROGRAM = re.compile(
    r"^  func\.func private @(_func\w*)\((.*?)^  }$", re.DOTALL | re.MULTILINE
)
_numbers = itertools.count()


def bridge(recorded: RecordedFunction, tpu_slice: Slice) -> list[str]:
    """The text in MLIR of each TPU program of a traced function.

    Raises CheckErrors.
    """
    text = _import(recorded.function, tpu_slice)
    bridged = run_passes(
        text, _PIPELINE, f"function '{recorded.name}'", "TensorFlow's bridge"
    )
    programs = [match[0] for match in _PROGRAM.finditer(bridged)]
    if not programs:
        raise CheckError(
            f"TensorFlow's bridge found no TPU program in '{recorded.name}'."
        )
    return programs


def _import(function: Any, tpu_slice: Slice) -> str:
    """A function in TensorFlow's MLIR dialect.

    Arguments that are variables become typed handles in the body, as when the
    runtime, which knows the values, compiles the function.
    """
    definition = function.function_def
    made = type(definition)()
    made.CopyFrom(definition)
    replaced, kept = {}, []
    for i, (tensor, argument) in enumerate(
        zip(function.inputs, definition.signature.input_arg, strict=True)
    ):
        kind = None
        if tensor.dtype == tf.resource:
            data = handle_data_util.get_resource_handle_data(tensor)
            if data is not None and len(data.shape_and_type) == 1:
                [kind] = data.shape_and_type
        if kind is None:
            kept.append((i, argument))
            continue
        node = made.node_def.add(name=f"handle_{i}", op="VarHandleOp")
        node.attr["dtype"].type = kind.dtype
        node.attr["shape"].shape.CopyFrom(kind.shape)
        node.attr["shared_name"].s = f"v{i}".encode()
        for name in ("container", "debug_name"):
            node.attr[name].s = b""
        node.attr["allowed_devices"].list.SetInParent()
        replaced[argument.name] = f"{node.name}:resource:0"
    del made.signature.input_arg[:]
    made.arg_attr.clear()
    made.resource_arg_unique_id.clear()
    for k, (i, argument) in enumerate(kept):
        made.signature.input_arg.append(argument)
        if i in definition.arg_attr:
            made.arg_attr[k].CopyFrom(definition.arg_attr[i])
    for node in made.node_def:
        for k, name in enumerate(node.input):
            node.input[k] = replaced.get(name, name)
    for key, name in list(made.ret.items()):
        made.ret[key] = replaced.get(name, name)
    made.signature.name = f"tpu_check_{next(_numbers)}"
    context.context().add_function_def(made)
    text = pywrap_mlir.ImportFunction(
        context.context()._handle, str(made).encode(), b"", False
    )
    # In a real run the runtime gives the devices. Without devices the bridge
    # treats a program of one replica as one of the host.
    devices = ", ".join(f'"{name}"' for name in offline.devices(tpu_slice))
    head = "module attributes {"
    return text.replace(head, f"{head}tf.devices = [{devices}], ", 1)
