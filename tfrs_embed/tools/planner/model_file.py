"""A model's tables and features, read by commands from a file of JSON."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from tfrs_embed.compat import strict_json
from tfrs_embed.compat.arguments import number
from tfrs_embed.configs.tables import FeatureConfig, TableConfig
from tfrs_embed.configs.types import CommunicationDtype
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.planner.planning import ZIPF_EXPONENT


@dataclasses.dataclass(frozen=True)
class Table:
    """An entry of "tables"."""

    name: str
    rows: int
    dim: int
    optimizer: str | None = None

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> TableConfig:
        """The table's configuration."""
        return TableConfig(
            self.name,
            self.rows,
            self.dim,
            optimizer=self.optimizer,  # type: ignore[arg-type]
        )


@dataclasses.dataclass(frozen=True)
class Feature:
    """An entry of "features"."""

    name: str
    table: str
    hotness: float

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a feature's name must not be empty.")
        number(self.hotness, f"Feature '{self.name}': hotness")


@dataclasses.dataclass(frozen=True)
class Model:
    """The file; its fields are arguments of `planning.plan`."""

    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    batch_size: int
    optimizer: str | None = None
    zipf_exponent: float = ZIPF_EXPONENT
    communication_dtype: CommunicationDtype = "float32"

    def __post_init__(self) -> None:
        tables = [table.name for table in self.tables]
        _require_different("tables", tables)
        _require_different("features", [f.name for f in self.features])
        for i, feature in enumerate(self.features):
            if feature.table not in tables:
                raise ValueError(
                    f"features[{i}] ('{feature.name}'): there is no table "
                    f"'{feature.table}'; the tables are {tables}."
                )
        used = {feature.table for feature in self.features}
        for i, name in enumerate(tables):
            if name not in used:
                raise ValueError(f"tables[{i}] ('{name}') has no feature.")
        if not tables:
            raise ValueError("there are no tables.")

    def feature_config(self) -> dict[str, FeatureConfig]:
        """The features by name, with their tables."""
        tables = {table.name: table.config() for table in self.tables}
        return {
            f.name: FeatureConfig(f.name, tables[f.table])
            for f in self.features
        }


def _require_different(field: str, names: Sequence[str]) -> None:
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if first.setdefault(name, i) != i:
            raise ValueError(
                f"{field}[{first[name]}] and {field}[{i}] are both named "
                f"'{name}'."
            )


def read(path: str) -> Model:
    """Reads a model's file; raises an InputError if it is missing or wrong."""
    try:
        text = pathlib.Path(path).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"'{path}' is not a file of text: {error}.") from None
    except OSError as error:
        raise InputError(
            f"'{path}' can't be read: {error.strerror or error}."
        ) from None
    try:
        return strict_json.loads(text, Model, "config")
    except ValueError as error:
        raise InputError(error) from None
