"""The search for the placements of the least predicted time.

A pass goes through all tables, the largest first, and takes for each what
lowers the time. Before, it does so for all tables of a width at once.
Collectives cost the same for one table as for many, so each set of placements
has a pass, from the best placement of each table by itself; then passes with
all placements improve what was found. There are no random numbers: equal
demands have equal results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from tfrs_embed.configs.plan import PLACEMENTS
from tfrs_embed.tools.planner.prediction import Model, Step

_FEW = 700  # Of up to so many choices all are tried.
_MOST = 2000  # After so many the best set of placements alone is improved.

_SETS = [
    names
    for count in range(1, len(PLACEMENTS) + 1)
    for names in itertools.combinations(PLACEMENTS, count)
]


def best_of(steps: Iterable[Step]) -> Step:
    """Returns the fastest step that fits, else the nearest to fitting."""
    return min(steps, key=lambda step: step.key)


def best_steps(model: Model) -> tuple[Step, dict[str, Step]]:
    """Finds the best choice, and others for comparison.

    Returns:
        The fastest choice that fits, else the one that is nearest to fitting;
        and by name those with one placement of all tables, and without each;
        without a limit, where none fits.
    """
    found = {names: _improve(model, names) for names in _SETS}
    best = best_of(found.values())
    for step in sorted(found.values(), key=lambda step: step.key):
        if step is not best and model.tried > _MOST:
            break
        best = best_of([best, _improve(model, PLACEMENTS, step)])
    best = _improve(model, PLACEMENTS, best)
    used = {
        model.candidates[option].placement
        for option, demand in zip(best.choice, model.demands, strict=True)
        if demand.kept is None
    }
    found[tuple(sorted(used))] = best
    unlimited = Model(model.demands, model.hardware, None)
    others = {f"all {name}": {name} for name in PLACEMENTS}
    for name in PLACEMENTS:
        others[f"without {name}"] = {*PLACEMENTS} - {name}
    steps = {}
    for name, allowed in others.items():
        step = best_of(found[n] for n in found if allowed.issuperset(n))
        if step.excess:
            step = _improve(unlimited, allowed)
        steps[name] = step
    return best, steps


def _improve(
    model: Model, allowed: Collection[str], best: Step | None = None
) -> Step:
    """Makes a pass from `best`, or from the best for each table by itself.

    Of few choices all are tried. Tables that can have none of the placements
    have their first candidate.
    """
    options = [
        {c: i for c, i in each.items() if demand.kept or c.placement in allowed}
        or dict(itertools.islice(each.items(), 1))
        for demand, each in zip(model.demands, model.options, strict=True)
    ]
    if math.prod(map(len, options)) <= _FEW:
        choices = itertools.product(*(each.values() for each in options))
        return best_of(map(model.step, choices))
    if best is None:
        best = model.step(
            min(each.values(), key=lambda i: model.step([i]).key)
            for each in options
        )
    tables = range(len(options))
    widths: dict[int, list[int]] = {}
    for i in tables:
        widths.setdefault(model.demands[i].dim, []).append(i)
    order = sorted(tables, key=lambda i: model.demands[i].bytes, reverse=True)
    groups: list[Sequence[int]] = [*widths.values(), *([i] for i in order)]
    for group in groups:
        for candidate in dict.fromkeys(c for i in group for c in options[i]):
            choice = list(best.choice)
            for i in group:
                choice[i] = options[i].get(candidate, choice[i])
            best = best_of([best, model.step(choice)])
    return best
