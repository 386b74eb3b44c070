"""torch tensors as ranges of the flat parameter vector that the state file stores."""

import itertools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nearflash.abi.errors import CommandError, FormatError, ShapeError
from nearflash.abi.kernel.commands import CopyFormat
from nearflash.abi.optimizers import MasterFormat
from nearflash.abi.topk import ValueFormat
from nearflash.device.backends.host.delta import apply_delta, delta_of
from nearflash.storage import Extent, Manifest, StateArray, TensorEntry
from nearflash.storage.state.master import round_master
from nearflash.training.step.fingerprint import (
    MODULUS,
    GradientFingerprints,
    fingerprint,
    fingerprint_of_copy,
    fingerprints,
)
from nearflash.training.step.host_memory import copy_all, divide_copies, is_plain, widen_bf16
from nearflash.training.step.members import Member, layout_of
from nearflash.training.step.requirements import check_parameter
from nearflash.training.step.streamed import find_values, is_streamed

__all__ = ["COPY_OF", "FlatParameters", "Gradients", "TensorPiece", "dtype_name"]

COPY_OF = {torch.float32: CopyFormat.NONE, torch.float16: CopyFormat.FP16, torch.bfloat16: CopyFormat.BF16}
"""What the device makes for tensors of a dtype: their low-precision copy, or nothing beside fp32."""
_WORDS = {
    torch.float32: (torch.int32, np.uint32, ValueFormat.FP32),
    torch.float16: (torch.int16, np.uint16, ValueFormat.FP16),
    torch.bfloat16: (torch.int16, np.uint16, ValueFormat.BF16),
}
"""A dtype's words, for torch and for NumPy, and their format in a delta."""
_NOTHING = torch.empty(0)
Gradients: TypeAlias = Mapping[int, torch.Tensor]
"""By tensor."""
_NONE_GIVEN: Gradients = MappingProxyType({})
_DTYPE_OF = {copy: dtype for dtype, copy in COPY_OF.items()}


@dataclass(frozen=True)
class TensorPiece:
    """Elements [first, first + length) of a tensor, at `position` in the flat vector."""

    tensor: int
    first: int
    length: int
    position: int


class StoredGradients(Protocol):
    """Gradients that are not in memory (nearflash.training.step.scratch)."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether it has the tensor's gradient."""

    def read(self, tensor: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """A part of it, (length,), in host memory."""


class FlatParameters:
    """The tensors of all parameter groups that have state, in order, each once.

    New values are written into the tensors as they come: what the store has is the way back until its commit. A host
    copy takes them where they may not come at once (`staged`), or cannot: of tensors on a GPU or not contiguous.
    `copy` is the only low-precision format that tensors may have beside fp32; None: fp16 and bf16, each as it is.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        copy: CopyFormat | None,
        extent_params: int,
        arrays: Iterable[StateArray],
        stored: Collection[str] = (),
        *,
        staged: bool = False,
        master: MasterFormat = MasterFormat.FP32,
    ) -> None:
        """stored: names of tensors that have state, though they may be frozen. staged: tensors stay until `publish`.

        Raises FormatError for a tensor that has no memory to write to or a dtype that is neither fp32 nor the copy's,
        with a split master for fp16, CommandError for shared memory, ShapeError where there is no element.
        """
        every = Member.of(groups)
        self.waiting = [member for member in every if not member.wants_state and member.name not in stored]
        """Tensors that have no state yet."""
        self.members = [member for member in every if member.wants_state or member.name in stored]
        self.layout = layout_of(groups)
        self.tensors: list[torch.Tensor] = [member.tensor for member in self.members]
        self.group_of: list[int] = [member.group for member in self.members]
        names = [member.name for member in self.members]
        dtypes = [dtype for dtype, own in COPY_OF.items() if copy is None or own in (CopyFormat.NONE, copy)]
        split = master is MasterFormat.SPLIT
        dtypes = [torch.bfloat16, torch.float32] if split else dtypes
        for name, tensor in zip(names, self.tensors, strict=True):
            check_parameter(name, tensor)
            if tensor.dtype not in dtypes:
                allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                hint = ', as its master is split: freeze it, or choose master="fp32"' if split else ""
                raise FormatError(f"parameter {name!r} must be {allowed}, not {dtype_name(tensor)}{hint}")
        if not self.waiting and not any(tensor.numel() for tensor in self.tensors):
            raise ShapeError("the parameters must have at least one element, not none; pass trainable tensors")
        _reject_shared(names, self.tensors)
        described = zip(names, self.tensors, strict=True)
        self.manifest = Manifest.pack(
            [(n, tuple(t.shape), dtype_name(t)) for n, t in described], extent_params, arrays, master
        )
        self._starts = [entry.start for entry in self.manifest.tensors]
        self._stops = [entry.stop for entry in self.manifest.tensors]
        self.scratch: StoredGradients | None = None
        """Has gradients that are not in memory."""
        self._all_staged = staged
        self._next: list[torch.Tensor | None] = [None] * len(self.tensors)
        """Host copies of new values, of those that need one."""
        self.begun: set[int] = set()
        """Extents of which tensors have new values, in place, that are not published."""
        self._staged: list[dict[int, int]] = [{} for _ in self.tensors]
        """Fingerprints of the staged values, by tensor and first element."""
        self.deltas: list[dict[int, NDArray[np.uint8]]] = [{} for _ in self.tensors]
        """Deltas (nearflash.abi.delta) from the tensors to their staged values, by tensor and first element."""
        self._versions: list[int] = []
        self._fingerprints: list[int] = []
        self.note_contents()

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Manifest entries, by tensor."""
        return self.manifest.tensors

    def copy_format(self, tensor: int) -> CopyFormat:
        """Format that the device returns for a tensor: its fp32 parameters (NONE) or a low-precision copy."""
        return COPY_OF[self.tensors[tensor].dtype]

    def tensors_in(self, start: int, stop: int) -> range:
        """Tensors that have a part, or padding, inside [start, stop) of the flat vector."""
        return range(bisect_right(self._stops, start), bisect_left(self._starts, stop))

    def extents_of(self, tensors: Iterable[int]) -> list[Extent]:
        """The extents that hold a part of one of these tensors, ascending."""
        size, extents = self.manifest.extent_params, self.manifest.extents
        extent_numbers: set[int] = set()
        for entry in (self.entries[index] for index in tensors):
            if entry.start < entry.stop:
                extent_numbers.update(range(entry.start // size, -(-entry.stop // size)))
        return [extents[index] for index in sorted(extent_numbers)]

    def check_memory(self) -> None:
        """Raise FormatError for a tensor that cannot be written to any more: its storage was resized, or replaced.

        CommandError for tensors that share their memory by now.
        """
        for entry, tensor in zip(self.entries, self.tensors, strict=True):
            check_parameter(entry.name, tensor)
        _reject_shared([entry.name for entry in self.entries], self.tensors)

    def pieces(self, start: int, stop: int) -> Iterator[TensorPiece]:
        """The tensors' elements inside [start, stop) of the flat vector."""
        for index in self.tensors_in(start, stop):
            entry = self.entries[index]
            first, last = max(start, entry.start), min(stop, entry.start + entry.params)
            if first < last:
                yield TensorPiece(index, first - entry.start, last - first, first)

    # From the tensors

    def put_gradients(
        self,
        start: int,
        stop: int,
        scalar: float,
        out: NDArray[np.float32],
        gathered: GradientFingerprints | None = None,
        given: Gradients = _NONE_GIVEN,
    ) -> None:
        """Write the gradients of [start, stop), rounded to fp32, times the fp32 scalar, into `out`; padding is zero.

        gathered: takes their fingerprints, before the multiplication. given: gradients, by tensor, in the place of what
        the tensors have: no other thread may set these meanwhile.
        """
        target = torch.from_numpy(out)
        for piece, at in self._places(start, stop, out):
            part, into = self._gradient_part(piece, given), target[at:][: piece.length]
            if part.dtype is torch.bfloat16 and is_plain(part):
                widen_bf16(part.data_ptr(), out[at : at + piece.length])
            else:
                into.copy_(part)
            if gathered is not None:
                gathered.add(piece.tensor, piece.first, into)
        if scalar != 1.0:
            with np.errstate(over="ignore"):  # the device counts what is not finite
                np.multiply(out, np.float32(scalar), out=out)

    def has_gradient(self, tensor: int) -> bool:
        """Whether a tensor has a gradient, in memory or not."""
        given = self.tensors[tensor]
        return given.grad is not None or (self.scratch is not None and self.scratch.holds(given))

    def gradient_parts(self, tensor: int) -> Iterator[torch.Tensor]:
        """A tensor's gradient, (n,), by parts where it is not in memory."""
        given, size = self.tensors[tensor], self.manifest.extent_params
        for first in range(0, given.numel(), size):
            yield self._gradient_part(TensorPiece(tensor, first, min(size, given.numel() - first), 0))

    def _gradient_part(self, piece: TensorPiece, given: Gradients = _NONE_GIVEN) -> torch.Tensor:
        tensor = self.tensors[piece.tensor]
        if self.scratch is not None and self.scratch.holds(tensor):
            return self.scratch.read(tensor, piece.first, piece.length)
        gradient = self._find_gradient(piece.tensor, given)
        assert gradient is not None, "runs hold tensors with gradients only"
        return gradient.reshape(-1)[piece.first : piece.first + piece.length]

    def _find_gradient(self, tensor: int, given: Gradients) -> torch.Tensor | None:
        return given[tensor] if tensor in given else self.tensors[tensor].grad

    def has_bf16_gradients(self, start: int, stop: int, given: Gradients) -> bool:
        """Whether all gradients of [start, stop) are bf16, and so could go to a device as they are. given: as above."""
        gradients = [self._find_gradient(index, given) for index in self.tensors_in(start, stop)]
        return all(gradient is not None and gradient.dtype is torch.bfloat16 for gradient in gradients)

    def put_bf16_gradients(
        self,
        start: int,
        stop: int,
        out: NDArray[np.uint16],
        gathered: GradientFingerprints | None,
        given: Gradients,
    ) -> None:
        """Write the bf16 gradients of [start, stop) into `out`, as they are; padding is zero. Others: as above."""
        target = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
        for piece, at in self._places(start, stop, out):
            part, into = self._gradient_part(piece, given), target[at:][: piece.length]
            if is_plain(part):
                copy_all([(into.data_ptr(), part.data_ptr(), part.nbytes)])
            else:
                into.copy_(part)
            if gathered is not None:
                gathered.add(piece.tensor, piece.first, into.float())

    def _places(self, start: int, stop: int, out: NDArray[Any]) -> Iterator[tuple[TensorPiece, int]]:
        """The pieces of [start, stop), each with its place in `out`, of which the rest becomes zero."""
        reached = 0
        for piece in self.pieces(start, stop):
            at = piece.position - start
            out[reached:at] = 0
            yield piece, at
            reached = at + piece.length
        out[reached:] = 0

    def put_parameters(self, extent: Extent, out: NDArray[np.float32]) -> None:
        """Write the tensors' present values, fp32, into `out` (one extent); padding becomes zero."""
        out[:] = 0
        target, held = torch.from_numpy(out), dict[int, torch.Tensor]()
        for piece in self.pieces(extent.start, extent.stop):
            tensor = self.tensors[piece.tensor]
            if piece.tensor not in held:
                held = {piece.tensor: find_values(tensor)}
            values = held[piece.tensor].reshape(-1)[piece.first : piece.first + piece.length]
            target[piece.position - extent.start :][: piece.length].copy_(values)

    def agrees(self, start: int, stop: int, masters: NDArray[np.float32]) -> bool:
        """Whether the tensors' present values of [start, stop) are those masters, rounded to their dtypes."""
        given = torch.from_numpy(masters)
        for piece in self.pieces(start, stop):
            if is_streamed(self.tensors[piece.tensor]):
                continue
            values = self.tensors[piece.tensor].detach().reshape(-1)[piece.first : piece.first + piece.length].cpu()
            if not torch.equal(
                values, self.round_masters(given[piece.position - start :][: piece.length], values.dtype)
            ):
                return False
        return True

    def put_changes(self, extent: Extent, tensors: Collection[int], masters: NDArray[np.float32]) -> None:
        """Write values of these tensors that are not their master, rounded to the dtype, into `masters`."""
        target = torch.from_numpy(masters)
        for piece in self.pieces(extent.start, extent.stop):
            if piece.tensor in tensors:
                values = self.tensors[piece.tensor].detach().reshape(-1)[piece.first : piece.first + piece.length].cpu()
                master = target[piece.position - extent.start :][: piece.length]
                rounded = self.round_masters(master, values.dtype)
                master.copy_(torch.where(rounded == values, master, values.float()))

    def put_weights(self, extent: Extent, out: NDArray[np.uint8]) -> bool:
        """Write the upper halves of split masters, as the tensors hold them, into `out`; the rest becomes zero.

        A bf16 tensor is its half, an fp32 one is its master. False where a tensor does not hold its values: then `out`
        is of no use.
        """
        words = out.view(np.int16)
        target = torch.from_numpy(words).view(torch.bfloat16)
        for piece, at in self._places(extent.start, extent.stop, words):
            tensor = self.tensors[piece.tensor]
            if is_streamed(tensor):
                return False
            into, part = target[at:][: piece.length], tensor.detach().reshape(-1)[piece.first :][: piece.length]
            if tensor.dtype is torch.float32:
                into.copy_(self.round_masters(part.cpu().contiguous(), torch.bfloat16))
            elif is_plain(tensor):
                copy_all([(into.data_ptr(), part.data_ptr(), part.nbytes)])
            else:
                into.copy_(part)
        return True

    def round_masters(self, masters: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Round fp32 masters, (n,), contiguous in host memory, to what tensors of a dtype hold of them."""
        if self.manifest.master is not MasterFormat.SPLIT or dtype is torch.float32:
            return masters.to(dtype)
        return torch.from_numpy(round_master(masters.numpy()).view(np.int16)).view(dtype)

    # To the tensors

    def prepare(self, tensors: Iterable[int]) -> None:
        """Before `stage`: host copies for the tensors that need one, and none for the others."""
        self.begun.clear()
        for index in tensors:
            tensor, held = self.tensors[index], self._next[index]
            if is_streamed(tensor) or (is_plain(tensor) and not self._all_staged):
                self._next[index] = None
            elif held is None or held.numel() != tensor.numel() or held.dtype is not tensor.dtype:
                pinned = tensor.is_cuda
                self._next[index] = torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=pinned)

    def stage(
        self, start: int, stop: int, source: NDArray[np.uint8], copy: CopyFormat, *, compare: bool = False
    ) -> None:
        """Keep the new values of [start, stop): bytes in fp32 (then rounded to the tensor's dtype) or `copy`.

        After `prepare`. start, stop: bounds of tensors or of extents. Fingerprints, and with `compare` deltas from the
        tensors' present values, are taken while the values are in the cache.
        """
        values = torch.from_numpy(source).view(_DTYPE_OF[copy])
        split = copy is CopyFormat.NONE and self.manifest.master is MasterFormat.SPLIT
        for piece in self.pieces(start, stop):
            if is_streamed(self.tensors[piece.tensor]):  # its values are the store's
                continue
            new = values[piece.position - start :][: piece.length]
            new = self.round_masters(new, self.tensors[piece.tensor].dtype) if split else new
            target = self._target(piece)
            old = self._present(piece) if compare else None
            self._staged[piece.tensor][piece.first] = fingerprint_of_copy(new, target, piece.first)
            if old is not None:
                self._keep_delta(piece, target, old)

    def is_plain(self, start: int, stop: int) -> bool:
        """Whether all tensors in [start, stop) have their numbers in host memory, one behind the other."""
        return all(is_plain(self.tensors[piece.tensor]) for piece in self.pieces(start, stop))

    def stage_changes(self, start: int, stop: int, delta: NDArray[np.uint8], *, compare: bool = False) -> None:
        """Keep the new values of [start, stop), where tensors are plain and of 16 bits: the present ones after a delta.

        As `stage` otherwise. A NaN that stays one keeps its payload. Raises StreamError.
        """
        staged = []
        for piece in self.pieces(start, stop):
            target = self._target(piece)
            if self._next[piece.tensor] is not None:
                place = self.tensors[piece.tensor].data_ptr() + piece.first * target.element_size()
                copy_all([(target.data_ptr(), place, target.nbytes)])
            alone = (piece.position, piece.length) == (start, stop - start)
            old = self._present(piece) if compare and not alone else None
            staged.append((piece, target, old))
        apply_delta(delta, [(piece.position - start, target.data_ptr(), piece.length) for piece, target, _ in staged])
        for piece, target, old in staged:
            self._staged[piece.tensor][piece.first] = fingerprint(target, piece.first)
            if old is not None:
                self._keep_delta(piece, target, old)
            elif compare:
                self.deltas[piece.tensor][piece.first] = delta.copy()

    def _keep_delta(self, piece: TensorPiece, target: torch.Tensor, old: NDArray[Any]) -> None:
        """Keep what changed in a piece, from its old words."""
        words, word, value_format = _WORDS[target.dtype]
        new = target.view(words).numpy().view(word)
        self.deltas[piece.tensor][piece.first] = delta_of(old, new, value_format)

    def _target(self, piece: TensorPiece) -> torch.Tensor:
        """Find where a piece's new values go."""
        if (whole := self._next[piece.tensor]) is None:
            whole = self.tensors[piece.tensor].detach().view(-1)
            self.begun.add(piece.position // self.manifest.extent_params)
        return whole[piece.first : piece.first + piece.length]

    def _present(self, piece: TensorPiece) -> NDArray[Any]:
        """Words of a piece of a tensor as they are; a copy where new values take their place."""
        words, word, _ = _WORDS[self.tensors[piece.tensor].dtype]
        part = slice(piece.first, piece.first + piece.length)
        values = self.tensors[piece.tensor].detach().reshape(-1)[part].resolve_neg().cpu().contiguous()
        found: NDArray[Any] = values.view(words).numpy().view(word)
        return found.copy() if self._next[piece.tensor] is None else found

    def marks(self, tensors: Collection[int]) -> list[tuple[int, int]]:
        """Fingerprints of every tensor before and after `publish` of these."""
        staged = [sum(parts.values()) % MODULUS for parts in self._staged]
        return [(now, staged[index] if index in tensors else now) for index, now in enumerate(self._fingerprints)]

    def publish(self, tensors: Sequence[int]) -> None:
        """Copy what has a host copy into the tensors, in place; those on CPU on all cores."""
        tensors = [index for index in tensors if not is_streamed(self.tensors[index])]
        copied = [index for index in tensors if self._next[index] is not None]
        plain = [index for index in copied if self._is_like_next(index)]
        copies = [(self.tensors[i].data_ptr(), new.data_ptr(), new.nbytes) for i in plain for new in [self._copy_of(i)]]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(copy_all, divide_copies(copies, os.cpu_count() or 1)):
                pass
        for index in (*plain, *set(tensors).difference(copied)):
            torch.autograd.graph.increment_version(self.tensors[index])
        with torch.no_grad():
            for index in set(copied).difference(plain):  # here, as the caller's stream is its thread's
                self.tensors[index].copy_(self._copy_of(index).view(self.tensors[index].shape))
        self.begun.clear()
        for index in tensors:
            self._fingerprints[index] = sum(self._staged[index].values()) % MODULUS
            self._versions[index] = self.tensors[index]._version

    def free_copies(self) -> None:
        """Give the host copies of new values back."""
        self._next = [None] * len(self.tensors)

    def note_undone(self) -> None:
        """Take as unchanged what was begun and has its values again."""
        size = self.manifest.extent_params
        for index in {i for at in self.begun for i in self.tensors_in(at * size, (at + 1) * size)}:
            if self._next[index] is None and not is_streamed(self.tensors[index]):
                torch.autograd.graph.increment_version(self.tensors[index])
                self._versions[index] = self.tensors[index]._version
        self.begun.clear()

    def _copy_of(self, index: int) -> torch.Tensor:
        values = self._next[index]
        assert values is not None, "only what was staged in a copy is copied"
        return values

    def _is_like_next(self, index: int) -> bool:
        tensor, values = self.tensors[index], self._copy_of(index)
        return is_plain(tensor) and tensor.dtype is values.dtype and tensor.numel() == values.numel()

    # Changes from outside

    def note_contents(self) -> None:
        """Take the tensors' present contents as known."""
        self._versions = self._count_versions()
        self._fingerprints = fingerprints(self._list_watched())

    def versions_changed(self) -> bool:
        """Whether tensors were changed by others, as far as torch counts versions; at once."""
        return self._versions != self._count_versions()

    def _count_versions(self) -> list[int]:
        return [0 if is_streamed(tensor) else tensor._version for tensor in self.tensors]

    def _list_watched(self) -> list[torch.Tensor]:
        """All tensors; none in the place of those that hold no values."""
        return [_NOTHING if is_streamed(tensor) else tensor for tensor in self.tensors]

    def find_changed(self, threads: int | None = None) -> list[str]:
        """Names of tensors that were changed by others, in whatever way; reads them all, on so many threads."""
        return [self.entries[index].name for index in self.find_changed_tensors(threads)]

    def find_changed_tensors(self, threads: int | None = None) -> list[int]:
        """The same, as indices."""
        today = fingerprints(self._list_watched(), threads)
        versions = self._count_versions()
        known = zip(self._versions, versions, self._fingerprints, today, strict=True)
        return [index for index, (version, now, mark, new) in enumerate(known) if version != now or mark != new]


def dtype_name(tensor: torch.Tensor) -> str:
    """Name of a tensor's dtype as the manifest has it: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def _reject_shared(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Raise CommandError for tensors in the same memory: the update of one would write over the other's."""
    spans = []
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.numel() and not tensor.is_meta and not is_streamed(tensor):
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            last = sum((length - 1) * stride for length, stride in steps)
            first = tensor.data_ptr()
            spans.append((str(tensor.device), first, first + (last + 1) * tensor.element_size(), name))
    for (device, _, stop, name), (other, first, _, other_name) in itertools.pairwise(sorted(spans)):
        if device == other and first < stop:
            raise CommandError(
                f"parameters must have memory of their own, but {name!r} and {other_name!r} share theirs: tie them as "
                "one Parameter (b.weight = a.weight), or clone one"
            )
