"""The table of abilities, docs/abilities.md: reads it, runs it, writes it.

`python -m abilities.table --write`, in the folder tests, measures all cells and
writes the page.
"""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from process_tiers import keras_and_strategy

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "abilities.md"
#: The processes, as tests/process_tiers.py names them, and their tables.
HEADINGS = {
    "": "## tf_keras",
    "keras:3": "## Keras 3",
    "mirrored:2": "## tf_keras, two replicas of a MirroredStrategy",
    "keras:3 mirrored:2": "## Keras 3, two replicas of a MirroredStrategy",
    "tpu:2x4": "## tf_keras, an emulated TPUStrategy",
}
HEAD = """\
# What layers can do

Each cell is a test of a layer, on one device in the first two tables. "yes": it
works, and its numbers equal numpy's. A number: the error or warning with this
number, below; "differs": no error, but other numbers, shapes or counts than a
variable's; "-": the layer has no masks. Keras's own `Embedding` shows what a
variable does. Dense int64 ids, "sgd" and "mse", where nothing else is said;
`DistributedEmbedding` is given one id for each sample, and sequences where
there are masks. Means behind masks are of `GlobalAveragePooling1D`.
"""
NO_MASKS = "no masks"
MARKS = {"works": "yes", NO_MASKS: "-"}
ERRORS = "## Errors and differences"
_RAISED = re.compile(r"^\s*(\w+Error): (.+)", re.MULTILINE)
# Lines of an error that say only where it was raised.
_FRAME = re.compile(r"\s*$|Exception encountered|Graph execution|Detected at")


def outcome(check, *args):
    """Runs a check; "works", its error's type and words, or another word."""
    try:
        check(*args)
    except Exception as error:
        lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
        kind = type(error).__name__
        if kind == "AssertionError":
            return "differs"
        if kind == "NoMasksError":
            return NO_MASKS
        if found := _RAISED.findall("\n".join(lines)):
            kind, lines = found[-1][0], [found[-1][1]]
        line = next((each for each in lines if not _FRAME.match(each)), "")
        line = re.sub(r"_?\d+|0x\w+|/\S*/", "", line)
        line = re.sub(r"[^\w\s.,:;()='/-]", "", line)
        return f"{kind}: {' '.join(line.split()[:9])}"
    return "works"


def render(results):
    """The page of results, a dict of {(process, ability, layer): outcome}."""
    numbers = {}
    lines = [HEAD]
    for process, heading in HEADINGS.items():
        cells = {k[1:]: v for k, v in results.items() if k[0] == process}
        names = list(dict.fromkeys(layer for _, layer in cells))
        lines += [heading, ""]
        lines += ["| | " + " | ".join(names) + " |"]
        lines += ["|---" * (len(names) + 1) + "|"]
        for title, row in itertools.groupby(cells, key=lambda key: key[0]):
            texts = [cells[key] for key in row]
            marks = [
                MARKS.get(text)
                or str(numbers.setdefault(text, len(numbers) + 1))
                for text in texts
            ]
            lines += [f"| {title} | " + " | ".join(marks) + " |"]
        lines += [""]
    lines += [ERRORS, ""]
    lines += [f"{number}. `{text}`" for text, number in numbers.items()]
    return "\n".join(lines) + "\n"


def parse(page):
    """The results of a page."""
    errors = {n: t for n, t in re.findall(r"^(\d+)\. `(.*)`$", page, re.M)}
    errors.update({mark: text for text, mark in MARKS.items()})
    results = {}
    for process, heading in HEADINGS.items():
        part = page.partition(heading + "\n")[2].partition("\n## ")[0]
        rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in part.splitlines()
            if line.startswith("| ")
        ]
        for title, *marks in rows[1:]:
            names = rows[0][-len(marks) :]
            for name, mark in zip(names, marks, strict=True):
                results[process, title, name] = errors[mark]
    return results


def measure():
    """Prints this process's cells as JSON."""
    # It sets up the devices.
    from abilities.cases import CASES
    from conftest import PROCESS, STRATEGY

    if STRATEGY:
        from abilities.on_replicas import ABILITIES
    else:
        from abilities.descriptors import ABILITIES
    arguments = [STRATEGY] if STRATEGY else []
    for title, check in ABILITIES.items():
        for case in CASES:
            text = outcome(check, case, *arguments)
            cell = [PROCESS, title, case.name, text]
            print("CELL", json.dumps(cell), flush=True)


def write():
    """Measures all cells, in two processes at a time, and writes the page."""
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(_measured, HEADINGS)
    results = {}
    for line in "".join(outputs).splitlines():
        if line.startswith("CELL "):
            process, title, name, text = json.loads(line[5:])
            results[process, title, name] = text
    PAGE.write_text(render(results), encoding="utf-8")


def _measured(process):
    keras, strategy = keras_and_strategy(process)
    return subprocess.run(
        [sys.executable, "-m", "abilities.table", "--measure"],
        env={
            **os.environ,
            "TFRS_EMBED_TEST_KERAS": keras,
            "TFRS_EMBED_TEST_STRATEGY": strategy,
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


if __name__ == "__main__":
    measure() if "--measure" in sys.argv else write()
