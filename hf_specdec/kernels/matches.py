"""Earlier occurrences of the end of a text: how far each place of the text agrees with it, read backwards.

Shapes: R rows, L places of a text, of which a row uses the first ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ._triton import tl, triton, use_triton


_BLOCK = 256


def match_lengths(texts: torch.LongTensor, lengths: torch.LongTensor, most: int) -> torch.LongTensor:
    """Number of last tokens `(R, L)` up to each place that equal the last tokens of the row, at most so many.

    It is 0 at the last token itself, and after the rows' tokens, of which there may be none.
    """
    run = _lengths_triton if use_triton(texts) else _lengths_torch
    return run(texts, lengths, most)


def _lengths_torch(texts, lengths, most):
    back = torch.arange(most, device=texts.device)
    places = lengths[:, None] - 1 - back
    last = texts.gather(1, places.clamp(min=0)).masked_fill(places < 0, -2)
    # By place and distance: the token that lies so far before it.
    before = F.pad(texts, (most - 1, 0), value=-1).unfold(1, most, 1).flip(-1)
    is_earlier = torch.arange(texts.shape[1], device=texts.device) < lengths[:, None] - 1
    return (before == last[:, None]).long().cumprod(-1).sum(-1) * is_earlier


@triton.jit
def _lengths_kernel(
    texts_ptr,  # [R, L]
    lengths_ptr,  # [R]
    matches_ptr,  # [R, L], written
    L,
    most,
    BLOCK: tl.constexpr,
):
    # A program: places of one row, which go backwards together for as long as one of them agrees.
    row = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    text = texts_ptr + row * L
    matches = tl.zeros([BLOCK], tl.int64)
    agrees = place < length - 1
    back = 0
    while (back < most) & (tl.max(agrees.to(tl.int32), axis=0) > 0):
        # Where any place agrees, the row has a token so far back.
        last = tl.load(text + length - 1 - back)
        agrees = agrees & (place >= back)
        agrees = agrees & (tl.load(text + place - back, mask=agrees, other=-1) == last)
        matches += agrees.to(tl.int64)
        back += 1
    tl.store(matches_ptr + row * L + place, matches, mask=place < L)


def _lengths_triton(texts, lengths, most):
    rows, size = texts.shape
    matches = torch.empty_like(texts)
    with torch.cuda.device_of(texts):
        _lengths_kernel[(triton.cdiv(size, _BLOCK), rows)](
            texts.contiguous(), lengths.contiguous(), matches, size, most, BLOCK=_BLOCK, num_warps=4
        )
    return matches
