"""Whether a contender computes what is being timed."""

import cases
import numpy as np

BAGS = 16


def activations(case, batch, steps):
    """A feature's sums for the first bags, after that many steps on the batch.

    All columns of a table are alike, so one stands for all of them.
    """
    for ids, feature in zip(batch, case.features, strict=True):
        rows = np.arange(case.tables[feature.table].rows)
        values = cases.row_values(rows)
        accumulator = np.full(values.shape, cases.INITIAL_ACCUMULATOR)
        for _ in range(steps):
            gradients = np.zeros_like(values)
            sums = values[ids].sum(1, keepdims=True)
            np.add.at(gradients, ids, 2 * sums)
            # All columns are alike, and so are their mean's and their squares.
            if case.optimizer.endswith("Adagrad"):
                accumulator += gradients**2
                gradients /= np.sqrt(accumulator)
            elif case.optimizer == "Adam":
                if steps > 1:
                    raise NotImplementedError("only Adam's first step is known")
                gradients = np.sign(gradients)  # Both moments are corrected.
            values = values - case.learning_rate * gradients
        yield values[ids[:BAGS]].sum(1)


def difference(case, runner, batch):
    """The difference between a step's result and the one it must have.

    Returns:
        "" if there is none. Models with an MLP are compared with each other
        instead, by their losses.
    """
    if runner.forward is None or case.mlp:
        return ""
    inputs = runner.prepare(batch)
    before = list(activations(case, batch, 0))
    if not agree(runner.forward(inputs), before, 0):
        return "it sums up other rows"
    if case.kind != "forward":
        runner.step(inputs)
        after = activations(case, batch, 1)
        if not agree(runner.forward(inputs), after, before):
            return "it updates rows by another rule"
    return ""


def agree(got, expected, before):
    """Whether all features' sums changed by what they must since `before`."""
    before = before or [0] * len(got)
    return all(
        np.allclose(column - b, e - b, rtol=0.01, atol=1e-6)
        for array, e, b in zip(got, expected, before, strict=True)
        for column in np.asarray(array)[:BAGS].T[[0, -1]]
    )
