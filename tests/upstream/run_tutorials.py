"""Runs other projects' tutorials as they are, and with this package's layers.

    SOURCE=FOLDER python tests/upstream/run_tutorials.py [--only NAME]

FOLDER has the repositories of TensorFlow Recommenders and of keras_rs, in
`recommenders` and `keras_rs`. Each program runs twice, from the same initial
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
#: What one tutorial imports; it has no release for newer TensorFlows.
RANKING = ROOT / ".build" / "upstream" / "ranking"
RANKING_RELEASE = "tensorflow-ranking==0.5.5"
MOST_LINES = 5
#: How far losses and metrics may be apart, relative and absolute: at a
#: candidate's rank of 100 another rounding can be another rank.
RELATIVE, ABSOLUTE = 2e-3, 1e-3

#: The folder of each project's programs, and their names. Left out are those
#: that download other data, those without an Embedding, and TFRS's
#: deep_recommenders: its deeper models differ by 0.2% after an epoch, its
#: linear one by 2e-7 after five. Whether rounding grows so fast isn't known.
PROGRAMS = {
    "recommenders": (
        "docs/examples/{}.ipynb",
        "basic_ranking basic_retrieval multitask context_features "
        "listwise_ranking dcn",
    ),
    "keras_rs": (
        "examples/{}.py",
        "basic_ranking basic_retrieval multi_task listwise_ranking dcn",
    ),
}

# A program's lines from here on are left out.
ENDS = {
    ("recommenders", "basic_retrieval"): (
        "scann_index = ",
        "scann has no release for newer TensorFlows",
    ),
}

# A text and what takes its place, in both runs: ten models are as one.
SHORTER = {("keras_rs", "dcn"): {"range(10)": "range(1)"}}

# What a line becomes, for the Keras that the program is written for.
SWAPS = {
    "recommenders": (
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


def notebook_code(notebook):
    """Returns the code of a notebook, without what is the shell's."""
    cells = json.loads(notebook)["cells"]
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


def results_of(code, project, epochs):
    """Runs a program in a process and a folder of its own.

    Returns:
        What `tutorials/child.py` writes, and the seconds that it took.

    Raises:
        RuntimeError: the program failed.
    """
    paths = [HERE / "tutorials", ROOT, RANKING]
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "TF_USE_LEGACY_KERAS": "1" if project == "recommenders" else "0",
        "KERAS_BACKEND": "tensorflow",
    }
    command = [sys.executable, str(HERE / "tutorials" / "child.py")]
    command += ["program.py", "results.json", "--epochs", str(epochs)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        (folder / "program.py").write_text(code)
        begin = time.monotonic()
        ran = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True
        )
        if ran.returncode:
            raise RuntimeError("\n".join(ran.stderr.splitlines()[-25:]))
        results = json.loads((folder / "results.json").read_text())
    return results, time.monotonic() - begin


def difference(one, other):
    """Returns the largest difference of all metrics, and whose.

    One is as large as differences may be.

    In `fit`, TFRS's top k of all candidates is left out: a step reads the
    candidates while it trains them, and two runs of the same program differ.
    """
    if [sorted(r) for r in one] != [sorted(r) for r in other]:
        raise ValueError("the programs fit and evaluate other things")
    return max(
        (
            float(np.max(abs(x - y) / (ABSOLUTE + RELATIVE * abs(x)))),
            f"{kind} {i}: {name}",
        )
        for i, (a, b) in enumerate(zip(one, other, strict=True))
        for kind, metrics in a.items()
        for name, values in metrics.items()
        if kind != "fit" or not name.startswith("factorized_top_k/")
        for x, y in [(np.asarray(values), np.asarray(b[kind][name]))]
    )


def compare(code, project, name, epochs):
    """Runs a program as it is and swapped, and prints how they differ.

    Returns:
        Whether they are the same.

    Raises:
        RuntimeError: one of them failed.
        ValueError: they can't be compared.
    """
    end, reason = ENDS.get((project, name), (None, None))
    if end:
        code = code[: code.index(end)]
        print(f"{project} {name}: without the end, as {reason}")
    for one, other in SHORTER.get((project, name), {}).items():
        code = code.replace(one, other)
    new, lines = swapped(code, project)
    before, seconds_before = results_of(code, project, epochs)
    after, seconds = results_of(new, project, epochs)
    if set(after["made"]) != {"tfrs_embed"}:
        raise ValueError(f"it made layers of {set(after['made'])}")
    worst, metric = difference(before["results"], after["results"])
    same = worst <= 1 and lines <= MOST_LINES
    print(
        f"{project} {name}: {'the same' if same else 'DIFFERENT'}, {lines} "
        f"lines changed, {len(after['results'])} results, largest difference "
        f"{worst:.1e} of what may be ({metric}); {seconds_before:.0f} and "
        f"{seconds:.0f} s",
        flush=True,
    )
    return same


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="NAME", help="programs of this name")
    parser.add_argument(
        "--epochs", type=int, default=1, help="of each fit, at most"
    )
    flags = parser.parse_args()
    source = os.environ.get("SOURCE")
    if not source:
        sys.exit("SOURCE names no folder with repositories; see --help.")
    if not RANKING.exists():
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps"]
        pip += ["--target", str(RANKING), RANKING_RELEASE]
        subprocess.run(pip, check=True)
    failed = ran = 0
    for project, (path, names) in PROGRAMS.items():
        if not (pathlib.Path(source) / project).is_dir():
            print(f"LEFT OUT: {project}, of which {source} has no folder")
            continue
        for name in names.split():
            if flags.only not in (None, name):
                continue
            program = pathlib.Path(source) / project / path.format(name)
            text = program.read_text()
            code = notebook_code(text) if path.endswith("ipynb") else text
            ran += 1
            try:
                failed += not compare(code, project, name, flags.epochs)
            except (RuntimeError, ValueError) as error:
                failed += 1
                print(f"{project} {name}: FAILED\n{error}", flush=True)
    sys.exit(bool(failed or not ran))


if __name__ == "__main__":
    main()
