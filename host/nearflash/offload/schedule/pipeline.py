"""Pipeline parallel over torch.distributed: each rank has some layers, and their KV cache, in order of the ranks.

Every rank runs the model's own code for every batch. Layers that are another rank's are passed by; a rank's first layer
takes its hidden states from the rank before, and the last rank's tokens go to all others, in the place of logits. With
several groups of batches one rank computes a group while the next rank computes another.

    torchrun --nproc 2 --no-python nearflash generate --model MODEL --prompts FILE --weights disk=1
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearflash.abi.errors import CommandError, DeviceLostError
from nearflash.planning.stages import STATES_SENT, TOKENS_SENT, split_layers

__all__ = ["PipelineStage", "count_ranks", "open_stage", "place_rank"]

_CERTAIN = 1e4
"""The logit of a token that another rank chose; that of all others is its negative."""


class PipelineStage:
    """This process's layers, of those of all ranks. count_bytes: is called with a link and the bytes that are sent.

    Raises CommandError for fewer layers than ranks.
    """

    def __init__(
        self, rank: int, ranks: int, layers: int, count_bytes: Callable[[str, int], None] = lambda link, size: None
    ) -> None:
        if not 0 <= rank < ranks:
            raise CommandError(f"rank must be below the {ranks} ranks, not {rank}")
        self.rank, self.ranks, self._count_bytes = rank, ranks, count_bytes
        self.first, self.end = split_layers(layers, ranks)[rank : rank + 2]
        """Its layers, half open."""
        self._sent: list[Any] = []

    @property
    def is_last(self) -> bool:
        """Whether it has the output layer."""
        return self.rank == self.ranks - 1

    def owns(self, number: int) -> bool:
        """Whether a layer is this rank's."""
        return self.first <= number < self.end

    def send_states(self, states: Tensor) -> None:
        """Hidden states (batch, t, hidden) to the next rank; returns at once."""
        self._send(states, self.rank + 1, STATES_SENT)

    def receive_states(self, like: Tensor) -> Tensor:
        """Hidden states of that shape from the rank before."""
        return self._receive(torch.empty_like(like), self.rank - 1)

    def send_tokens(self, tokens: Tensor) -> None:
        """Chosen tokens (batch,) to all other ranks; returns at once."""
        for rank in range(self.ranks - 1):
            self._send(tokens, rank, TOKENS_SENT)

    def receive_logits(self, states: Tensor, vocabulary: int) -> Tensor:
        """Logits (batch, t, vocabulary), fp32, of which the tokens that the last rank chose are largest."""
        tokens = self._receive(torch.empty(len(states), dtype=torch.int64, device=states.device), self.ranks - 1)
        logits = torch.full((*states.shape[:2], vocabulary), -_CERTAIN, device=states.device)
        return logits.scatter_(2, tokens[:, None, None].expand(-1, states.shape[1], 1), _CERTAIN)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent = []

    def _send(self, tensor: Tensor, rank: int, link: str) -> None:
        data = tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        try:
            self._sent.append((dist.isend(data, rank), data))
        except RuntimeError as error:
            raise _rank_error(rank, error) from error
        self._count_bytes(link, data.numel())

    @staticmethod
    def _receive(tensor: Tensor, rank: int) -> Tensor:
        try:
            dist.recv(tensor.view(torch.uint8), rank)
        except RuntimeError as error:
            raise _rank_error(rank, error) from error
        return tensor


def _rank_error(rank: int, error: RuntimeError) -> DeviceLostError:
    return DeviceLostError(f"rank {rank} is lost ({str(error).splitlines()[0][:200]}): see its log, and run again")


def count_ranks() -> int:
    """Processes that torchrun started together; 1 where it did not."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def place_rank(device: str, gpus: int) -> str:
    """The device of torch of this process: of a machine's GPUs each of its ranks has one, by its local number.

    Raises CommandError for a GPU by number, or fewer GPUs than ranks on this machine.
    """
    if count_ranks() == 1 or device.partition(":")[0] != "cuda":
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device != "cuda":
        raise CommandError(
            f"device must be cuda with several ranks, whose GPU is that of their local rank, not {device}"
        )
    if local >= gpus:
        raise CommandError(f"ranks of a machine must have a GPU each: local rank {local} finds {gpus} GPUs")
    return f"cuda:{local}"


def open_stage(layers: int, count_bytes: Callable[[str, int], None] = lambda link, size: None) -> PipelineStage:
    """This process's stage where torchrun started several, else the only one. Raises CommandError.

    Tensors of a GPU go by NCCL, those of the host by gloo.
    """
    ranks = count_ranks()
    if ranks == 1:
        return PipelineStage(0, 1, layers)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return PipelineStage(dist.get_rank(), ranks, layers, count_bytes)
