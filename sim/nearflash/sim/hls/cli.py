"""The command `nearflash hls`: start, check and estimate optimizers of one's own for the HLS kernels."""

import argparse
from pathlib import Path
from typing import Any

from nearflash.support.files import PUBLIC_MODE, write_durably

__all__ = ["hls"]

_EXAMPLES = """examples:
  nearflash hls new amsgrad
  nearflash hls check amsgrad.hpp
  nearflash hls analyze adamw --flash 3.3
"""


def hls(subparsers: Any) -> None:
    """Register `nearflash hls new|check|analyze|kernel`."""
    parser = subparsers.add_parser("hls", epilog=_EXAMPLES)
    commands = parser.add_subparsers(metavar="ACTION", required=True)

    new = commands.add_parser("new", help="Write a struct, its Python definition and a line of README to start from.")
    new.add_argument("name", help="Name in lower-case letters and digits; the classes have it capitalised.")
    new.add_argument("--folder", type=Path, default=Path(), help="Folder to write to.")
    new.set_defaults(run=_new)

    check = commands.add_parser("check", help="Compare the C++ struct with the Python definition, to the bit.")
    check.add_argument("file", type=Path, help="The .hpp or the .py file.")
    check.add_argument("--params", type=int, default=1 << 16, help="Parameters of each case.")
    check.add_argument("--seed", type=int, default=0, help="Seed of the random values.")
    check.set_defaults(run=_check)

    analyze = commands.add_parser("analyze", help="Count operations, and name the limit: lanes, ports, DDR or flash.")
    analyze.add_argument("file", nargs="?", help="A .hpp or .py file, or a shipped kernel such as adamw "
                         "(default: the kernel of the report).")  # fmt: skip
    analyze.add_argument("--config", default="update-smartssd", help="Build configuration: lanes, port width, clock.")
    analyze.add_argument(
        "--report", type=Path, help="Use the II and clock of this csynth.xml of Vitis HLS in place of the aims."
    )
    analyze.add_argument("--flash", type=float, default=3.3, help="Rate of the P2P link, GB/s each direction.")
    analyze.add_argument("--ddr", type=float, default=19.2, help="Rate of device memory, GB/s.")
    analyze.set_defaults(run=_analyze)

    kernel = commands.add_parser("kernel", help="Write the top with ports and pragmas, for synthesis.")
    kernel.add_argument("file", type=Path, nargs="?", help="The .hpp or the .py file (default: the shipped kernels).")
    kernel.set_defaults(run=_kernel)


def _new(arguments: argparse.Namespace) -> int:
    from nearflash.sim.hls.new import new_rule

    for path in new_rule(arguments.name, arguments.folder):
        print(path)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from nearflash.sim.hls.check import check_rule, load_rule

    kind, cases, words, mismatches = load_rule(arguments.file), 0, 0, 0
    shown: set[str] = set()
    for case in check_rule(kind, params=arguments.params, seed=arguments.seed):
        cases, words, mismatches = cases + 1, words + case.words, mismatches + case.mismatches
        state = f"{case.mismatches:,} words differ" if case.mismatches else "equal to the bit"
        print(f"step {case.rule.step:<6}weight_decay {case.rule.weight_decay:<5g}{case.real:<7}"
              f"{arguments.params:,} parameters: {state}")  # fmt: skip
        for difference in case.first:
            if difference.array not in shown:
                print(f"  {difference}")
        shown |= {difference.array for difference in case.first}
    print(f"{kind.__name__}: {cases} cases, {words:,} words compared, {mismatches:,} mismatches")
    return 1 if mismatches else 0


def _analyze(arguments: argparse.Namespace) -> int:
    from nearflash.abi.errors import CommandError
    from nearflash.abi.kernel.config import update_config
    from nearflash.sim.hls.analyze import KernelHost, estimate
    from nearflash.sim.hls.report import read_report

    report = read_report(arguments.report) if arguments.report else None
    name = arguments.file or (report and report.top.removeprefix("update_").removesuffix("_topk"))
    if not name:
        raise CommandError("a file, a shipped kernel or --report must be given, not nothing")
    calls = _calls(name)
    machine = KernelHost(arguments.flash * 1e9, arguments.ddr * 1e9)
    estimated = estimate(calls, update_config(arguments.config), machine, ii=report.slowest_ii if report else 1,
                     clock_hz=report.clock_hz if report else None)  # fmt: skip
    build, counts = estimated.config, "  ".join(f"{n} {name}" for name, n in estimated.operations.items() if n)
    origin = "of the report" if report else "by construction"
    print(f"{calls[0].kernel.optimizer} on {build.full_name}: {build.lanes} lanes, {build.port_bits}-bit ports, "
          f"{estimated.clock_hz / 1e6:.0f} MHz, II {estimated.ii} ({origin})")  # fmt: skip
    print(f"  a parameter: {counts}; lane about {estimated.depth_cycles} cycles deep; {estimated.arrays} state arrays")
    for name, rate in estimated.rates.items():
        print(f"  {name:<6}{rate / 1e6:8.0f} M parameters/s{'   <- binds' if name == estimated.bound else ''}")
    if report:
        print(f"  report: {report.top} on {report.part}, {report.estimated_ns} ns of {report.target_ns} ns, "
              + ", ".join(f"{name} {n}" for name, n in report.resources.items()))  # fmt: skip
        for loop in report.loops:
            print(f"  loop {loop.module}/{loop.name}: II {loop.ii}, depth {loop.depth_cycles}")
    return 0


def _calls(file: str) -> list[Any]:
    from nearflash.sim.hls.analyze import rule_calls
    from nearflash.sim.hls.check import load_rule
    from nearflash.sim.hls.kernels import call_of
    from nearflash.sim.hls.vectors import rules

    shipped = [call for call in map(call_of, rules()) if call.kernel.name == file]
    return shipped or list(rule_calls(load_rule(Path(file))))


def _kernel(arguments: argparse.Namespace) -> int:
    from nearflash.sim.hls.build import HLS
    from nearflash.sim.hls.check import load_rule
    from nearflash.sim.hls.kernels import call_of, generate_tops

    if arguments.file:
        kernel = call_of(load_rule(arguments.file)(lr=1e-3, step=1)).kernel
        folder, tops = arguments.file.parent, {f"{kernel.function}.cpp": kernel.text}
    else:
        folder, tops = HLS / "kernels", generate_tops()
    for name, text in tops.items():
        write_durably(folder / name, text, mode=PUBLIC_MODE)
        print(folder / name)
    return 0
