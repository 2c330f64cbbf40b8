"""Diagnoses speculation: tells whether it writes the right text, whether a drafter fits, and which one pays.

verify      greedy texts beside those of plain generation; each difference is a numerical tie or a bug
diagnose    target and drafter: what fits, what does not, and why few drafts are accepted
advise      the fastest way of speculating on the user's own prompts
"""

from ..bench.prompts import Batch, general_prompts, make_batches
from .advice import Advice, Choices, Option, Rejection, advise, recommend
from .checks import Finding
from .doctor import Diagnosis, diagnose
from .verification import BUG, TIE, Difference, Verification, verify


__all__ = [
    "BUG",
    "TIE",
    "Advice",
    "Batch",
    "Choices",
    "Diagnosis",
    "Difference",
    "Finding",
    "Option",
    "Rejection",
    "Verification",
    "advise",
    "diagnose",
    "general_prompts",
    "make_batches",
    "recommend",
    "verify",
]
