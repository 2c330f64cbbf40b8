"""Losses of the recipes: a step of the training sees what drafting sees, and a loss is what its definition says."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hf_specdec.candidate_generators.dflash import recipe as dflash
from hf_specdec.candidate_generators.dflash.heads.domino import DominoRecipe
from hf_specdec.candidate_generators.dflash.heads.lilicorr import LiLiCorrRecipe
from hf_specdec.candidate_generators.dflash.heads.selector import DFlash2Recipe
from hf_specdec.candidate_generators.dflash.network import BlockView, DFlashNetwork
from hf_specdec.candidate_generators.draft_model.recipe import DraftModelRecipe
from hf_specdec.candidate_generators.eagle.generator import masked_logits
from hf_specdec.candidate_generators.medusa.recipe import MedusaRecipe
from hf_specdec.candidate_generators.mlp_speculator.recipe import MLPSpeculatorRecipe
from hf_specdec.drafting.slots import DRAFT_STATE, DraftEntries
from hf_specdec.drafting.state import Entries
from hf_specdec.training import recipe as frame
from hf_specdec.training.autoregressive import walk_cycles
from hf_specdec.training.reading import TargetReader
from hf_specdec.training.recipe import sum_over_chunks
from tests.helpers.levels import in_full, split
from tests.helpers.models import VOCAB_SIZE, tiny_llama
from tests.helpers.recipes import MTP_TARGETS, RECIPES, SIZES, built, drafted_block, enlarged, read


def random_tokens(*shape):
    return torch.randint(1, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(3))


# EAGLE heads and MTP layers


SHORT = [("eagle", "llama"), ("eagle3, few tokens", "llama"), ("eagle3, parallel", "llama")]
SHORT += [("mtp", "mistral, window of 4")]
DRAFT_STEPS = [name for name, recipe in RECIPES.items() if recipe.method in ("eagle", "eagle3", "mtp")]
ALL = [(name, "llama") for name in DRAFT_STEPS] + [("mtp", kind) for kind in MTP_TARGETS]
# Anchors of two rows, in another order each.
ANCHORS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 4, 3, 2, 1, 0, 5, 6, 8, 7]])


@pytest.mark.parametrize(("name", "kind"), split(dict.fromkeys(ALL), SHORT))
@torch.no_grad()
def test_a_step_sees_what_drafting_sees(name, kind):
    target, recipe, steps = MTP_TARGETS[kind](), RECIPES[name], 4
    network = built(recipe, target)
    is_parallel = "parallel" in name
    if is_parallel:
        torch.nn.init.normal_(network.mask_hidden)
    # Experts and recurrent layers know float32 alone.
    network = network.double() if kind == "llama" else network
    reading = read(recipe, network, target, length=14)
    tokens, states = reading.tokens, network.fuse(reading.states)
    walked = list(walk_cycles(network, tokens, states, ANCHORS, steps))
    for anchor in range(10):
        places = (ANCHORS == anchor).nonzero(as_tuple=True)
        # What the cached forward of a cycle does that begins here, one token at a time or all at once.
        entries, count = DraftEntries(network, starts=[0, 0], leads=[0, 0], capacity=32, num_nodes=steps), anchor + 1
        if is_parallel:
            raw = {key: state[:, :count] for key, state in reading.states.items()}
            new = Entries(tokens[:, 1 : count + 1], raw, [count] * 2)
            expected = masked_logits(entries, new, network.mask_state(), 4)
            found = torch.stack([network.logits(output)[places] for _, output in walked], dim=1)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
            continue
        outputs = entries.read(Entries(tokens[:, 1 : count + 1], {DRAFT_STATE: states[:, :count]}, [count, count]))
        hidden, output = (part[:, -1:] for part in outputs)
        logits = network.logits(output)
        for step in range(steps):
            if step:
                node = tokens[:, anchor + 1 + step, None]
                hidden, logits = entries.step(node, hidden, torch.zeros(1, dtype=torch.long))
            fed, output = walked[step]
            for found, expected in ((fed, hidden), (network.logits(output), logits)):
                # The target's lm_head computes in float32, and its logits are large.
                atol = max(1e-4, 1e-6 * expected.abs().max().item())
                torch.testing.assert_close(found[places], expected[:, 0], atol=atol, rtol=1e-5)


def test_cycles_begin_where_their_first_draft_counts(target):
    tokens = random_tokens(3, 12)
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    counted[0, 4:7] = counted[1, 6:] = True
    reading = TargetReader(target, ()).read(tokens, counted)
    anchors = reading.cycle_anchors()
    assert [row[begins].tolist() for row, begins in zip(anchors, reading.begins_at(anchors))] == [
        [2, 3, 4],
        [4, 5, 6, 7, 8, 9],
        [],
    ]
    labels = reading.labels_at(anchors, 4)
    assert (labels != -100).sum(2).tolist() == [[3, 6, 0], [2, 5, 0], [1, 4, 0], [0, 3, 0]]
    assert labels[1, 1, :5].tolist() == tokens[1, 7:].tolist()


@pytest.mark.parametrize("name", ["eagle", "eagle3, few tokens", *in_full("eagle3, parallel", "mtp, narrow")])
def test_the_loss_is_the_weighted_mean_of_the_steps(name, target):
    recipe = replace(RECIPES[name], ttt_steps=2, head_decay=0.5, **({"noise": 0.0} if name == "eagle" else {}))
    network = built(recipe, target)
    reading = read(recipe, network, target, length=16, uncounted=7)
    tokens, known = reading.tokens, list(range(VOCAB_SIZE))
    known = known if network.token_ids is None else network.token_ids.tolist()
    target_logits = target(tokens).logits
    means = []
    anchors = torch.arange(15).expand(2, -1)
    for step, (fed, output) in enumerate(walk_cycles(network, tokens, network.fuse(reading.states), anchors, 2)):
        losses = []
        for row in range(2):
            for anchor in range(16 - 2 - step):
                label = int(tokens[row, anchor + 2 + step])
                # Cycles begin where their first draft counts.
                if not reading.counted[row, anchor + 2] or label not in known:
                    continue
                probs = target_logits[row, anchor + 1 + step, known].softmax(-1)
                log_probs = network.logits(output[row, anchor]).log_softmax(-1)
                loss = recipe.kl_weight * (probs * (probs.log() - log_probs)).sum()
                loss = loss - (1 - recipe.kl_weight) * log_probs[known.index(label)]
                if recipe.method == "eagle":
                    state = reading.states["last"][row, anchor + 1 + step]
                    loss = recipe.token_weight * loss + F.smooth_l1_loss(fed[row, anchor], state)
                losses.append(loss)
        means.append(torch.stack(losses).mean())
    expected = (means[0] + 0.5 * means[1]) / 1.5
    torch.testing.assert_close(recipe.loss(network, reading), expected, atol=1e-4, rtol=1e-4)


# DFlash drafts


def selector_loss(network, output, before, token):
    """Loss of the selector for a token after another one, where it is a candidate."""
    selector, logits = network.block_head, network.logits(output[None])[0]
    candidates = logits.argsort(descending=True)[: selector.sizes.top_k].tolist()
    if token not in candidates:
        return 0.0
    projected = selector.predecessor_codebook[before] * selector.hidden_projection(output)
    scores = torch.stack([logits[c] + projected @ selector.successor_codebook[c] for c in candidates])
    return -scores.log_softmax(-1)[candidates.index(token)]


def lattice_losses(recipe, walk, text, target_logits):
    """Losses of the lattice at the places of a block, up to the first whose token is no candidate."""
    before, losses = 0, []
    for candidates, scores, token, wanted in zip(walk.tokens[0].tolist(), walk.scores[0], text, target_logits):
        if token not in candidates:
            break
        right, probs = candidates.index(token), scores[before].softmax(-1)
        rejected = sum(prob * max(0, wanted[token] - wanted[c]) for prob, c in zip(probs, candidates))
        losses.append(-recipe.lattice_weight * probs[right].log() + recipe.rejection_weight * rejected)
        before = right
    return losses


@pytest.mark.parametrize(
    "name",
    [
        *("dflash, revealed", "dflash, selector", "dflash, domino", "dflash, lilicorr"),
        *in_full("dflash, all anchors, distilled", "dflash, selector, revealed", "dflash, lilicorr, distilled"),
    ],
)
def test_the_loss_is_that_of_blocks_read_one_by_one(name, target, monkeypatch):
    """Blocks are read as drafting reads them, also where a layer slides, and whatever the size of a piece is."""
    recipe = replace(RECIPES[name], num_anchors=min(RECIPES[name].num_anchors, 9))
    network = built(recipe, target)
    if "revealed" in name:
        sliding = replace(network.config, views=(BlockView(), BlockView(4, True)))
        network = enlarged(DFlashNetwork(sliding).attach(target))
        monkeypatch.setattr(dflash, "_PIECE", 1)
    reading = read(recipe, network, target, uncounted=7)
    target_logits = target(reading.tokens).logits
    torch.manual_seed(4)
    found = recipe.loss(network, reading)
    torch.manual_seed(4)
    anchors = recipe.draw_anchors(reading)
    revealed = recipe.draw_revealed(reading.labels_at(anchors, recipe.num_drafts).movedim(0, 2))
    assert bool(revealed.any()) == bool(recipe.reveal_share)
    total = weights = 0.0
    of_lattice = []
    for row, index in itertools.product(range(2), range(anchors.shape[1])):
        place = int(anchors[row, index])
        if place + 2 >= 20 or not reading.counted[row, place + 2]:
            continue
        before, wanted = (values[row, place + 1 :] for values in (reading.tokens, target_logits))
        text, shown = before[1:].tolist(), revealed[row, index].tolist()
        masked = [text[at] if known else network.config.mask_token_id for at, known in enumerate(shown)]
        seen = network.fuse({key: reading.states[key][row, None, place] for key in network.target_hidden_states})
        whole = drafted_block(network, reading, row, place, masked)
        block = network.block(whole[None], before[:1], {"context": seen})
        output, logits = block.output[0], block.logits[0]
        if isinstance(recipe, DominoRecipe):
            walk = network.block_head.begin(block)
            for walk.position, token in enumerate(before[: len(logits)]):
                logits = torch.cat(
                    (logits[: walk.position], walk.logits(token[None, None])[0], logits[walk.position + 1 :])
                )
        if isinstance(recipe, LiLiCorrRecipe):
            of_lattice += lattice_losses(recipe, network.block_head.begin(block), text, wanted)
        log_probs, wanted = logits.log_softmax(-1), wanted.log_softmax(-1)
        for mask, token in enumerate(text[: recipe.num_drafts]):
            if shown[mask]:
                continue
            divergence = (wanted[mask].exp() * (wanted[mask] - log_probs[mask])).sum()
            loss = recipe.kl_weight * divergence - (1 - recipe.kl_weight) * log_probs[mask, token]
            if isinstance(recipe, DFlash2Recipe):
                loss = loss + recipe.selector_weight * selector_loss(network, output[mask], before[mask], token)
            total = total + recipe.head_decay**mask * loss
            weights += recipe.head_decay**mask
    assert not isinstance(recipe, LiLiCorrRecipe) or len(of_lattice) > 5
    expected = total / weights + sum(of_lattice) / max(len(of_lattice), 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


# Heads, draft models, and what all recipes share


def test_medusa_loss_is_the_weighted_mean_of_the_heads_where_tokens_count(target):
    recipe = MedusaRecipe(num_heads=2, head_decay=0.5)
    network = built(recipe, target)
    tokens, reader = random_tokens(2, 20), TargetReader(target, ("last",))
    logits = network(reader.read(tokens).states["last"], target.lm_head)
    for first in (0, 12):
        means = []
        for head in range(2):
            label = max(first, 2 + head)
            here = logits[head, :, label - 2 - head : -2 - head]
            means.append(F.cross_entropy(here.flatten(0, 1), tokens[:, label:].flatten()))
        reading = reader.read(tokens, (torch.arange(20) >= first).expand(2, -1))
        torch.testing.assert_close(recipe.loss(network, reading), (means[0] + 0.5 * means[1]) / 1.5)


def test_stages_read_the_tokens_before_the_one_they_draft(target):
    recipe = MLPSpeculatorRecipe(n_predict=2, inner_dim=16, head_decay=1.0)
    network, tokens = recipe.build(target), random_tokens(1, 12)
    reading = TargetReader(target, ("last",)).read(tokens)
    losses = []
    for position in range(9):
        known = tokens[:, position + 1 : position + 3]
        logits = network(reading.states["last"][:, position], known)[:, 0]
        losses.append(F.cross_entropy(logits, tokens[0, position + 2 : position + 4], reduction="none"))
    last = network(reading.states["last"][:, 9], tokens[:, 10:11])[:, 0]
    means = torch.stack(losses).T
    first = torch.cat((means[0], F.cross_entropy(last, tokens[0, 11:], reduction="none"))).mean()
    torch.testing.assert_close(recipe.loss(network, reading), (first + means[1].mean()) / 2)


def test_draft_models_learn_the_text_or_the_target(target):
    tokens, student = random_tokens(2, 60), tiny_llama(5)
    reader = TargetReader(target, ("last",))
    log_probs, wanted = (model(tokens).logits[:, :-1].log_softmax(-1) for model in (student, target))
    cross_entropy = F.cross_entropy(log_probs.flatten(0, 1), tokens[:, 1:].flatten())
    divergence = (wanted.exp() * (wanted - log_probs)).sum(-1).mean()
    for kl_weight in (0.0, 0.25, 1.0):
        recipe = DraftModelRecipe(from_scratch=SIZES, kl_weight=kl_weight)
        expected = kl_weight * divergence + (1 - kl_weight) * cross_entropy
        torch.testing.assert_close(recipe.loss(student, reader.read(tokens)), expected)
    assert recipe.loss(target, reader.read(tokens)).abs() < 1e-6
    # A draft may have a smaller vocabulary.
    small = replace(recipe, from_scratch={**SIZES, "vocab_size": VOCAB_SIZE - 4}, kl_weight=0.5)
    network, tokens = small.build(target), random_tokens(2, 20).clamp(max=VOCAB_SIZE - 5)
    loss = small.loss(network, reader.read(tokens))
    tokens[0, -1] = VOCAB_SIZE - 1
    with_foreign = small.loss(network, reader.read(tokens))
    assert torch.isfinite(with_foreign)
    assert with_foreign != loss


def test_logits_that_are_computed_again_in_chunks_give_the_same_gradients(target, monkeypatch):
    seen = []
    sum_over_chunks(lambda rows: seen.append(rows) or torch.zeros(()), 40, logits_per_position=10**9)
    assert seen == [slice(0, 16), slice(16, 32), slice(32, 48)]
    recipe = MedusaRecipe(num_heads=2)
    reading = TargetReader(target, ("last",)).read(random_tokens(4, 40))
    gradients = []
    for kept in (frame.KEPT_LOGITS, 0):
        monkeypatch.setattr(frame, "KEPT_LOGITS", kept)
        monkeypatch.setattr(frame, "CHUNK_LOGITS", 2 * VOCAB_SIZE * 32)
        network = recipe.build(target)
        recipe.loss(network, reading).backward()
        gradients.append(network.weights[0].grad)
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients)
