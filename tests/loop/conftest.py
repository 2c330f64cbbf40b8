"""The one source of random numbers of a test, and the method that tests of settings register."""

import pytest
import torch

from hf_specdec.candidate_generators import register_candidate_generator, unregister_candidate_generator
from tests.helpers.toy_method import ToyGenerator


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def toy_method():
    register_candidate_generator("toy", ToyGenerator)
    yield
    unregister_candidate_generator("toy")
