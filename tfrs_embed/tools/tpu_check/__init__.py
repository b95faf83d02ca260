"""Checks programs for TPUs, on a machine that has none.

Example:
    >>> print(tfrs_embed.tpu_check.Slice.of("v5p-8"))
    v5p:2x2x1 (4 chips of 4 SparseCores)
"""

from tfrs_embed.sparsecore.slices import Slice
from tfrs_embed.tools.tpu_check.checking import check
from tfrs_embed.tools.tpu_check.compiling import Compiled, Compiler
from tfrs_embed.tools.tpu_check.errors import CheckError
from tfrs_embed.tools.tpu_check.lowering import Program, SparseCoreCall
from tfrs_embed.tools.tpu_check.report import (
    CheckedFunction,
    CheckedProgram,
    Report,
)

__all__ = [
    "CheckError",
    "CheckedFunction",
    "CheckedProgram",
    "Compiled",
    "Compiler",
    "Program",
    "Report",
    "Slice",
    "SparseCoreCall",
    "check",
]
