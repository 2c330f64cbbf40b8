"""MTP: the published drafts and runs, the target's text whatever is drafted, and drafts against recomputation."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Qwen2ForCausalLM,
)

from hf_specdec import (
    SpecConfigError,
    SpeculativeConfig,
    Speculator,
    UnsupportedModelError,
    generate_many,
    load_speculator,
    record,
)
from hf_specdec.candidate_generators.mtp.entries import LayerEntries
from hf_specdec.candidate_generators.mtp.generator import MtpCandidateGenerator
from hf_specdec.candidate_generators.mtp.network import MtpNetwork, new_mtp
from hf_specdec.drafting import slots
from hf_specdec.drafting.growth import DynamicTree
from hf_specdec.method import methods
from hf_specdec.protocol import Commit, DraftStep, Prompt, Session
from tests.helpers.by_hand import GREEDY, drafts_of, feed, padded, rows_of
from tests.helpers.distribution import (
    no_drafts,
)
from tests.helpers.models import prompts, tiny_llama, tiny_mistral
from tests.helpers.paths import FIXTURES


PUBLISHED = FIXTURES / "mtp"
NAMES = sorted(path.name for path in PUBLISHED.iterdir())
# Their targets have recurrent layers, which verify chains only.
HYBRID = ("qwen3_5", "qwen3_next")
every_case = pytest.mark.parametrize("name", NAMES)
every_mode = pytest.mark.parametrize("mode", ["chain", "reuse"])

TREE = {"draft_tree_depth": 3, "draft_tree_top_k": 3, "num_draft_nodes": 7}


@cache
def published(name):
    """Target, with its MTP layers in its own checkpoint, and expected tensors of a published case."""
    # MiMo is Qwen2 with MTP layers, and no type of transformers.
    cls = Qwen2ForCausalLM if name == "mimo" else AutoModelForCausalLM
    target = cls.from_pretrained(PUBLISHED / name / "target", dtype=torch.float32).eval()
    target.generation_config.pad_token_id = 0
    return target, load_file(PUBLISHED / name / "expected.safetensors")


def generator_for(network, batch_size, **options):
    config = SpeculativeConfig("mtp", "loaded", **options)
    return MtpCandidateGenerator(config, network, Session(batch_size, 256, torch.device("cpu")))


def speculator_for(network, **options):
    return Speculator(SpeculativeConfig("mtp", "loaded", **options), MtpCandidateGenerator, network)


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    """Switches gradients off as the loop does: embedding and lm_head are the target's, which could be trained."""
    with torch.no_grad():
        yield


class LogitsOf:
    """The logits that a network computes while it drafts, one tensor `(R, V)` a step."""

    def __init__(self, network, monkeypatch):
        self.seen = []
        compute = network.logits

        def watched(output):
            logits = compute(output)
            if logits.dim() > 1:
                self.seen.append(logits if logits.dim() == 2 else logits[:, 0])
            return logits

        monkeypatch.setattr(network, "logits", watched)

    def take(self):
        seen, self.seen = self.seen, []
        return torch.stack(seen, dim=1)


class TestPublishedDrafts:
    """Each round is forced: so many drafts are accepted, and then comes another token."""

    @every_case
    @every_mode
    @pytest.mark.parametrize(("rows", "num_rounds"), [([""], 4), (["", "p2."], 2)], ids=["alone", "batch"])
    def test_rounds(self, name, mode, rows, num_rounds, monkeypatch):
        target, expected = published(name)
        names = [f"{row}{mode}" for row in rows]
        network = load_speculator(target, "mtp").resources
        depth = expected[f"{names[0]}.r0.logits"].shape[0]
        generator = generator_for(network, len(rows), mtp_mode=mode, num_speculative_tokens=depth)
        (key,) = generator.target_hidden_states
        logits = LogitsOf(network, monkeypatch)
        texts = [expected[f"{name}.r0.ids"] for name in names]
        states = [expected[f"{name}.r0.hidden"] for name in names]
        lengths = [len(text) - 1 for text in texts]
        starts = [max(lengths) - length for length in lengths]
        inputs = padded([text[:-1] for text in texts], left=True)
        generator.prefill(Prompt(inputs, starts, {key: padded(states, left=True)}))
        known, number = lengths, 0
        while all(f"{name}.r{number}.ids" in expected for name in names):
            texts = [expected[f"{name}.r{number}.ids"] for name in names]
            new = [text[length:] for text, length in zip(texts, known)]
            last = [expected[f"{name}.r{number}.hidden"][-len(part) :] for name, part in zip(names, new)]
            accepted = [len(part) - 1 for part in new]
            if number:
                assert accepted == [int(expected[f"{name}.r{number}.accepted"]) for name in names]
            everything = list(range(len(rows)))
            lists = [part.tolist() for part in new]
            generator.observe(Commit(everything, padded(new, False), lists, accepted, {key: padded(last, False)}))
            known = list(map(len, texts))
            found = drafts_of(generator, texts)
            seen = logits.take()
            for row, name in enumerate(names):
                wanted = expected[f"{name}.r{number}.tokens"].tolist()
                assert found[row] == [tuple(wanted[: step + 1]) for step in range(depth)]
                torch.testing.assert_close(seen[row], expected[f"{name}.r{number}.logits"], atol=1e-4, rtol=1e-5)
            number += 1
        assert number >= num_rounds


class TestPublishedRuns:
    def run(self, name, mode, rows, **arguments):
        target, expected = published(name)
        texts = [expected[f"{row}prompt_ids"] for row in rows]
        mask = padded([torch.ones_like(text) for text in texts], left=True)
        depth = expected[f"{rows[0]}{mode}.trace.drafts"].shape[1]
        speculative = {"method": "mtp", "mtp_mode": mode, "num_speculative_tokens": depth}
        inputs = {"input_ids": padded(texts, left=True), "attention_mask": mask}
        # Some tokens more, so that the room left does not limit the last drafts.
        length = len(expected[f"{rows[0]}greedy_ids"]) + 10
        with record(trace=True) as made:
            output = target.generate(
                **inputs, **{**GREEDY, "max_new_tokens": length}, **arguments, speculative=speculative
            )
        for index, row in enumerate(rows):
            greedy = expected[f"{row}greedy_ids"]
            assert torch.equal(output[index, mask.shape[1] :][: len(greedy)], greedy)
            accepted = expected[f"{row}{mode}.trace.accepted"].tolist()
            traces = rows_of(made.calls[0], index)[: len(accepted)]
            assert [trace.num_accepted for trace in traces] == accepted
            drafts = expected[f"{row}{mode}.trace.drafts"].tolist()
            assert [trace.draft_tokens for trace in traces] == drafts

    @every_case
    @every_mode
    def test_whole_run(self, name, mode):
        """Rows of a batch; a row alone is among the recorded drafts."""
        self.run(name, mode, ["", "p2."])

    @pytest.mark.parametrize("name", ["glm4_moe_k3", "mellum", "ernie4_5_moe"])
    @every_mode
    def test_prefill_in_chunks(self, name, mode, monkeypatch):
        self.run(name, mode, ["", "p2."], prefill_chunk_size=5)
        # Other sizes are tried by `TestLayersAgainstRecomputation`.
        monkeypatch.setattr(slots, "_CHUNK_SIZE", 2)
        self.run(name, mode, ["", "p2."])


def random_mtp(num_layers=3, seed=0):
    """MTP layers of random weights for a tiny target."""
    target = tiny_llama(seed)
    network = new_mtp(target, num_layers)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return network.requires_grad_(False)


class Row:
    """A text that grows by what is drafted for it, with states of the target made up."""

    def __init__(self, network, length, generator):
        self.network, self.generator = network, generator
        self.text = torch.randint(1, 64, (length + 1,), generator=generator)
        self.states = torch.randn((length, 32), generator=generator)

    def recomputed(self, depth):
        """Drafts and their logits by definition: every layer reads the whole text."""
        tokens, hidden, logits = self.text[1:][None], self.states[None], []
        positions = torch.arange(len(self.states))[None]
        for layer in range(depth):
            hidden, output = self.network(tokens, hidden, positions, None, layer=layer)
            logits.append(self.network.logits(output[0, -1]))
            tokens = torch.cat((tokens[:, 1:], logits[-1].argmax()[None, None]), dim=1)
        return torch.stack(logits).argmax(-1).tolist(), torch.stack(logits)

    def extend(self, drafted, num_accepted, num_kept):
        """Commits so many of the accepted drafts and the token after them: its tokens, and the states they follow."""
        bonus = torch.randint(1, 64, (1,), generator=self.generator)
        new = torch.cat((torch.tensor(drafted[:num_accepted], dtype=torch.long), bonus))[:num_kept]
        states = torch.randn((len(new), 32), generator=self.generator)
        self.text, self.states = torch.cat((self.text, new)), torch.cat((self.states, states))
        return new, states


@pytest.mark.parametrize("seed", range(3))
def test_a_sliding_window_in_padded_rows(seed):
    """Rows that end apart, in positions that become equal, since one of them began later."""
    target = tiny_mistral(sliding_window=16, vocab_size=8)
    inputs = {"input_ids": torch.tensor([[1, 2, 3, 4, 5], [0, 0, 3, 4, 5]])}
    inputs["attention_mask"] = (inputs["input_ids"] > 0).long()
    speculator = load_speculator(target, draft_model=new_mtp(target, 1), method="mtp", num_speculative_tokens=4)
    settings = {
        **inputs,
        "do_sample": True,
        "max_new_tokens": 60,
        "eos_token_id": None,
        "return_dict_in_generate": True,
    }
    texts = []
    for drafter in (speculator, no_drafts()):
        torch.manual_seed(seed)
        output = target.generate(**settings, assistant=drafter)
        texts.append(output.sequences.tolist())
        assert (output.speculative.num_draft_tokens > 40) == (drafter is speculator)
    assert texts[0] == texts[1]


class TestLayersAgainstRecomputation:
    """States of several layers are right whatever was accepted, in rows that differ in everything."""

    NETWORKS = {layers: random_mtp(layers) for layers in (1, 2, 3, 4)}

    @settings(max_examples=25)
    @given(
        num_layers=st.integers(1, 4),
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
        chunk_size=st.sampled_from([1, 2, 3, 1024]),
        seed=st.integers(0, 10**6),
    )
    def test_any_run(self, num_layers, lengths, chunk_size, seed):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(slots, "_CHUNK_SIZE", chunk_size)
            self.run(num_layers, lengths, seed, monkeypatch)

    def test_rows_that_begin_after_the_first_chunks_of_a_fresh_network(self, monkeypatch):
        monkeypatch.setattr(slots, "_CHUNK_SIZE", 1)
        monkeypatch.setitem(self.NETWORKS, 4, random_mtp(4))
        self.run(4, [1, 2, 9], 0, monkeypatch)

    def run(self, num_layers, lengths, seed, monkeypatch):
        network, random = self.NETWORKS[num_layers], torch.Generator().manual_seed(seed)
        rows = [Row(network, length, random) for length in lengths]
        logits = LogitsOf(network, monkeypatch)
        generator = generator_for(network, len(rows), mtp_mode="chain", draft_min_path_prob=0.0)
        starts = [max(lengths) - length for length in lengths]
        states = {"last": padded([row.states for row in rows], left=True)}
        generator.prefill(Prompt(padded([row.text[:-1] for row in rows], left=True), starts, states))
        assert isinstance(generator.entries, LayerEntries)
        news = [(row.text[-1:], row.states[-1:]) for row in rows]

        def below(most):
            return int(torch.randint(0, most, (1,), generator=random))

        for _ in range(6):
            numbers = list(range(len(rows)))
            tokens, states = (padded(parts, left=False) for parts in zip(*news))
            lists = [new.tolist() for new, _ in news]
            generator.observe(Commit(numbers, tokens, lists, [0] * len(rows), {"last": states}))
            if below(4) == 0:
                # Nothing was drafted before the next tokens.
                news = [row.extend([], 0, 1) for row in rows]
                continue
            logits.take() if logits.seen else None
            limits = [1 + below(num_layers) for _ in rows]
            texts = [row.text for row in rows]
            draft = generator.propose(DraftStep(numbers, tokens[:, 0], list(map(len, texts)), limits))
            seen, drafts = logits.take(), draft.token_lists()
            for index, row in enumerate(rows):
                wanted, values = row.recomputed(limits[index])
                torch.testing.assert_close(seen[index, : limits[index]], values, atol=1e-4, rtol=1e-4)
                assert drafts[index] == wanted
            news = []
            for row, drafted in zip(rows, drafts):
                accepted = below(len(drafted) + 1)
                news.append(row.extend(drafted, accepted, 1 + below(accepted + 1)))
            if len(rows) > 1 and below(3) == 0:
                keep = [len(rows) - 1, *range(1, len(rows) - 1)]
                # As in the loop, what was committed is known before rows leave.
                tokens, states = (padded(parts, left=False) for parts in zip(*news))
                lists = [new.tolist() for new, _ in news]
                generator.observe(Commit(numbers, tokens, lists, [0] * len(rows), {"last": states}))
                generator.keep_rows(keep)
                rows = [rows[index] for index in keep]
                news = [row.extend([], 0, 1) for row in rows]

    def test_layers_that_no_draft_needed_catch_up(self, monkeypatch):
        """An unlikely draft ends early; the layers after it have read the text all the same when it goes on."""
        network, random = self.NETWORKS[3], torch.Generator().manual_seed(0)
        row = Row(network, 6, random)
        generator = generator_for(network, 1, mtp_mode="chain")
        generator.prefill(Prompt(row.text[None, :-1], [0], {"last": row.states[None]}))
        new = row.text[-1:], row.states[-1:]
        for threshold in (0.999, 0.999, 0.0, 0.999, 0.0):
            generator.threshold = threshold
            generator.observe(Commit([0], new[0][None], [new[0].tolist()], [0], {"last": new[1][None]}))
            draft = generator.propose(DraftStep([0], row.text[-1:], [len(row.text)], [3])).token_lists()[0]
            assert draft == row.recomputed(3)[0][: 1 if threshold else 3]
            new = row.extend(draft, len(draft), len(draft) + 1)


class TestTrees:
    def test_dynamic_tree_by_definition(self):
        """Every node of the tree has the logits that reading the whole text and its path gives."""
        network, random = random_mtp(1), torch.Generator().manual_seed(3)
        row = Row(network, 8, random)
        generator = generator_for(network, 1, **TREE)
        assert isinstance(generator.plan, DynamicTree)
        states = [{"last": row.states}]
        feed(generator, [row.text], states, (5,))
        (paths,) = drafts_of(generator, [row.text])
        assert len(paths) == TREE["num_draft_nodes"]
        path_log_probs = {}

        def grow(path, log_prob, tokens, hidden):
            positions = torch.arange(tokens.shape[1])[None]
            handed_on, output = network(tokens, hidden, positions, None)
            best = network.logits(output[0, -1]).log_softmax(-1).topk(TREE["draft_tree_top_k"])
            for value, token in zip(best.values.tolist(), best.indices.tolist()):
                path_log_probs[(*path, token)] = log_prob + value
                if len(path) < TREE["draft_tree_depth"] - 1:
                    following = torch.cat((tokens, torch.tensor([[token]])), dim=1)
                    grow((*path, token), log_prob + value, following, torch.cat((hidden, handed_on[:, -1:]), dim=1))

        grow((), 0.0, row.text[1:][None], row.states[None])
        # Only the best of each level are continued, the best of all that were looked at are drafted.
        continued = {()}
        for depth in range(1, TREE["draft_tree_depth"]):
            level = [path for path in path_log_probs if len(path) == depth and path[:-1] in continued]
            continued |= set(sorted(level, key=path_log_probs.get, reverse=True)[: TREE["draft_tree_top_k"]])
        looked_at = [path for path in path_log_probs if path[:-1] in continued]
        assert set(paths) == set(sorted(looked_at, key=path_log_probs.get, reverse=True)[: len(paths)])


class TestSettings:
    def test_targets_that_take_no_trees(self):
        session = Session(1, 100, torch.device("cpu"), supports_trees=False)
        speculator_for(random_mtp(1), mtp_mode="reuse", **TREE).candidate_generator(session)
        assert any("chains instead of trees" in note for note in session.notes)

    def test_mode_by_the_checkpoint(self):
        cases = {"glm4_moe_k3": ("chain", 3), "glm4_moe": ("reuse", 3)}
        for name, (mode, length) in cases.items():
            network = load_speculator(published(name)[0], "mtp").resources
            generator = generator_for(network, 1)
            assert (generator.mode, generator.num_speculative_tokens) == (mode, length)

    def test_a_chain_is_no_longer_than_the_layers_are_many(self):
        network = load_speculator(published("glm4_moe_k3")[0], "mtp").resources
        generator = generator_for(network, 1, num_speculative_tokens=5)
        assert generator.num_speculative_tokens == 3
        (note,) = generator.session.notes
        assert "3 draft tokens instead of 5" in note
        assert generator_for(network, 1, num_speculative_tokens=5, mtp_mode="reuse").num_speculative_tokens == 5

    @pytest.mark.parametrize("options", [{"draft_tree_top_k": 3}, {"speculative_token_tree": [(0,), (1,)]}])
    def test_trees_of_several_layers(self, options):
        network = load_speculator(published("glm4_moe_k3")[0], "mtp").resources
        with pytest.raises(SpecConfigError, match=f"`{next(iter(options))}`.*3 MTP layers.*mtp_mode='reuse'"):
            generator_for(network, 1, **options)

    def test_old_names(self):
        aliases = methods()["mtp"].aliases
        assert len(aliases) == 6
        for alias in aliases:
            assert SpeculativeConfig(alias).method == "mtp"

    @pytest.mark.parametrize("name", ["pangu_ultra_moe_mtp", "suffix+pangu_ultra_moe_mtp"])
    def test_a_name_with_nothing_after_it(self, model, name):
        with pytest.raises(SpecConfigError, match="'pangu_ultra_moe_mtp' cannot be used: transformers has no model"):
            SpeculativeConfig.resolve(name)
        with pytest.raises(SpecConfigError, match="'pangu_ultra_moe_mtp' cannot be used"):
            model.generate(**prompts(1), max_new_tokens=3, spec_method=name)


@pytest.fixture(scope="module")
def pair():
    """A tiny Gemma 4 and an assistant for it."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "sliding_window": 8,
        "initializer_range": 0.5,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    layers = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "num_kv_shared_layers": 2}
    torch.manual_seed(0)
    target = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, **layers)).eval()
    layers = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
    text_config = Gemma4TextConfig(**sizes, enable_moe_block=False, **layers)
    config = Gemma4AssistantConfig(text_config=text_config, backbone_hidden_size=32)
    with pytest.MonkeyPatch.context() as monkeypatch:
        modes = getattr(Gemma4TextConfig, "kv_sharing_modes", None)
        if modes is not None:
            # Some versions of transformers refuse to build any assistant: no layer of its own has keys to share.
            def shared(config):
                is_whole = config.num_kv_shared_layers == config.num_hidden_layers
                return ["reuse"] * config.num_hidden_layers if is_whole else modes.fget(config)

            monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(shared))
        yield target, Gemma4AssistantForCausalLM(config).eval()


class TestAssistantsThatReadTheCache:
    """Gemma 4's assistants, in batches."""

    # Few tokens are left, so that some of the drafts of an untrained assistant are right.
    FEW = {"suppress_tokens": list(range(4, 64))}

    def official_draft(self, target, assistant, text, count):
        """The draft of transformers' forward of the assistant after a text `(1, L)`, the anchor included."""
        with torch.no_grad():
            read = target(text[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
            hidden, token, draft = read.hidden_states[-1][:, -1:], text[:, -1:], []
            for _ in range(count):
                inputs = torch.cat([target.get_input_embeddings()(token), hidden], dim=-1)
                output = assistant(
                    inputs_embeds=inputs,
                    position_ids=torch.tensor([[text.shape[1] - 1]]),
                    shared_kv_states=read.shared_kv_states,
                )
                scores = output.logits.index_fill(-1, torch.tensor(self.FEW["suppress_tokens"]), float("-inf"))
                token, hidden = scores.argmax(-1), output.last_hidden_state
                draft.append(int(token))
        return draft

    @pytest.mark.parametrize("batch_size", [1, 3])
    @pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
    def test_drafts_are_those_of_transformers_forward(self, pair, batch_size, samples):
        target, assistant = pair
        inputs, arguments = prompts(batch_size, length=14), {**GREEDY, **self.FEW}
        if samples:
            arguments |= {"do_sample": True, "temperature": 20.0, "max_new_tokens": 40}
            settings = {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "greedy"}
            torch.manual_seed(0)
        else:
            settings = {"method": "mtp", "num_speculative_tokens": 3}
        speculator = load_speculator(target, settings, draft_model=assistant)
        with record(trace=True) as made:
            ours = target.generate(**inputs, **arguments, assistant=speculator)
        assert samples or torch.equal(ours, target.generate(**inputs, **arguments))
        starts = (inputs["attention_mask"] == 0).sum(1).tolist()
        ends, num_drafts, right = [inputs["input_ids"].shape[1] + 1] * batch_size, 0, 0
        for cycle in made.calls[0].cycles:
            for row in cycle.rows:
                number, draft = row.row, row.draft_tokens
                if draft:
                    text = ours[number : number + 1, starts[number] : ends[number]]
                    assert draft == self.official_draft(target, assistant, text, len(draft))
                    num_drafts += 1
                ends[number] += len(row.committed_tokens)
                right += row.num_accepted
        assert num_drafts > 5
        assert right == made.calls[0].stats.num_accepted_tokens
        # Where they are sampled, rows of the batch get different lengths.
        assert not samples or right > 4 * batch_size

    def test_checkpoint(self, pair, tmp_path):
        target, assistant = pair
        assistant.save_pretrained(tmp_path)
        plain = target.generate(**prompts(2), **GREEDY)
        output = target.generate(
            **prompts(2), **GREEDY, spec_model=str(tmp_path), num_speculative_tokens=2, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain)
        assert output.speculative.method == "mtp"
        assert output.speculative.num_draft_tokens > 0

    @pytest.mark.parametrize("settings", [{}, {"num_speculative_tokens": 2}])
    def test_rows_join(self, pair, settings):
        target, assistant = pair
        speculator = load_speculator(target, draft_model=assistant, **settings)
        requests = [prompts(1, length=length, padding=False)["input_ids"][0].tolist() for length in (5, 9, 7, 12)]
        results = generate_many(target, requests, batch_size=2, in_order=True, assistant=speculator, **GREEDY)
        for request, result in zip(requests, results):
            text = torch.tensor([request])
            plain = target.generate(text, attention_mask=torch.ones_like(text), **GREEDY)
            assert result.tokens == plain[0, len(request) :].tolist()

    def test_what_does_not_work(self, pair):
        target, assistant = pair
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has no layers that share"):
            load_speculator(tiny_llama(), draft_model=assistant)
        with pytest.raises(SpecConfigError, match="`num_draft_nodes` is about trees.*chains"):
            load_speculator(target, "mtp", draft_model=assistant, num_draft_nodes=8)
        generator = load_speculator(target, draft_model=assistant).candidate_generator(
            Session(1, 100, torch.device("cpu"))
        )
        with pytest.raises(SpecConfigError, match="keys and values of its target"):
            generator.propose(DraftStep([0], torch.tensor([1]), [3], [2]))


def test_the_network_is_not_the_targets():
    """Neither target nor network holds the other's weights."""
    target, _ = published("glm4_moe_k3")
    network = load_speculator(target, "mtp").resources
    assert isinstance(network, MtpNetwork)
    shared = {parameter.data_ptr() for parameter in target.parameters()}
    assert shared.isdisjoint(parameter.data_ptr() for parameter in network.parameters())
    assert not any("embed" in name or "lm_head" in name for name in network.state_dict())
    assert not any(parameter.requires_grad for parameter in network.parameters())
