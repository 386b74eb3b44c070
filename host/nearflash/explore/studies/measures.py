"""Measures to compare with a published figure: functions by name, whose parameters a row of a data file gives.

Every function takes plain values and returns a number. A system on InstInfer's host is a table: system (instinfer,
flexgen, flexgen-sparq, deepspeed), batch (a number, or "best" of powers of two up to 256), drives, and for instinfer
its selection.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

from nearflash.abi.errors import CommandError, PlanError
from nearflash.explore.outcome import Outcome
from nearflash.explore.shapes import shape
from nearflash.explore.ssd import Ssd
from nearflash.explore.systems import kvnand
from nearflash.explore.systems.flexgen import flexgen, zero_inference
from nearflash.explore.systems.ifc import EVERY_MECHANISM, QUANTS, Arrangement, Decode, Die
from nearflash.explore.systems.instinfer import Serving, instinfer_step, instinfer_throughput
from nearflash.explore.systems.kvnand import decode_step
from nearflash.explore.systems.layered import LayeredHost, Placement, bitmap_fraction, layer_pass
from nearflash.explore.systems.smart_infinity import SmartSsd, Training, speed_up, training_step
from nearflash.explore.tables import read_part
from nearflash.planning.cost import predict
from nearflash.planning.policy import OffloadPolicy, Shares
from nearflash.planning.profile import load_machine
from nearflash.planning.terms import Workload

__all__ = ["MEASURES", "measure"]

_BATCHES = (4, 8, 16, 32, 64, 128, 256)
_KV_PHASES = ("flash", "KV read", "KV write")
_DIES = 16
_SCANNED = 150
"""Steps of 5 % of contexts from 1,024 tokens, in which the last crossing is looked for."""


def measure(name: str, parameters: Mapping[str, Any]) -> float:
    """The value. Raises CommandError for another name or parameters that it does not take, PlanError for bad ones."""
    if name not in MEASURES:
        raise CommandError(f"measure must be one of {', '.join(MEASURES)}, not {name!r}")
    try:
        return float(MEASURES[name](**parameters))
    except TypeError as error:
        raise CommandError(f"parameters of {name} must be those that it takes: {error}") from error


def _placement(layers: Mapping[str, int]) -> Placement:
    return Placement(layers.get("gpu", 0), layers.get("cpu", 0), layers.get("ssd", 0))


def pass_seconds(model: str, layers: Mapping[str, int], format: str = "dense", bits: int = 16,
                 direct: bool = False) -> float:  # fmt: skip
    """Seconds of one pass over the placed layers, half of the weights zero in the format bitmap."""
    if format not in ("dense", "bitmap"):
        raise PlanError(f"format must be dense or bitmap, not {format!r}")
    stored = bitmap_fraction(bits) if format == "bitmap" else 1.0
    outcome = layer_pass(
        model, _placement(layers), LayeredHost.endor(), stored_fraction=stored, bits=bits, direct=direct
    )
    return outcome.seconds


def pass_speed_up(over: Mapping[str, int], **given: Any) -> float:
    """Over a dense pass with the layers of `over`."""
    return pass_seconds(given["model"], over, bits=given.get("bits", 16)) / pass_seconds(**given)


def _bitmap_size(bits: int) -> float:
    return bitmap_fraction(bits)


def _step(system: str, batch: int, drives: int = 1, selection: str = "dense") -> Outcome:
    serving = Serving(batch=batch)
    if system == "instinfer":
        return instinfer_step(serving, drives, selection)
    if system == "deepspeed":
        return zero_inference(serving)
    if system not in ("flexgen", "flexgen-sparq"):
        raise PlanError(f"system must be instinfer, flexgen, flexgen-sparq or deepspeed, not {system!r}")
    return flexgen(serving, drives, sparq=system == "flexgen-sparq")


def _fits(given: Mapping[str, Any]) -> bool:
    return _step(**given).fits


def _throughput(given: Mapping[str, Any]) -> float:
    if given["batch"] == "best":
        return max(_throughput({**given, "batch": batch}) for batch in _BATCHES if _fits({**given, "batch": batch}))
    if given["system"] == "instinfer":
        return instinfer_throughput(
            Serving(batch=given["batch"]), given.get("drives", 1), given.get("selection", "dense")
        )
    return _step(**given).rate


def _rate(system: str, batch: int, drives: int = 1, selection: str = "dense") -> float:
    """Tokens a second."""
    return _throughput({"system": system, "batch": batch, "drives": drives, "selection": selection})


def _feasible_batch(**given: Any) -> float:
    return max(batch for batch in _BATCHES if _fits({**given, "batch": batch}))


def _best_batch(**given: Any) -> float:
    """The batch of most tokens a second, of those that fit."""
    feasible = [batch for batch in _BATCHES if _fits({**given, "batch": batch})]
    return max(feasible, key=lambda batch: _throughput({**given, "batch": batch}))


def _throughput_ratio(ours: Mapping[str, Any], over: Mapping[str, Any]) -> float:
    return _throughput(ours) / _throughput(over)


def _kv_share(**given: Any) -> float:
    return _step(**given).share(*_KV_PHASES)


def _update_share(**given: Any) -> float:
    return training_step(Training(**given)).share("state read", "update", "state write")


def _speed_up(**given: Any) -> float:
    return speed_up(Training(**given))


def _saturation(model: str, gpu: str, gain: float = 0.05, most: int = 16) -> float:
    seconds = [training_step(Training(model, drives=drives, gpu=gpu)).seconds for drives in range(1, most + 1)]
    gains = [before / after - 1 for before, after in pairwise(seconds)]
    return next((drives for drives, measured_gain in enumerate(gains, 1) if measured_gain <= gain), most)


def _serial_share() -> float:
    drive = read_part(SmartSsd, "smartssd")
    read, written = 16 / drive.read_bytes_per_s, 12 / drive.write_bytes_per_s
    return max(read, written) / (read + written)


def _updater_rate() -> float:
    return read_part(SmartSsd, "smartssd").updater_bytes_per_s / 16 / 1e9


def _kv(model: str, context: int, arrangement: str, quant: str, dies: int = _DIES) -> Outcome:
    decode = Decode(model, context, quant)
    if arrangement.startswith("Base"):
        return decode_step(decode, Arrangement(arrangement))
    kind = "" if arrangement == "best" else arrangement
    outcome = kvnand.best(decode, dies, kind)
    if outcome is None:
        raise PlanError(f"{dies} dies must hold {model} and {context} tokens in {quant}; they do not")
    return outcome


def _decode_ratio(models: Sequence[str], context: int, over: str, arrangement: str, quant: str,
                  dies: int = _DIES) -> float:  # fmt: skip
    ratios = [
        _kv(model, context, over, quant, dies).seconds / _kv(model, context, arrangement, quant, dies).seconds
        for model in models
    ]
    return float(prod(ratios) ** (1 / len(ratios)))


def _energy_ratio(model: str, context: int, over: str, arrangement: str, quant: str) -> float:
    return _kv(model, context, arrangement, quant).joules / _kv(model, context, over, quant).joules


def _decode_rate(model: str, context: int, dies: int = _DIES) -> float:
    """The best arrangement and quantisation."""
    outcomes = [kvnand.best(Decode(model, context, quant), dies) for quant in QUANTS]
    return max(outcome.rate for outcome in outcomes if outcome is not None)


def _best_split(model: str, context: int, quant: str, dies: int, part: str) -> float:
    weights, kv = _kv(model, context, "D", quant, dies).system.removeprefix("D-(").removesuffix(")").split("+")
    if part not in ("weights", "kv"):
        raise PlanError(f"part must be weights or kv, not {part!r}")
    return float(weights if part == "weights" else kv)


def _crossing(model: str, quant: str, dies: int, without: Sequence[str] = ()) -> float:
    """Tokens from which the fastest D is always faster than C, by time alone: neither must hold them. Infinite if none.

    without: mechanisms that are off. C's time has steps, so that the two may cross several times: the last one counts.
    """
    mechanisms = EVERY_MECHANISM.without(*without)

    def ahead(context: int) -> bool:
        compact, *discrete = (
            decode_step(Decode(model, context, quant), arrangement, mechanisms).seconds
            for arrangement in kvnand.splits(dies)
        )
        return min(discrete, default=float("inf")) < compact

    scanned = [2**exponent for exponent in range(10)]
    scanned += [int(1024 * 1.05**step) for step in range(_SCANNED)]
    behind = [context for context in scanned if not ahead(context)]
    if scanned[-1] in behind:
        return float("inf")
    least = max(behind, default=0)
    most = next(context for context in scanned if context > least)
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if ahead(middle) else (middle + 1, most)
    return float(least)


def _endurance(model: str, context: int, quant: str, tokens_per_s: float, years: float) -> float:
    return kvnand.endurance_cycles(Decode(model, context, quant), tokens_per_s, years)


def _room(model: str, context: int, arrangement: str, quant: str, dies: int = _DIES) -> float:
    """Bytes of what is fullest, over bytes that it has to hold."""
    kind = Arrangement(arrangement) if arrangement.startswith("Base") else Arrangement(arrangement, dies)
    found = decode_step(Decode(model, context, quant), kind)
    return min(found.capacity_bytes[tier] / held for tier, held in found.memory_bytes.items())


def _multiply_share(reuse: int, multipliers: int) -> float:
    """Seconds that so many multipliers of a plane take for a page of 16-bit elements, over tR."""
    die = replace(read_part(Die, "kvnand"), fmac_count=multipliers)
    return die.multiply_s(16, reuse) / (die.read_us * 1e-6)


def _die_gigabits() -> float:
    return read_part(Die, "kvnand").flash_bytes * 8 / 2**30


def _flash_rate(drive: str) -> float:
    return read_part(Ssd, drive).read_bytes_per_s / 1e9


def _head_seconds(drive: str, tokens: int, dim: int) -> float:
    return 4 * dim * tokens / read_part(Ssd, drive).read_bytes_per_s


def _flexgen_t4(model: str, prompt: int, gbs: int, batches: int, percent: Sequence[float], part: str,
                overlap: bool = True) -> float:  # fmt: skip
    """FlexGen on its own machine, by the planner: 32 tokens; part: tokens_per_second, or PHASE or PHASE PART in s."""
    if len(percent) != 6:
        raise PlanError(f"percent must be six numbers, not {percent!r}")
    weights, cache, states = (
        Shares(a / 100, b / 100, (100 - a - b) / 100) for a, b in zip(percent[::2], percent[1::2], strict=True)
    )
    policy = OffloadPolicy(gbs, batches, weights, cache, states, overlap=overlap, cpu_attention=cache.gpu < 1)
    prediction = predict(shape(model), load_machine("t4"), Workload(prompt, 32), policy)
    if part == "tokens_per_second":
        return prediction.tokens_per_second
    phase, _, piece = part.partition(" ")
    return prediction.breakdown(phase)[piece] if piece else getattr(prediction, f"{phase}_s")


MEASURES: dict[str, Callable[..., float]] = {
    "pass_seconds": pass_seconds,
    "pass_speed_up": pass_speed_up,
    "bitmap_size": _bitmap_size,
    "rate": _rate,
    "feasible_batch": _feasible_batch,
    "best_batch": _best_batch,
    "throughput_ratio": _throughput_ratio,
    "kv_share": _kv_share,
    "update_share": _update_share,
    "speed_up": _speed_up,
    "saturation": _saturation,
    "serial_share": _serial_share,
    "updater_rate": _updater_rate,
    "decode_ratio": _decode_ratio,
    "energy_ratio": _energy_ratio,
    "decode_rate": _decode_rate,
    "best_split": _best_split,
    "crossing": _crossing,
    "endurance": _endurance,
    "room": _room,
    "multiply_share": _multiply_share,
    "die_gigabits": _die_gigabits,
    "flash_rate": _flash_rate,
    "head_seconds": _head_seconds,
    "flexgen_t4": _flexgen_t4,
}
