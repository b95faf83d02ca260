"""Executes the notebooks, each from start to end in a fresh kernel.

    python examples/notebooks/run.py            # All of them.
    python examples/notebooks/run.py retrieval  # Some.

Writes them with their outputs to the folder `executed` beside this file, as
.ipynb, and with --html as pages too. Fails if a cell raises, or a notebook
takes longer than its limit.
"""

from __future__ import annotations

import argparse
import ast
import os
import pathlib
import re
import sys
import time

import jupytext
import nbclient
import nbconvert
import nbformat

HERE = pathlib.Path(__file__).resolve().parent
OUTPUT = HERE / "executed"
#: Files with jupytext's header are notebooks; this one is none.
HEADER = "# ---\n# jupyter:\n"
LIMIT = 180
#: Read when tensorflow is imported; notebooks set it themselves.
KERAS = "TF_USE_LEGACY_KERAS"
#: Lines of TensorFlow's own log, most of them written before it reads how much
#: it is to write.
LOG = re.compile(
    r"^(?:[IWEF]\d{4} |WARNING: All log messages before absl).*\n?", re.M
)


def find() -> dict[str, pathlib.Path]:
    """Returns the notebooks by name."""
    return {
        path.stem: path
        for path in sorted(HERE.glob("*.py"))
        if path.read_text("utf-8").startswith(HEADER)
    }


def check(notebook: nbformat.NotebookNode) -> None:
    """Wants what every notebook has to have.

    Raises:
        ValueError: the first cell with code doesn't choose a Keras, or the last
            one asserts nothing, so that no result could fail.
    """
    code = [c.source for c in notebook.cells if c.cell_type == "code"]
    if KERAS not in code[0]:
        raise ValueError(f"its first cell doesn't set {KERAS}.")
    if not any(
        isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code[-1]))
    ):
        raise ValueError("its last cell asserts nothing about the result.")


def drop_log(notebook: nbformat.NotebookNode) -> None:
    """Takes TensorFlow's log out of a notebook's outputs."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                if output.get("name") == "stderr":
                    output.text = LOG.sub("", output.text)
            cell.outputs = [
                o
                for o in cell.outputs
                if o.get("text", "").strip() or "text" not in o
            ]


def execute(path: pathlib.Path, limit: float, html: bool) -> str:
    """Executes a notebook and writes it with its outputs.

    Args:
        path: the notebook.
        limit: seconds that it may take.
        html: whether to write a page too.

    Returns:
        The last line that it printed.

    Raises:
        ValueError: it lacks something; see `check`.
        nbclient.exceptions.CellTimeoutError: it took longer.
        nbclient.exceptions.CellExecutionError: a cell raised.
        nbclient.exceptions.DeadKernelError: its process ended.
    """
    notebook = jupytext.read(path)
    check(notebook)
    end = time.monotonic() + limit
    client = nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        # A cell has what the ones before it have left.
        timeout_func=lambda _: max(1, int(end - time.monotonic())),
    )
    try:
        client.execute()
    finally:
        # One that failed too: its outputs show where.
        drop_log(notebook)
        OUTPUT.mkdir(exist_ok=True)
        target = OUTPUT / f"{path.stem}.ipynb"
        nbformat.write(notebook, target)
    if html:
        page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
        target.with_suffix(".html").write_text(page, "utf-8")
    printed = "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "stream" and output.name == "stdout"
    )
    return printed.rstrip().rpartition("\n")[-1]


def main() -> None:
    """Executes all, even after a failure, and reports each."""
    notebooks = find()
    flags = parse_flags(list(notebooks))
    # Else a notebook that forgets it would work here, and nowhere else.
    os.environ.pop(KERAS, None)
    # The kernel of this Python, not one that the user has installed.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    failed = []
    for name in flags.names or notebooks:
        start = time.monotonic()
        try:
            result = execute(notebooks[name], flags.limit, flags.html)
        except (
            ValueError,
            nbclient.exceptions.CellControlSignal,
            nbclient.exceptions.DeadKernelError,
        ) as error:
            failed.append(name)
            result = f"FAILED: {error}"
        seconds = time.monotonic() - start
        print(
            f"{name}: {seconds:.0f} of {flags.limit:g} s: {result}", flush=True
        )
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse_flags(names: list[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Executes the notebooks.")
    # Not choices=: with nargs="*" argparse wants the empty list among them.
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"one of {', '.join(names)} [all]",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT,
        metavar="SECONDS",
        help="what each may take [%(default)s]",
    )
    parser.add_argument(
        "--html", action="store_true", help="write HTML pages too"
    )
    flags = parser.parse_args()
    for name in flags.names:
        if name not in names:
            parser.error(f"no notebook {name!r}; there are {', '.join(names)}")
    return flags


if __name__ == "__main__":
    main()
