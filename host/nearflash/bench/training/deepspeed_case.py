"""The case `deepspeed-nvme`, run by the Python that `make baseline` sets up: ZeRO-3, optimizer state on NVMe, CPU.

One process with gloo. Reads and writes are pipelined and asynchronous; as DeepSpeed has it, nothing is flushed, so a
step is not durable. `--build` compiles the operators that DeepSpeed builds on first use, and ends.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nearflash.bench.training.cases import MAX_NORM, parser
from nearflash.bench.training.measured import disk_bytes, measure
from nearflash.bench.training.subject import SCALARS, batch, model

__all__ = ["main"]

CASE = "deepspeed-nvme"
SUB_GROUP_PARAMS = 16_000_000
_BUFFERS = 12
"""Of a subgroup's length: p, m, v and gradient of the subgroup before, this one and the next."""


class ZeroInfinity:
    """A DeepSpeed engine."""

    def __init__(self, size: str, folder: Path) -> None:
        import deepspeed

        self._size = size
        net = model(size)
        self.params = sum(p.numel() for p in net.parameters())
        self._engine: Any = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=_config(folder), dist_init_required=True
        )[0]

    @property
    def link_bytes(self) -> int:
        """See Subject: all that goes between drive and host, as its update is the host's."""
        return sum(disk_bytes())

    def gradients(self, step: int) -> float:
        """See Subject."""
        ids = batch(self._size, step)
        loss = self._engine(input_ids=ids, labels=ids).loss
        self._engine.backward(loss)
        return float(loss.detach())

    def update(self) -> None:
        """See Subject."""
        self._engine.step()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and leave without the teardown that hangs on CPU."""
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0", DS_ACCELERATOR="cpu"
    )
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # one ninja, or all is built again
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "ops"))
    if argv == ["--build"]:
        _build()
        return
    arguments = parser([CASE]).parse_args(argv)
    report = os.dup(1)  # DeepSpeed and its compilers write to standard output
    os.dup2(2, 1)
    subject = ZeroInfinity(arguments.size, arguments.path)
    measured = measure(subject, subject.params, arguments.steps)
    os.write(report, json.dumps(measured.to_json()).encode() + b"\n")
    torch.distributed.destroy_process_group()
    os._exit(0)


def _build() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder

    for builder in (CPUAdamBuilder(), AsyncIOBuilder()):
        builder.load()


def _config(folder: Path) -> dict[str, Any]:
    offload = {
        "device": "nvme", "nvme_path": str(folder), "pin_memory": False, "buffer_count": _BUFFERS,
        "pipeline_read": True, "pipeline_write": True,
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {**SCALARS, "betas": list(SCALARS["betas"])}},
        "zero_optimization": {"stage": 3, "sub_group_size": SUB_GROUP_PARAMS, "offload_optimizer": offload},
        "aio": {
            "block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 2, "single_submit": False,
            "overlap_events": True,
        },
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
