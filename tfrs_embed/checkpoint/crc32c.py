"""CRC-32C, the checksum of TensorFlow's files, in numpy.

A CRC is the remainder of a polynomial over GF(2), whose coefficients are the
bits, by the polynomial P. Two things make it fast without a loop over bytes:

- P(x) to the power of 2^k is P(x^(2^k)), with as few terms as P. To divide by
  that, 2^k bits are added to others as a whole, where these terms are. The
  remainder, 32 times 2^k bits, has the CRC of what it is of.
- What is left is cut into lanes, which go through the usual table lookups side
  by side. The CRC of two strings one behind the other is that of the first,
  multiplied by a power of x, plus that of the second.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

# The polynomial, bits reversed.
_POLYNOMIAL = 0x82F63B78
# How far behind x^32 its other terms are. The nearest is 4 behind.
_BEHIND = [bit + 1 for bit in range(32) if _POLYNOMIAL >> bit & 1]
_NEAREST = 4
_ROW = 1 << 13
# The bytes that are copied at a time.
_PART = 8 << 20
_WORD = 8


def crc32c(data: Any, before: int = 0) -> int:
    """Computes a CRC-32C.

    Args:
        data: bytes, or a contiguous numpy array.
        before: the CRC of what comes before it.

    Returns:
        The CRC of both.
    """
    array = np.frombuffer(data, np.uint8)
    state = before ^ 0xFFFFFFFF
    for start in range(0, array.size, _PART):
        part = array[start : start + _PART]
        state = _times(_shift(part.size), state) ^ _remainder(part)
    return state ^ 0xFFFFFFFF


def masked_crc32c(crc: int) -> int:
    """The form in which TensorFlow stores a CRC among the data it is of."""
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return (rotated + 0xA282EAD8) & 0xFFFFFFFF


def _remainder(array: np.ndarray) -> int:
    """The CRC without the usual inversions before and after."""
    array = _fold(array)
    lanes = 1
    while lanes * lanes * _WORD < array.size:
        lanes *= 2
    steps = -(-array.size // (lanes * _WORD))
    # Zeros in front change nothing, without inversions.
    padded = np.zeros(steps * lanes * _WORD, np.uint8)
    padded[padded.size - array.size :] = array
    words = padded.view("<u8").reshape(lanes, steps)
    first, second, third, fourth = _tables()
    crcs = np.zeros(lanes, np.uint32)
    for word in np.ascontiguousarray(words.T):
        parts = (word ^ crcs).view("<u2").reshape(lanes, 4)
        crcs = fourth[parts[:, 0]]
        crcs ^= third[parts[:, 1]]
        crcs ^= second[parts[:, 2]]
        crcs ^= first[parts[:, 3]]
    size = steps * _WORD
    while len(crcs) > 1:
        crcs = _times_all(_shift(size), crcs[::2]) ^ crcs[1::2]
        size *= 2
    return int(crcs[0])


def _fold(array: np.ndarray) -> np.ndarray:
    """Bytes with the same remainder, 32 rows of them at most."""
    last = -(-array.size // _ROW) - 32
    if last <= 0:
        return array
    # A multiple of the rows that are added at once: zeros in front.
    last += -last % _NEAREST
    rows = np.zeros((last + 32, _ROW // _WORD), np.uint64)
    rows.view(np.uint8).reshape(-1)[rows.nbytes - array.size :] = array
    for i in range(0, last, _NEAREST):
        added = rows[i : i + _NEAREST]
        for behind in _BEHIND:
            sums = rows[i + behind : i + behind + _NEAREST]
            np.bitwise_xor(sums, added, out=sums)
    return rows[last:].view(np.uint8).reshape(-1)


@functools.cache
def _tables() -> list[np.ndarray]:
    """For two bytes, their CRC with 0, 2, 4 and 6 zero bytes behind them."""
    crcs = np.arange(1 << 16, dtype=np.uint32)
    tables = []
    for _ in range(4):
        for _ in range(16):
            crcs = crcs >> 1 ^ np.where(crcs & 1, _POLYNOMIAL, 0).astype("u4")
        tables.append(crcs)
    return tables


@functools.lru_cache(256)
def _shift(size: int) -> tuple[int, ...]:
    """The matrix that appends zero bytes, as the images of the 32 bits."""
    if size == 0:
        return tuple(1 << i for i in range(32))
    if size == 1:
        return tuple(_shift_byte(1 << i) for i in range(32))
    half = _shift(size // 2)
    whole = tuple(_times(half, bits) for bits in half)
    if size % 2:
        whole = tuple(_shift_byte(bits) for bits in whole)
    return whole


def _shift_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc


def _times(matrix: tuple[int, ...], crc: int) -> int:
    result = 0
    for bit, image in enumerate(matrix):
        if crc >> bit & 1:
            result ^= image
    return result


def _times_all(matrix: tuple[int, ...], crcs: np.ndarray) -> np.ndarray:
    result = np.zeros_like(crcs)
    for bit, image in enumerate(matrix):
        result ^= np.where(crcs >> bit & 1, image, 0).astype(np.uint32)
    return result
