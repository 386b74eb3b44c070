"""Models larger than memory: the weights of a model's blocks stay on flash and are read as each block runs.

    stream = stream_blocks(model, optimizer)       # from here on the blocks' weights are in the optimizer's store alone
    loss = model(...)                              # each block: read, run, give back; the next one is read meanwhile
    loss.backward()                                # in the other order, once more
    optimizer.step()                               # updates the store; nothing is copied back

Blocks are found by structure: the members of the outermost ModuleLists, ModuleDicts and Sequentials. All else
(embeddings, heads, last norms, and what they share with blocks) stays in memory, and so do buffers. Frozen weights lie
in a file of their own beside the state, which has no name and goes with the process.

A block's weights are the store's masters of the last committed step, rounded: the same bits that a tensor in memory
has. The graph that backward needs holds references to them in the place of weights; other saved tensors pass to the
hooks that are there already (torch.autograd.graph.save_on_cpu, torch.utils.checkpoint), so these work as without.

In memory at once are the weights of CACHED_BLOCKS blocks, of those being read (READ_AHEAD_BLOCKS), and of each block
that runs inside another; and one extent of the store for each of three threads that read a block.

Limits: a cast copy of a weight (autocast) is an activation and stays in the graph. Outside its block a weight holds NaN
(nearflash.training.step.streamed); `model.state_dict()` reads the values, and needs memory for all of them.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from nearflash.abi.errors import CommandError, StateError
from nearflash.abi.optimizers import MasterFormat
from nearflash.storage import Extent, aligned_buffer
from nearflash.storage.io.backend import BLOCK_BYTES
from nearflash.storage.io.direct import DirectFile
from nearflash.storage.io.reuse import reuse_buffer
from nearflash.support.closing import Closing
from nearflash.support.prefetch import Prefetcher
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.step.host_memory import is_plain
from nearflash.training.step.streamed import is_streamed, mark_streamed, placeholder, unmark

__all__ = ["BlockStream", "find_blocks", "split_for_muon", "stream_blocks"]

_WITHOUT_FORWARD = (torch.nn.ModuleList, torch.nn.ModuleDict)
_LISTS = (*_WITHOUT_FORWARD, torch.nn.Sequential)
_READERS = 3
CACHED_BLOCKS = 2
"""Blocks in memory at once: the one that runs, and the one before it, whose backward may not have ended."""
READ_AHEAD_BLOCKS = 1
"""Blocks that are read before they run: those behind the one that runs, in forward or in backward order."""
_Weights = dict[torch.nn.Parameter, torch.Tensor]


def find_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Members of the outermost lists of modules that have parameters, each once, in the model's order."""
    blocks: list[torch.nn.Module] = []
    for child in model.children():
        if isinstance(model, _LISTS) and not isinstance(child, _WITHOUT_FORWARD):
            blocks += [child] if next(child.parameters(), None) is not None else []
        else:
            blocks += find_blocks(child)
    return list(dict.fromkeys(blocks))


def split_for_muon(model: torch.nn.Module, **adamw: Any) -> list[dict[str, Any]]:
    """Groups for NearStorageMuon, with names: the matrices of blocks but for embeddings, and all else by AdamW.

    adamw: scalars of the second group. What blocks share with the modules around them goes to AdamW.
    """
    blocks = find_blocks(model)
    outside = [
        parameter for module in _modules_outside(model, blocks) for parameter in module.parameters(recurse=False)
    ]
    embedded = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    others = {id(parameter) for parameter in (*outside, *embedded)}
    hidden = {id(p) for block in blocks for p in block.parameters() if p.ndim == 2 and id(p) not in others}
    named = list(model.named_parameters())
    return [
        {"params": [(name, p) for name, p in named if id(p) in hidden]},
        {"params": [(name, p) for name, p in named if id(p) not in hidden], "use_muon": False, **adamw},
    ]


def stream_blocks(
    model: torch.nn.Module, optimizer: NearStorageOptimizer, *, cached_blocks: int = CACHED_BLOCKS,
    read_ahead: int = READ_AHEAD_BLOCKS,
) -> "BlockStream":  # fmt: skip
    """Free the weights of `model`'s blocks and read them from `optimizer`'s store whenever a block runs.

    cached_blocks: so many stay in memory. read_ahead: so many more are read before they run (0: none). Raises
    CommandError for a model without blocks, or an optimizer that has not all of their trained weights; StorageFullError
    where the frozen ones have no room. Nothing was changed then.
    """
    if not isinstance(optimizer, NearStorageOptimizer):
        raise CommandError(f"optimizer must be a NearStorageOptimizer, whose store has the weights, not {optimizer!r}")
    optimizer._check_open()
    if optimizer._settings.delta_bytes:
        raise CommandError("delta_bytes must be 0 for blocks to be streamed: a delta compares weights in memory")
    if cached_blocks < 1:
        raise CommandError(f"cached_blocks must be at least 1, not {cached_blocks}")
    if read_ahead < 0:
        raise CommandError(f"read_ahead must be at least 0, not {read_ahead}")
    blocks = find_blocks(model)
    if not blocks:
        raise CommandError(
            f"{type(model).__name__} must have a ModuleList, ModuleDict or Sequential of blocks, but has none: put the "
            "modules that run one after another into one"
        )
    inside = {parameter for block in blocks for parameter in block.parameters()}
    stays = {parameter for module in _modules_outside(model, blocks) for parameter in module.parameters(recurse=False)}
    known = {id(member.tensor) for member in (*optimizer._optimizer_state.flat.members,
                                              *optimizer._optimizer_state.flat.waiting)}  # fmt: skip
    streamed = [parameter for parameter in model.parameters() if parameter in inside and parameter not in stays]
    for name, parameter in model.named_parameters():
        if parameter in inside and parameter.requires_grad and id(parameter) not in known:
            raise CommandError(f"parameter {name!r} must be in the optimizer, or frozen, for its block to be streamed")
        if is_streamed(parameter):
            raise CommandError(f"parameter {name!r} must not be streamed already: close the stream that has it")
    parameters = [parameter for parameter in streamed if parameter.requires_grad or is_plain(parameter)]
    return BlockStream(blocks, parameters, optimizer, cached_blocks, read_ahead)


def _modules_outside(model: torch.nn.Module, blocks: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    if model not in blocks:
        yield model
        for child in model.children():
            yield from _modules_outside(child, blocks)


class BlockStream(Closing):
    """The weights of blocks, on flash; made by `stream_blocks`. `close` brings them back into memory."""

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        parameters: Sequence[torch.nn.Parameter],
        optimizer: NearStorageOptimizer,
        cached_blocks: int,
        read_ahead: int,
    ) -> None:
        self.blocks = tuple(blocks)
        """The modules whose weights come and go."""
        self._source = _Source(parameters, optimizer)
        streamed = set(parameters)
        self._parameters = {
            module: [parameter for parameter in module.parameters() if parameter in streamed]
            for block in blocks
            for module in block.modules()
        }
        self._block_of = {parameter: block for block in blocks for parameter in self._parameters[block]}
        self._cached_blocks, self._ahead_blocks = cached_blocks, read_ahead
        self._places = {block: place for place, block in enumerate(self.blocks)}
        self._last: int | None = None
        """Place of the block that was used last, at this version."""
        self._ahead: Prefetcher[tuple[str, torch.nn.Module], _Weights] = Prefetcher(
            "nearflash-blocks", lambda key: self._source.read(self._parameters[key[1]]), limit=max(read_ahead, 1)
        )
        self._held: OrderedDict[torch.nn.Module, None] = OrderedDict()
        self._values: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._version = self._source.version
        self._users: Counter[torch.nn.Parameter] = Counter()
        self._owners: dict[int, torch.nn.Parameter] = {}
        """Weights by the address of their memory, while their block runs."""
        self._running: list[tuple[torch.nn.Module, ExitStack]] = []
        self._handles: list[RemovableHandle] = []
        for parameter in parameters:
            mark_streamed(parameter, _Values(self._source, parameter))
            parameter.data = placeholder(parameter)
        for module, members in self._parameters.items():
            if members:
                self._attach(module)

    @property
    def read_bytes(self) -> int:
        """Read from flash so far."""
        return self._source.read_bytes

    def close(self) -> None:
        """Bring all weights into memory, as they are in the store, and leave the model as it was before."""
        self._ahead_blocks = 0
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for block in self.blocks:
            self._load(block)
            for parameter in self._parameters[block]:
                values = self._values[parameter]
                if is_streamed(parameter):
                    parameter.data = values.clone()
        for parameter in self._block_of:
            unmark(parameter)
        self._forget()
        self._ahead.close()
        self._source.note_resident()
        self._source.close()

    def _attach(self, module: torch.nn.Module) -> None:
        """To parts of a block, too: a checkpoint inside a block's forward runs these again, and not the block."""
        add = self._handles.append
        add(module.register_forward_pre_hook(lambda module, _: self._enter(module)))
        add(module.register_forward_hook(lambda module, _, __: self._leave(module), always_call=True))
        add(module.register_state_dict_pre_hook(lambda module, *_: self._enter(module)))
        add(module.register_state_dict_post_hook(lambda module, *_: self._leave(module)))

    # A block's weights come and go

    def _enter(self, module: torch.nn.Module) -> None:
        members = self._parameters[module]
        if module in self._places:
            self._load(module)
            self._read_ahead(module)
        for parameter in members:
            values = self._value(parameter)
            self._users[parameter] += 1
            if self._users[parameter] == 1:
                parameter.data = values
                self._owners[values.untyped_storage().data_ptr()] = parameter
        saved = ExitStack()
        if torch.is_grad_enabled() and not _keeps_references(self):
            saved.enter_context(_keep_references(self))
        self._running.append((module, saved))

    def _leave(self, module: torch.nn.Module) -> None:
        """Also after an error, which may have come before `_enter` had ended."""
        if not self._running or self._running[-1][0] is not module:
            return
        self._running.pop()[1].close()
        for parameter in self._parameters[module]:
            self._users[parameter] -= 1
            if not self._users[parameter]:
                self._owners.pop(parameter.untyped_storage().data_ptr(), None)
                parameter.data = placeholder(parameter)

    def _value(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        if self._version != self._source.version or parameter not in self._values:
            self._load(self._block_of[parameter])
        return self._values[parameter]

    def _load(self, block: torch.nn.Module) -> None:
        if self._version != self._source.version:
            self._forget()
        self._held[block] = None
        self._held.move_to_end(block)
        self._evict()
        members = self._parameters[block]
        if any(parameter not in self._values for parameter in members) and (self._version, block) in self._ahead:
            loaded = self._ahead.take((self._version, block))
            self._values |= {parameter: values for parameter, values in loaded.items() if parameter not in self._values}
        if missing := [parameter for parameter in members if parameter not in self._values]:
            self._values |= self._source.read(missing)

    def _read_ahead(self, block: torch.nn.Module) -> None:
        """Begin to read the blocks behind one that is used, in the direction from the one that was used before."""
        place, last = self._places[block], self._last
        if place == last or not self._ahead_blocks:
            return
        self._last = place
        step = -1 if last is not None and place < last else 1
        places = [place + step * (1 + n) for n in range(self._ahead_blocks)]
        due = [self.blocks[at] for at in places if 0 <= at < len(self.blocks)]
        keys = [(self._version, following) for following in due if following not in self._held]
        self._ahead.drop([key for key in self._ahead if key not in keys])
        for key in keys:
            self._ahead.begin(key)

    def _evict(self) -> None:
        while len(self._held) > self._cached_blocks:
            self._held.popitem(last=False)
        kept = {parameter for block in self._held for parameter in self._parameters[block]}
        kept |= {parameter for block, _ in self._running for parameter in self._parameters[block]}
        for parameter in self._values.keys() - kept:
            del self._values[parameter]

    def _forget(self) -> None:
        self._ahead.drop()
        self._last = None
        self._values.clear()
        self._held.clear()
        self._version = self._source.version

    # In the graph of backward

    def owner_of(self, tensor: torch.Tensor) -> torch.nn.Parameter | None:
        """The weight of a block that runs whose memory a tensor shows, with its dtype."""
        owner = self._owners.get(tensor.untyped_storage().data_ptr())
        return owner if owner is not None and owner.dtype is tensor.dtype else None

    def version(self) -> str:
        """Tell the weights that are read now from those of other steps."""
        return self._source.version

    def values_of(self, parameter: torch.nn.Parameter, version: str) -> torch.Tensor:
        """Its values, for backward. Raises RuntimeError where those of that version are gone."""
        if version != self._source.version:
            raise RuntimeError(
                "weights must be those of the forward pass during backward, but the optimizer has made a step since: "
                "run backward before it"
            )
        if (block := self._block_of[parameter]) in self._held:
            self._held.move_to_end(block)
        values = self._value(parameter)
        self._read_ahead(block)
        return values


class _Reference:
    """A weight, or a view of one, in the place of its values."""

    def __init__(self, stream: BlockStream, parameter: torch.nn.Parameter, view: torch.Tensor) -> None:
        self._stream, self._parameter, self._version = stream, parameter, stream.version()
        self._place = view.shape, view.stride(), view.storage_offset()

    def values(self) -> torch.Tensor:
        """As the view was."""
        return self._stream.values_of(self._parameter, self._version).as_strided(*self._place)


def _keeps_references(stream: BlockStream) -> bool:
    """Whether the hooks that save tensors now are this stream's."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return around is not None and getattr(around[0], "stream", None) is stream


def _keep_references(stream: BlockStream) -> torch.autograd.graph.saved_tensors_hooks:
    """Hooks that save references to weights, and hand other tensors to the hooks around these."""
    around = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        if (owner := stream.owner_of(tensor)) is not None:
            return _Reference(stream, owner, tensor)
        return around[0](tensor) if around else (tensor, tensor._version)

    pack.stream = stream  # type: ignore[attr-defined]

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, _Reference):
            return packed.values()
        if around:
            result: torch.Tensor = around[1](packed)
            return result
        tensor, version = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(tensor.shape)} is at version {tensor._version}; expected version {version} instead"
            )
        found: torch.Tensor = tensor
        return found

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Values:
    """Reads the values of one parameter, for the optimizer."""

    def __init__(self, source: "_Source", parameter: torch.nn.Parameter) -> None:
        self._source, self._parameter = source, parameter

    def __call__(self) -> torch.Tensor:
        return self._source.read([self._parameter])[self._parameter]


class _Source:
    """Reads weights from the optimizer's store, and frozen ones from a file."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: NearStorageOptimizer) -> None:
        self._optimizer = optimizer
        self.read_bytes, self._lock = 0, Lock()
        self._frozen: DirectFile | None = None
        self._offsets: dict[torch.nn.Parameter, int] = {}
        stored = self._find_stored()
        self._write_frozen([parameter for parameter in parameters if id(parameter) not in stored])

    @property
    def version(self) -> str:
        """Changes with each commit of the store."""
        return self._optimizer._optimizer_state.store.stamp.commit

    def _find_stored(self) -> dict[int, int]:
        return {id(tensor): index for index, tensor in enumerate(self._optimizer._optimizer_state.flat.tensors)}

    def read(self, parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Their values, in memory of their own. Raises StateError."""
        stored = self._find_stored()
        values = {p: torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in parameters}
        inside = {stored[id(p)]: values[p].view(-1) for p in parameters if id(p) in stored}
        extents = self._optimizer._optimizer_state.flat.extents_of(inside)
        with torch.no_grad(), ThreadPoolExecutor(_READERS) as pool:
            self._count(sum(pool.map(lambda extent: self._read_extent(extent, inside), extents)))
            for parameter in parameters:
                if id(parameter) not in stored:
                    self._read_frozen(parameter, values[parameter])
        return values

    def _read_extent(self, extent: Extent, values: Mapping[int, torch.Tensor]) -> int:
        """Give tensors, by index, what an extent has of them; bytes that were read."""
        state = self._optimizer._optimizer_state
        pieces = [piece for piece in state.flat.pieces(extent.start, extent.stop) if piece.tensor in values]
        split = state.store.manifest.master is MasterFormat.SPLIT  # then bf16 weights are an array of their own
        halves = split and all(values[piece.tensor].dtype is torch.bfloat16 for piece in pieces)
        array = state.store.manifest.array("weight" if halves else "p")
        memory = reuse_buffer(array.extent_bytes(extent))
        state.store.read(array.name, extent, memory)
        held = torch.from_numpy(memory).view(torch.bfloat16 if halves else torch.float32)
        for piece in pieces:
            new = held[piece.position - extent.start :][: piece.length]
            values[piece.tensor][piece.first : piece.first + piece.length].copy_(new)
        return memory.nbytes

    def _count(self, size_bytes: int) -> None:
        with self._lock:
            self.read_bytes += size_bytes

    def note_resident(self) -> None:
        """The tensors of the optimizer hold their values again."""
        self._optimizer._optimizer_state.flat.note_contents()

    def close(self) -> None:
        """Give the file of frozen weights back."""
        if self._frozen is not None:
            self._frozen.close()
            self._frozen = None

    # Frozen weights

    def _write_frozen(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        if not parameters:
            return
        sizes = [_count_bytes(parameter) for parameter in parameters]
        path = Path(self._optimizer.store.path)
        path = path.with_name(f"{path.name}.frozen")
        self._frozen = DirectFile.create(path, sum(sizes), direct=self._optimizer._settings.direct)
        path.unlink()  # it goes with the process
        offset = 0
        for parameter, size_bytes in zip(parameters, sizes, strict=True):
            memory = aligned_buffer(size_bytes)
            content = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            memory[: content.size] = content
            self._frozen.write(offset, memory)
            self._offsets[parameter] = offset
            offset += size_bytes

    def _read_frozen(self, parameter: torch.nn.Parameter, out: torch.Tensor) -> None:
        if self._frozen is None or parameter not in self._offsets:
            raise StateError("a streamed weight must be in the optimizer's store or be frozen, but is in neither")
        memory = aligned_buffer(_count_bytes(parameter))
        self._frozen.read(self._offsets[parameter], memory)
        used = torch.from_numpy(memory[: out.numel() * out.element_size()])
        out.copy_(used.view(out.dtype).view(out.shape))
        self._count(memory.nbytes)


def _count_bytes(parameter: torch.Tensor) -> int:
    return max(1, -(-parameter.numel() * parameter.element_size() // BLOCK_BYTES)) * BLOCK_BYTES
