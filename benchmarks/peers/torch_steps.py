"""Training steps of the contenders that run on torch."""

import os

import cases
import numpy as np
import torch

from peers import Runner

torch.set_num_threads(len(os.sched_getaffinity(0)))


def fill(weights):
    """Gives a table its initial values."""
    values = cases.row_values(np.arange(weights.shape[0]))
    with torch.no_grad():
        weights.copy_(torch.tensor(values, dtype=torch.float32)[:, None])


def make_head(case):
    """The loss of activations side by side, and what it trains."""
    if not case.mlp:
        return (lambda x: (x * x).sum()), []
    numerical, labels = map(torch.from_numpy, case.dense_inputs())
    layers = []
    for kernel, bias in case.mlp_weights():
        layers += [make_linear(kernel, bias), torch.nn.ReLU()]
    top = torch.nn.Sequential(*layers[:-1])
    layers = []
    for kernel, bias in case.bottom_weights():
        # As Keras's batch normalization.
        norm = torch.nn.BatchNorm1d(kernel.shape[1], eps=1e-3, momentum=0.01)
        layers += [make_linear(kernel, bias), torch.nn.ReLU(), norm]
    bottom = torch.nn.Sequential(*layers)
    criterion = torch.nn.BCEWithLogitsLoss()

    def loss(x):
        return criterion(top(torch.cat([x, bottom(numerical)], 1)), labels)

    return loss, [*bottom.parameters(), *top.parameters()]


def make_linear(kernel, bias):
    """A layer with these weights."""
    layer = torch.nn.Linear(*kernel.shape)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(kernel.T))
        layer.bias.copy_(torch.from_numpy(bias))
    return layer


def make_optimizer(case, parameters, sparse):
    """The case's optimizer, with Keras's settings."""
    if case.optimizer == "Adagrad":
        return torch.optim.Adagrad(
            parameters,
            case.learning_rate,
            initial_accumulator_value=cases.INITIAL_ACCUMULATOR,
            eps=cases.EPSILON,
        )
    name = "Sparse" * (sparse and case.optimizer == "Adam") + case.optimizer
    return getattr(torch.optim, name)(parameters, case.learning_rate)


def make_runner(case, prepare, embed, sparse_parameters=()):
    """Makes a runner.

    Args:
        case: the case.
        prepare: as the runner's.
        embed: gives the features' activations side by side.
        sparse_parameters: tables that don't update themselves.
    """
    head, parameters = make_head(case)
    optimizers = []
    if parameters:
        optimizers.append(make_optimizer(case, parameters, sparse=False))
    if sparse_parameters and case.kind != "forward":
        optimizers.append(make_optimizer(case, sparse_parameters, sparse=True))

    def step(inputs):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = head(embed(inputs))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    @torch.no_grad()
    def forward(inputs):
        return torch.split(embed(inputs), case.dims, 1)

    return Runner(prepare, step, forward)
