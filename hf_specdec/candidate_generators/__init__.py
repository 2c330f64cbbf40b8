"""The drafting methods, one folder each: its descriptor in `__init__.py`, its generator, network, formats, recipe.

`method.py` finds them; this module registers methods of one's own.
"""

from __future__ import annotations

from ..errors import SpecConfigError
from ..method import COMBINING, Method, add_method, names_of_methods
from ..method import remove_method as unregister_candidate_generator


__all__ = ["register_candidate_generator", "unregister_candidate_generator"]


def register_candidate_generator(name: str, generator: type) -> None:
    """Adds a method under a new name, usable as `spec_method=name` from then on.

    Args:
        name (`str`): A name that no method or alias has.
        generator (`type`): A subclass of `hf_specdec.CandidateGenerator` with its own `options_class`.

    Raises:
        SpecConfigError: The name is taken or would be read as a combination, or the class is not a candidate
            generator of this package.
    """
    from .base import CandidateGenerator

    if COMBINING in name:
        raise SpecConfigError(f"spec_method='{name}' would be read as a combination. Name it without '{COMBINING}'.")
    if name in [*names_of_methods(), "auto"]:
        raise SpecConfigError(f"spec_method='{name}' is taken. Register the candidate generator under another name.")
    if not (isinstance(generator, type) and issubclass(generator, CandidateGenerator)):
        raise SpecConfigError(
            f"A candidate generator must be a subclass of hf_specdec.CandidateGenerator, got {generator!r}."
        )
    add_method(Method(name=name, noun=name, generator=generator, drafts_static_trees=True))
