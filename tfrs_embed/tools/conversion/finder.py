"""What finders of a library's tables in a TensorFlow checkpoint share."""

from __future__ import annotations

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.tools.conversion.contents import Table
from tfrs_embed.tools.conversion.objects import Objects, Variables


class Finder:
    """Finds a library's tables in a checkpoint, as it is made.

    Args:
        reader: the checkpoint.
        variables: the variables' shapes and dtypes by path.
        objects: the checkpoint's objects.

    Attributes:
        tables: what was found.
        steps: the number of updates by the layer's path.
        taken: the paths of the variables that these are.
        notes: what a reader should know.
    """

    def __init__(
        self, reader: BundleReader, variables: Variables, objects: Objects
    ) -> None:
        self.tables: list[Table] = []
        self.steps: dict[str, int] = {}
        self.taken: set[str] = set()
        self.notes: list[str] = []
        self._reader = reader
        self._variables = variables
        self._objects = objects
