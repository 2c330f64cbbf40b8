"""`hf-specdec warm-up`: compiles kernels for a target and a drafter, and captures what calls will run as graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import counted
from .common import JsonOption, say, show
from .target import ANY_SPEC, Place, SpecOption, on_target


if TYPE_CHECKING:
    from ..warming import WarmUp


@on_target
def warm_up_command(
    place: Place,
    spec: SpecOption = ANY_SPEC,
    batch_size: Annotated[
        list[int] | None, typer.Option("--batch-size", "-b", min=1, help="Rows of calls to come; may be repeated.")
    ] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="About the most tokens of a prompt.")] = 512,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=2, help="Likewise of a text.")] = 128,
    sampling: Annotated[bool, typer.Option("--sampling/--greedy", help="Calls will sample, too.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Compile kernels beforehand, and try what is captured as CUDA graphs.

    The kernels stay on disk, where later processes find them. Graphs belong to a process: call `hf_specdec.warm_up()`
    in a server, after loading its model.
    """
    from ..warming import warm_up

    with place.loaded() as (model, _):
        done = warm_up(
            model,
            place.settings(spec),
            batch_sizes=batch_size or [1],
            prompt_length=prompt_length,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
        )
    show(done.to_dict(), as_json, lambda: _print(done))


def _print(done: WarmUp) -> None:
    captures = f"captured {done.num_graph_captures} of the target, {done.num_draft_graph_captures} of drafts"
    if done.graphs != "on":
        captures = f"nothing to capture ({done.graphs.removeprefix('off: ')})"
    say(f"{counted(done.num_calls, 'call')} in {done.seconds:.1f} s; {captures}.")
    say(f"Attention: {done.attention}.")
    for note in done.notes:
        say(note)
