"""The nesting of a feature configuration.

A configuration is one `FeatureConfig`, or any nesting of dicts, lists and
tuples of them. `Structure` flattens inputs of this nesting, and packs outputs
into it. `tf.nest` would reorder dicts, and its errors show whole structures
instead of the wrong key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Structure:
    """A nesting whose leaves are numbered in the order of declaration.

    Attributes:
        template: the nesting, with each leaf replaced by its number.
        paths: each leaf's path, e.g. `"user/id"`; `""` for a single leaf.
    """

    template: Any
    paths: tuple[str, ...]

    @classmethod
    def split(
        cls,
        value: Any,
        is_leaf: Callable[[Any], bool],
        leaf: str = "FeatureConfig",
    ) -> tuple[Structure, list[Any]]:
        """Splits a nesting into its structure and its leaves in order.

        A node that is neither a leaf nor a dict, list or tuple is a TypeError,
        which calls a leaf by its name.
        """
        leaves: list[Any] = []
        paths: list[str] = []

        def visit(node: Any, path: str) -> Any:
            if is_leaf(node):
                leaves.append(node)
                paths.append(path)
                return len(leaves) - 1
            if isinstance(node, Mapping):
                return {k: visit(v, _join(path, k)) for k, v in node.items()}
            if isinstance(node, (list, tuple)):
                children = [
                    visit(v, _join(path, i)) for i, v in enumerate(node)
                ]
                return _like(node, children)
            where = f" at '{path}'" if path else ""
            raise TypeError(
                f"Expected a {leaf} or a dict, list or tuple of them"
                f"{where}, got {_describe(node)}."
            )

        template = visit(value, "")
        return cls(template, tuple(paths)), leaves

    def flatten(
        self, value: Any, what: str, partial: bool | None = None
    ) -> list[Any]:
        """Returns the leaves of `value`, which must have this structure.

        Args:
            value: the nesting; lists and tuples are interchangeable.
            what: the value's name in errors: "inputs", "weights".
            partial: whether keys, or entries of lists (as None), may be
                missing; None: never, and errors don't mention partial=True.

        Returns:
            The leaves, in this structure's order, None for missing ones.

        Raises:
            ValueError: a key is missing or unknown, or a length differs.
            TypeError: a node has another kind than in this structure.
        """
        flat: list[Any] = [None] * len(self.paths)

        def visit(template: Any, node: Any, path: str) -> None:
            where = f"{what}['{path}']" if path else what
            if partial and node is None and path:
                return
            if isinstance(template, int):
                if isinstance(node, Mapping):
                    raise TypeError(
                        f"{where} must be one feature's tensor, got a dict "
                        f"with the keys {list(node)}."
                    )
                flat[template] = node
            elif isinstance(template, dict):
                if not isinstance(node, Mapping):
                    raise TypeError(
                        f"{where} must be a dict with the keys "
                        f"{list(template)}, got {_describe(node)}."
                    )
                unknown = [k for k in node if k not in template]
                # Beside unknown keys the missing ones show what is misspelt.
                missing = [k for k in template if k not in node]
                if partial and not unknown:
                    missing = []
                problems = [f"unknown keys {unknown}"] if unknown else []
                hint = ""
                if missing:
                    problems.append(f"missing keys {missing}")
                    if partial is False:
                        hint = (
                            " With partial=True a call may leave features out."
                        )
                if problems:
                    raise ValueError(
                        f"{where} has {' and '.join(problems)}; the keys must "
                        f"be {list(template)}.{hint}"
                    )
                for key, child in template.items():
                    if key in node:
                        visit(child, node[key], _join(path, key))
            else:
                if not isinstance(node, (list, tuple)):
                    raise TypeError(
                        f"{where} must be a list or tuple of {len(template)} "
                        f"entries, got {_describe(node)}."
                    )
                if len(node) != len(template):
                    raise ValueError(
                        f"{where} must have {len(template)} entries, got "
                        f"{len(node)}."
                    )
                for i, (child, entry) in enumerate(
                    zip(template, node, strict=True)
                ):
                    visit(child, entry, _join(path, i))

        visit(self.template, value, "")
        return flat

    def pack(self, leaves: Mapping[int, Any]) -> Any:
        """Returns the nesting with `leaves` by number in their places.

        Dicts have no keys for missing leaves; lists and tuples have None.
        """

        def there(template: Any) -> bool:
            if isinstance(template, int):
                return template in leaves
            if isinstance(template, dict):
                template = template.values()
            return any(there(child) for child in template)

        def build(template: Any) -> Any:
            if isinstance(template, int):
                return leaves[template]
            if isinstance(template, dict):
                return {k: build(v) for k, v in template.items() if there(v)}
            return _like(
                template, [build(v) if there(v) else None for v in template]
            )

        return build(self.template)


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _like(sequence: Any, children: list[Any]) -> Any:
    """Returns `children` as the same kind of sequence."""
    if isinstance(sequence, tuple):
        if hasattr(sequence, "_fields"):
            return type(sequence)(*children)
        return tuple(children)
    return children


def _describe(value: Any) -> str:
    if hasattr(value, "columns"):  # Of pandas.
        return f"a {type(value).__name__}: dict(frame) makes a dict of it"
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{type(value).__name__} {text}"
