"""A small decoder that composes norms, attentions, residuals and optimizers, and the loop that trains it."""
