"""The commands `nearflash sim`, `nearflash formal` and `nearflash mutation`."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from nearflash.support.arguments import Ineffective, declare_ineffective

__all__ = ["formal", "mutation", "sim"]


def sim(subparsers: Any) -> None:
    """Register `nearflash sim UNIT`: one cocotb testbench on Verilator."""
    parser = subparsers.add_parser(
        "sim", epilog="examples:\n  nearflash sim\n  nearflash sim gateware.bus.read --waves\n"
    )
    parser.add_argument("unit", nargs="?", help="Testbench, such as gateware.bus.read (default: list them).")
    parser.add_argument("--waves", action="store_true", help="Write a wave file and print its path.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the testbench's random values.")
    parser.set_defaults(run=_sim)
    declare_ineffective(
        parser, Ineffective(("waves", "seed"), lambda given: given.unit is None, "given with a testbench, which runs")
    )


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
    parser = subparsers.add_parser("formal", epilog="examples:\n  nearflash formal\n  nearflash formal --json\n")
    parser.add_argument("proof", nargs="*", help="Names of proofs (default: all).")
    parser.add_argument("--json", action="store_true", help="Write one JSON object a line to standard output.")
    parser.set_defaults(run=_formal)


def _formal(arguments: argparse.Namespace) -> int:
    import json

    from nearflash.verify.proofs.run import run
    from nearflash.verify.units.catalogue import choose_proofs

    bad = 0
    for result in run(choose_proofs(arguments.proof or None)):
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
    parser = subparsers.add_parser(
        "mutation", epilog="examples:\n  nearflash mutation weights.pack --survivors\n  nearflash mutation --json\n"
    )
    parser.add_argument("unit", nargs="*", help="Units, such as weights.pack (default: all).")
    parser.add_argument("--mutants", type=int, help="Mutants of each unit (default: the unit's own number).")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the mutants and the vectors.")
    parser.add_argument("--survivors", action="store_true", help="List the mutants that no vector noticed.")
    parser.add_argument("--json", action="store_true", help="Write one JSON object a line to standard output.")
    parser.set_defaults(rows=_mutation)


def _mutation(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from nearflash.verify.mutants.run import run
    from nearflash.verify.units.catalogue import choose_targets

    options = {"mutants": arguments.mutants, "seed": arguments.seed, "survivors": arguments.survivors}
    return run(choose_targets(arguments.unit or None), **options)
