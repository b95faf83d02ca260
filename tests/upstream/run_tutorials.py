"""Runs other projects' tutorials as they are, and with this package's layers.

    python tests/upstream/run_tutorials.py FOLDER [--only NAME] [--epochs N]

FOLDER is a checkout of github.com/tensorflow/recommenders or
github.com/keras-team/keras-rs. Each program runs twice, from the same initial
values: as it is, and with the lines changed that SWAPS names. It passes if all
losses and metrics are the same but for rounding, and at most five lines differ.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MOST_LINES = 5

TFRS = (
    "basic_ranking basic_retrieval multitask context_features "
    "listwise_ranking dcn deep_recommenders"
).split()
KERAS_RS = (
    "basic_ranking basic_retrieval multi_task listwise_ranking dcn"
).split()

# A program's lines from here on are left out.
ENDS = {
    ("tfrs", "basic_retrieval"): (
        "scann_index = ",
        "scann has no release for newer TensorFlows",
    ),
}

# A text and what takes its place, in both runs: ten models are as one.
SHORTER = {("keras_rs", "dcn"): ("range(10)", "range(1)")}

# What a line becomes, for the Keras that the program is written for.
SWAPS = {
    "tfrs": (
        r"\btf\.keras\.layers\.Embedding\b",
        "tfrs_embed.Embedding",
        "import tfrs_embed",
    ),
    "keras_rs": (
        r"\bkeras\.layers\.Embedding\b",
        "tfrs_embed.keras3.Embedding",
        "import tfrs_embed.keras3",
    ),
}


def notebook_code(path):
    """Returns the code of a notebook, without what is the shell's."""
    cells = json.loads(path.read_text())["cells"]
    code = [
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"
    ]
    lines = "\n".join(code).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("!", "%")))


def swapped(code, project):
    """Returns the program with this package's layer, and the lines changed."""
    pattern, layer, import_line = SWAPS[project]
    lines = code.splitlines()
    changed = [re.sub(pattern, layer, line) for line in lines]
    count = sum(a != b for a, b in zip(lines, changed, strict=True))
    if not count:
        raise ValueError("no line names an Embedding")
    first = next(
        i for i, line in enumerate(changed) if re.match(r"import ", line)
    )
    changed.insert(first, import_line)
    return "\n".join(changed), count + 1


def results_of(code, project, epochs, folder):
    """Runs a program in a process of its own."""
    program, results = folder / "program.py", folder / "results.json"
    program.write_text(code)
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "tutorials"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        ),
        "TF_USE_LEGACY_KERAS": "1" if project == "tfrs" else "0",
        "KERAS_BACKEND": "tensorflow",
    }
    child = [sys.executable, str(HERE / "tutorials" / "child.py")]
    ran = subprocess.run(
        [*child, str(program), str(results), "--epochs", str(epochs)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise RuntimeError("\n".join(ran.stderr.splitlines()[-25:]))
    return json.loads(results.read_text())


def difference(one, other):
    """Returns the largest relative difference of all metrics, and whose.

    In `fit`, TFRS's top k of all candidates is left out: a step reads the
    candidates while it trains them, and two runs of the same program differ.
    """
    if [sorted(r) for r in one] != [sorted(r) for r in other]:
        raise ValueError("the programs fit and evaluate other things")
    return max(
        (float(np.max(abs(x - y) / (abs(x) + 1e-2))), f"{kind} {i}: {name}")
        for i, (a, b) in enumerate(zip(one, other, strict=True))
        for kind, metrics in a.items()
        for name, values in metrics.items()
        if kind != "fit" or not name.startswith("factorized_top_k/")
        for x, y in [(np.asarray(values), np.asarray(b[kind][name]))]
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=2e-3)
    flags = parser.parse_args()
    notebooks = flags.folder / "docs" / "examples"
    if notebooks.is_dir():
        project, names = "tfrs", TFRS
    else:
        project, names = "keras_rs", KERAS_RS
    failed = []
    for name in flags.only or names:
        if project == "tfrs":
            code = notebook_code(notebooks / f"{name}.ipynb")
        else:
            code = (flags.folder / "examples" / f"{name}.py").read_text()
        end, reason = ENDS.get((project, name), (None, None))
        if end:
            code = code[: code.index(end)]
            print(f"{project} {name}: without the end, as {reason}")
        code = code.replace(*SHORTER.get((project, name), ("", "")))
        try:
            new, lines = swapped(code, project)
            with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b:
                begin = time.monotonic()
                before = results_of(code, project, flags.epochs, pathlib.Path(a))
                middle = time.monotonic()
                after = results_of(new, project, flags.epochs, pathlib.Path(b))
            seconds = middle - begin, time.monotonic() - middle
            if set(after["made"]) != {"tfrs_embed"}:
                raise ValueError(f"made layers of {set(after['made'])}")
            before, after = before["results"], after["results"]
            worst, metric = difference(before, after)
        except (RuntimeError, ValueError) as error:
            failed.append(name)
            print(f"{project} {name}: FAILED\n{error}", flush=True)
            continue
        fine = worst <= flags.tolerance and lines <= MOST_LINES
        if not fine:
            failed.append(name)
        print(
            f"{project} {name}: {'the same' if fine else 'DIFFERENT'}, "
            f"{lines} lines changed, {len(after)} results, largest relative "
            f"difference {worst:.1e} ({metric}); {seconds[0]:.0f} and "
            f"{seconds[1]:.0f} s",
            flush=True,
        )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
