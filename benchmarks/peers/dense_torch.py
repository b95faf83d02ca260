"""The dense part of a model, without its lookups, in torch."""

import dataclasses

import torch

from peers import torch_steps


def make(case, form):
    # Its gradient is computed as a lookup's would be, and not used.
    looked_up = torch.rand(case.batch, sum(case.dims), requires_grad=True)

    def embed(_):
        looked_up.grad = None
        return looked_up

    runner = torch_steps.make_runner(case, lambda batch: None, embed)
    return dataclasses.replace(runner, forward=None)
