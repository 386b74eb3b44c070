"""The demo's course: some steps on one device, the state file closed and opened again, more steps on another."""

from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from nearflash.demo.audit import Audit
from nearflash.demo.data import Windows, load_model
from nearflash.demo.progress import DemoProgress
from nearflash.demo.report import DemoReport
from nearflash.demo.waves import record_waves
from nearflash.device import Device, open_device
from nearflash.training import NearStorageAdamW, Timeline

__all__ = ["Demo"]


class Demo:
    """Takes the options of `python -m nearflash.demo`; files go to `options.output`."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.output = options.output
        self.timeline = Timeline()
        self.output.mkdir(parents=True, exist_ok=True)
        self.model, tokenizer = load_model(options.model, torch.bfloat16)
        self.windows = Windows(tokenizer, options.text.read_text(encoding="utf-8"), options.window, options.batch)
        self.loss: list[float] = []

    def run(self) -> DemoReport:
        """Train, compare, write the files, print. Raises what devices and optimizer raise."""
        print(f"opening {self.options.rtl_device} (a simulator is built on first use) ...", flush=True)
        with self.timeline.span("open device"):
            device = open_device(self.options.rtl_device, "update")
        print("training; a simulated step takes ten to thirty seconds on two cores ...", flush=True)
        # A simulator with waves is another build: it takes the cores that the one-threaded simulation leaves idle.
        with device, ThreadPoolExecutor(1) as background:
            waves = background.submit(record_waves, device, self.output / "update.vcd") if self.options.waves else None
            report = self._train(device)
            with self.timeline.span("wait for waves"):
                has_waves = waves is not None and waves.result()
        report.write(self.output / "report.json")
        report.plot(self.output / "training.png")
        self.timeline.write(self.output / "trace.json")
        print("", *report.summary(), "", *self._where_to_look(has_waves), sep="\n")
        return report

    def _train(self, device: Device) -> DemoReport:
        options = self.options
        (self.output / "optimizer.state").unlink(missing_ok=True)
        before = self._text_loss()
        with self._optimizer(device, resume=False) as optimizer:
            audit = Audit(list(self.model.parameters()), optimizer.store.manifest)
            self._steps(optimizer, audit, device.identity.name, options.rtl_steps)
            traffic, profile = optimizer.report.traffic, str(optimizer.store.profile)
        with open_device(options.host_device, "update") as host, self._optimizer(host, resume=True) as optimizer:
            audit.check_resumed(optimizer)
            self._steps(optimizer, audit, host.identity.name, options.host_steps)
        report = DemoReport(
            params=sum(tensor.numel() for tensor in self.model.parameters()),
            rtl_steps=options.rtl_steps,
            host_steps=options.host_steps,
            profile=profile,
            rtl_device=device.identity.name,
            host_device=host.identity.name,
            digest=device.identity.config.digest,
            loss=self.loss,
            text_loss_before=before,
            text_loss_after=self._text_loss(),
            mismatches=audit.mismatches,
            words_compared=audit.words,
            torch_rel_error=audit.torch_error,
            seconds=self.timeline.seconds,
        )
        report.take_traffic(traffic, device.identity)
        return report

    def _optimizer(self, device: Device, *, resume: bool) -> NearStorageAdamW:
        return NearStorageAdamW(
            self.model.named_parameters(),
            path=self.output / "optimizer.state",
            device=device,
            lr=self.options.lr,
            param_dtype="bf16",
            resume=resume,
            timeline=self.timeline,
        )

    def _steps(self, optimizer: NearStorageAdamW, audit: Audit, name: str, steps: int) -> None:
        # A step is compared while the next one runs: the simulation and the model of the update take one core each.
        with DemoProgress(name, steps) as progress, ThreadPoolExecutor(1) as background:
            before: Future[str] | None = None
            for _ in range(steps):
                compare = self._step(optimizer, audit, name)
                if before is not None:
                    progress.line(before.result())
                before = background.submit(compare)
            if before is not None:
                progress.line(before.result())

    def _step(self, optimizer: NearStorageAdamW, audit: Audit, name: str) -> Callable[[], str]:
        """One step of training; what it returns compares the step and gives the line to print."""
        with self.timeline.span("forward and backward"):
            loss = self._loss(self.windows.batch(len(self.loss)))
            loss.backward()
        seconds = -self.timeline.seconds.get("step", 0.0)
        optimizer.step()
        seconds += self.timeline.seconds["step"]
        taken = audit.record(optimizer)
        optimizer.zero_grad()
        self.loss.append(loss.item())
        done, text = optimizer.steps, f"loss {loss.item():.3f}  optimizer {seconds:.2f} s"

        def compare() -> str:
            with self.timeline.span("compare with the model"):
                audit.check(taken)
            return f"{name}  step {done}  {text}  {audit.mismatches} of {audit.words:,} words differ from the model"

        return compare

    def _loss(self, ids: torch.Tensor) -> Any:
        return self.model(input_ids=ids, labels=ids).loss

    def _text_loss(self) -> float:
        """Mean loss over all windows, nats per token."""
        with torch.no_grad(), self.timeline.span("loss over the text"):
            return sum(self._loss(window[None]).item() for window in self.windows.all) / len(self.windows.all)

    def _where_to_look(self, waves: bool) -> list[str]:
        files = {
            "report.json": "all figures",
            "training.png": "loss by step, and bytes over the host link",
            "trace.json": "what ran when: open in ui.perfetto.dev or chrome://tracing",
            "optimizer.state": "the state: `head -c 4096` shows its superblock",
        }
        if waves:
            files["update.vcd"] = "waves of the kernel's first cycles: open in gtkwave or surfer"
        return [f"{self.output / name!s:32} {what}" for name, what in files.items()]
