"""Random distributions and numbers for acceptance rules, and what a rule commits."""

from __future__ import annotations

import numpy as np
import torch


ALMOST_ONE = float(np.nextafter(1.0, 0.0))
SAMPLES = 60_000


def uniform(generator, *shape):
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def random_probs(generator, *shape, scale=1.5):
    return torch.randn(shape, generator=generator).mul(scale).softmax(-1)


def rows_of(acceptance):
    """The committed tokens of each row; checks the padding of all fields on the way."""
    rows = []
    fields = acceptance.num_accepted, acceptance.path, acceptance.tokens
    for count, path, tokens in zip(*(field.tolist() for field in fields)):
        assert path[0] == 0
        assert path[count:] == [path[count]] * (len(path) - count)
        assert tokens[count + 1 :] == [0] * (len(tokens) - count - 1)
        rows.append(tokens[: count + 1])
    return rows
