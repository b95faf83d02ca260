"""Functions of tensors: ids to bags, bags to activations, gradients to rows."""
