"""Heads with quantised weights, stored in 8 bits with factors."""

import pytest
import torch

from hf_specdec.checkpoints.header import Header
from hf_specdec.checkpoints.quantised import scaled
from hf_specdec.checkpoints.reader import CheckpointReader
from hf_specdec.errors import CheckpointFormatError
from hf_specdec.hub.detect import detect_checkpoint
from tests.helpers.heads import copy_of, folder_of, load, loaded_target, method_of
from tests.helpers.levels import in_full


FP8, INT8 = torch.float8_e4m3fn, torch.int8
# What is made of a matrix: the ends of the names of its factors, their shape, the type, and what the config says.
FORMS = {
    # The last blocks are cut off.
    "blocks": ("_scale_inv", lambda *shape: [-(-n // 24) for n in shape], FP8, {"weight_block_size": [24, 24]}),
    "rows": ("_scale", lambda rows, inputs: (rows, 1), FP8, {"quant_method": "compressed-tensors"}),
    # The file does not say how long the groups are.
    "groups": ("_scale", lambda rows, inputs: (rows, inputs // 16), FP8, {"quant_method": "compressed-tensors"}),
    "one": ("_scale", lambda *shape: (), FP8, {"quant_method": "modelopt"}),
    "integers": ("_scale", lambda rows, inputs: (rows,), INT8, {}),
}


def spread(factors, weight):
    """Factors as long as the matrix."""
    if factors.dim() < 2:
        return factors if factors.dim() == 0 else factors[:, None]
    for dim, length in enumerate(weight.shape):
        size = 24 if factors.shape[dim] == -(-length // 24) else length // factors.shape[dim]
        factors = factors.repeat_interleave(size, dim).narrow(dim, 0, length)
    return factors


def stored_in(form):
    end, shape_of, dtype, _ = FORMS[form]

    def change(tensors):
        torch.manual_seed(0)
        for name in [name for name in tensors if "_proj.weight" in name or name.endswith("linear.weight")]:
            weight = tensors[name].float()
            factors = 0.5 + torch.rand(shape_of(*weight.shape))
            if dtype is INT8:
                factors = weight.abs().amax(1) / 127
            numbers = weight / spread(factors, weight)
            tensors[name] = (numbers.round() if dtype is INT8 else numbers).to(dtype)
            tensors[f"{name}{end}"] = factors
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
        return tensors

    return change


EAGLE3, DFLASH = "eagle/eagle3_llama", "dflash/qwen3_random_b8"
MEDUSA, MTP = "medusa/v2_shared_lm_head_safetensors", "mtp/deepseek_v3"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((EAGLE3, "blocks"), (DFLASH, "rows"), (MEDUSA, "integers")),
        *in_full((EAGLE3, "groups"), (DFLASH, "one"), (EAGLE3, "integers"), (MEDUSA, "blocks"), (MTP, "blocks")),
    ],
)
def test_stored_in_8_bits(name, form, tmp_path):
    target, method = loaded_target(folder_of(name)), method_of(name)
    folder = copy_of(name, tmp_path / "head", {"quantization_config": FORMS[form][3]}, stored_in(form))
    assert detect_checkpoint(str(folder)).problems == ()
    expected = load(method, folder_of(name), target).state_dict()
    found = load(method, folder, target).state_dict()
    assert found.keys() == expected.keys()
    changed = 0
    for key, tensor in expected.items():
        # Three bits after the point, or 127 steps.
        torch.testing.assert_close(found[key], tensor, rtol=0.07, atol=0.02 * float(tensor.abs().max()))
        changed += not torch.equal(found[key], tensor)
    assert changed


def test_factors_that_fit_or_do_not():
    weight = torch.ones(8, 8).to(torch.float8_e4m3fn)

    def scaled_by(factors, stated, dtype=None):
        config = {} if stated is None else {"quantization_config": {"weight_block_size": stated}}
        return scaled(CheckpointReader(Header("head", config, {})), "up.weight", weight, factors, dtype)

    for factors, stated, message in (
        (torch.ones(3, 2), [4, 4], r"\[3, 2\] factors of up.weight.*blocks of \[4, 4\]"),
        (torch.ones(3, 2), None, "factors of up.weight"),
        (torch.ones(2, 2), [4, 4, 4], r"`weight_block_size`=\[4, 4, 4\].*2 dimensions with factors of 2"),
        (torch.ones(8, 2), [2**30, 4], "8, 2.*factors of up.weight"),
        (torch.ones(2, 2, dtype=torch.uint8), [4, 4], "factors in uint8"),
    ):
        with pytest.raises(CheckpointFormatError, match=message):
            scaled_by(factors, stated)
    # Of rows, beside blocks of the target.
    factors = torch.arange(1.0, 9)
    for given in (factors, factors[:, None]):
        assert torch.equal(scaled_by(given, [4, 4], torch.float32), factors[:, None].expand(8, 8))
