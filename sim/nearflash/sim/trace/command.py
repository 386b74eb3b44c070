"""The command `nearflash trace`."""

import argparse
from pathlib import Path
from typing import Any

__all__ = ["trace"]


def trace(subparsers: Any) -> None:
    """Register `nearflash trace attend`: a batch of heads on the simulated kernel, over time."""
    parser = subparsers.add_parser(
        "trace", epilog="examples:\n  nearflash trace attend\n  nearflash trace attend --heads 4 --waves\n"
    )
    parser.add_argument("kernel", choices=["attend"], help="Kernel to trace.")
    parser.add_argument("--heads", type=int, default=12, help="Heads of the batch.")
    parser.add_argument("--tokens", type=int, default=1024, help="Tokens of each head, a multiple of 1024.")
    parser.add_argument("--link", type=int, default=491, help="Rate of the links to NAND, MB/s.")
    parser.add_argument("--out", type=Path, default=Path("build/trace"), help="Folder to write to.")
    parser.add_argument(
        "--waves", action="store_true", help="Write 2,000 cycles of waves too (200 MB), from a simulator built for it."
    )
    parser.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    from nearflash.sim.trace.events import trace_events
    from nearflash.sim.trace.picture import plot
    from nearflash.sim.trace.recording import HeadLoad, record, record_waves
    from nearflash.sim.trace.spans import channel_figures
    from nearflash.support.trace_events import write_trace

    workload = HeadLoad(heads=arguments.heads, tokens=arguments.tokens, link_bytes_per_s=arguments.link * 1_000_000)
    names = {suffix: arguments.out / f"{arguments.kernel}.{suffix}" for suffix in ("json", "png", "vcd")}
    arguments.out.mkdir(parents=True, exist_ok=True)
    recording = record(workload)
    window = recording.middle
    print(f"shares of cycles {window.start:,} to {window.stop:,} of {recording.cycles:,}, in percent")
    for number in range(len(recording.channels)):
        shares = channel_figures(recording, number)
        print(f"channel {number}  " + "  ".join(f"{name} {100 * share:.1f}" for name, share in shares.items()))
    write_trace(names["json"], trace_events(recording), "ns")
    print(f"trace      {names['json']}  (open with ui.perfetto.dev)")
    plot(recording, names["png"])
    print(f"picture    {names['png']}")
    if arguments.waves:
        record_waves(workload, names["vcd"])
        print(f"waves      {names['vcd']}  (open with GTKWave or Surfer)")
    return 0
