"""Tables' names in places that not all characters may be in."""

from __future__ import annotations

import re


def escape(name: str, characters: str) -> str:
    """Replaces characters by their codes, as URLs do.

    A name without them stays as it is, unless it looks like an escaped one, so
    that no two names become one.

    Args:
        name: the name.
        characters: the characters, of ASCII.

    Returns:
        The name without the characters.
    """
    return re.sub(
        rf"[{re.escape(characters)}]|%(?=[0-9A-F]{{2}})",
        lambda match: f"%{ord(match[0]):02X}",
        name,
    )


def unescape(name: str) -> str:
    """The name that `escape` was given, whatever the characters were."""
    return re.sub("%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), name)


def in_key(name: str) -> str:
    """An object's name as a part of a checkpoint's key."""
    return name.replace(".", "..").replace("/", ".S")


def in_saved_model(name: str) -> str:
    """A table's name in a SavedModel, where Keras takes a dot for a path."""
    return escape(name, ".")


def in_graphs(name: str) -> str:
    """A table's name where graphs have it among their own: in ASCII.

    No two names become one.
    """
    return re.sub(
        r"[^A-Za-z0-9_.\\/>-]|>(?=[0-9A-F]{2})",
        lambda match: "".join(f">{byte:02X}" for byte in match[0].encode()),
        name,
    )
