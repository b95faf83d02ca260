"""The table in docs/tpu.md of what was shown how, from the tests' results.

    python support.py update TIERS   # writes what was found
    python support.py check TIERS    # fails where docs say something else

A promise has a mark in a tier if its test there passed. `check` wants the marks
of the tiers that run in full to be the same; of what is compiled, which is a
choice but for the nightly tests, those that were found must be there.
"""

import collections
import json
import pathlib
import sys

from models import MODELS
from promises import PROMISES, Hardware

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "tpu.md"
BEGIN, END = "<!-- tiers: begin -->\n", "<!-- tiers: end -->\n"
IN_FULL = ("emulated", "lowered")
COMPILED = ("compiled for v5p", "compiled for v6e", "compiled for v5e")
COLUMNS = (
    ("SparseCores", Hardware.V2, ("emulated", "lowered", *COMPILED[:2])),
    ("embedding cores", Hardware.V1, ("lowered",)),
    ("neither", Hardware.UNSUPPORTED, ("emulated", "lowered", COMPILED[2])),
)


def read(path):
    """The results: by tier, the promises and hardware that held."""
    found = collections.defaultdict(set)
    for line in pathlib.Path(path).read_text().splitlines():
        tier, promise, hardware = json.loads(line)
        found[tier].add((promise, hardware))
    return found


def render(found):
    """The table."""
    head, rule = ["promise"], ["---"]
    for title, _, tiers in COLUMNS:
        for tier in tiers:
            head.append(f"{title}: {tier}")
            rule.append(":---:")
    lines = [head, rule]
    for promise in (*PROMISES, *MODELS):
        cells = [promise.name]
        for _, hardware, tiers in COLUMNS:
            for tier in tiers:
                holds = (promise.name, hardware.name) in found[tier]
                asked = hardware in promise.hardware and not (
                    tier == "emulated" and promise in MODELS
                )
                cells.append("yes" if holds else "no" if asked else "-")
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def parse(text):
    """The results that a table shows."""
    found = collections.defaultdict(set)
    columns = [(tier, h) for _, h, tiers in COLUMNS for tier in tiers]
    for line in text.splitlines()[2:]:
        name, *cells = [c.strip() for c in line.strip("|").split(" | ")]
        for (tier, hardware), cell in zip(columns, cells, strict=True):
            if cell == "yes":
                found[tier].add((name, hardware.name))
    return found


def main(command, path):
    """Writes or checks the table."""
    found = read(path)
    before, _, rest = DOCS.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    said = parse(table)
    if command == "update":
        for tier in COMPILED:
            found[tier] |= said[tier]
        DOCS.write_text(f"{before}{BEGIN}{render(found)}{END}{after}")
        return 0
    wrong = [
        f"{tier}: {promise} on {hardware}"
        for tier in (*IN_FULL, *COMPILED)
        for promise, hardware in sorted(
            found[tier] ^ said[tier]
            if tier in IN_FULL
            else found[tier] - said[tier]
        )
    ]
    if wrong:
        print("docs/tpu.md is wrong about:", *wrong, sep="\n  ")
        print("make tpu-support ARGS=update writes what was found.")
        return 1
    marks = sum(map(len, found.values()))
    print(f"docs/tpu.md says what {marks} tests have shown")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
