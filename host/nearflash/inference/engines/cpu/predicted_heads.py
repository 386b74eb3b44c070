"""All heads of one sequence in a call of CpuEngine by policy kvswap: one choice of groups, by predicted queries."""

from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.engines.cpu.heads import Heads
from nearflash.inference.engines.paged.compact_index import CompactIndex
from nearflash.inference.engines.paged.index_rows import IndexCache
from nearflash.inference.engines.paged.reads import SequenceReads
from nearflash.inference.engines.paged.softmax import AttentionForm
from nearflash.inference.policy.policy import AttentionPolicy
from nearflash.inference.sparse.kvswap import choose_groups, reduce_queries, score_groups
from nearflash.storage.kv import KvLayout

__all__ = ["PredictedHeads", "choose_predicted_groups"]

F32 = NDArray[np.float32]
Bools = NDArray[np.bool_]


class PredictedHeads(Heads):
    """As Heads; `predicted` (H, g, d) is what the layer before predicts of q, None in the first layer, which reads all.

    Raises UnsupportedError where it is None in another one.
    """

    def __init__(
        self, row: int, reads: SequenceReads, q: F32, predicted: F32 | None, policy: AttentionPolicy, layout: KvLayout,
        index: CompactIndex,
    ) -> None:  # fmt: skip
        super().__init__(row, reads, q, np.empty((len(q), 0), np.int64), policy, layout)
        self._predicted, self._compact = predicted, index
        if predicted is None and not self._takes_all:
            if reads.stored.page_tag.layer:
                raise UnsupportedError(
                    "engine must be given queries that the layer before predicts (Engine.predict) by policy kvswap: "
                    "attach the model, whose layers must have their attention as self_attn"
                )
            self._takes_all = True

    def ask(self, ask: Callable[..., Future], index: IndexCache) -> None:
        """Nothing: its index is in memory."""

    def _choose(self, full: int, form: AttentionForm[F32]) -> Bools:
        assert self._predicted is not None
        ahead, tokens = self.reads.ahead, self.reads.tokens
        if ahead is not None and ahead.tokens == tokens:
            chosen = ahead.chosen[0]
        else:
            chosen = choose_predicted_groups(
                self.reads, tokens, self._predicted, self.policy, self._layout, self._compact
            )
        wanted = np.ones((len(self._q), full), bool)
        wanted[:, : len(chosen)] = chosen
        return wanted


def choose_predicted_groups(
    reads: SequenceReads, tokens: int, predicted: F32, policy: AttentionPolicy, layout: KvLayout, index: CompactIndex
) -> Bools:
    """Which groups (G,) of the whole index blocks of so many tokens are read, the same for all heads."""
    (heads, _, dim), size = predicted.shape, layout.group_tokens
    resolved, blocks = policy.resolve(tokens, dim, layout), tokens // layout.block_tokens
    sequence, layer = reads.stored.sequence, reads.stored.page_tag.layer
    kept = index.rows(sequence, layer, blocks, heads * resolved.score_dims, reads.keys)
    queries = torch.from_numpy(predicted).flatten(0, 1).unsqueeze(1)
    scores = score_groups(reduce_queries(queries, kept.projection, heads), kept.rows.float(), size)
    groups = blocks * layout.block_tokens // size
    count = resolved.top_k - (-(-(tokens - groups * size) // size))
    local = max(tokens - resolved.local_window, 0) // size
    return np.asarray(choose_groups(scores, *(torch.tensor([each]) for each in (groups, count, local)))[0].numpy())
