"""A model's tables and features, read by `plan` from a file of JSON."""

from __future__ import annotations

import dataclasses
import pathlib

from tfrs_embed.compat import strict_json
from tfrs_embed.configs.file_storage import FileStorage
from tfrs_embed.configs.tables import FeatureConfig, TableConfig
from tfrs_embed.configs.types import CommunicationDtype
from tfrs_embed.tools.planner.planning import ZIPF_EXPONENT


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """An entry of "tables"."""

    name: str
    rows: int
    dim: int
    optimizer: str | None = None
    in_files: bool = False


@dataclasses.dataclass(frozen=True)
class FeatureEntry:
    """An entry of "features"."""

    name: str
    table: str
    hotness: float


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """The file; its fields are arguments of `planning.plan`."""

    tables: tuple[TableEntry, ...]
    features: tuple[FeatureEntry, ...]
    batch_size: int
    optimizer: str | None = None
    zipf_exponent: float = ZIPF_EXPONENT
    communication_dtype: CommunicationDtype = "float32"

    def __post_init__(self) -> None:
        tables = [table.name for table in self.tables]
        features = [feature.name for feature in self.features]
        for field, names in (("tables", tables), ("features", features)):
            for i, name in enumerate(names):
                if name in names[:i]:
                    raise ValueError(
                        f"{field}[{names.index(name)}] and {field}[{i}] are "
                        f"both named '{name}'."
                    )
        used = [feature.table for feature in self.features]
        for i, table in enumerate(used):
            if table not in tables:
                raise ValueError(
                    f"features[{i}] ('{features[i]}'): there is no table "
                    f"'{table}'; the tables are {tables}."
                )
        for i, name in enumerate(tables):
            if name not in used:
                raise ValueError(f"tables[{i}] ('{name}') has no feature.")

    def feature_config(self) -> dict[str, FeatureConfig]:
        """The features by name, with their tables."""
        tables = {
            table.name: TableConfig(
                table.name,
                table.rows,
                table.dim,
                optimizer=table.optimizer,  # type: ignore[arg-type]
                storage=FileStorage("files") if table.in_files else None,
            )
            for table in self.tables
        }
        return {
            f.name: FeatureConfig(f.name, tables[f.table])
            for f in self.features
        }


def read(path: str) -> ModelFile:
    """Reads a model's file.

    Raises:
        OSError: the file can't be read.
        ValueError: the file is not what docs/planning.md describes.
    """
    return strict_json.loads(
        pathlib.Path(path).read_bytes(), ModelFile, "config"
    )
