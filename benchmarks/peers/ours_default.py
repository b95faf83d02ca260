"""This library's layer, whose small tables the model's optimizer trains."""

from peers import ours


def make(case, form):
    # None would do for tables of this size, too: none has more rows.
    largest = max(table.rows for table in case.tables)
    return ours.make(case, form, size_threshold=max(10_000, largest))
