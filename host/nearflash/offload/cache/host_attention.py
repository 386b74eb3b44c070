"""Decode's attention on the host beside a GPU: over keys and values of the host's memory, which stay there.

The query, with the new token's key and value, comes down over the link and the output goes up; the host computes what
transformers would of its own tensors, in fp16 by the loops of the engine for processors, while another batch is
computed (nearflash.offload.schedule).
Source: FlexGen (arXiv 2303.06865), section 4.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nearflash.abi.errors import UnsupportedError
from nearflash.inference.cache.attention import near_storage_attention
from nearflash.inference.engines.cpu.kernels import attend_memory
from nearflash.inference.engines.paged.softmax import AttentionForm
from nearflash.offload.tiers.ledger import Ledger
from nearflash.offload.tiers.link import DeviceLink
from nearflash.support.threads import map_all, set_ieee_arithmetic

__all__ = ["HostAttention", "attend_halves", "count_visible"]


class HostAttention:
    """Attends for queries of the far memory, one at a time.

    staged_bytes: of the largest query with its new keys and values, and of its output, each. run: has a function run in
    whichever thread, and returns when it has.
    """

    def __init__(
        self, link: DeviceLink, ledger: Ledger, staged_bytes: int, run: Callable[[Callable[[], None]], None]
    ) -> None:
        self.link, self._ledger, self._staged_bytes, self._run = link, ledger, staged_bytes, run
        ledger.take("host", 2 * staged_bytes, "queries and outputs of attention")
        self._down, self._up = link.host_memory(staged_bytes), link.host_memory(staged_bytes)
        self._threads = ThreadPoolExecutor(
            torch.get_num_threads(), "nearflash-host-attention", initializer=set_ieee_arithmetic
        )

    def close(self) -> None:
        """Free its memory; once, when nothing attends."""
        self._threads.shutdown()
        self._ledger.give("host", 2 * self._staged_bytes)

    def land(self, mark: Any, states: Tensor, new: tuple[Tensor, Tensor]) -> None:
        """Copy a prompt's keys and values to the host's, (2, sequences, heads, tokens, d)."""
        with self.link.aside(mark):
            for place, value in zip(states, new, strict=True):
                self.link.pull("cache", value, place)

    def ask(self, key: Tensor, states: Tensor, number: int) -> Tensor:
        """The new token's key (batch, heads, 1, d) as attention takes it, which adds it to the end of a layer's visible
        keys and values of the host, (2, batch, heads, tokens, d).

        Raises UnsupportedError for several new tokens.
        """
        if key.shape[2] != 1:
            raise UnsupportedError(
                f"layer {number} must be given 1 token at a time behind the prompt, not {key.shape[2]}"
            )
        key.attend_there = partial(self._answer, states, number)  # type: ignore[attr-defined]
        return key

    def _answer(self, states: Tensor, number: int, module: Any, query: Tensor, key: Tensor, value: Tensor,
                mask: Tensor | None, *options: Any) -> Tensor:  # fmt: skip
        """The attention of a query (batch, heads, 1, d): (batch, 1, heads, d)."""
        rows = torch.cat([query, key, value], dim=1)
        output = query.new_empty(query.shape[0], 1, query.shape[1], value.shape[3])
        self._run(partial(self._attend, self.link.mark(), states, number, module, rows, mask, output, options))
        return output

    def _attend(self, mark: Any, states: Tensor, number: int, module: Any, rows: Tensor, mask: Tensor | None,
                output: Tensor, options: tuple[Any, ...]) -> None:  # fmt: skip
        """Fill the output. options: scaling, softcap, and logits of sinks in the far memory."""
        scaling, softcap, sinks = options
        down, up = (_view(memory, like) for memory, like in ((self._down, rows), (self._up, output)))
        with self._ledger.span("attend on host", layer=number), self.link.aside(mark):
            self.link.pull("cache", rows, down)
            heads = states.shape[2]
            query, key, value = down.split([rows.shape[1] - 2 * heads, heads, heads], dim=1)
            states[0, :, :, -1:], states[1, :, :, -1:] = key, value
            mask, sinks = self._bring_mask(mask), self._bring("sinks", sinks)
            counts = count_visible(mask, *states.shape[1:4:2]) if states.dtype == torch.float16 else None
            if counts is None:
                found, _ = near_storage_attention(
                    module, query, states[0], states[1], mask, scaling=scaling, softcap=softcap, s_aux=sinks
                )
            else:
                found = attend_halves(self._threads, query, states, counts, scaling, softcap, sinks)
            self.link.push("cache", up.copy_(found), output)

    def _bring_mask(self, mask: Tensor | None) -> Tensor | None:
        """A mask in the host's memory, once for all layers of a pass that have it."""
        held: Tensor | None = getattr(mask, "on_host", None)
        if mask is not None and held is None:
            held = mask.on_host = self._bring("masks", mask)  # type: ignore[attr-defined]
        return held

    def _bring(self, what: str, value: Tensor | None) -> Tensor | None:
        """A tensor beside queries, in the host's memory."""
        if value is None:
            return None
        held = torch.empty(value.shape, dtype=value.dtype)
        self.link.pull(what, value, held)
        return held


def attend_halves(
    threads: Executor, query: Tensor, states: Tensor, counts: Sequence[int], scaling: float | None = None,
    softcap: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of a query (batch, heads, 1, d) to the last tokens, so many of each sequence, of keys and values
    (2, batch, KV heads, tokens, d), fp16, by compiled loops on some threads: (batch, 1, heads, d), fp32.
    """
    _, batch, kv_heads, tokens, dim = states.shape
    q = query.reshape(batch, kv_heads, -1, dim).numpy()
    given = None if sinks is None else sinks.float().view(kv_heads, -1).numpy()
    form = AttentionForm(dim**-0.5 if scaling is None else scaling, softcap, given)
    out = np.empty(q.shape, np.float32)

    def attend(row: int) -> None:
        keys, values = states[:, row, :, tokens - counts[row] :].numpy()
        attend_memory(q[row], keys, values, counts[row], form, out[row])

    map_all(threads, attend, range(batch))
    return torch.from_numpy(out).view(batch, 1, -1, dim)


def count_visible(mask: Tensor | None, sequences: int, tokens: int) -> list[int] | None:
    """How many of the last tokens each sequence sees by a mask (1 or sequences, 1, 1, tokens); None where it is of
    another form, or hides some between those that it shows.
    """
    if mask is None:
        return [tokens] * sequences
    if mask.dtype != torch.bool or mask.shape[1:] != (1, 1, tokens):
        return None
    rows = mask[:, 0, 0].expand(sequences, tokens)
    counts = rows.sum(dim=1, keepdim=True)
    last = torch.arange(tokens) >= tokens - counts
    return counts.flatten().tolist() if torch.equal(rows, last) else None


def _view(memory: Tensor, like: Tensor) -> Tensor:
    """The beginning of (n,) uint8 as another tensor's shape and type."""
    return memory[: like.nbytes].view(like.dtype).view(like.shape)
