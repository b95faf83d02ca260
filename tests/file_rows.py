"""Files in place of memory, whatever a layer's tables say."""

import dataclasses
import tempfile

from tfrs_embed import FileStorage
from tfrs_embed.storage.memory import MemoryRows


class FileRows(MemoryRows):
    """Keeps all tables in files of a folder of its own."""

    def build(self, tables):
        # The files stay mapped when they are removed, at the test's end.
        self._folder = tempfile.TemporaryDirectory()
        storage = FileStorage(self._folder.name)
        super().build(
            [
                dataclasses.replace(
                    t, spec=dataclasses.replace(t.spec, storage=storage)
                )
                for t in tables
            ]
        )
