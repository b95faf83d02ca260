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

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "abilities.md"
HEADINGS = {"2": "## tf_keras", "3": "## Keras 3"}
HEAD = """\
# What layers can do

Each cell is a test of a layer on one device. "yes": it works, and its numbers
equal numpy's. A number: the error with this number, below; "differs": no
error, but other numbers, shapes or counts than a variable's. Keras's own
`Embedding` shows what a variable does. Dense int64 ids, "sgd" and "mse", where
nothing else is said; `DistributedEmbedding` is given one id for each sample.
"""
ERRORS = "## Errors and differences"
_RAISED = re.compile(r"^\s*(\w+Error): (.+)", re.MULTILINE)
# Lines of an error that say only where it was raised.
_FRAME = re.compile(r"\s*$|Exception encountered|Graph execution|Detected at")


def outcome(check, case):
    """Runs a check; "works", "differs", or its error's type and words."""
    try:
        check(case)
    except Exception as error:
        lines = re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()
        kind = type(error).__name__
        if kind == "AssertionError":
            return "differs"
        if found := _RAISED.findall("\n".join(lines)):
            kind, lines = found[-1][0], [found[-1][1]]
        line = next((each for each in lines if not _FRAME.match(each)), "")
        line = re.sub(r"_?\d+|0x\w+|/\S*/", "", line)
        line = re.sub(r"[^\w\s.,:;()='/-]", "", line)
        return f"{kind}: {' '.join(line.split()[:9])}"
    return "works"


def render(results):
    """The page of results, a dict of {(keras, ability, layer): outcome}."""
    numbers = {}
    lines = [HEAD]
    for keras, heading in HEADINGS.items():
        cells = {k[1:]: v for k, v in results.items() if k[0] == keras}
        names = list(dict.fromkeys(layer for _, layer in cells))
        lines += [heading, ""]
        lines += ["| | " + " | ".join(names) + " |"]
        lines += ["|---" * (len(names) + 1) + "|"]
        for title, row in itertools.groupby(cells, key=lambda key: key[0]):
            texts = [cells[key] for key in row]
            marks = [
                "yes"
                if text == "works"
                else str(numbers.setdefault(text, len(numbers) + 1))
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
    errors["yes"] = "works"
    results = {}
    for keras, heading in HEADINGS.items():
        part = page.partition(heading + "\n")[2].partition("\n## ")[0]
        rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in part.splitlines()
            if line.startswith("| ")
        ]
        for title, *marks in rows[1:]:
            names = rows[0][-len(marks) :]
            for name, mark in zip(names, marks, strict=True):
                results[keras, title, name] = errors[mark]
    return results


def measure():
    """Prints this process's cells as JSON."""
    from abilities.descriptors import ABILITIES, CASES

    for title, check in ABILITIES.items():
        for case in CASES:
            cell = [title, case.name, outcome(check, case)]
            print("CELL", json.dumps(cell), flush=True)


def write():
    """Measures both Keras versions side by side, and writes the page."""
    command = [sys.executable, "-m", "abilities.table", "--measure"]
    running = {}
    for keras in HEADINGS:
        env = {
            **os.environ,
            "TFRS_EMBED_TEST_KERAS": keras,
            "TF_USE_LEGACY_KERAS": "1" if keras == "2" else "0",
        }
        running[keras] = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, text=True
        )
    results = {}
    for keras, process in running.items():
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"Keras {keras}: exit {process.returncode}")
        for line in output.splitlines():
            if line.startswith("CELL "):
                title, name, text = json.loads(line[5:])
                results[keras, title, name] = text
    PAGE.write_text(render(results), encoding="utf-8")


if __name__ == "__main__":
    measure() if "--measure" in sys.argv else write()
