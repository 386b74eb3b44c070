"""A transformers Trainer whose optimizer state is near storage.

    arguments = TrainingArguments(...)
    trainer = Trainer(model, arguments, ..., callbacks=[Snapshots()],
                      optimizer_cls_and_kwargs=trainer_optimizer(arguments, path="/nvme/state"))
    trainer.train()

A run starts from the model that the Trainer has. Where the path holds an earlier run's state, that one is renamed to
`….previous`, with a warning. `trainer.train(resume_from_checkpoint=...)` resumes: from the snapshot in the checkpoint,
or from the earlier state where it is at the checkpoint's step.

The model may be in fp32, bf16 or fp16. `optimizers=(optimizer, None)` works, too: then
the Trainer clips the gradients, and the optimizer's `max_grad_norm` must be None, or they are clipped twice.
overlap="backward" gains nothing here: the Trainer multiplies all gradients (by 1 where it does not clip) when backward
has ended, so that each speculative step is a misprediction.
"""

import inspect
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from nearflash.abi.errors import CommandError, NearflashError, StateError
from nearflash.storage import StateStore
from nearflash.storage.state.snapshot import make_folder
from nearflash.support.files import give_name
from nearflash.training.integrations.checkpoints import FOLDER, files_of, restore, save
from nearflash.training.integrations.ranks import RankedOptimizer
from nearflash.training.integrations.shards import ShardedOptimizer, own_paths
from nearflash.training.optimizers.adagrad import NearStorageAdagrad
from nearflash.training.optimizers.adam import NearStorageAdamW
from nearflash.training.optimizers.lion import NearStorageLion
from nearflash.training.optimizers.optimizer import NearStorageOptimizer
from nearflash.training.optimizers.sgd import NearStorageSGD
from nearflash.training.step.settings import StepSettings

__all__ = ["Snapshots", "trainer_optimizer"]

_KINDS: dict[str, type[NearStorageOptimizer]] = {
    **dict.fromkeys(
        ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused",
         "paged_adamw_32bit"), NearStorageAdamW,
    ),
    "sgd": NearStorageSGD,
    "adagrad": NearStorageAdagrad,
    "lion_32bit": NearStorageLion,
    "paged_lion_32bit": NearStorageLion,
}  # fmt: skip
"""By TrainingArguments.optim."""
_NORM = "_nearflash_max_grad_norm"
"""On the arguments: the max_grad_norm that went to the optimizer."""
_IDENTITY, _STEP = "nearflash_identity", "nearflash_step"
"""In a handle."""
_OPEN: WeakValueDictionary[tuple[Path, ...], torch.optim.Optimizer] = WeakValueDictionary()
"""Optimizers of Trainers, by their files: a Trainer leaves its optimizer open."""


def trainer_optimizer(
    arguments: TrainingArguments,
    *,
    path: str | Path | Sequence[str | Path],
    kind: type[NearStorageOptimizer] | None = None,
    checkpoint: str | Path | None = None,
    sharded: bool | None = None,
    **options: Any,
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """`optimizer_cls_and_kwargs` of a Trainer with these arguments; `options` are the optimizer's, and come first.

    kind: of the optimizer; that of arguments.optim by default. Learning rate, betas and eps are those of `arguments`.
    Clipping becomes the optimizer's, which knows the norm anyway: arguments.max_grad_norm is 0 afterwards.
    checkpoint: as the Trainer will resume from; its snapshot replaces the state. Without it the run starts from the
    model's weights, or resumes from the checkpoint that `train` is given; resume="auto" resumes from a state there.
    With several processes each has a RankedOptimizer on `path`/rank0 and so on.
    sharded: whether parameters are, or will be, DTensors: as arguments.fsdp says by default. Then it is a
    ShardedOptimizer, which resumes from `checkpoint` or with resume=True only.

    Raises CommandError for an arguments.optim that is none of these, and as `restore`.
    """
    kind = kind or _kind(arguments)
    accepted = inspect.signature(kind).parameters
    chosen: dict[str, Any] = {"path": path, "lr": arguments.learning_rate}
    if "betas" in accepted:
        chosen["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
    if issubclass(kind, NearStorageAdamW):
        chosen["eps"] = arguments.adam_epsilon
    if norm := arguments.max_grad_norm or getattr(arguments, _NORM, None):
        chosen["max_grad_norm"] = norm
        setattr(arguments, _NORM, norm)
        arguments.max_grad_norm = 0.0
    chosen |= options
    rank = arguments.process_index if arguments.world_size > 1 else None
    base: type[torch.optim.Optimizer] = kind
    files = chosen["path"]
    if sharded := bool(getattr(arguments, "fsdp", None)) if sharded is None else sharded:
        base, chosen["kind"] = ShardedOptimizer, kind
        for folder in [files] if isinstance(files, str | Path) else files:
            make_folder(Path(folder))
        files = own_paths(files, arguments.process_index)
    elif rank is not None:
        base = RankedOptimizer
        chosen |= {"kind": kind, "path": (files := _own_paths(files, rank))}
    if checkpoint is not None:
        device = options.get("device", "")
        restore(checkpoint, files, devices=1 if isinstance(device, str) else len(device), rank=rank)
        chosen.setdefault("resume", True)
    if sharded:
        return base, chosen
    return _of_trainer(base, Path(arguments.output_dir).absolute()), chosen


class Snapshots(TrainerCallback):
    """At each save of the Trainer a snapshot of the state, in the folder `nearflash` of the checkpoint."""

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """See TrainerCallback."""
        optimizer = kwargs["optimizer"]
        save(getattr(optimizer, "optimizer", optimizer), _checkpoint(args, state))  # accelerate's wrapper


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder that the Trainer has just saved to; in a search each trial has a folder of its own."""
    name = f"checkpoint-{state.global_step}"
    folder = Path(args.output_dir) / name
    if state.is_hyper_param_search:
        trials = sorted(Path(args.output_dir).glob(f"*/{name}"), key=lambda each: each.stat().st_mtime_ns)
        folder = trials[-1] if trials else folder
    return folder


def _kind(arguments: TrainingArguments) -> type[NearStorageOptimizer]:
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if name not in _KINDS:
        raise CommandError(
            f"optim must be one of {', '.join(_KINDS)}, not {name!r}; choose one of them, or pass kind=, and "
            'state_format="mx8" for moments of 8 bits'
        )
    return _KINDS[name]


def _own_paths(path: str | Path | Sequence[str | Path], rank: int) -> list[Path]:
    given = [path] if isinstance(path, str | Path) else path
    paths = [Path(base) / f"rank{rank}" for base in given]
    for rank_path in paths:
        make_folder(rank_path)
    return paths


def _of_trainer(base: type[torch.optim.Optimizer], output: Path) -> type[torch.optim.Optimizer]:
    """A class like `base` that starts beside an earlier run's state, and resumes from the checkpoints in `output`."""

    class OfTrainer(base):  # type: ignore[misc, valid-type]
        def __init__(self, params: Any, **options: Any) -> None:
            paths = StepSettings(path=options["path"], device=options.get("device", "host")).paths
            self._paths = tuple(path.absolute() for path in paths)  # wherever the script goes
            options["path"] = self._paths
            self._given, self._output = options, output
            if (earlier := _OPEN.get(self._paths)) is not None:
                earlier.close()  # type: ignore[attr-defined] # its Trainer has made room for this one
            moved = [] if "resume" in options else _set_aside(self._paths, options.get("direct", True))
            try:
                super().__init__(params, **options)
            except BaseException:
                for path in (path for path in moved if not path.exists()):
                    give_name(_previous(path), path)
                raise
            _OPEN[self._paths] = self
            if moved:
                self._warning = self.register_step_pre_hook(lambda *_: self._warn())

        def _warn(self) -> None:
            self._warning.remove()
            warnings.warn(
                f"{self._paths[0]} held the state of an earlier run, which is {_previous(self._paths[0])} now: this "
                "run starts from the model's weights; to go on with that one pass resume_from_checkpoint, or "
                'resume="auto" to trainer_optimizer',
                stacklevel=2,
            )

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            handle: dict[str, Any] = next(iter(state_dict.get("state", {}).values()), {})
            wanted = handle.get(_IDENTITY), handle.get(_STEP)
            if (
                base is not RankedOptimizer
                and None not in wanted
                and wanted != (int(self.store.identity, 16), self.steps)
            ):
                self._resume(wanted)
            super().load_state_dict(state_dict)

        def _resume(self, wanted: tuple[Any, Any]) -> None:
            """Open the state of that identity and step, where it is a snapshot or the earlier state."""
            direct = self._given.get("direct", True)
            places = [*self._output.glob(f"checkpoint-*/{FOLDER}"), *self._output.glob(f"*/checkpoint-*/{FOLDER}")]
            sets = [[_previous(path) for path in self._paths], *map(files_of, places)]
            matching = next((files for files in sets if _version(files, direct) == wanted), None)
            if matching is None:
                return
            self.close()
            if matching == sets[0]:
                for path in self._paths:
                    give_name(_previous(path), path)
            else:
                restore(matching[0].parent.parent, self._paths, devices=len(self._paths), direct=direct)
            if (warning := getattr(self, "_warning", None)) is not None:
                warning.remove()
            super().__init__(self.param_groups, **(self._given | {"resume": True}))

    OfTrainer.__name__, OfTrainer.__qualname__ = base.__name__, base.__qualname__
    OfTrainer.__doc__ = base.__doc__
    return OfTrainer


def _previous(path: Path) -> Path:
    return path.with_name(f"{path.name}.previous")


def _set_aside(paths: Sequence[Path], direct: bool) -> list[Path]:
    """Rename an earlier run's state; its files. Raises StateError where they are no state, damaged, or in use."""
    there = [path for path in paths if path.exists()]
    if not there or any(not path.is_file() for path in there):
        return []  # the optimizer reports what they are
    _open_soon(paths, direct).close()
    for path in there:
        give_name(path, _previous(path))
    return there


def _open_soon(paths: Sequence[Path], direct: bool) -> StateStore:
    """The store, once its files are released: an optimizer that nobody refers to closes them a little later."""
    for _ in range(20):
        try:
            return StateStore.open(paths, direct=direct)
        except StateError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            time.sleep(0.1)
    return StateStore.open(paths, direct=direct)


def _version(files: Sequence[Path], direct: bool) -> tuple[int, int] | None:
    """(identity, step) of the state in these files; None where there is none."""
    if files and all(path.is_file() for path in files):
        with warnings.catch_warnings(), suppress(NearflashError):
            warnings.simplefilter("ignore")
            with StateStore.open(files, direct=direct) as store:
                return int(store.identity, 16), store.steps
    return None
