"""Findings of the demo: checks, report.json, the printed summary, the plot."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nearflash.device import Identity
from nearflash.support.files import replace_file, write_durably
from nearflash.training import Traffic

__all__ = ["DemoReport"]

TORCH_BOUND = 1e-6
"""Largest allowed relative error of one step against torch.optim.AdamW."""


@dataclass
class DemoReport:
    """Fields of report.json. Rates per parameter are per parameter and step of the simulated phase."""

    params: int
    rtl_steps: int
    host_steps: int
    profile: str
    rtl_device: str
    host_device: str
    digest: str
    """SHA-256 of the simulated kernel's build configuration."""
    loss: list[float] = field(default_factory=list)
    """Training loss (nats per token) of each step's batch, before the step."""
    text_loss_before: float = 0.0
    text_loss_after: float = 0.0
    mismatches: int = 0
    """Words that differ from nearflash.model, of `words_compared`."""
    words_compared: int = 0
    torch_rel_error: float = 0.0
    cycles_per_param: float | None = None
    """None where the device does not count cycles."""
    host_link_bytes_per_param: float = 0.0
    conventional_host_link_bytes_per_param: float = 0.0
    conventional_with_gradients_bytes_per_param: float = 0.0
    device_bytes_per_param: float = 0.0
    """Bytes through the kernel's memory ports, reads and writes."""
    flash_bytes_per_param: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    def take_traffic(self, traffic: Traffic, identity: Identity) -> None:
        """Rates of the simulated phase."""
        counters, params = traffic.counters, max(traffic.params, 1)
        beats = counters.get("read_beats", 0) + counters.get("write_beats", 0)
        self.cycles_per_param = counters["cycles"] / params if "cycles" in counters else None
        self.device_bytes_per_param = beats * identity.config.port_bytes / params
        self.host_link_bytes_per_param = traffic.host_link_bytes / params
        self.conventional_host_link_bytes_per_param = traffic.conventional_bytes / params
        self.conventional_with_gradients_bytes_per_param = traffic.conventional_bytes_with_gradients / params
        self.flash_bytes_per_param = (traffic.flash_read_bytes + traffic.flash_written_bytes) / params

    def failures(self) -> list[str]:
        """List what does not hold; empty when all is well."""
        checks = {
            f"{self.mismatches} of {self.words_compared} words differ from nearflash.model": self.mismatches == 0,
            "no word was compared": self.words_compared > 0,
            f"the first step differs from torch.optim.AdamW by {self.torch_rel_error:.2e} of the update, "
            f"over {TORCH_BOUND:.0e}": self.torch_rel_error <= TORCH_BOUND,
            f"the loss over the text did not fall: {self.text_loss_before:.3f} to {self.text_loss_after:.3f}":
                self.text_loss_after < self.text_loss_before,
        }  # fmt: skip
        return [text for text, holds in checks.items() if not holds]

    def summary(self) -> list[str]:
        """The result in sentences: every fraction says of what."""
        link, conventional = self.host_link_bytes_per_param, self.conventional_host_link_bytes_per_param
        cycles = "not counted by this device"
        if self.cycles_per_param is not None:
            cycles = f"{self.cycles_per_param:.3f} per parameter (simulated kernel, waits for its memory included)"
        return [
            f"model              {self.params:,} parameters; {self.rtl_steps} steps on {self.rtl_device}, then "
            f"{self.host_steps} on {self.host_device} from the same state file, opened again",
            f"loss               {self.text_loss_before:.3f} before, {self.text_loss_after:.3f} after "
            "(nats per token, over the whole text)",
            f"equal to the model {self.mismatches} of {self.words_compared:,} words of p, m, v and copy differ "
            f"(profile {self.profile})",
            f"against torch      first step within {self.torch_rel_error:.1e} of each element's update beyond 1 ulp "
            f"(bound {TORCH_BOUND:.0e})",
            f"host link          {link:.2f} bytes per parameter and step; conventional offload of p, m, v: "
            f"{conventional:.2f}, so {100 * link / conventional:.0f} % of that "
            f"({self.conventional_with_gradients_bytes_per_param:.0f} with gradients on flash)",
            f"device memory      {self.device_bytes_per_param:.2f} bytes per parameter and step through the kernel's "
            "ports, reads and writes",
            f"flash              {self.flash_bytes_per_param:.2f} bytes per parameter and step, reads and writes, by "
            "direct I/O",
            f"cycles             {cycles}",
        ]

    def write(self, path: Path) -> None:
        """report.json."""
        write_durably(path, json.dumps(asdict(self), indent=1) + "\n")

    def plot(self, path: Path) -> None:
        """Loss by step, and bytes over the host link, as PNG."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        steps = range(1, len(self.loss) + 1)
        left.plot(steps, self.loss, marker="o", color="tab:blue")
        left.axvline(self.rtl_steps + 0.5, color="grey", linestyle="--")
        left.set(xlabel="step", ylabel="training loss (nats per token)", xticks=steps)
        left.set_title(f"{self.rtl_device} | {self.host_device}", fontsize="medium")
        bars: dict[str, Any] = {
            "this optimizer": self.host_link_bytes_per_param,
            "conventional:\np, m, v": self.conventional_host_link_bytes_per_param,
            "conventional:\np, m, v, gradients": self.conventional_with_gradients_bytes_per_param,
        }
        right.bar_label(right.bar(list(bars), list(bars.values()), color=["tab:green", "grey", "grey"]), fmt="%.1f")
        right.set(ylabel="bytes per parameter and step", title="over the host link")
        with replace_file(path) as out:
            figure.savefig(out, format="png", dpi=110)
        pyplot.close(figure)
