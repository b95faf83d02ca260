"""The search for the placements of the least predicted time.

A pass goes through all tables, the largest first, and takes for each what
lowers the time. Before, it does so for all tables of a width together, and for
those of a width that have the same placement. Collectives cost the same for one
table as for many, so each set of placements has a pass, from the best placement
of each table by itself, and the best sets have passes until one finds nothing
better; then passes with all placements improve what was found.
There are no random numbers: equal demands have equal results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence

from tfrs_embed.configs.plan import PLACEMENTS
from tfrs_embed.tools.planner.prediction import CostModel, Step

_FEW = 700  # Up to this number of choices, all are tried.
_BEST_SETS = 3  # So many sets of placements have more than one pass.
_MOST = 2000  # After so many the best set of placements alone is improved.

_SETS = [
    names
    for count in range(1, len(PLACEMENTS) + 1)
    for names in itertools.combinations(PLACEMENTS, count)
]


def best_of(steps: Iterable[Step]) -> Step:
    """Returns the fastest step that fits, else the nearest to fitting."""
    return min(steps, key=lambda step: step.key)


def best_step(model: CostModel) -> Step:
    """Returns the fastest choice that fits, else the nearest to fitting."""
    found = {names: _pass(model, names) for names in _SETS}
    for names in sorted(found, key=lambda names: found[names].key)[:_BEST_SETS]:
        found[names] = _passes(model, names, found[names])
    best = best_of(found.values())
    for step in sorted(found.values(), key=lambda step: step.key):
        if step is not best and model.tried > _MOST:
            break
        best = best_of([best, _passes(model, PLACEMENTS, step)])
    return _passes(model, PLACEMENTS, best)


def _passes(model: CostModel, allowed: Collection[str], best: Step) -> Step:
    """Makes passes from `best` until one finds nothing better."""
    while (step := _pass(model, allowed, best)).key < best.key:
        best = step
    return best


def _pass(
    model: CostModel, allowed: Collection[str], best: Step | None = None
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
    alike: dict[tuple[int, str], list[int]] = {}
    for i, (demand, option) in enumerate(
        zip(model.demands, best.choice, strict=True)
    ):
        placement = model.candidates[option].placement
        alike.setdefault((demand.dim, ""), []).append(i)
        alike.setdefault((demand.dim, placement), []).append(i)
    sizes = [demand.bytes for demand in model.demands]
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    groups: list[Sequence[int]] = [*alike.values(), *([i] for i in order)]
    for group in groups:
        for candidate in dict.fromkeys(c for i in group for c in options[i]):
            choice = list(best.choice)
            for i in group:
                choice[i] = options[i].get(candidate, choice[i])
            best = best_of([best, model.step(choice)])
    return best
