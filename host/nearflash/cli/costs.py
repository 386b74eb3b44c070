"""`nearflash bitstream list --cost`: a row for each build of a kernel, by its manifest and the table of the part."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from nearflash.abi.errors import BitstreamError
from nearflash.abi.kernel.config import config

__all__ = ["cost_rows", "show_costs"]


def cost_rows(boards: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Rows of the builds that there are: cells and clock as in the manifest, with its evidence; the rate is a model's.

    clock_hz is what a build runs at, or aims at where it was not routed.
    """
    from nearflash.device.bitstreams import load_manifest
    from nearflash.explore.studies.kernels import compute_rate, find_fpga

    for board in boards:
        fpga = find_fpga(board.part)
        for build in map(config, board.kernels):
            try:
                made = load_manifest(board, build.kernel)
            except BitstreamError:
                continue
            rate, cells = compute_rate(build, made.clock_hz, board.memory.bandwidth_bytes_per_s), made.utilisation
            yield {
                "board": board.name, "kernel": build.kernel, "lut": cells.lut, "dsp": cells.dsp, "bram36": cells.bram36,
                "clock_hz": made.clock_hz, "bytes_per_second": rate.bytes_per_s, "units_per_second": rate.units_per_s,
                "unit": rate.unit, "part": board.part, "part_usd": fpga.price_usd, "price_date": fpga.date,
                "evidence": made.evidence, "rate_evidence": "model",
            }  # fmt: skip


def show_costs(boards: Sequence[Any], *, as_json: bool) -> int:
    """Print the rows as a table, or as JSON."""
    rows = list(cost_rows(boards))
    if as_json:
        print("\n".join(map(json.dumps, rows)))
        return 0
    head = f"{'board':<10}{'kernel':<8}{'LUT':>8}{'DSP':>5}{'BRAM36':>8}{'MHz':>7}{'GB/s':>7}{'M/s':>7}  "
    print(f"{head}{'of':<18}{'part, $':>8}  evidence (rates: bounds by a model)")
    for row in rows:
        print(
            f"{row['board']:<10}{row['kernel']:<8}{row['lut']:>8,.0f}{row['dsp']:>5.0f}{row['bram36']:>8}"
            f"{row['clock_hz'] / 1e6:>7.1f}{row['bytes_per_second'] / 1e9:>7.2f}{row['units_per_second'] / 1e6:>7.1f}  "
            f"{row['unit']:<18}{row['part_usd']:>8,.0f}  {row['evidence']}, price of {row['price_date']}"
        )
    return 0
