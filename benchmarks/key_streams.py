"""Keys of benchmarks of tables whose keys come and go, for any library."""

import os

import numpy as np

ALPHA = 1.05  # The ids' power law.
# Makes keys of ids that move.
MIXER = 0x9E3779B1


class Ids:
    """Draws ids by a power law; rare ones are anywhere in the vocabulary."""

    def __init__(self, args):
        self.args = args
        self.rng = np.random.default_rng(0)
        self.place = self.rng.permutation(args.rows)
        # Keys of all ids, and of as many more that aren't in the table yet.
        high = 2**62
        self.key = self.rng.integers(-high, high, 2 * args.rows) * 2 + 1

    def draw(self):
        """[batch, width] ids, below rows."""
        args = self.args
        u = self.rng.random((args.batch, args.width))
        # The inverse of the power law's distribution.
        scale = args.rows ** (1 - ALPHA) - 1
        rank = (u * scale + 1) ** (1 / (1 - ALPHA))
        return self.place[np.minimum(rank.astype(np.int64), args.rows) - 1]

    def with_new(self):
        """The same as keys, some of them new."""
        ids = self.draw()
        new = self.rng.random(ids.shape) < self.args.new
        ids[new] = self.rng.integers(
            self.args.rows, 2 * self.args.rows, new.sum()
        )
        return self.key[ids]


def moved(batch, step, rows):
    """A stream's ids in a step: they move by rows / 100 every 100 steps."""
    return batch + (step // 100) * (rows // 100)


def memory():
    """Bytes that this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
