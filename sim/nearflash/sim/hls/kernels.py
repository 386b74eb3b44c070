"""Which HLS kernel runs a rule, with which scalars."""

from dataclasses import dataclass, replace
from functools import singledispatch
from pathlib import Path

from nearflash.abi.errors import CommandError
from nearflash.abi.kernel.config import UpdateConfig
from nearflash.abi.optimizers import (
    AdagradStep,
    AdamStep,
    LionStep,
    MasterFormat,
    OptimizerStep,
    Profile,
    SgdStep,
    StateFormat,
)
from nearflash.sim.hls.kernel_text import update_kernel
from nearflash.sim.hls.library import HlsLibrary
from nearflash.sim.hls.rule import HlsRule
from nearflash.support.native import CompileError

__all__ = ["SHIPPED", "HlsCall", "HlsKernel", "call_of", "generate_tops"]


@dataclass(frozen=True)
class HlsKernel:
    """An update kernel: a struct template, its header, and the names of its fields."""

    name: str
    optimizer: str
    header: str
    arrays: tuple[str, ...]
    """Fields of State, p first."""
    scalars: tuple[str, ...]
    folder: Path | None = None
    """Where the header lies, for one that is not of hls/include."""
    topk: bool = False
    """The gradient is a Top-K stream, expanded on its way to the lanes."""
    delta: bool = False
    """What the copy changes is written in its place (nearflash.abi.delta)."""
    split: bool = False
    """p is a split master."""

    @property
    def ports(self) -> tuple[str, ...]:
        """Arrays in memory, in the order of the arguments."""
        return (*MasterFormat.SPLIT.arrays, *self.arrays[1:]) if self.split else self.arrays

    @property
    def function(self) -> str:
        """Name of the top, and of its file."""
        return f"update_{self.name}{'_topk' * self.topk}{'_delta' * self.delta}{'_split' * self.split}"

    @property
    def text(self) -> str:
        """C++ of the kernel's top."""
        name = self.function.removeprefix("update_")
        variant = {"topk": self.topk, "delta": self.delta, "split": self.split}
        return update_kernel(name, self.optimizer, self.header, self.arrays, self.scalars, **variant)

    def library(self, config: UpdateConfig, real: str = "float") -> HlsLibrary:
        """The kernel, compiled for the lanes and ports of `config` with the scalar type `real`, float or Fp32.

        Raises CompileError.
        """
        try:
            return HlsLibrary.build(self.function, self.text, config, real=real, folder=self.folder)
        except CompileError as error:
            raise self._in_users_words(error) from error

    def _in_users_words(self, error: CompileError) -> CompileError:
        """An error of the top is one of names: at the struct whose fields are not those of the Python definition."""
        if self.folder is None or not error.diagnosis.startswith("kernel.cpp"):
            return error
        path = self.folder / self.header
        struct, names = ("Scalars", self.scalars) if "Scalars" in error.diagnosis else ("State", self.arrays)
        lines = path.read_text().splitlines()
        number = next((k for k, line in enumerate(lines, 1) if f"struct {struct}" in line), 1)
        where = f"{path}:{number}: fields of {struct} must be {', '.join(names)}, as in the Python definition"
        return CompileError(f"{where}\n{error.diagnosis}", error.log)


@dataclass(frozen=True)
class HlsCall:
    """A kernel and the values of its scalars for one rule."""

    kernel: HlsKernel
    scalars: dict[str, float]


_SUFFIX = {Profile.IEEE: "", Profile.TORCH_FUSED: "TorchFused", Profile.DEEPSPEED: "DeepSpeed"}


def _make(
    name: str, optimizer: str, file: str, arrays: str, scalars: str, rule: type[OptimizerStep]
) -> dict[Profile, HlsKernel]:
    """A kernel of each operation order that the rule has."""
    header, fields = f"nearflash/optimizers/{file}", (tuple(arrays.split()), tuple(scalars.split()))
    names = {profile: f"{name}_{profile}" if suffix else name for profile, suffix in _SUFFIX.items()}
    return {
        profile: HlsKernel(names[profile], optimizer + _SUFFIX[profile], header, *fields) for profile in rule.PROFILES
    }


_ADAM = "beta1 one_minus_beta1 beta2 one_minus_beta2 eps step_size root decay decays"
_ADAMW = _make("adamw", "AdamW", "adam.hpp", "p m v", _ADAM, AdamStep)
_ADAM_L2 = _make("adam", "Adam", "adam.hpp", "p m v", _ADAM, AdamStep)
_SGD = _make("sgd", "Sgd", "sgd.hpp", "p", "lr decay", SgdStep)
_SGD_MOMENTUM = _make("sgd_momentum", "SgdMomentum", "sgd.hpp", "p m", "lr retained gain nesterov decay", SgdStep)
_ADAGRAD = _make("adagrad", "Adagrad", "adagrad.hpp", "p v", "step_size eps decay", AdagradStep)
_LION = _make("lion", "Lion", "lion.hpp", "p m", "lr beta1 one_minus_beta1 beta2 one_minus_beta2 decay", LionStep)
SHIPPED = tuple(
    kernel for kernels in (_ADAMW, _ADAM_L2, _SGD, _SGD_MOMENTUM, _ADAGRAD, _LION) for kernel in kernels.values()
)
"""Every kernel of ours."""


def generate_tops() -> dict[str, str]:
    """Texts of the tops in hls/kernels by file: profile ieee, and of each variant one. Others are made when needed."""
    kernels = [kernels[Profile.IEEE] for kernels in (_ADAMW, _ADAM_L2, _SGD, _SGD_MOMENTUM, _ADAGRAD, _LION)]
    adamw = kernels[0]
    variants = replace(adamw, topk=True), replace(adamw, delta=True), replace(adamw, split=True)
    return {f"{kernel.function}.cpp": kernel.text for kernel in (*kernels, *variants)}


def call_of(rule: OptimizerStep) -> HlsCall:
    """The kernel and the scalars of a rule. Raises CommandError for one that has no HLS kernel."""
    if rule.state_format is not StateFormat.FP32:
        raise CommandError(f"state_format must be fp32 on an HLS kernel, not {rule.state_format}")
    return _call_of(rule)


@singledispatch
def _call_of(rule: OptimizerStep) -> HlsCall:
    raise CommandError(f"rule must be one that has an HLS kernel, not {rule!r}; derive it from HlsRule")


@_call_of.register
def _(rule: HlsRule) -> HlsCall:
    header, scalars = rule.header(), rule.scalars()
    name, arrays = type(rule).optimizer, ("p", *rule.ARRAYS)
    return HlsCall(HlsKernel(name, type(rule).__name__, header.name, arrays, tuple(scalars), header.parent), scalars)


@_call_of.register
def _(rule: AdamStep) -> HlsCall:
    kernel = (_ADAMW if rule.decoupled else _ADAM_L2)[rule.profile]
    inverse = rule.profile is Profile.DEEPSPEED
    root = rule.inverse_bias_correction2_sqrt if inverse else rule.bias_correction2_sqrt
    return _by_name(kernel, rule, root=root, decays=float(rule.weight_decay > 0))


@_call_of.register
def _(rule: SgdStep) -> HlsCall:
    if not rule.momentum:
        return HlsCall(_SGD[rule.profile], {"lr": rule.lr, "decay": rule.decay})
    nesterov = rule.momentum if rule.nesterov else 0.0
    values = {"lr": rule.lr, "retained": rule.retained, "gain": rule.gain, "nesterov": nesterov, "decay": rule.decay}
    return HlsCall(_SGD_MOMENTUM[rule.profile], values)


@_call_of.register
def _(rule: AdagradStep) -> HlsCall:
    return _by_name(_ADAGRAD[rule.profile], rule)


@_call_of.register
def _(rule: LionStep) -> HlsCall:
    return _by_name(_LION[rule.profile], rule)


def _by_name(kernel: HlsKernel, rule: OptimizerStep, **given: float) -> HlsCall:
    """Scalars that are attributes of the rule, and those given."""
    return HlsCall(kernel, {name: given[name] if name in given else getattr(rule, name) for name in kernel.scalars})
