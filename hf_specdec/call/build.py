"""The parts of a call: the drafter, target, judging and observers of its loop."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING
from weakref import ref

from ..logits.randomness import RowUniforms
from ..logits.rules import StandardRule, acceptance_rule
from ..logits.sampling import DraftSampler
from ..loop.judging import WAITING, Judging, Verifier
from ..loop.loop import DecodingLoop
from ..loop.observers import AcceptanceWatch, ColumnStreamer, Listeners, Observer, OutputRecorder, Statistics
from ..loop.rows import Group, Rows
from ..loop.tracing import Tracer
from ..metrics import SpecDecodingStats, begin_call
from ..protocol import DrafterSource, Session
from ..target.cache import SlotCache
from ..target.facts import model_profile
from ..target.graphs import call_graphs
from ..target.lean import slot_model
from ..target.parts.adapters import ADAPTED_ROW, OutsideOfAdapters, RowInputs
from ..target_facts import vocabulary_size
from .output import KeptCache, returned


if TYPE_CHECKING:
    import torch

    from ..candidate_generators.base import CandidateGenerator
    from ..target.model import SlotModel
    from ..target.request import Request
    from .output import SpeculativeOutput


# Tokens of a text for which there is room from the beginning. A maximum may be there only as a limit.
_MOST_ROOM = 1024


def decode(request: Request, speculator: DrafterSource) -> torch.LongTensor | SpeculativeOutput:
    """Decodes one call: token ids `(B, L)`, or a `SpeculativeOutput` if its config asks for a dict."""
    recorder = OutputRecorder(request.batch_size, request.generation_config)
    group = Group(request, recorder.scores)
    observers: list[Observer] = [recorder] if recorder.reads_logits else []
    with closing(build(request, speculator, Rows(request.batch_size), [group], observers)) as loop:
        loop.run()
        loop.end()
        if group.stop.num_cut_back:
            loop.stats.notes.append(
                f"{group.stop.num_cut_back} tokens after the ends of rows have been generated and cut off: a stopping "
                "criterion is shown a column when all rows have reached it."
            )
        return returned(loop, group, recorder)


def build(
    request: Request,
    speculator: DrafterSource,
    rows: Rows,
    groups: list[Group],
    observers: list[Observer],
    is_first: bool = True,
    is_reported: bool = True,
) -> DecodingLoop:
    """The loop of a call of `generate()`, which is one group, or of many requests.

    Args:
        request (`Request`): All prompts as one batch, for the forward that reads them.
        speculator (`DrafterSource`): Makes the candidate generator.
        rows (`Rows`): Places for the rows that it may come to have at a time.
        groups (`list[Group]`): Those that it begins with, in the order of the batch.
        observers (`list[Observer]`): Those of the caller.
        is_first (`bool`): There is no other loop that it will join, so it has graphs, and listeners are told of it.
        is_reported (`bool`): Listeners are told of loops.

    Raises:
        SpecConfigError: The acceptance rule cannot do what a request wants.
        UnsupportedModelError: The target's attention cannot take masks of a draft.
    """
    model, profile = request.model, model_profile(request.model)
    is_one_call = not groups[0].fails_alone
    samples = bool(request.generation_config.do_sample)
    # Requests bring random numbers of their own.
    if not is_one_call:
        uniforms = RowUniforms(0, request.device)
    else:
        uniforms = RowUniforms(request.draw_seed(), request.device) if samples else None
    # Tokens that a row may still get.
    room = max(group.stop.max_length - group.sequences.lengths[0] for group in groups)
    stats = SpecDecodingStats(
        method=speculator.method, batch_size=request.batch_size, drafter=dict(getattr(speculator, "origin", {}))
    )
    session = Session(
        batch_size=len(rows.places),
        max_length=request.input_ids.shape[1] + room,
        device=request.device,
        sampler=DraftSampler(rows, uniforms if samples else None, vocabulary_size(model)),
        supports_trees=profile.supports_trees,
        notes=stats.notes,
        group=request.processes,
    )
    drafter: CandidateGenerator = speculator.candidate_generator(session)
    stats.num_spec_tokens = drafter.num_speculative_tokens
    with ExitStack() as if_it_fails:
        if_it_fails.callback(drafter.close)
        recorder = next((observer for observer in observers if isinstance(observer, OutputRecorder)), None)
        wants_states = recorder is not None and recorder.wants_states

        def make_rule(of_rows: RowUniforms | None) -> StandardRule:
            return acceptance_rule(
                drafter.config,
                drafter.samples_drafts,
                of_rows,
                lambda: uniforms or RowUniforms(request.draw_seed(), request.device),
                model.training,
            )

        judging = Judging(rows, make_rule, uniforms, samples)
        stats.rejection_sample_method = judging.rule.name
        if judging.rule.note:
            stats.notes.append(judging.rule.note)
        if is_one_call:
            (group,) = groups
            scores = None if recorder is None else recorder.scores
            verifier = Verifier(group.stack, rows, judging.rule, scores, _why_equal(group), request.batch_size)
            if verifier.why_equal:
                stats.notes.append(WAITING.format(verifier.why_equal))
            group.verifier = verifier
            rows.enter(group, list(range(request.batch_size)))
        else:
            for number, group in enumerate(groups):
                judging.enter(group, number)
                rows.enter(group, [number])
        target = _target(request, drafter, room, wants_states)
        if row_inputs := request.row_inputs():
            target.parts.append(RowInputs(model, row_inputs))
        if_it_fails.callback(target.close)
        session.target_ref = ref(target)
        if ADAPTED_ROW in row_inputs:
            drafter = OutsideOfAdapters(drafter, model)
        config = getattr(speculator, "config", None)
        if is_first:
            graphs = call_graphs(
                model,
                largest=drafter.num_draft_nodes + 1,
                enforce_eager=getattr(config, "enforce_eager", False),
                all_hidden_states=wants_states,
                row_inputs=tuple(row_inputs),
            )
            target.use_graphs(graphs)
        judging.rule.check_depth(drafter.num_speculative_tokens)
        if_it_fails.pop_all()
    observers = [Statistics(stats, drafter, target), *observers]
    if is_one_call and request.keeps_cache:
        observers.append(KeptCache(groups[0], target))
    if is_first and is_reported:
        is_adaptive = getattr(speculator, "is_adaptive", False)
        # A model that was made from a config alone has no name but its class.
        progress = begin_call(stats, model.config._name_or_path or type(model).__name__)
        if progress.traces:
            observers.append(Tracer(progress.traces, stats.method, is_joint=not is_one_call))
        if progress.observers:
            observers.append(Listeners(progress))
        # With an adaptive length, drafts that do not pay are not made for long.
        if config is not None and not is_adaptive:
            observers.append(AcceptanceWatch(stats, model, config))
    if request.streamer is not None:
        observers.append(ColumnStreamer(request.streamer, groups[0]))
    judging.reads_drafts = any(observer.reads_drafts for observer in observers)
    return DecodingLoop(request, session, rows, drafter, target, judging, observers, stats)


def _why_equal(group: Group) -> str | None:
    """What makes all rows advance by the same number of tokens, in words."""
    request, profile = group.request, model_profile(group.request.model)
    if request.batch_size > 1 and profile.counts_slots:
        return "the target model tells positions from the order of its cache"
    if request.keeps_cache and profile.is_recurrent and group.stop.may_cut_back:
        return (
            "stopping criteria may end a row before its last tokens, and the cache to be returned has a recurrent "
            "state, which cannot be cut back"
        )
    return None


def _target(request: Request, drafter: CandidateGenerator, room: int, wants_states: bool) -> SlotModel:
    prompt_length, nodes = request.prompt_length, drafter.num_draft_nodes + 1
    cache = SlotCache(prompt_length + min(room, _MOST_ROOM) + nodes, limit=prompt_length + room + nodes)
    forward_kwargs = {"output_hidden_states": True} if wants_states else None
    target = slot_model(request.model, cache, drafter.target_hidden_states, forward_kwargs)
    target.most_committed = drafter.num_speculative_tokens + 1
    target.num_successors = min(drafter.num_best_tokens, vocabulary_size(request.model))
    return target
