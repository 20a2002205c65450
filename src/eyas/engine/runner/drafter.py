"""The drafter over the requests' blocks: it reads what the target has seen, then drafts behind it.

Reading is lazy. The target's states of tokens that the drafter has not read wait beside the request; they are read,
many in one pass, when the request is to be drafted for, when they are a prompt's, or when too many of them wait. A
request that does not speculate for a while therefore costs next to nothing, and still can come back. Of all that is
read, later tokens see keys and values alone, so with one layer nothing else is computed, but for the last token.

    read    slot i takes the target's state at i beside token i + 1, for every token but the newest
    chain   one candidate per depth; a row may stop early. Now and then those after it are looked at too
    tree    the dynamic tree of EAGLE-2: `width` candidates per node, the `width` most confident nodes of a depth
            grow, the `budget` most confident of all are offered

Drafted slots lie behind the read ones and are overwritten by the next read: rejected guesses are never seen.

Shapes: N tokens of a pass, R rows, D drafter hidden, X concatenated auxiliary states, W draft vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from eyas.drafter.config import HasLayers
from eyas.drafter.model import DepthOutput, Drafter
from eyas.engine.kv_cache.cache import KVCache
from eyas.engine.request import SequenceState
from eyas.engine.runner.attention import PagedAttention
from eyas.engine.runner.drafts import DraftsChains, remember_in
from eyas.engine.runner.fused_drafter import fused_drafter
from eyas.engine.runner.hidden_states import HiddenStateBuffer
from eyas.engine.runner.tree_growth import TreeGrowth
from eyas.engine.runner.weight_copy import copy_weights, paired, require_alike, shared_places
from eyas.engine.sampler import SamplingMetadata, draw, draw_many
from eyas.engine.speculation.draft import Candidates, Draft, Tree
from eyas.kernels.attention.metadata import AttentionMetadata, AttentionRow, integers

__all__ = ["LUMP", "ContinueDrafting", "Draft", "DrafterRunner", "SamplingMetadataFor", "Tree"]

LUMP = 64
"""States of a prompt that are worth a pass of their own; fewer wait for company."""
MANY = 32
"""Tokens whose queries and outputs, which nobody needs, take longer than a pass of its own for the last one."""
PATIENCE_BYTES = 2**26
"""What may wait behind prompts while nothing is drafted. A request that ends before that never costs the reading."""

ContinueDrafting = Callable[[Sequence[int], Sequence[Sequence[float]]], Sequence[bool]]
"""Given the keys of requests still drafting and how sure the drafter was of each draft: which go one deeper."""

SamplingMetadataFor = Callable[[SequenceState, Sequence[int]], SamplingMetadata]
"""How a request's token behind its tokens and these drafts is to be chosen."""


class DrafterRunner:
    """A drafter for many requests."""

    def __init__(self, drafter: Drafter, cache: KVCache, *, window: int | None = None, sinks: int = 0) -> None:
        self.model, self.cache = drafter, cache
        self.run = fused_drafter(drafter)
        """What computes it."""
        self._chains = self.run if isinstance(self.run, DraftsChains) else None
        self.remembers = len(drafter.layers) == 1
        """Whether of what is read, later tokens see only keys and values that need no other."""
        self.window, self.sinks = window, sinks
        self.token_W = drafter.vocab().target_ids_W
        self._device, self.dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
        self.states = HiddenStateBuffer()
        """What the target has read and this drafter has not."""
        self._normed_D: dict[int, Tensor] = {}
        self._feedback_D: dict[int, Tensor] = {}

    def take_weights(self, drafter: Drafter, target: HasLayers) -> None:
        """Draft with the weights of another drafter, which are copied over these: nothing moves, so whatever was
        captured or compiled goes on. Nothing may be under way.

        The other one is made ready and tried as this one was, and stays as it is. `UnlikeError`: the two differ in more
        than weights. Whatever is raised, nothing has changed.
        """
        require_alike(self.model, drafter, target)
        paired(self.model, drafter)  # compiled code would read beyond a weight that is too short
        token_W, run = drafter.vocab().target_ids_W, fused_drafter(drafter)
        pairs = [*paired(self.model, drafter), *paired(self.run, run), *paired(self.token_W, token_W, "d2t")]
        copy_weights(pairs, shared_places(self.model))
        self.model.recorded_acceptance = drafter.recorded_acceptance

    def patience(self, requests: int) -> int:
        """States of each of so many requests that may wait."""
        config = self.model.config
        size = config.num_aux_hidden_states * config.target_hidden_size * self.dtype.itemsize
        return max(LUMP, PATIENCE_BYTES // (size * max(1, requests)))

    def forget(self, key: int) -> None:
        """Drop what is kept for a request that ended or lost its blocks."""
        self.states.forget(key)
        self._normed_D.pop(key, None)
        self._feedback_D.pop(key, None)

    @torch.inference_mode()
    def read(self, seqs: Sequence[SequenceState], *, but_last: bool = False) -> None:
        """Read what waits, perhaps all but the last state; the caller records the new `drafter_length` of each."""
        left = int(but_last)
        seqs = [seq for seq in seqs if sum(states.size for states in self.states.of(seq)) > left]
        if not seqs:
            return
        aux, tokens, rows = list[Tensor](), list[int](), []
        for seq in seqs:
            start, end = seq.drafter_length, seq.target_length - left
            aux += self.states.take(seq, but_last=but_last)
            tokens += seq.tokens[start + 1 : end + 1]
            rows.append(AttentionRow(blocks=seq.blocks, base=start, count=end - start))
        aux_NX = torch.cat(aux) if len(aux) > 1 else aux[0]
        assert len(aux_NX) == len(tokens), "one state for every token but the newest"
        layout = self._lay_out(rows)
        aux_NX, token_N = aux_NX.to(self.dtype), integers(tokens, self._device)
        last = [end - 1 for end in accumulate(row.count for row in rows)]
        in_bulk = self.remembers and (but_last or len(tokens) >= len(rows) + MANY)
        if self._chains is not None and not in_bulk:
            output = self._chains.read(aux_NX, token_N, layout.position_N, self.attention(layout))
            self._keep(output, seqs, last)
            return
        hidden_ND = self.run.fuse(aux_NX)
        if in_bulk:
            remember_in(self.cache, self.run, layout, hidden_ND, token_N)
            if but_last:
                return
            last_R = integers(last, self._device)
            hidden_ND, token_N, last = hidden_ND[last_R], token_N[last_R], list(range(len(rows)))
            layout = self._lay_out(AttentionRow(blocks=row.blocks, base=row.end - 1, count=1) for row in rows)
        output = self.run.step(hidden_ND, token_N, layout.position_N, self.attention(layout))
        self._keep(output, seqs, last)

    def _keep(self, output: DepthOutput, seqs: Sequence[SequenceState], places: Sequence[int]) -> None:
        """What the next drafts of requests come of."""
        for seq, place in zip(seqs, places, strict=True):
            self._normed_D[seq.key], self._feedback_D[seq.key] = output.normed[place], output.feedback[place]

    @torch.inference_mode()
    def chain(
        self,
        seqs: Sequence[SequenceState],
        depths: Sequence[int],
        sampling_metadata: SamplingMetadataFor,
        continue_drafting: ContinueDrafting | None = None,
        *,
        look: int = 1,
    ) -> list[Draft]:
        """Draft up to `depths` tokens for each request, all of which have been read to their end.

        Of each, `look` candidates are noted, the draft being the first; where that is 1, none are.
        """
        if len(seqs) == 1 and look == 1:
            made = self._chain_at_once(seqs[0], depths[0], continue_drafting)
            if made is not None:
                return [made]
        tokens: list[list[int]] = [[] for _ in seqs]
        confidences: list[list[float]] = [[] for _ in seqs]
        candidates: list[dict[int, Candidates]] = [{} for _ in seqs]
        rows = list(range(len(seqs)))
        normed_RD = torch.stack([self._normed_D[seq.key] for seq in seqs])
        feedback_RD = torch.stack([self._feedback_D[seq.key] for seq in seqs])
        for depth in range(1, max(depths) + 1):
            if depth > 1:
                going = [depths[row] >= depth for row in rows]
                if continue_drafting is not None:
                    allowed = continue_drafting([seqs[row].key for row in rows], [confidences[row] for row in rows])
                    going = [a and b for a, b in zip(going, allowed, strict=True)]
                places = [place for place, goes in enumerate(going) if goes]
                if not places:
                    break
                if len(places) < len(rows):
                    rows = [rows[place] for place in places]
                    feedback_RD = feedback_RD[places]
                behind = depth - 2
                layout = self._lay_out(
                    AttentionRow(blocks=seqs[row].blocks, base=seqs[row].drafter_length + behind, count=1)
                    for row in rows
                )
                token_R = integers([tokens[row][-1] for row in rows], self._device)
                output = self.run.step(feedback_RD, token_R, layout.position_N, self.attention(layout))
                normed_RD, feedback_RD = output.normed, output.feedback
            wanted = [sampling_metadata(seqs[row], tokens[row]) for row in rows]
            logits_RW = self.run.logits(normed_RD)
            if look == 1:
                drawn = draw(logits_RW, wanted, self.token_W)
                firsts = list(zip(drawn.tokens, drawn.confidences, strict=True))
            else:
                drawn = draw_many(logits_RW, wanted, self.token_W, look)
                seen = [Candidates(tuple(a), tuple(b)) for a, b in zip(drawn.tokens, drawn.confidences, strict=True)]
                for row, some in zip(rows, seen, strict=True):
                    candidates[row][depth - 2] = some
                firsts = [(some.tokens[0], some.confidences[0]) for some in seen]
            for row, (token, confidence) in zip(rows, firsts, strict=True):
                tokens[row].append(token)
                confidences[row].append(confidence)
        return [_chain(*drafted) for drafted in zip(tokens, confidences, candidates, strict=True)]

    def _chain_at_once(
        self, seq: SequenceState, depths: int, continue_drafting: ContinueDrafting | None
    ) -> Draft | None:
        """The same for one greedy request, without a look at it between depths; None where that cannot be."""
        greedy = seq.request.sampling.temperature == 0 and seq.matcher is None
        if not greedy or self._chains is None:
            return None

        def goes_on(confidences: Sequence[float]) -> bool:
            return continue_drafting is None or continue_drafting([seq.key], [confidences])[0]

        layout = self._lay_out([AttentionRow(blocks=seq.blocks, base=seq.drafter_length, count=1)])
        states = self._normed_D[seq.key], self._feedback_D[seq.key]
        made = self._chains.chain(*states, self.attention(layout), depths, goes_on)
        return None if made is None else _chain(*made, {})

    @torch.inference_mode()
    def tree(
        self,
        seqs: Sequence[SequenceState],
        shapes: Sequence[Tree],
        sampling_metadata: SamplingMetadataFor,
        *,
        look: int = 1,
    ) -> list[Draft]:
        """Grow a tree for each request, all of which have been read to their end.

        The candidates behind its nodes are noted: as many as it is wide, and no fewer than `look`.
        """
        growths = [TreeGrowth(seq, shape) for seq, shape in zip(seqs, shapes, strict=True)]
        normed_RD = torch.stack([self._normed_D[seq.key] for seq in seqs])
        parents: list[tuple[TreeGrowth, int]] = [(growth, -1) for growth in growths]
        for depth in range(1, max(shape.depth for shape in shapes) + 1):
            if depth > 1:
                grown = [(growth, growth.grow(depth)) for growth in growths]
                parents = [(growth, node) for growth, nodes in grown for node in nodes]
                if not parents:
                    break
                normed_RD = self._expand([growth for growth, nodes in grown if nodes])
            wanted = [sampling_metadata(growth.seq, growth.tokens_to(node)) for growth, node in parents]
            width = max(look, *(growth.shape.width for growth, _ in parents))
            drawn = draw_many(self.run.logits(normed_RD), wanted, self.token_W, width)
            for (growth, node), tokens, confidences in zip(parents, drawn.tokens, drawn.confidences, strict=True):
                growth.add(node, Candidates(tuple(tokens), tuple(confidences)))
        return [growth.offered() for growth in growths]

    def _expand(self, growths: Sequence[TreeGrowth]) -> Tensor:
        """Run the nodes that grow now, each behind its own path."""
        rows, hidden, tokens = [], list[Tensor](), list[int]()
        for growth in growths:
            seq, nodes = growth.seq, growth.newest
            ancestors = torch.tensor(growth.ancestors())
            rows.append(AttentionRow(blocks=seq.blocks, base=seq.drafter_length, count=len(nodes), ancestors=ancestors))
            first_D = self._feedback_D[seq.key]
            hidden += [growth.feedback_D.get(growth.parents[node], first_D) for node in nodes]
            tokens += [growth.tokens[node] for node in nodes]
        layout = self._lay_out(rows)
        token_N = integers(tokens, self._device)
        output = self.run.step(torch.stack(hidden), token_N, layout.position_N, self.attention(layout))
        places = iter(range(len(tokens)))
        for growth in growths:
            growth.feedback_D |= {node: output.feedback[next(places)] for node in growth.newest}
        return output.normed

    def _lay_out(self, rows: Iterable[AttentionRow]) -> AttentionMetadata:
        return AttentionMetadata.of(list(rows), block_size=self.cache.block_size, device=self._device)

    def attention(self, layout: AttentionMetadata) -> PagedAttention:
        """Attention over the drafter's blocks in one pass."""
        return PagedAttention(self.cache, layout, window=self.window, sinks=self.sinks)


def _chain(tokens: Sequence[int], confidences: Sequence[float], candidates: Mapping[int, Candidates]) -> Draft:
    return Draft(
        tokens=tuple(tokens),
        parents=tuple(range(-1, len(tokens) - 1)),
        confidences=tuple(confidences),
        candidates=candidates,
    )
