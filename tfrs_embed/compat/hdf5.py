"""HDF5 files, which may be a stranger's: what they hold must be in them.

HDF5 can take a file's values from any other file of the machine: by external
storage, virtual datasets and links. Filters can inflate some bytes without
bound or load plugins, and a dataset's declared size may be stored nowhere.
Keras writes none of these.
"""

from __future__ import annotations

import h5py

# The longest path of an object, and text of an attribute.
_MOST_LETTERS = 4096


def objects(group: h5py.Group) -> dict[str, h5py.Group | h5py.Dataset]:
    """Returns the groups and datasets below a group by path; reads no values.

    Raises:
        ValueError: the file is damaged, has links other than hard ones, or two
            links of one object; or a dataset's values are in other files, go
            through a filter, or are fewer than its shape declares.
    """
    try:
        return _objects(group)
    except (AttributeError, LookupError, OSError, RuntimeError, TypeError) as e:
        raise ValueError(f"It is damaged HDF5: {e}") from e


def text(item: h5py.Group, attribute: str) -> str:
    """Returns an attribute's text; "": it has none, or no short text."""
    if attribute not in item.attrs:
        return ""
    there = item.attrs.get_id(attribute)
    is_text = h5py.check_string_dtype(there.dtype) and there.shape == ()
    if not is_text or there.get_storage_size() > _MOST_LETTERS:
        return ""
    value = item.attrs[attribute]
    return value if isinstance(value, str) else ""


def _objects(group: h5py.Group) -> dict[str, h5py.Group | h5py.Dataset]:
    found: dict[str, h5py.Group | h5py.Dataset] = {}
    seen = {_address(group)}
    declared = 0
    waiting = [("", group)]
    while waiting:  # Without recursion, which deep files would make crash.
        owner, items = waiting.pop()
        for name in items:
            path = f"{owner}{name}"
            if len(path) > _MOST_LETTERS:
                raise ValueError(
                    f"'{path[:40]}...' has more than {_MOST_LETTERS} letters."
                )
            link = items.get(name, getclass=True, getlink=True)
            if link is not h5py.HardLink:
                raise ValueError(
                    f"'{path}' is a link ({link.__name__}), which is not "
                    "followed."
                )
            item = items[name]
            if not isinstance(item, h5py.Group | h5py.Dataset):
                continue  # A named datatype.
            address = _address(item)
            if address in seen:
                raise ValueError(f"'{path}' is also under another name.")
            seen.add(address)
            found[path] = item
            if isinstance(item, h5py.Group):
                waiting.append((f"{path}/", item))
                continue
            _check(item, path)
            declared += item.nbytes
    if declared > group.file.id.get_filesize():
        raise ValueError(
            f"Its datasets declare {declared} bytes, more than the file has."
        )
    return dict(sorted(found.items()))


def _check(dataset: h5py.Dataset, path: str) -> None:
    # First: the shape of a virtual dataset may be that of another file's.
    if dataset.is_virtual or dataset.external:
        raise ValueError(
            f"The values of '{path}' are in other files, which are not read."
        )
    if dataset.id.get_create_plist().get_nfilters():
        raise ValueError(
            f"The values of '{path}' are compressed or filtered: h5repack -f "
            "NONE makes a file that can be read."
        )
    if dataset.shape is None:
        raise ValueError(f"'{path}' has no shape.")
    stored = dataset.id.get_storage_size()
    if stored < dataset.nbytes:
        raise ValueError(
            f"'{path}' declares {dataset.nbytes} bytes, shape "
            f"{list(dataset.shape)}, and stores {stored}."
        )


def _address(item: h5py.Group | h5py.Dataset) -> int:
    return int(h5py.h5o.get_info(item.id).addr)
