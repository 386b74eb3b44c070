"""Heads for the attend kernel: random ones, their pages on a simulated device, and the model's answers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearflash.abi.attend.codeword import Owner
from nearflash.abi.attend.descriptor import HeadCompletion
from nearflash.abi.attend.faults import Fault
from nearflash.abi.config import AttendConfig
from nearflash.device.attend import Head
from nearflash.device.base import Buffer, Device
from nearflash.model.attend.head import HeadResult, attend
from nearflash.model.attend.image import PageImage, head_image
from nearflash.model.attend.placement import MemoryStore, NandStore, Store
from nearflash.model.attend.settings import Addresses, Settings
from nearflash.model.attend.traffic import traffic
from nearflash.sim.device import VerilatorDevice

__all__ = ["Case", "differences", "place", "random_case"]

_LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Case:
    """One head: its tensors, and how it is attended to."""

    settings: Settings
    owner: Owner
    q: NDArray[np.float16]
    """(g, d)."""
    k: NDArray[np.float16]
    """(S, d)."""
    v: NDArray[np.float16]
    """(S, d)."""
    v_mean: NDArray[np.float32]
    """(d,)."""

    def result(self) -> HeadResult:
        """The model's answer, without repetition."""
        return attend(self.q, self.k, self.v, self.v_mean, self.settings)

    def completion(self, result: HeadResult) -> HeadCompletion:
        """What the kernel has to write back."""
        pages = traffic(self.settings, result.channels, result.chosen).all.requests
        return result.completion(pages)


def random_case(settings: Settings, tokens: int, group: int, seed: int, *, head: int = 0) -> Case:
    """Normal q, k, v with some large channels and some tokens that attract q."""
    rng, dim = np.random.default_rng(seed), settings.dim
    q, k, v = (rng.standard_normal((n, dim)) for n in (group, tokens, tokens))
    q[:, rng.choice(dim, max(1, dim // 8), replace=False)] *= 4
    k[rng.choice(tokens, max(1, tokens // 32), replace=False)] += q[0] / 4
    narrow = [x.astype(np.float16) for x in (q, k, v)]
    mean = narrow[2].astype(np.float64).mean(axis=0).astype(np.float32)
    return Case(settings, Owner(seed, head % 7, head), narrow[0], narrow[1], narrow[2], mean)


def place(device: Device, cases: Sequence[Case], *, nand: bool = False) -> tuple[list[Head], Buffer]:
    """The heads of the cases, their pages in the buffer, which is the caller's to free, or on simulated NAND."""
    config = device.identity.config
    assert isinstance(config, AttendConfig)
    size = 4096 + sum(4 * case.k.nbytes + 64 * case.settings.page_bytes for case in cases)
    buffer = device.allocate(8 * size)
    store: Store = MemoryStore(buffer.address, config.channels)
    if nand:
        store = NandStore(config.channels, config.units)
    heads = []
    for case in cases:
        image = head_image(case.k, case.v, case.settings, case.owner, store)
        for page in image.pages:
            _write(device, buffer, page)
        descriptor = case.settings.descriptor(case.owner, len(case.k), len(case.q), Addresses())
        heads.append(Head(descriptor, case.q, case.v_mean, image.token_table, image.index_table))
    buffer.sync_to_device()
    return heads, buffer


def _write(device: Device, buffer: Buffer, page: PageImage) -> None:
    data, entry = np.frombuffer(page.data, np.uint8), page.entry
    if entry.address is None:
        assert isinstance(device, VerilatorDevice)
        device.kernel.channels[entry.channel].load(entry.unit, np.array([entry.row]), data[None])
    else:
        buffer.host[entry.address - buffer.address :][: data.size] = data


def differences(case: Case, completion: HeadCompletion, out: NDArray[np.float16] | None) -> str:
    """How a kernel's answer differs from the model's; empty where it does not."""
    result = case.result()
    wanted, found = case.completion(result), []
    names = ["faults", "entries"]
    if not result.faults & ~(Fault.REFERENCE_HIGH | Fault.REFERENCE_LOW):
        names += ["selected", "pages"]
        maximum = (*wanted.maximum, *[-32768] * (8 - len(wanted.maximum)))
        if completion.maximum != maximum:
            found.append(f"maximum must be {maximum}, not {completion.maximum}")
    for name in names:
        if getattr(completion, name) != getattr(wanted, name):
            found.append(f"{name} must be {getattr(wanted, name)!r}, not {getattr(completion, name)!r}")
    if (out is None) != (result.out is None):
        found.append(f"out must be {result.out}, not {out}")
    elif out is not None and result.out is not None:
        wrong = (out.view(np.uint16) != result.out.view(np.uint16)).sum()
        if wrong:
            found.append(f"{wrong} of {out.size} outputs differ")
    return "; ".join(found)
