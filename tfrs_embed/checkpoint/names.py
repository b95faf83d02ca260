"""Keys of checkpoints, and names where characters are restricted: of files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

#: The name of a variable's value in a checkpoint.
VALUE = "VARIABLE_VALUE"
#: The end of the keys of values.
SUFFIX = f"/.ATTRIBUTES/{VALUE}"
#: The path, below a table's, of what has changed in it.
DELTA = "delta"
# The longest file name of most file systems, in bytes.
_LONGEST = 255


def key_of(name: str) -> str:
    """The key of an object's value; `name` is the object's path or the key."""
    return name if name.endswith(SUFFIX) else f"{name}{SUFFIX}"


def sibling(key: str, name: str) -> str:
    """The key of another child of a key's parent."""
    parent, slash, _ = key[: -len(SUFFIX)].rpartition("/")
    return f"{parent}{slash}{name}{SUFFIX}"


def name_in(key: str) -> str:
    """The last name of a key's path: that of a table's part."""
    return key[: -len(SUFFIX)].rpartition("/")[2]


def in_delta(key: str, name: str | None = None) -> str:
    """The key, in a delta, of changed rows of a table's part.

    `name` is another part's name.
    """
    return sibling(key, f"{DELTA}/{name or name_in(key)}")


def escape(name: str, characters: str) -> str:
    """Replaces some ASCII characters by their codes, as URLs do.

    A "%" before two hexadecimal digits is replaced too: two names never become
    the same one.
    """
    return re.sub(
        rf"[{re.escape(characters)}]|%(?=[0-9A-F]{{2}})",
        lambda match: f"%{ord(match[0]):02X}",
        name,
    )


def unescape(name: str) -> str:
    """The name that `escape` was given, for any characters."""
    return re.sub("%([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), name)


def in_key(name: str) -> str:
    """An object's name as TensorFlow writes it in a checkpoint's key."""
    return name.replace(".", "..").replace("/", ".S")


def from_key(part: str) -> str:
    """The name that `in_key` was given."""
    return re.sub(r"\.([.S])", lambda m: "/" if m[1] == "S" else ".", part)


def in_saved_model(name: str) -> str:
    """A table's name in a SavedModel, where Keras takes a dot for a path."""
    return escape(name, ".")


def in_graphs(name: str) -> str:
    """A table's name in names of graphs: in ASCII, no two names the same."""
    return re.sub(
        r"[^A-Za-z0-9_.\\/>-]|>(?=[0-9A-F]{2})",
        lambda match: "".join(f">{byte:02X}" for byte in match[0].encode()),
        name,
    )


def in_folder(name: str, taken: Collection[str] = ()) -> str:
    """Returns the name of an object's file or folder.

    No two names give the same one; on file systems that ignore case, names that
    differ in case alone are one file. A dot at the beginning stays.

    Args:
        name: the object's name: a table's, a layer's or a slot's.
        taken: names that the folder has for other files.

    Raises:
        ValueError: the name is empty, or too long for a file's.
    """
    found = escape(name, "/\\\0")
    if found in (".", "..", *taken):
        found = f"%{ord(found[0]):02X}{found[1:]}"
    size = len(os.fsencode(found))
    if not 0 < size <= _LONGEST:
        raise ValueError(
            f"The name '{found}' can't be a file's: it has {size} bytes, and a "
            f"file's name has 1 to {_LONGEST}."
        )
    return found


def is_plain(name: str) -> bool:
    """Whether a name that a file tells is one in the file's own folder."""
    return name not in ("", ".", "..") and not {*"/\\\0"} & {*name}
