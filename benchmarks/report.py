"""The report of run.py, as Markdown and as a picture."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import platform
import re
import statistics
import textwrap

import cases
import numpy as np
from peers import PEERS

MIB = 1 << 20
DIFFERS = "†"  # Marks contenders that compute something else.
DENSE_PARTS = {"fbgemm": "dense-torch"}  # All others': dense-tf.

OTHERS = """\
Other programs' figures stand beside what they measure:
[sequences](sequences.md), [retrieval](retrieval.md),
[files](input.md), [tables larger than memory](memory.md#tables-in-files),
[how a step grows](speed.md#how-a-step-grows),
[serving](serving.md), [checkpoints](checkpoints.md), [hashing](hashing.md),
[dynamic tables](dynamic_tables.md), [clusters](scaling.md)."""

INTRODUCTIONS = {
    "row_wise": (
        "Row-wise Adagrad",
        "A training step of the same table, with one accumulator for each row, "
        "and beside it with one for each column.",
    ),
    "single": (
        "A training step on one table",
        "Lookup, sum of each sample's rows, loss = sum of squares, backward "
        "pass and update. The columns are optimizers.",
    ),
    "threads": (
        "One thread and two",
        "The same table and batch, each contender on as many cores as it has "
        "threads.",
    ),
    "features": (
        "A hundred features",
        "A table for each, Adagrad. Tracing, once for each shape of a batch, "
        "is in the first step.",
    ),
    "dlrm": (
        "DLRM",
        "The configuration of DeepRec's modelzoo: 26 tables of 10,000 rows of "
        "16, ids drawn from a power law over the cardinalities of Criteo's "
        "columns and hashed; 13 numerical features through an MLP of 512, 256, "
        "64 and 16 with batch normalization; its output beside the activations "
        "through one of 512, 256 and 1, of which DeepRec's program makes the "
        "512, but does not use it. One optimizer trains all. Batches are made "
        "before; [files](input.md) has it with reading, beside published "
        "figures.",
    ),
    "full": (
        "A whole model with tables of their own size",
        'The synthetic model "Tiny", its tables as large as they are, at its '
        "own batch. Contenders don't fit in memory together, so each runs all "
        "its steps before the next one.",
    ),
    "forward": ("The forward pass alone", "For inference, without slots."),
    "tiny": (
        "A whole model",
        'The synthetic model "Tiny" with the large tables a hundredth of '
        "theirs: an MLP of 256, 128 and 1 on all activations and 10 numerical "
        "features, trained with Adagrad. The time above the dense part is the "
        "step's time less the time of a step of the same MLP on given "
        "activations.",
    ),
    "tables": (
        "Few and many tables",
        "As many lookups in as many rows, of one width, in more tables: a "
        "training step of one layer, Adagrad, one id a sample.",
    ),
    "vocabulary": (
        "The size of the table",
        "The same draws modulo the number of rows; a training step, Adagrad.",
    ),
    "dims": ("The width of the rows", "A training step, Adagrad."),
    "memory": (
        "Memory",
        "MiB. The most memory that training steps take, tracing included, "
        "beside the process with its tables and slots.",
    ),
}


@dataclasses.dataclass
class Row:
    """A contender's result in one case.

    Attributes:
        peer: key of `PEERS`.
        form: which of its forms ran.
        ready: the first message of its process.
        error: why it has no times.
        seconds: of each step.
    """

    peer: str
    form: str = ""
    ready: dict = dataclasses.field(default_factory=dict)
    error: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def key(self):
        """Rows with one key are a line of the report's table."""
        peer = PEERS[self.peer]
        return self.peer, self.form if peer.all_forms else ""

    @property
    def ms(self):
        if self.error or not self.seconds:
            return None
        return 1e3 * statistics.median(self.seconds)


def title(key):
    name, form = key
    return f"{PEERS[name].title}, {form} ids" if form else PEERS[name].title


def markdown(results, args):
    """The whole report."""
    parts = [header(results, args)]
    for group in dict.fromkeys(case.group for case, _ in results):
        columns = [(c, rows) for c, rows in results if c.group == group]
        heading, text = INTRODUCTIONS[group]
        parts += [f"## {heading}", wrap(text), facts([c for c, _ in columns])]
        parts += [table(columns), *reasons(columns), *costs(columns)]
    return "\n\n".join(parts)


def header(results, args):
    versions, kernels = {}, {}
    for _, rows in results:
        for row in rows:
            versions.update(row.ready.get("versions", {}))
            if row.ready.get("info"):
                kernels[PEERS[row.peer].title] = row.ready["info"]
    lines = [
        "# Benchmarks",
        "",
        wrap(
            "Made by `benchmarks/run.py`. Medians in ms; the ratios are to a "
            "table's first line. A peer that takes several forms of ids, or "
            "compilation, has the fastest one's time, with the form in "
            "brackets. Each has a process of its own with as many threads as "
            f"cores; all take turns, {args.rounds} rounds of {args.steps} "
            f"steps on {args.batches} batches, after "
            f"{1000 * cases.WARM_UP_SECONDS:.0f} ms of steps that are not "
            "timed."
        ),
        "",
        wrap(
            "Ids are int64 with a power law (Zipf, exponent 1.05), modulo the "
            "table's rows, so batches have duplicates. All contenders start "
            "from the same rows, and what each computes is checked in a step "
            f"that is not timed; {DIFFERS} marks a difference. The least "
            "memory traffic is measured with threads that read the looked-up "
            "rows, then read and write each unique row of the table and its "
            "slots, prefetching, and compute nothing."
        ),
        "",
        OTHERS,
        "",
        f"- {machine()}",
        "- " + ", ".join(f"{k} {v}" for k, v in sorted(versions.items())),
        *[f"- {name}: {info}" for name, info in kernels.items()],
    ]
    if args.quick:
        lines += [
            "",
            "**A trial with small cases: these figures say nothing.**",
        ]
    return "\n".join(lines)


def wrap(text):
    return textwrap.fill(text, 80)


def machine():
    cpu = re.search(
        r"model name\s*:\s*(.*)", pathlib.Path("/proc/cpuinfo").read_text()
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{cpu[1] if cpu else platform.machine()}, "
        f"{len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB, "
        f"Python {platform.python_version()}"
    )


def facts(group):
    """The cases' lookups, with a line for each case that differs."""
    lines = {}
    for case in group:
        ids = case.ids(0)
        tables = [f.table for f in case.features]
        unique = sum(
            np.unique(
                np.concatenate(
                    [
                        i.ravel()
                        for i, t in zip(ids, tables, strict=True)
                        if t == n
                    ]
                )
            ).size
            for n in set(tables)
        )
        rows = sum(t.rows for t in case.tables)
        widths = sorted({t.dim for t in case.tables})
        text = (
            f"{len(case.tables):,} table{'s' * (len(case.tables) > 1)}, "
            f"{rows:,} rows of {' and '.join(map(str, widths))}, batch "
            f"{case.batch:,}, {sum(i.size for i in ids):,} lookups of "
            f"{unique:,} unique rows"
        )
        lines.setdefault(text, []).append(case.label)
    if len(lines) == 1:
        return wrap(next(iter(lines)) + ".")
    return "\n".join(f"- {', '.join(v)}: {k}" for k, v in lines.items())


def table(columns):
    """A group's cases side by side."""
    keys = line_keys(columns)
    cells = {key: [] for key in keys}
    heads = []
    lines = []
    if columns[0][0].kind == "memory":
        heads = [case.label for case, _ in columns]
        size = [f"{case.table_bytes / MIB:,.0f}" for case, _ in columns]
        lines.append(line("tables and slots", size))
        add_column = memory_cells
    else:
        for case, _ in columns:
            heads += [f"{case.label}, ms", "ratio"]
            heads += ["samples/s"] * shows_rate(case)
            heads += ["above the dense part, ms", "ratio"] * has_dense(case)
        add_column = time_cells
    for case, rows in columns:
        found = {row.key: row for row in rows}
        for key, cell in add_column(case, found, keys).items():
            cells[key] += cell
    lines += [line(title(key), cells[key]) for key in keys]
    rule = "|---" + "|---:" * len(heads) + "|"
    return "\n".join([line("", heads), rule, *lines])


def line_keys(columns):
    """The contenders that have a line or a colour, in the order of `PEERS`."""
    found = {row.key for _, rows in columns for row in rows}
    names = list(PEERS)
    return sorted(found, key=lambda key: (names.index(key[0]), key[1]))


def line(name, cells):
    return "| " + " | ".join([name, *cells]) + " |"


def memory_cells(case, found, keys):
    cells = {}
    for key in keys:
        row = found.get(key)
        peak = row.ready.get("peak_bytes") if row else None
        cells[key] = ["missing" if peak is None else f"{peak / MIB:,.0f}"]
    return cells


def time_cells(case, found, keys):
    """Each contender's time in a case, and how often it is the first one's."""
    times = {key: row.ms for key, row in found.items()}
    cells = {key: with_ratio(times, keys[0], key, found) for key in keys}
    if shows_rate(case):
        for key in keys:
            ms = times.get(key)
            cells[key].append(f"{1e3 * case.batch / ms:,.0f}" if ms else "")
    if has_dense(case):
        above = above_dense(times)
        for key in keys:
            cells[key] += with_ratio(above, keys[0], key)
    return cells


def shows_rate(case):
    """Whether a report says how many samples a second a case trains."""
    return case.group in ("dlrm", "full")


def has_dense(case):
    """Whether a case has the dense part alone among its contenders."""
    return "dense-tf" in case.peers and not shows_rate(case)


def costs(columns):
    """A table of what contenders took before the steps that are timed."""
    rows = {}
    heads = []
    for case, found in columns:
        if not case.costs:
            continue
        heads += [f"{case.label}: import, s", "first step, s", "peak, MiB"]
        found = {row.key: row.ready for row in found if "peak" in row.ready}
        for key in line_keys(columns):
            ready = found.get(key)
            rows.setdefault(key, []).extend(
                [
                    f"{ready['import_seconds']:.1f}",
                    f"{ready['first_seconds']:.2f}",
                    f"{ready['peak'] / MIB:,.0f}",
                ]
                if ready
                else ["", "", ""]
            )
    if not rows:
        return []
    rule = "|---" + "|---:" * len(heads) + "|"
    lines = [line(title(key), cells) for key, cells in rows.items()]
    text = (
        "Before that: the import of the library and what it stands on, the "
        "first training step with its tracing or compilation, and the most "
        "memory that the process had."
    )
    return [wrap(text), "\n".join([line("", heads), rule, *lines])]


def above_dense(times):
    """Times less that of the dense part, of contenders that have both."""
    above = {}
    for (name, form), ms in times.items():
        dense = times.get((DENSE_PARTS.get(name, "dense-tf"), ""))
        if ms and dense and not name.startswith("dense-"):
            above[name, form] = ms - dense
    return above


def with_ratio(times, first, key, found=None):
    """A contender's time, and its ratio to that of the first one."""
    ms = times.get(key)
    if ms is None:
        return ["" if found is None else "missing", ""]
    text = f"{ms:.1f}" if ms >= 1 else f"{ms:.2f}"
    peer = PEERS[key[0]]
    text += DIFFERS * bool(found and found[key].ready.get("differs"))
    if found and len(peer.forms) > 1 and not peer.all_forms:
        text += f" ({found[key].form})"
    reference = times.get(first)
    return [text, f"{ms / reference:.2f}" if reference else ""]


def reasons(columns):
    """Why contenders are missing or marked, as a list if any are."""
    lines = {}
    for case, rows in columns:
        for row in rows:
            differs = row.ready.get("differs")
            if row.error:
                why = f"- {PEERS[row.peer].title} is missing: {row.error}"
            elif differs:
                why = f"- {DIFFERS} {PEERS[row.peer].title}: {differs}"
            else:
                continue
            lines.setdefault(why, []).append(case.label)
    text = "\n".join(f"{k} ({', '.join(v)})" for k, v in lines.items())
    return [text] if text else []


def plot(results, path):
    """Draws a chart for each group of times, beside the report.

    Args:
        results: pairs of a case and its rows.
        path: the report's.

    Returns:
        The charts' paths by group.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    groups = {}
    for case, rows in results:
        if case.kind != "memory":
            groups.setdefault(case.group, []).append((case, rows))
    charts = {}
    for group, columns in groups.items():
        charts[group] = path.with_name(f"{path.stem}_{group}.svg")
        keys = line_keys(columns)
        # So high that no bar's label meets another's.
        height = 1.2 + 0.16 * len(keys) * len(columns) + 0.1 * len(keys)
        figure, axis = pyplot.subplots(
            figsize=(9, height), layout="constrained"
        )
        ratios(axis, columns, keys)
        axis.set_title(INTRODUCTIONS[group][0], fontsize=10)
        figure.savefig(charts[group], metadata={"Date": None})
        pyplot.close(figure)
    return charts


def ratios(axis, columns, keys):
    """Bars from 1: each contender's time divided by the first one's."""
    thickness = 0.85 / len(columns)
    for i, (case, rows) in enumerate(columns):
        times = {row.key: row.ms for row in rows}
        first = times.get(keys[0])
        if not first:
            continue
        known = [k for k, key in enumerate(keys) if times.get(key)]
        values = [times[keys[k]] / first for k in known]
        bar = axis.barh(
            [k + (i + 0.5) * thickness - 0.425 for k in known],
            [value - 1 for value in values],
            thickness,
            left=1,
            label=case.label,
        )
        labels = [f"{value:.3g}" for value in values]
        axis.bar_label(bar, labels, padding=2, fontsize=7)
    axis.set_xscale("log")
    # Not powers of ten: most ratios are below ten.
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(
        lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else ""
    )
    axis.axvline(1, color="black", linewidth=0.6)
    axis.set_yticks(range(len(keys)), [title(k) for k in keys], fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.15)
    axis.set_xlabel(f"time / that of {title(keys[0])}", fontsize=8)
    if len(columns) > 1:
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
