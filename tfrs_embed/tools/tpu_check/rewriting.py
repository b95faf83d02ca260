"""Rewrites programs where passes or parsers know less than a TPU's runtime.

The runtime evaluates sizes and positions while it compiles. The passes don't,
and would refuse programs that TPUs take.
"""

from __future__ import annotations

import math
import re

import numpy as np

# Four spaces: only there each name is one value.
_RESULT = re.compile(r"^    (%\w+)(?::\d+)? = \"tf\.(\w+)\"\(([^)]*)\)", re.M)
_SCALAR = re.compile(
    r'^    (%\w+) = "tf\.Const"\(\) <\{value = dense<(\d+)> : tensor<i32>\}>',
    re.M,
)
_STACK = re.compile(
    r'^(    %\w+ = "tf\.TensorListStack"\((%\w+)#(\d+), %\w+\) '
    r"<\{num_elements = )-1",
    re.M,
)
_SLICE_GRADIENT = re.compile(
    r'^( *%\w+ = )"tf\.StridedSliceGrad"\(%\w+, (%\w+), %\w+, %\w+, (%\w+)\) '
    r"<\{([^}]*)\}> (?:\{[^}]*\} )?: "
    r"\(\S+ (tensor<(\d+)x(i\d+)>), \S+ \S+ (\S+)\) -> tensor<([\dx]+)x(\w+)>",
    re.M,
)
_BOOLEANS = re.compile(r'dense<"0x([0-9A-F]+)"> : tensor<((?:\d+x)+)i1>')


def with_lengths(text: str) -> str:
    """Gives the results of loops over lists of tensors their lengths.

    Keras's recurrent layers leave them out where the number of steps is a
    tensor, if only a constant.
    """
    sizes = dict(_SCALAR.findall(text))
    made = {name: (kind, args) for name, kind, args in _RESULT.findall(text)}

    def length(stack: re.Match[str]) -> str:
        kind, loop = made.get(stack[2], ("", ""))
        if kind != "WhileRegion":
            return stack[0]
        _, arguments = made.get(loop.split(", ")[int(stack[3])], ("", ""))
        return stack[1] + sizes.get(arguments.rpartition(", ")[2], "-1")

    return _STACK.sub(length, text)


def with_updates(text: str) -> str:
    """Writes gradients of `x[:, i]` as updates of zeros, as the kernel does.

    The passes know no other gradients of slices than those at constants.
    """

    def update(gradient: re.Match[str]) -> str:
        result, begin, slopes, attributes, spec, n, index, kind = (
            gradient.groups()[:8]
        )
        shape = [int(size) for size in gradient[9].split("x")]
        masks = {
            name: int(mask)
            for name, mask in re.findall(r"(\w+)_mask = (\d+)", attributes)
        }
        one = [masks["shrink_axis"] >> i & 1 for i in range(len(shape))]
        others = 2 ** int(n) - 1 - masks["shrink_axis"]
        whole = masks["begin"] & masks["end"] & others == others
        special = masks["new_axis"] or masks["ellipsis"]
        if begin.startswith("%cst") or special or not whole:
            return gradient[0]
        part = [1 if o else s for o, s in zip(one, shape, strict=True)]
        # A name of its own: digits end names of digits.
        rank, name = len(shape), f"%of_{result.split()[0][1:]}"
        places = f"tensor<{rank}x{index}>"
        whole_type = f"tensor<{gradient[9]}x{gradient[10]}>"
        part_type = f"tensor<{'x'.join(map(str, part))}x{gradient[10]}>"
        zero = "0.0" if "f" in gradient[10] else "0"

        def constant(suffix: str, value: object, of: str) -> str:
            return (
                f'{name}_{suffix} = "tf.Const"() <{{value = dense<{value}> : '
                f"{of}}}> : () -> {of}"
            )

        return "\n".join(
            [
                constant("zeros", zero, whole_type),
                constant("shape", part, f"tensor<{rank}xi32>"),
                f'{name}_part = "tf.Reshape"({slopes}, {name}_shape) : '
                f"({kind}, tensor<{rank}xi32>) -> {part_type}",
                constant("more", [[0, rank - int(n)]], "tensor<1x2xi32>"),
                f'{name}_begin = "tf.Pad"({begin}, {name}_more) : '
                f"({spec}, tensor<1x2xi32>) -> {places}",
                constant("one", one, places),
                f'{name}_place = "tf.Mul"({name}_begin, {name}_one) : '
                f"({places}, {places}) -> {places}",
                f'{result}"tf.XlaDynamicUpdateSlice"({name}_zeros, '
                f"{name}_part, {name}_place) : ({whole_type}, {part_type}, "
                f"{places}) -> {whole_type}",
            ]
        )

    return _SLICE_GRADIENT.sub(update, text)


def with_plain_booleans(text: str) -> str:
    """Writes constants of booleans in words.

    TensorFlow writes eight of them in a byte; newer parsers read one.
    """

    def in_words(constant: re.Match[str]) -> str:
        packed = np.frombuffer(bytes.fromhex(constant[1]), np.uint8)
        shape = [int(n) for n in constant[2].split("x")[:-1]]
        bits = np.unpackbits(packed, bitorder="little")[: math.prod(shape)]
        values = str(bits.reshape(shape).astype(bool).tolist()).lower()
        return f"dense<{values}> : tensor<{constant[2]}i1>"

    return _BOOLEANS.sub(in_words, text)
