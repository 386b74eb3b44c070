"""Lightning's Trainer with state on flash: `python -m nearflash.training.examples.lightning TEXT FOLDER`.

A second call goes on from the last checkpoint in FOLDER, for as many steps again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

try:
    from lightning.pytorch import LightningModule, Trainer
except ImportError:
    from pytorch_lightning import LightningModule, Trainer

from nearflash.training import NearStorageAdamW
from nearflash.training.integrations.lightning import LightningSnapshots

__all__ = ["Bytes", "main"]
WINDOW, STEPS = 64, 10


class Bytes(LightningModule):
    """Predicts the byte after a window; its optimizer's state is at `path`."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.path, self.losses = path, list[float]()
        self.net = torch.nn.Sequential(torch.nn.Embedding(256, 16), torch.nn.Flatten(), torch.nn.Linear(1024, 256))

    def training_step(self, batch: torch.Tensor, _: int) -> Any:
        """Loss of a batch."""
        loss = torch.nn.functional.cross_entropy(self.net(batch[:, :-1]), batch[:, -1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        """The one line that differs."""
        return NearStorageAdamW(self.parameters(), lr=1e-3, path=self.path / "state", resume="auto")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the losses."""
    text, folder = map(Path, sys.argv[1:] if argv is None else argv)
    folder.mkdir(parents=True, exist_ok=True)
    windows = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long().unfold(0, WINDOW + 1, 7)
    data: Any = torch.utils.data.DataLoader(windows, batch_size=32)  # type: ignore[arg-type]
    last = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    done = int(last.stem) if last else 0
    trainer = Trainer(max_steps=done + STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, callbacks=[LightningSnapshots(folder / "state", folder)])  # fmt: skip
    module = Bytes(folder)
    trainer.fit(module, data, ckpt_path=last)
    trainer.save_checkpoint(folder / f"{trainer.global_step}.ckpt")
    print(*(f"{loss:.4f}" for loss in module.losses))
    return 0


if __name__ == "__main__":
    sys.exit(main())
