"""The commands `nearflash sim`, `nearflash formal`, `nearflash mutation` and `nearflash trace`."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["formal", "mutation", "sim", "trace"]


def sim(subparsers: Any) -> None:
    """Register `nearflash sim UNIT`: one cocotb testbench on Verilator."""
    parser = subparsers.add_parser("sim", help="run one cocotb testbench on Verilator")
    parser.add_argument("unit", nargs="?", help="for example gateware.bus.read; without one, list them")
    parser.add_argument("--waves", action="store_true", help="write a wave file and name it")
    parser.add_argument("--seed", type=int, default=0, help="of the testbench's random values")
    parser.set_defaults(run=_sim)


def _sim(arguments: argparse.Namespace) -> int:
    from nearflash.verify.cocotb.run import find_testbenches, run_testbench

    if arguments.unit is None:
        print("\n".join(find_testbenches()))
        return 0
    result = run_testbench(arguments.unit, waves=arguments.waves, seed=arguments.seed)
    for name in result.passed:
        print(f"passed  {name}")
    for name in result.failed:
        print(f"FAILED  {name}")
    print(f"log     {result.log_path}")
    if result.wave_path:
        print(f"waves   {result.wave_path}  (open with GTKWave or Surfer)")
    return 1 if result.failed or not result.passed else 0


def formal(subparsers: Any) -> None:
    """Register `nearflash formal`: the proofs of stream elements and AXI masters."""
    parser = subparsers.add_parser("formal", help="prove the stream elements and the AXI masters")
    parser.add_argument("proof", nargs="*", help="names of proofs; without one, all")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on standard output")
    parser.set_defaults(run=_formal)


def _formal(arguments: argparse.Namespace) -> int:
    import json

    from nearflash.verify.proofs.run import run

    bad = 0
    for result in run(arguments.proof or None):
        bad += result["status"] != "pass"
        if arguments.json:
            print(json.dumps({"bench": "formal", **result}), flush=True)
            continue
        line = f"{result['status']:<8}{result['proof']:<24}{result['mode']:<7}{result['engine']:<14}"
        line += f"{result['seconds']:6.1f} s"
        if result["status"] != "pass":
            line += f"  property {result.get('property')}, trace {result.get('trace')}"
        print(line, flush=True)
    print(f"{bad} results that are not a pass", file=sys.stderr)
    return 1 if bad else 0


def mutation(subparsers: Any) -> None:
    """Register `nearflash mutation`: the share of a unit's mutants that its vectors notice."""
    parser = subparsers.add_parser("mutation", help="change units in many places and see whether their vectors notice")
    parser.add_argument("unit", nargs="*", help="for example num.mac; without one, all")
    parser.add_argument("--mutants", type=int, help="how many of each unit; by default its own number")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants and the vectors")
    parser.add_argument("--survivors", action="store_true", help="list the mutants that live")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on standard output")
    parser.set_defaults(rows=_mutation)


def _mutation(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from nearflash.verify.mutants.run import run

    options = {"mutants": arguments.mutants, "seed": arguments.seed, "survivors": arguments.survivors}
    return run(arguments.unit or None, **options)


def trace(subparsers: Any) -> None:
    """Register `nearflash trace attend`: a batch of heads on the simulated kernel, over time."""
    parser = subparsers.add_parser("trace", help="show a simulated kernel at work: a trace, a picture, waves")
    parser.add_argument("kernel", choices=["attend"])
    parser.add_argument("--heads", type=int, default=12, help="of the batch")
    parser.add_argument("--tokens", type=int, default=1024, help="of each head, a multiple of 1024")
    parser.add_argument("--link", type=int, default=491, help="rate of the NAND's links, MB/s")
    parser.add_argument("--out", type=Path, default=Path("build/trace"), help="folder to write to")
    parser.add_argument(
        "--waves", action="store_true", help="2,000 cycles of waves too (200 MB), from a simulator built for it"
    )
    parser.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    from nearflash.sim.trace.events import write_events
    from nearflash.sim.trace.picture import draw
    from nearflash.sim.trace.recording import Workload, record, record_waves
    from nearflash.sim.trace.spans import channel_figures

    workload = Workload(heads=arguments.heads, tokens=arguments.tokens, link_bytes_per_s=arguments.link * 1_000_000)
    names = {suffix: arguments.out / f"{arguments.kernel}.{suffix}" for suffix in ("json", "png", "vcd")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    recording = record(workload)
    window = recording.middle
    print(f"shares of cycles {window.start:,} to {window.stop:,} of {recording.cycles:,}, in percent")
    for number in range(len(recording.channels)):
        shares = channel_figures(recording, number)
        print(f"channel {number}  " + "  ".join(f"{name} {100 * share:.1f}" for name, share in shares.items()))
    write_events(recording, names["json"])
    print(f"trace      {names['json']}  (open with ui.perfetto.dev)")
    draw(recording, names["png"])
    print(f"picture    {names['png']}")
    if arguments.waves:
        record_waves(workload, names["vcd"])
        print(f"waves      {names['vcd']}  (open with GTKWave or Surfer)")
    return 0
