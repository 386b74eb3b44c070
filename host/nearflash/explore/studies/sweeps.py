"""Rows of each system over its parameters, and all systems beside ours on one workload."""

from collections.abc import Iterator, Sequence
from typing import Any

from nearflash.explore.outcome import Outcome
from nearflash.explore.shapes import list_trained
from nearflash.explore.studies.costs import cost_of
from nearflash.explore.systems.flexgen import flexgen, zero_inference
from nearflash.explore.systems.ifc import Arrangement, Decode
from nearflash.explore.systems.instinfer import Serving, instinfer_step
from nearflash.explore.systems.kvnand import best, decode_step
from nearflash.explore.systems.layered import LayeredHost, Placement, bitmap_fraction, layer_pass
from nearflash.explore.systems.nearflash import sparf_page_step
from nearflash.explore.systems.smart_infinity import METHODS, Training, training_step

__all__ = ["compare_systems", "endor_rows", "instinfer_rows", "row_of", "run_serving_systems",
           "smart_infinity_rows"]  # fmt: skip

_SHORT_BLOCK = 256
"""Tokens of an index block in a build for short contexts and many KV heads."""
_CODED_FRACTION = 0.526
"""Bytes of a coded bitmap of half of the weights, of dense fp16: measured on doclm-30m (docs/results/weights.md)."""


def row_of(found: Outcome, **given: Any) -> dict[str, Any]:
    """Columns that a table shows of an outcome."""
    return {
        **given,
        "system": found.system,
        "model": found.model,
        "seconds": found.seconds,
        "units_per_second": found.rate,
        "fits": found.fits,
        "phases": dict(found.phases),
        "hidden": dict(found.hidden),
        "traffic_bytes": dict(found.traffic_bytes),
        "memory_bytes": dict(found.memory_bytes),
        **cost_of(found),
    }


def instinfer_rows(batches: Sequence[int], csds: Sequence[int], model: str = "opt-13b", prompt: int = 1024,
                   new: int = 1024) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A decode step of every system by batch and drives: FlexGen, with SparQ, InstInfer dense and SparF, ours twice."""
    for batch in batches:
        serving = Serving(model, prompt, new, batch)
        for drives in csds:
            for outcome in run_serving_systems(serving, drives):
                yield row_of(outcome, batch=batch, drives=drives)


def run_serving_systems(serving: Serving, drives: int) -> Iterator[Outcome]:
    """Every system with so many drives, ours twice: as measured, and with short index blocks."""
    yield flexgen(serving, drives)
    yield flexgen(serving, drives, sparq=True)
    yield instinfer_step(serving, drives)
    yield instinfer_step(serving, drives, "sparf-8")
    yield sparf_page_step(serving, drives)
    yield sparf_page_step(serving, drives, block_tokens=_SHORT_BLOCK)


def smart_infinity_rows(
    models: Sequence[str], csds: Sequence[int], gpu: str = "a5000", optimizer: str = "adam", keep: float = 0.01,
    congested: bool = False, parameters: str = "host",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A training step of every method by model and drives, with its speed-up over ZeRO-Infinity on as many drives."""
    for model in models or list_trained():
        for drives in csds:
            steps = [training_step(Training(model, method, drives, gpu, optimizer, keep, congested=congested,
                                            parameters=parameters))
                     for method in METHODS]  # fmt: skip
            for method, outcome in zip(METHODS, steps, strict=True):
                yield row_of(outcome, method=method, drives=drives, gpu=gpu, optimizer=optimizer,
                             speed_up=steps[0].seconds / outcome.seconds)  # fmt: skip


def endor_rows(model: str, layers: Placement, bits: int = 16, density: float = 0.5) -> Iterator[dict[str, Any]]:
    """One pass: dense, bitmap, bitmap without host memory between, and our coded bitmap the same way."""
    host = LayeredHost.endor()
    cases = [("dense", 1.0, False), ("bitmap", bitmap_fraction(bits, density), False),
             ("bitmap, direct", bitmap_fraction(bits, density), True)]  # fmt: skip
    if bits == 16 and density == 0.5:
        cases.append(("coded bitmap (ours), direct", _CODED_FRACTION, True))
    first = None
    for name, stored, direct in cases:
        outcome = layer_pass(model, layers, host, stored_fraction=stored, bits=bits, direct=direct)
        first = first or outcome
        yield row_of(outcome, format=name, speed_up=first.seconds / outcome.seconds)


def compare_systems() -> dict[str, list[Outcome]]:
    """All systems on the papers' workloads, ours among them."""
    serving, host = Serving(batch=64), LayeredHost.endor()
    half, layers = bitmap_fraction(), Placement(5, 8, 51)
    decode = Decode("llama3.1-8b", 10_000)
    flash = [outcome for outcome in (best(decode, 16, "C"), best(decode, 16, "D")) if outcome is not None]
    return {
        "decode step of 64 sequences, OPT-13B, 1,024 + 1,024 tokens, two drives": [
            zero_inference(Serving(batch=16)), *run_serving_systems(serving, 2)],
        "decode step of 16 sequences, LLaMA3.1-8B, 16,384 + 1,024 tokens, two drives": [
            *run_serving_systems(Serving("llama3.1-8b", 16_384, 1024, 16), 2)],
        "training step, GPT-2 8.4B, six drives": [training_step(Training(method=method)) for method in METHODS],
        "one pass, OPT-66B, layers 5/8/51": [
            layer_pass("opt-66b", layers, host),
            layer_pass("opt-66b", layers, host, stored_fraction=half),
            layer_pass("opt-66b", layers, host, stored_fraction=half, direct=True),
            layer_pass("opt-66b", layers, host, stored_fraction=_CODED_FRACTION, direct=True),
        ],
        "one token, LLaMA3.1-8B, 10,000 tokens, fp16": [
            decode_step(decode, Arrangement("Base-1")), decode_step(decode, Arrangement("Base-2")), *flash,
            sparf_page_step(Serving("llama3.1-8b", 10_000, 1, 1), 2)],
    }  # fmt: skip
