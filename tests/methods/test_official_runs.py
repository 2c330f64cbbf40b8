"""DFlash, EAGLE, P-EAGLE and MTP draft what the official code drafts: every token, acceptance and length recorded."""

import re
from itertools import product

import pytest
import torch

from hf_specdec import load_speculator, record
from hf_specdec.drafting import slots
from hf_specdec.drafts import DraftTree
from hf_specdec.protocol import Commit, DraftStep, Prompt
from tests.helpers.by_hand import GREEDY, drafts_of, generator_for, padded, ragged, rows_of
from tests.helpers.levels import in_full
from tests.helpers.published import MTP, published


CLOSE = {"atol": 2e-4, "rtol": 1e-4}
EAGLE_TREE = {"draft_tree_depth": 5, "draft_tree_top_k": 4, "num_draft_nodes": 11}


def run(name, prompts, length, prefill_chunk_size=None, **speculative):
    """What a greedy call writes after prompts, and the rows' drafts cycle by cycle."""
    inputs = ragged(*prompts)
    # Some tokens more, so that the room left does not limit the last drafts.
    settings = {**GREEDY, "max_new_tokens": length + 10, "prefill_chunk_size": prefill_chunk_size}
    with record(trace=True) as made:
        output = published(name).target.generate(**inputs, **settings, speculative=speculative)
    traces = [rows_of(made.calls[0], row) for row in range(len(prompts))]
    return output[:, inputs["input_ids"].shape[1] :], traces


def accepted(traces):
    return [trace.num_accepted for trace in traces]


def topology(trace):
    return DraftTree.from_lists([trace.draft_tokens], parents=[trace.parents]).topology


# Recorded runs of DFlash: plain ones, with other blocks, thresholds or denoising steps, and with trees.
RUN = re.compile(r"(generate(?:_b\d|_t\d\d)?|refine\d|ddtree\d+|tree_w\d_n\d+)\.(?:accepted|acceptance_lengths)$")


def shape_of(recorded):
    """Settings of a recorded run of DFlash."""
    shape = {"num_draft_nodes": 0, "dflash_num_denoising_steps": 1}
    numbers = list(map(int, re.findall(r"\d+", recorded)))
    if recorded.startswith("generate_b"):
        shape["dflash_block_size"] = numbers[0]
    elif recorded.startswith("refine"):
        shape["dflash_num_denoising_steps"] = numbers[0]
    elif recorded.startswith("ddtree"):
        shape["num_draft_nodes"] = numbers[0]
    elif recorded.startswith("tree"):
        # Theirs count the anchor.
        shape |= {"draft_tree_top_k": numbers[0], "num_draft_nodes": numbers[1] - 1}
    return shape


class TestDFlash:
    @pytest.mark.parametrize(
        "name",
        [
            *("jetspec_b8", "dflash2_full_b8", "domino_b6", "dspark_confidence_b5"),
            *in_full(
                "trained_b8",
                "qwen3_random_b8",
                "default_layer_ids_b4",
                "dflash2_sliding_b5",
                "trained_for_refinement_b8",
            ),
        ],
    )
    def test_runs(self, name):
        names = {found[1] for key in published(f"dflash/{name}").expected if (found := RUN.search(key))}
        assert names
        for recorded in names:
            self.check(name, recorded)

    def check(self, name, recorded):
        """One recorded run, of all its prompts at once."""
        _, folder, expected = published(f"dflash/{name}")
        rows = [f"prompt{row}." for row in range(4)]
        rows = [row for row in rows if any(key.startswith(f"{row}{recorded}.") for key in expected)] or [""]
        prompts = [expected[f"{row}input_ids"][0] for row in rows]
        # All runs of a prompt write the same.
        written = recorded if f"{rows[0]}{recorded}.output_ids" in expected else "generate"
        texts = [expected[f"{row}{written}.output_ids"][0, len(prompt) :] for row, prompt in zip(rows, prompts)]
        settings = {"model": folder, **shape_of(recorded)}
        if f"{rows[0]}{recorded}.threshold" in expected:
            settings["draft_confidence_threshold"] = expected[f"{rows[0]}{recorded}.threshold"].item()
        found = run(f"dflash/{name}", prompts, max(map(len, texts)), **settings)
        for row, text, output, traces in zip(rows, texts, *found):
            key = f"{row}{recorded}"
            assert torch.equal(output[: len(text)], text)
            if f"{key}.acceptance_lengths" in expected:
                lengths = (expected[f"{key}.acceptance_lengths"] - 1).tolist()
            else:
                lengths = expected[f"{key}.accepted"].tolist()
            assert accepted(traces[: len(lengths)]) == lengths
            sizes = expected.get(f"{key}.proposal_lengths", torch.empty(0)).tolist()
            assert [len(trace.draft_tokens) for trace in traces[: len(sizes)]] == sizes
            blocks = expected.get(f"{key}.block_tokens", torch.empty(0)).tolist()
            assert [trace.draft_tokens for trace in traces[: len(blocks)]] == blocks
            if "ddtree" in recorded and row == "prompt0.":
                assert traces[0].draft_tokens == expected[f"{recorded}.node_token_ids"].tolist()
                assert traces[0].parents == [parent - 1 for parent in expected[f"{recorded}.parents"][1:].tolist()]

    # In domino_b6 and dflash2_full_b8 the rounds are the first cycles of the greedy run.
    @pytest.mark.parametrize(
        "name",
        [
            *("dflash2_sliding_b5", "dspark_confidence_b5"),
            *in_full("qwen3_random_b8", "default_layer_ids_b4", "trained_b8", "trained_for_refinement_b8"),
            *in_full("jetspec_b8", "dflash2_full_b8", "domino_b6", "dspark_vanilla_b5"),
        ],
    )
    @torch.no_grad()
    def test_rounds(self, name):
        """Drafts, and the keys and values that are kept of the text."""
        target, folder, expected = published(f"dflash/{name}")
        network = load_speculator(target, model=folder).resources
        generator = generator_for(network, num_draft_nodes=0)
        prompt = expected.get("input_ids", expected.get("prompt0.input_ids"))
        drafted, length = [], prompt.shape[1]
        for number in range(3):
            recorded = {key.removeprefix(f"r{number}."): x for key, x in expected.items()}
            parts = recorded["context_features"].split(network.config.target_hidden_size, dim=-1)
            states = dict(zip(network.target_hidden_states, parts))
            anchor = recorded["block_input_ids"][:, 0]
            if number == 0:
                generator.prefill(Prompt(prompt, [0], states))
                states = {key: value[:, -1:] for key, value in states.items()}
            tokens = torch.cat([*drafted, anchor])[None]
            generator.observe(Commit([0], tokens, tokens.tolist(), [tokens.shape[1] - 1], states))
            length += tokens.shape[1]
            if "anchor_position" in recorded:
                assert length - 1 == recorded["anchor_position"]
            proposed = generator.propose(DraftStep([0], anchor, [length], [100]))
            assert torch.equal(proposed.tokens, recorded["draft_tokens"])
            if "survival" in recorded:
                torch.testing.assert_close(proposed.path_log_probs.exp(), recorded["survival"], **CLOSE)
            if number < 2:
                count = int(recorded.get("forced_accepted", recorded.get("accepted")))
                drafted = [recorded["draft_tokens"][0, :count]]
        for index, layer in enumerate(generator.state.slots.cache.row_states(0)):
            for part, ours in zip("kv", layer):
                if f"cache.{part}.{index}" in expected:
                    # In some cases a further round has been run.
                    kept = expected[f"cache.{part}.{index}"][:, :, : ours.shape[1]]
                    torch.testing.assert_close(ours[None], kept, **CLOSE)


class TestEagle:
    # A head of version 3 for the same kind of target in other spellings is the same to the drafter.
    every_head = pytest.mark.parametrize(
        "name", ["eagle1_llama", "eagle3_qwen3", *in_full("eagle3_llama", "eagle3_speculators", "eagle3_specforge")]
    )

    def run(self, name, count, **shape):
        _, folder, expected = published(f"eagle/{name}")
        method = name.partition("_")[0].replace("eagle1", "eagle")
        settings = {"method": method, "model": folder, **shape}
        (output,), (traces,) = run(f"eagle/{name}", expected["prompt_ids"], len(expected[count]), **settings)
        assert torch.equal(output[: len(expected[count])], expected[count])
        return expected, traces

    @every_head
    def test_chains_and_dynamic_trees(self, name):
        expected, traces = self.run(name, "baseline_tokens", num_speculative_tokens=5)
        assert traces[0].draft_tokens == expected["chain_tokens"].tolist()
        assert traces[0].parents == [-1, 0, 1, 2, 3]
        expected, traces = self.run(name, "gen_tokens", **EAGLE_TREE)
        lengths = expected["gen_accept_lengths"].tolist()
        assert accepted(traces[: len(lengths)]) == lengths
        recorded = [expected[f"gen_cycle_{part}"] for part in ("draft_tokens", "tree_mask", "position_ids")]
        for trace, tokens, mask, depths in zip(traces, *recorded):
            assert trace.draft_tokens == tokens[1:].tolist()
            assert torch.equal(topology(trace).ancestors, mask.bool())
            assert torch.equal(topology(trace).depths, depths)

    def test_static_tree_of_the_first_version(self):
        expected, traces = self.run("eagle1_llama", "v1_gen_tokens", speculative_token_tree="eagle_1")
        lengths = expected["v1_gen_accept_lengths"].tolist()
        assert accepted(traces[: len(lengths)]) == lengths
        drafts = [trace.draft_tokens for trace in traces[: len(lengths)]]
        assert drafts == expected["v1_gen_cycle_draft_tokens"][:, 1:].tolist()
        assert torch.equal(topology(traces[0]).ancestors, expected["v1_tree_attn_mask"].bool())
        assert torch.equal(topology(traces[0]).depths, expected["v1_tree_position_ids"])


class TestPEagle:
    @torch.no_grad()
    def test_rounds(self, monkeypatch):
        """So many drafts are accepted as the official code was forced to accept."""
        target, folder, expected = published("eagle/eagle3_peagle")
        network = load_speculator(target, model=folder).resources
        compute, logits = network.logits, []
        monkeypatch.setattr(network, "logits", lambda *given: logits.append(compute(*given)) or logits[-1])
        generator = generator_for(network, num_speculative_tokens=5)
        prompt = expected["input_ids"]
        length = prompt.shape[1]
        for number in range(4):
            entered = f"r{number}."
            parts = expected[f"{entered}context_features"].split(network.config.target_hidden_size, dim=-1)
            states = dict(zip(network.target_hidden_states, parts))
            new = expected[f"{entered}input_ids"][:, :-4]
            if number == 0:
                generator.prefill(Prompt(prompt, [0], states))
                states, new = {key: value[:, -1:] for key, value in states.items()}, new[:, -1:]
            generator.observe(Commit([0], new, new.tolist(), [new.shape[1] - 1], states))
            length += new.shape[1]
            draft = generator.propose(DraftStep([0], new[:, -1], [length], [100]))
            assert draft.token_lists() == expected[f"{entered}draft_tokens"].tolist()
            torch.testing.assert_close(logits[-1][0], expected[f"{entered}draft_logits"], **CLOSE)


class TestMtp:
    # One layer of each kind of attention, and several layers; the others are of other families.
    SHORT = ("glm4_moe_k3", "mellum")
    REST = sorted(path.name for path in MTP.iterdir() if path.name not in ("glm4_moe_k3", "mellum"))
    every_case = pytest.mark.parametrize("name", [*SHORT, *in_full(*REST)])

    @every_case
    @torch.no_grad()
    def test_rounds(self, name, monkeypatch):
        """So many drafts are accepted as the official code was forced to accept, in two rows and in one."""
        target, _, expected = published(f"mtp/{name}")
        network = load_speculator(target, "mtp").resources
        bind_head, logits = network.bind_head, []

        def bound(*how):
            head = bind_head(*how)
            return lambda output: logits.append(head(output)) or logits[-1]

        monkeypatch.setattr(network, "bind_head", bound)
        for mode, is_alone in product(("chain", "reuse"), (True, False) if name in self.SHORT else (False,)):
            rows = [mode] if is_alone else [mode, f"p2.{mode}"]
            depth = expected[f"{mode}.r0.logits"].shape[0]
            generator = generator_for(network, len(rows), mtp_mode=mode, num_speculative_tokens=depth)
            (key,) = generator.target_hidden_states
            texts = [expected[f"{row}.r0.ids"][:-1] for row in rows]
            lengths = [len(text) for text in texts]
            states = padded([expected[f"{row}.r0.hidden"] for row in rows], left=True)
            starts = [max(lengths) - length for length in lengths]
            generator.prefill(Prompt(padded(texts, left=True), starts, {key: states}))
            number = 0
            while all(f"{row}.r{number}.ids" in expected for row in rows):
                texts = [expected[f"{row}.r{number}.ids"] for row in rows]
                new = [text[length:] for text, length in zip(texts, lengths)]
                hidden = [expected[f"{row}.r{number}.hidden"][-len(part) :] for row, part in zip(rows, new)]
                counts = [len(part) - 1 for part in new]
                if number:
                    assert counts == [int(expected[f"{row}.r{number}.accepted"]) for row in rows]
                lists = [part.tolist() for part in new]
                states = {key: padded(hidden, False)}
                generator.observe(Commit(list(range(len(rows))), padded(new, False), lists, counts, states))
                lengths = list(map(len, texts))
                logits.clear()
                found = drafts_of(generator, texts)
                seen = torch.stack([step.view(len(rows), -1) for step in logits if step.dim() > 1], dim=1)
                for index, row in enumerate(rows):
                    wanted = expected[f"{row}.r{number}.tokens"].tolist()
                    assert found[index] == [tuple(wanted[: step + 1]) for step in range(depth)]
                    wanted = expected[f"{row}.r{number}.logits"]
                    torch.testing.assert_close(seen[index], wanted, atol=1e-4, rtol=1e-5)
                number += 1
            assert number >= 4 - len(rows)

    @every_case
    def test_runs(self, name, monkeypatch):
        """Two rows of a batch, with prompts read as a whole and in chunks; one alone is among the rounds."""
        for mode in ("chain", "reuse"):
            self.run(name, mode)
        monkeypatch.setattr(slots, "_CHUNK_SIZE", 2)
        for mode in ("chain", "reuse") if name in ("mellum", "ernie4_5_moe") else ():
            self.run(name, mode, prefill_chunk_size=5)

    def run(self, name, mode, **arguments):
        expected, rows = published(f"mtp/{name}").expected, ["", "p2."]
        depth = expected[f"{mode}.trace.drafts"].shape[1]
        settings = {"method": "mtp", "mtp_mode": mode, "num_speculative_tokens": depth}
        prompts = [expected[f"{row}prompt_ids"] for row in rows]
        texts = [expected[f"{row}greedy_ids"] for row in rows]
        outputs, traces = run(f"mtp/{name}", prompts, len(texts[0]), **arguments, **settings)
        for index, row in enumerate(rows):
            assert torch.equal(outputs[index, : len(texts[index])], texts[index])
            lengths = expected[f"{row}{mode}.trace.accepted"].tolist()
            assert accepted(traces[index][: len(lengths)]) == lengths
            drafts = [trace.draft_tokens for trace in traces[index][: len(lengths)]]
            assert drafts == expected[f"{row}{mode}.trace.drafts"].tolist()
