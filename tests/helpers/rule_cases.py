"""Random distributions, numbers and drafts for acceptance rules, what a rule commits, and a rule by definition."""

from __future__ import annotations

import numpy as np
import torch

from hf_specdec.drafts import DraftTree
from hf_specdec.kernels.sampling import sample_from_probs


ALMOST_ONE = float(np.nextafter(1.0, 0.0))
SAMPLES = 60_000


def uniform(generator, *shape):
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def random_probs(generator, *shape, scale=1.5):
    return torch.randn(shape, generator=generator).mul(scale).softmax(-1)


def random_chains(generator, batch_size=16, size=5, vocab_size=300, overlap=0.8):
    """Drawn chains of different lengths, the target's distributions, and the two kinds of numbers of a rule."""
    target_probs = random_probs(generator, batch_size, size + 1, vocab_size)
    noise = random_probs(generator, batch_size, size, vocab_size)
    probs = overlap * target_probs[:, :-1] + (1 - overlap) * noise
    tokens = sample_from_probs(probs, uniform(generator, batch_size, size))
    num_nodes = torch.randint(size + 1, (batch_size,), generator=generator)
    draft = DraftTree.chain(tokens, num_nodes, probs)
    return draft, target_probs, uniform(generator, batch_size, size), uniform(generator, batch_size, size + 1)


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


def typical_limit(distribution, threshold, alpha):
    """The probability that typical acceptance asks of a token."""
    entropy = -(distribution * (distribution + 1e-5).log()).sum()
    return min(threshold, alpha * float((-entropy).exp()))


def typical_by_definition(tokens, parents, num_nodes, scores, threshold, alpha):
    """Path and committed tokens of one row under typical acceptance, by a walk over all paths."""
    distributions = scores.double().softmax(-1)
    paths = {0: ([], 0.0)}
    for node, (token, parent) in enumerate(zip(tokens[:num_nodes], parents)):
        distribution = distributions[parent + 1]
        if parent + 1 in paths and distribution[token] > typical_limit(distribution, threshold, alpha):
            path, likelihood = paths[parent + 1]
            paths[node + 1] = ([*path, node + 1], likelihood + float(distribution[token].log()))
    last = max(paths, key=lambda node: (len(paths[node][0]), paths[node][1], -node))
    path = paths[last][0]
    return path, [*(tokens[node - 1] for node in path), int(distributions[last].argmax())]
