"""Drafts by definition: a row's whole text is read again for every token, without a cache."""

from __future__ import annotations

import math

import torch
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from hf_specdec.candidate_generators.dflash.heads import Block
from hf_specdec.candidate_generators.dflash.heads.domino import DominoConfig
from hf_specdec.candidate_generators.dflash.heads.lilicorr import LiLiCorrConfig
from hf_specdec.candidate_generators.dflash.heads.markov import MarkovConfig
from hf_specdec.candidate_generators.dflash.heads.selector import SelectorConfig
from hf_specdec.candidate_generators.dflash.heads.xpress import XPressConfig


class RecomputedBlock:
    """One row's drafts by definition: text and block as one sequence, without a cache, with attention spelt out."""

    def __init__(self, network, text, states):
        self.network, self.before, self.anchor = network, text[-2].item(), text[-1:]
        self.head, self.sizes = network.block_head, network.config.head
        self.has_selector = isinstance(self.sizes, SelectorConfig)
        self.has_lattice = isinstance(self.sizes, LiLiCorrConfig)
        joined = torch.cat([states[layer + 1] for layer in network.config.target_layer_ids], dim=-1)
        self.fused = norm(network.hidden_norm, joined @ network.fc.weight.T)

    def logits(self, masked):
        """Logits of every position of a block that has these tokens after the anchor."""
        network, config = self.network, self.network.config
        stream, length = network.embed(torch.cat([self.anchor, masked])[None])[0], len(self.fused)
        positions = torch.arange(length + len(stream))
        cosine, sine = network.rotary_emb(stream, positions[None])
        for index, layer in enumerate(network.layers):
            attention, view = layer.self_attn, config.view(index)
            normed = norm(layer.input_layernorm, stream)
            read = self.convolved(layer, "attention_conv", normed, 0, normed)
            both = torch.cat([self.fused, read])
            queries, keys, values = (
                projection(x).view(len(x), -1, config.head_dim).transpose(0, 1)
                for projection, x in ((attention.q_proj, read), (attention.k_proj, both), (attention.v_proj, both))
            )
            queries, keys = norm(attention.q_norm, queries), norm(attention.k_norm, keys)
            queries = apply_rotary_pos_emb(queries[None], queries[None], cosine[:, length:], sine[:, length:])[0][0]
            keys = apply_rotary_pos_emb(keys[None], keys[None], cosine, sine)[0][0]
            groups = config.num_attention_heads // config.num_key_value_heads
            keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
            distance = positions[length:, None] - positions
            seen = (distance >= 0) | (not view.causal)
            seen &= distance.abs() < (view.window or 1000)
            weights = queries @ keys.transpose(1, 2) / config.head_dim**0.5
            attended = weights.masked_fill(~seen, -torch.inf).softmax(-1) @ values
            attended = attention.o_proj(attended.transpose(0, 1).flatten(1))
            stream = stream + self.convolved(layer, "attention_conv", normed, 1, attended)
            normed = norm(layer.post_attention_layernorm, stream)
            output = layer.mlp(self.convolved(layer, "mlp_conv", normed, 0, normed))
            stream = stream + self.convolved(layer, "mlp_conv", normed, 1, output)
        output = norm(network.norm, stream)
        logits = network.logits(output)
        self.anchor_output, self.output = output[:1], output if config.predicts_next else output[1:]
        if self.has_selector:
            head = network._target.head.weight
            logits = config.logit_scale * (output @ head.T)
            logits = config.logit_softcap * (logits / config.logit_softcap).tanh() if config.logit_softcap else logits
        return logits if config.predicts_next else logits[1:]

    def convolved(self, layer, name, normed, side, values):
        """One side of a convolution, tap by tap."""
        if not self.network.config.conv_kernel_size:
            return values
        convolution, taps = getattr(layer, name), self.network.config.conv_kernel_size
        group = self.network.config.conv_group_size
        kernels = (normed @ convolution.kernel_projection.weight.T).view(len(normed), 2, taps, -1)
        result = torch.zeros_like(values)
        for row in range(len(values)):
            for tap in range(min(taps, row + 1)):
                of_groups = [part for part in kernels[row, side, tap] for _ in range(group)]
                result[row] += (convolution.base_kernel[side, tap] + torch.stack(of_groups)) * values[row - tap]
        return result

    def candidates(self, row):
        count = self.sizes.top_k if self.has_selector else self.sizes.candidate_topk
        return row.topk(count).indices.tolist()

    def scores(self, rows, position, previous, candidates):
        """Scores of candidates after a token."""
        selector = self.head
        if self.has_lattice:
            # The lattice's, whose own numbers are compared with the official ones.
            memory = {"context": self.fused[-1:]}
            whole = self.head.begin(Block(self.network, self.anchor, self.output[None], rows[None], None, memory))
            place = 0 if position == 0 else whole.tokens[0, position - 1].tolist().index(previous)
            return whole.scores[0, position, place]
        before = selector.predecessor_codebook[previous] * selector.hidden_projection(self.output[position])
        return torch.stack([rows[position][c] + before @ selector.successor_codebook[c] for c in candidates])

    def walk(self, rows, known):
        """Tokens of a walk and their probabilities among the candidates; `known` tokens by position are kept."""
        previous, tokens, sureness = self.anchor.item(), [], []
        for position, row in enumerate(rows):
            candidates = self.candidates(row)
            scores = self.scores(rows, position, previous, candidates)
            best = scores.argmax().item()
            previous = known.get(position, candidates[best])
            tokens.append(previous)
            sureness.append(scores.softmax(-1)[best].item())
        return tokens, sureness

    def masks(self, block_size):
        return torch.full((block_size - 1,), self.network.config.mask_token_id)

    def chain(self, block_size, count):
        if isinstance(self.sizes, XPressConfig):
            return self.refined(count)
        rows, found = self.logits(self.masks(block_size)), []
        if self.has_lattice:
            # Positions that are not drafted do not count.
            rows, self.output = rows[:count], self.output[:count]
        if self.has_selector or self.has_lattice:
            return prefixes(self.walk(rows, {})[0][:count])
        for position, row in enumerate(rows[:count]):
            row = row + self.correction(position, [self.anchor.item(), *found])
            found.append(self.network.target_ids(row.argmax()[None]).item())
        return prefixes(found)

    def refined(self, count):
        """XPress's passes, position by position."""
        head, config = self.head, self.network.config
        size = config.block_size
        rows, anchor = self.logits(self.masks(size)), self.anchor.item()
        outputs = torch.cat([self.anchor_output, self.output])
        mean, tokens = head.down_g(outputs.mean(0)), self.network.target_ids(rows.argmax(-1)).tolist()
        for _ in range(self.sizes.num_passes):
            previous, states = [self.before, anchor, *tokens[:-1]], []
            for output, token in zip(outputs, previous):
                states.append(head.in_proj(torch.cat([head.down_h(output), mean, head.w1.weight[token]])))
            found = []
            for place in range(1, size):
                mixed = states[place] + sum(head.mix.L[:, place, j] * states[j] for j in range(place + 1))
                gate, up = head.mlp.gate_proj(mixed), head.mlp.up_proj(mixed)
                mixed = mixed + head.mlp.down_proj(gate * gate.sigmoid() * up)
                found.append((rows[place - 1] + head.w2(mixed)).argmax()[None])
            tokens = self.network.target_ids(torch.cat(found)).tolist()
        return prefixes(tokens[:count])

    def confidences(self, block_size):
        """Probabilities that tokens are kept, by the head's equation."""
        found = [path[-1] for path in self.chain(block_size, block_size)]
        head, confidences = self.head.confidence_head, []
        for output, before in zip(self.output, [self.anchor.item(), *found]):
            if self.sizes.confidence_with_markov:
                output = torch.cat([output, self.head.markov_w1.weight[before]])
            confidences.append(head["proj"](output).sigmoid().item())
        return confidences

    def correction(self, position, before):
        """What the tokens of a block before a position, the anchor among them, add to its logits."""
        network, config, output = self.network, self.network.config, self.output[position]
        head, sizes = self.head, self.sizes
        if isinstance(sizes, DominoConfig):
            gru = torch.nn.GRU(config.hidden_size, sizes.gru_hidden_dim, bias=False, batch_first=True)
            gru.load_state_dict(head.prefix_gru.state_dict())
            state = gru(network.embed(torch.tensor([before])))[1][0, 0]
            first, _, second = head.embed_proj
            inner = first.weight @ torch.cat([output, state])
            return 0 if position < sizes.pure_draft_prefix_len else second.weight @ (inner * inner.sigmoid())
        if not isinstance(sizes, MarkovConfig) or not sizes.rank:
            return 0
        state = torch.zeros(sizes.rank)
        for place, token in enumerate(before):
            row = head.markov_w1.weight[token]
            if sizes.type == "gated":
                row = row * head.gate_proj(torch.cat([output, row])).sigmoid()
            if sizes.type == "rnn":
                joint = head.joint_proj(torch.cat([state, row, self.output[place]]))
                gate, new, row = joint.view(3, -1)
                state, row = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh(), row.tanh()
        return head.markov_w2.weight @ row

    def denoised(self, block_size, num_steps, count):
        """The equations of several denoising steps over lists."""
        size = block_size - 1
        tokens, sureness, known = [None] * size, [0.0] * size, set()
        for step in range(num_steps):
            inputs = [tokens[i] if i in known else self.network.config.mask_token_id for i in range(size)]
            rows = self.logits(torch.tensor(inputs))
            if not self.has_selector:
                best = [self.network.target_ids(row.argmax()).item() for row in rows]
                sure = [row.max().item() for row in rows.softmax(-1)]
            else:
                best, sure = self.walk(rows, {i: tokens[i] for i in known})
            for i in set(range(size)) - known:
                tokens[i], sureness[i] = best[i], sure[i]
            keep = -(-size * (step + 1) // num_steps)
            known = set(sorted(range(size), key=lambda i: -sureness[i])[:keep])
        return prefixes(tokens[:count])

    def tree(self, block_size, budget, depth):
        """The most probable of all prefixes of the first tokens."""
        rows = self.logits(self.masks(block_size))[:depth]
        self.output = self.output[:depth]
        found, last = [], [(0.0, ())]
        for position in range(depth):
            longer = []
            for total, path in last:
                log_probs = self.log_probs(rows, position, path[-1] if path else self.anchor.item())
                longer += [(total + value, (*path, token)) for token, value in log_probs]
            # A longer prefix is less probable than the prefix of which it goes on.
            last = sorted(longer, key=lambda prefix: -prefix[0])[:budget]
            found += last
        return [path for _, path in sorted(found, key=lambda prefix: -prefix[0])[:budget]]

    def log_probs(self, rows, position, previous):
        """Tokens that may follow one, with their log-probabilities."""
        if not (self.has_selector or self.has_lattice):
            values, ids = rows[position].double().log_softmax(-1).sort(descending=True)
            return list(zip(self.network.target_ids(ids).tolist(), values.tolist()))
        candidates = self.candidates(rows[position])
        scores = self.scores(rows, position, previous, candidates)
        return list(zip(candidates, scores.double().log_softmax(-1).tolist()))


def norm(layer, hidden):
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + layer.variance_epsilon)
    return layer.weight * (hidden * scale)


def prefixes(tokens):
    return [tuple(tokens[: count + 1]) for count in range(len(tokens))]


class RecomputedHead:
    """One row's drafts by an EAGLE head or an MTP layer: every node reads the whole text and its path again."""

    def __init__(self, network, text, states):
        self.network, self.tokens = network, text[1:]
        self.hidden = network.fuse({key: value[None] for key, value in states.items()})[0]
        self.spans = network.spans

    def read(self, tokens, hidden):
        """States handed on and outputs of a whole text."""
        steps = torch.arange(len(tokens))
        distance = steps[:, None] - steps
        masks = {}
        for span in self.spans:
            visible = (distance >= 0) & (distance < (span.size or len(tokens)))
            mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
            masks[span] = mask[None, None]
        masks = masks if len(masks) > 1 else masks[self.spans[0]]
        return self.network(tokens[None], hidden[None], steps[None], masks)

    def log_probs(self, path):
        """The target's tokens that may follow a path of tokens: best first, with their log-probabilities."""
        hidden = self.hidden
        for count in range(len(path) + 1):
            tokens = torch.cat([self.tokens, torch.tensor(path[:count], dtype=torch.long)])
            fed_back, output = self.read(tokens, hidden)
            hidden = torch.cat([hidden, fed_back[0, -1:]])
        logits = self.network.logits(output[0, -1])
        values, ids = logits.log_softmax(-1).sort(descending=True)
        return list(zip(self.network.target_ids(ids).tolist(), values.tolist()))

    def static(self, paths):
        found = []
        for ranks in paths:
            path = ()
            for rank in ranks:
                path = (*path, self.log_probs(path)[rank][0])
            found.append(path)
        return found

    def dynamic(self, limit, draft_tree_depth, draft_tree_top_k, num_draft_nodes, draft_confidence_threshold=0.0):
        """The equations of EAGLE-2 over lists: `(score, path)` of all candidates, level by level."""
        candidates, front = [], [(0.0, ())]
        for _ in range(min(limit, draft_tree_depth)):
            level = [
                (score + value, (*path, token))
                for score, path in front
                for token, value in self.log_probs(path)[:draft_tree_top_k]
            ]
            candidates += level
            front = sorted(level, key=lambda node: -node[0])[:draft_tree_top_k]
            if math.exp(front[0][0]) <= draft_confidence_threshold:
                break
        chosen = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[:num_draft_nodes]
        return [candidates[i][1] for i in sorted(chosen)]

    def parallel(self, limit):
        """P-EAGLE's tokens: the last entry and masks, as one causal sequence."""
        network, config = self.network, self.network.config
        parts = network.mask_hidden.split(config.target_hidden_size)
        mask = network.fuse({key: part[None, None] for key, part in zip(network.target_hidden_states, parts)})
        count = config.num_parallel_tokens
        hidden = torch.cat([self.hidden, mask[0].expand(count - 1, -1)])
        tokens = torch.cat([self.tokens, torch.full((count - 1,), config.mask_token_id)])
        _, output = self.read(tokens, hidden)
        return prefixes(network.logits(output)[0, -count:].argmax(-1).tolist()[:limit])
