"""The one source of random numbers of a test."""

import pytest
import torch


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)
