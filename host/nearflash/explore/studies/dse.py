"""Design-space exploration: KVNAND's grids, and builds of our own attend engine under a board's resources."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nearflash.abi.errors import PlanError
from nearflash.explore.outcome import Outcome
from nearflash.explore.ssd import Ssd
from nearflash.explore.studies.costs import cost_of
from nearflash.explore.systems.ifc import EVERY_MECHANISM, Arrangement, Decode, Die, Mechanisms
from nearflash.explore.systems.instinfer import KvShare, Serving
from nearflash.explore.systems.kvnand import best, decode_step, splits
from nearflash.explore.systems.nearflash import sparf_page_step
from nearflash.explore.systems.prefill import prefill_step
from nearflash.explore.tables import read_part
from nearflash.explore.wear import Price, years

__all__ = ["FpgaBoard", "Synthesis", "engine_builds", "kvnand_best", "kvnand_choice", "kvnand_grid",
           "nearflash_row"]  # fmt: skip

_SHORTEST = 128
_CONTEXT_CYCLES = 2300
"""Of a head that no other of its phases overlap: prepare, selection, finish (attention.md, section 4)."""


def kvnand_grid(
    models: Sequence[str], contexts: Sequence[int], quants: Sequence[str], dies: int,
    mechanisms: Mechanisms = EVERY_MECHANISM,
) -> Iterator[dict[str, object]]:  # fmt: skip
    """A row for each model, context, quantisation and arrangement; seconds is None where it does not fit."""
    for model in models:
        for quant in quants:
            for context in contexts:
                decode = Decode(model, context, quant)
                bases = [decode_step(decode, Arrangement(name), mechanisms) for name in ("Base-1", "Base-2")]
                for arrangement in splits(dies):
                    yield kvnand_row(decode, arrangement, mechanisms, bases)


def kvnand_row(
    decode: Decode,
    arrangement: Arrangement,
    mechanisms: Mechanisms = EVERY_MECHANISM,
    bases: Sequence[Outcome] = (),
) -> dict[str, object]:
    """One cell: time, energy, price, years of decoding until the KV region is worn, and the baselines beside it.

    `seconds` is None where the cell does not fit, a baseline's where that does not. parallel: how C generates QKV.
    joules_per_token is of moved bits alone, joules_per_unit with the NPU's rated power.
    """
    outcome = decode_step(decode, arrangement, mechanisms)
    parallel = "head" if arrangement.kind == "C" and mechanisms.confined else "tensor"
    row: dict[str, object] = {"model": decode.model, "context": decode.context, "quant": decode.quant,
                              "arrangement": outcome.system, "parallel": parallel, "fits": outcome.fits}  # fmt: skip
    row |= _beside(outcome, bases)
    if not outcome.fits:
        return row | {"seconds": None}
    flash = sum(outcome.capacity_bytes.values())
    written = decode.shape.kv * decode.value_bytes * outcome.rate
    free, cost = flash - decode.weight_bytes, cost_of(outcome)
    return row | {
        "seconds": outcome.seconds,
        "tokens_per_second": outcome.rate,
        "first_token_seconds": prefill_step(decode, arrangement).seconds,
        "joules_per_token": outcome.joules,
        "joules_per_unit": cost["joules_per_unit"],
        "usd_per_million": cost["usd_per_million"],
        "flash_usd": read_part(Price, "usual").dollars(flash),
        "years_to_wear": years(written, free, read_part(Die, "kvnand").endurance_count),
        "phases": dict(outcome.phases),
    }


def nearflash_row(model: str, context: int, drives: int = 2) -> dict[str, object]:
    """Ours on the same token: a GPU with the weights in 16 bits, `drives` that attend; joules are of rated power."""
    found = sparf_page_step(Serving(model, context, 1, 1), drives)
    row: dict[str, object] = {"model": model, "context": context, "quant": "w16a16", "arrangement": found.system,
                              "parallel": "head", "fits": found.fits, "seconds": None}  # fmt: skip
    if not found.fits:
        return row
    cost = cost_of(found)
    return row | {"seconds": found.seconds, "tokens_per_second": found.rate, "joules_per_unit": cost["joules_per_unit"],
                  "usd_per_million": cost["usd_per_million"], "phases": dict(found.phases)}  # fmt: skip


def _beside(outcome: Outcome, bases: Sequence[Outcome]) -> dict[str, object]:
    """Seconds of each baseline, how much faster the cell is, and dollars of Base-1's flash and DRAM."""
    row: dict[str, object] = {}
    for base in bases:
        name = base.system.lower().replace("-", "_")
        row[f"{name}_seconds"] = base.seconds if base.fits else None
        row[f"{name}_speed_up"] = base.seconds / outcome.seconds if base.fits and outcome.fits else None
        if base.system == "Base-1":
            flash, dram = base.capacity_bytes["weight dies"], base.capacity_bytes["KV"]
            row["base_1_usd"] = read_part(Price, "usual").dollars(flash, dram)
    return row


def kvnand_choice(model: str, quant: str, dies: int, most: int = 131_072) -> Iterator[dict[str, object]]:
    """The arrangement to take, by context: a row where the fastest one that fits changes, up to `most` tokens.

    Contexts are tried in steps of 5 %. Raises PlanError where no arrangement holds even the shortest.
    """
    chosen, context = "", _SHORTEST
    while context <= most:
        found = best(Decode(model, context, quant), dies)
        if found is None and not chosen:
            raise PlanError(f"{dies} dies must hold {model} in {quant}; they do not")
        name = found.system if found is not None else "none fits"
        if name != chosen:
            yield {"model": model, "quant": quant, "from_tokens": context, "arrangement": name,
                   "tokens_per_second": found.rate if found is not None else None}  # fmt: skip
        chosen, context = name, max(context + 1, int(context * 1.05))


def kvnand_best(rows: Sequence[dict[str, object]]) -> dict[tuple[object, ...], dict[str, object]]:
    """The fastest arrangement that fits, by model, quantisation and context."""
    best_rows: dict[tuple[object, ...], dict[str, object]] = {}
    for row in rows:
        key = (row["model"], row["quant"], row["context"])
        seconds, known = row["seconds"], best_rows.get(key)
        if isinstance(seconds, float) and (known is None or seconds < float(str(known["seconds"]))):
            best_rows[key] = row
    return best_rows


@dataclass(frozen=True)
class FpgaBoard:
    """Resources of a device, and the price of one at a date."""

    FILE: ClassVar[str] = "board"

    source: str
    date: str
    part: str
    """How names of its parts begin."""
    lut_count: int
    bram_count: int
    dsp_count: int
    price_usd: float


@dataclass(frozen=True)
class Synthesis:
    """Resources of a channel, of what there is once, and of a channel's set of lanes for one more query head."""

    source: str
    channel_lut_count: int
    channel_dsp_count: int
    channel_bram_count: int
    base_lut_count: int
    base_dsp_count: int
    base_bram_count: int
    lanes_lut_count: int
    lanes_dsp_count: int
    heads_per_beat_count: int
    contexts_count: int


def engine_builds(
    board: str = "zynq7045",
    tokens: int = 4096,
    dim: int = 128,
    group: int = 4,
    drives: Sequence[str] = ("slc-low-latency", "instinfer-16k"),
    modes: Sequence[str] = ("dense", "sparf-8", "sparf-page"),
) -> list[dict[str, object]]:
    """Every build of channels, query heads a beat, contexts, clock, pages and mode, fastest first; `fits` by the board.

    A head takes as long as its busiest part: flash, lanes, selection. Contexts hide what a lone head waits for.
    Raises PlanError for counts below 1.
    """
    if min(tokens, dim, group) < 1:
        raise PlanError(f"tokens, dim and group must be 1 at least, not {tokens}, {dim}, {group}")
    limits, cost = read_part(FpgaBoard, board), read_part(Synthesis, "attend")
    axes = ([2, 4, 8, 16], [1, 2, 4, 8], [4, 8, 16, 32, 64], [200e6, 250e6, 285e6, 300e6])
    channels, heads, contexts, clock = (axis.ravel() for axis in np.meshgrid(*axes, indexing="ij"))
    more = channels * (heads - cost.heads_per_beat_count)
    lut = cost.base_lut_count + channels * cost.channel_lut_count + more * cost.lanes_lut_count
    dsp = cost.base_dsp_count + channels * cost.channel_dsp_count + more * cost.lanes_dsp_count
    bram = cost.base_bram_count * contexts / cost.contexts_count + channels * cost.channel_bram_count
    fits = (lut <= limits.lut_count) & (dsp <= limits.dsp_count) & (bram <= limits.bram_count)
    rows: list[dict[str, object]] = []
    for drive in drives:
        for mode in modes:
            rate = _heads_per_s(read_part(Ssd, drive), read_part(KvShare, mode), (tokens, dim, group),
                                channels, heads, contexts, clock)  # fmt: skip
            rows += [
                {"board": board, "drive": drive, "mode": mode, "channels": int(c), "heads_per_beat": int(h),
                 "contexts": int(n), "clock_hz": float(f), "heads_per_second": float(r), "lut": int(a), "dsp": int(b),
                 "bram36": float(d), "part_usd": limits.price_usd, "fits": bool(ok)}
                for c, h, n, f, r, a, b, d, ok in zip(channels, heads, contexts, clock, rate, lut, dsp, bram, fits,
                                                      strict=True)
            ]  # fmt: skip
    return sorted(rows, key=lambda row: (not row["fits"], -float(str(row["heads_per_second"]))))


def _heads_per_s(
    drive: Ssd, mode: KvShare, load: tuple[int, int, int], channels: np.ndarray, heads: np.ndarray,
    contexts: np.ndarray, clock: np.ndarray,
) -> np.ndarray:  # fmt: skip
    tokens, dim, group = load
    moved = 4 * dim * tokens * mode.flash_fraction(tokens, tokens % mode.block_tokens)
    flash = moved / (drive.read_bytes_per_s / drive.channels_count * channels)
    passes = np.ceil(group / heads)
    lanes = 4 * channels
    work = tokens * dim * (mode.qk_fraction + mode.pv_fraction) * passes / lanes / clock
    select = 2 * tokens * mode.keys_count / 4 / clock if mode.keys_count else np.zeros_like(clock)
    busiest = np.maximum(np.maximum(flash, work), select)
    alone = flash + select + _CONTEXT_CYCLES / clock + 2 * drive.read_us * 1e-6
    rate: np.ndarray = np.minimum(1 / busiest, contexts / alone)
    return rate
