"""The parts of a call: the drafter, target, judging and observers of its loop."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from ..logits.randomness import RowUniforms
from ..logits.rules import acceptance_rule
from ..logits.sampling import DraftSampler
from ..loop.ahead import Ahead
from ..loop.judging import Judging
from ..loop.loop import DecodingLoop
from ..loop.observers import ColumnStreamer, Listeners, Observer, Observers, Statistics
from ..loop.recorder import OutputRecorder
from ..loop.rows import Group, Rows
from ..loop.tracing import Tracer
from ..metrics import SpecDecodingStats, begin_call
from ..protocol import Session
from ..speculator import GivenCandidateGenerator, Speculator
from ..target.cache import SlotCache
from ..target.facts import model_profile
from ..target.graphs import call_graphs
from ..target.lean import slot_model
from ..target.parts.adapters import RowInputs
from ..target_facts import model_name, vocabulary_size
from .output import KeptCache, returned


if TYPE_CHECKING:
    import torch

    from ..candidate_generators.base import CandidateGenerator
    from ..target.model import SlotModel
    from ..target.prompts import Request
    from .output import SpeculativeOutput


# Tokens of a text for which there is room from the beginning. A maximum may be there only as a limit.
_MOST_ROOM = 1024


def decode(request: Request, speculator: Speculator | GivenCandidateGenerator) -> torch.LongTensor | SpeculativeOutput:
    """Decodes one call: token ids `(B, L)`, or a `SpeculativeOutput` if its config asks for a dict."""
    recorder = OutputRecorder(request.batch_size, request.generation_config)
    group = Group(request, recorder.scores)
    with closing(build(request, speculator, Rows(request.batch_size), [group], recorder)) as loop:
        loop.run()
        loop.end()
        if num_cut_back := group.texts.num_cut_back:
            loop.stats.notes.append(
                f"{num_cut_back} tokens after the ends of rows have been generated and cut off: a stopping "
                "criterion is shown a column when all rows have reached it."
            )
        return returned(loop, group, recorder)


def build(
    request: Request,
    speculator: Speculator | GivenCandidateGenerator,
    rows: Rows,
    groups: list[Group],
    recorder: OutputRecorder | None = None,
    observers: list[Observer] | None = None,
    is_first: bool = True,
    is_reported: bool = True,
) -> DecodingLoop:
    """The loop of a call of `generate()`, which is one group, or of many requests.

    The request has all prompts as one batch, for the forward that reads them; `rows` has places for all that may come.
    A loop that is not the first one will join another: it has no graphs, and listeners are not told of it.
    """
    model = request.model
    samples = bool(request.generation_config.do_sample)
    if groups[0].fails_alone:
        # Requests bring random numbers of their own.
        uniforms = RowUniforms(0, request.device)
    else:
        uniforms = RowUniforms(request.draw_seed(), request.device) if samples else None
    # Tokens that a row may still get.
    room = max(group.texts.max_length - group.texts.lengths[0] for group in groups)
    stats = SpecDecodingStats(method=speculator.method, batch_size=request.batch_size, drafter=dict(speculator.origin))
    session = Session(
        batch_size=len(rows.places),
        max_length=request.input_ids.shape[1] + room,
        device=request.device,
        sampler=DraftSampler(rows, uniforms if samples else None, vocabulary_size(model)),
        supports_trees=model_profile(model).supports_trees,
        notes=stats.notes,
        group=request.processes,
    )
    drafter: CandidateGenerator = speculator.candidate_generator(session)
    stats.num_spec_tokens = drafter.num_speculative_tokens
    with ExitStack() as if_it_fails:
        if_it_fails.callback(drafter.close)
        make_rule = partial(
            acceptance_rule,
            *(drafter.config, drafter.num_speculative_tokens, drafter.samples_drafts),
            new_uniforms=lambda: uniforms or RowUniforms(request.draw_seed(), request.device),
            is_training=model.training,
        )
        judging = Judging(rows, make_rule, uniforms, samples, stats.notes)
        stats.rejection_sample_method = judging.rule.name
        if judging.rule.note:
            stats.notes.append(judging.rule.note)
        for group in groups:
            rows.enter(group)
            judging.enter(group, len(rows.active) - 1, None if recorder is None else recorder.scores)
            if why := group.verifier.why_equal:
                judging.keep_equal(why)
        wants_states = recorder is not None and recorder.wants_states
        target = _target(request, drafter, room, wants_states)
        row_inputs = request.row_inputs()
        if row_inputs:
            target.parts.append(RowInputs(model, row_inputs))
        if_it_fails.callback(target.close)
        session.target_ref = ref(target)
        if is_first:
            graphs = call_graphs(
                model,
                largest=drafter.num_draft_nodes + 1,
                enforce_eager=speculator.config is not None and speculator.config.enforce_eager,
                all_hidden_states=wants_states,
                row_inputs=tuple(row_inputs),
            )
            target.use_graphs(graphs)
        if_it_fails.pop_all()
    is_told = is_first and is_reported
    # With an adaptive length, drafts that do not pay are not made for long.
    watched = speculator.config if is_told and not speculator.is_adaptive else None
    watching: list[Observer] = [Statistics(stats, rows, drafter, target, watched), *(observers or [])]
    if recorder is not None and recorder.reads_logits:
        watching.append(recorder)
    if request.keeps_cache:
        watching.append(KeptCache(groups[0], target))
    if is_told:
        progress = begin_call(stats, model_name(model))
        if progress.traces:
            watching.append(Tracer(progress.traces, stats.method, is_joint=groups[0].fails_alone))
        if progress.observers:
            watching.append(Listeners(progress))
    if request.streamer is not None:
        watching.append(ColumnStreamer(request.streamer, groups[0]))
    seen, ahead = Observers(watching), None
    # A forward goes on after its call has returned, but on a CPU.
    if session.device.type != "cpu" or target.graphs is not None:
        ahead = Ahead(rows, drafter, target, judging, session, stats, seen)
    return DecodingLoop(request, session, rows, drafter, target, judging, seen, stats, ahead)


def _target(request: Request, drafter: CandidateGenerator, room: int, wants_states: bool) -> SlotModel:
    prompt_length, nodes = request.prompt_length, drafter.num_draft_nodes + 1
    cache = SlotCache(prompt_length + min(room, _MOST_ROOM) + nodes, limit=prompt_length + room + nodes)
    forward_kwargs = {"output_hidden_states": True} if wants_states else None
    target = slot_model(request.model, cache, drafter.target_hidden_states, forward_kwargs)
    target.most_committed = drafter.num_speculative_tokens + 1
    target.num_successors = min(drafter.num_best_tokens, vocabulary_size(request.model))
    return target
