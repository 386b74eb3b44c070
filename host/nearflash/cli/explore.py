"""`nearflash explore`: models of near-storage systems, swept, compared with papers, and reported."""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError
from nearflash.bench.runner import print_rows, with_origin
from nearflash.support.arguments import MOST, Ineffective, declare_ineffective, positive, rate
from nearflash.support.files import PUBLIC_MODE, check_replaceable

__all__ = ["amounts", "explore", "parse_ranges"]

_EXAMPLES = """examples:
  nearflash explore kvnand --model llama3.1-70b --quant w4a16 --context 100k --dies 8 --png grid.png
  nearflash explore instinfer --batch 4..256 --csds 1..20
  nearflash explore smart-infinity --model gpt2-8.4b --csds 1..10 --png scaling.png
  nearflash explore smart-infinity --csds 6 --set smartssd.smartssd.write_bytes_per_s=1.6e9
  nearflash explore endor --model opt-66b --layers 5/8/51
  nearflash explore serving-cluster --model llama3.1-70b --users 100 --rate 5 --hosts 1..4
  nearflash explore training-cluster --model llama3.1-70b --hosts 4,8 --drives 4,8
  nearflash explore compare --trace systems.json      opens in ui.perfetto.dev
  nearflash explore check --json                      our figures against the papers'
  nearflash explore report -o report.html
"""
_SCALE = {"k": 1_000, "m": 1_000_000}
_COST = ("usd_per_million", "joules_per_unit")
_MOST_DIES = 4096
"""Every split of them is computed."""


def amounts(text: str) -> list[int]:
    """Numbers, `100k` for 100,000, with commas between; `4..256` doubles from 4 to 256."""
    values: list[int] = []
    for part in text.lower().split(","):
        first, dots, last = part.partition("..")
        low = _amount(first)
        high = _amount(last) if dots else low
        if high < low:
            raise argparse.ArgumentTypeError(f"must be FIRST..LAST with FIRST at most LAST, not {text!r}")
        while low <= high:
            values.append(low)
            low *= 2
    return values


def parse_ranges(text: str) -> list[int]:
    """Numbers with commas between; `1..20` is every one from 1 to 20."""
    values: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = positive(first)
        high = positive(last) if dots else low
        if high < low or high > 1000:
            raise argparse.ArgumentTypeError(f"must be FIRST..LAST, 1000 at most, not {text!r}")
        values += range(low, high + 1)
    return values


def _amount(text: str) -> int:
    scale = _SCALE.get(text[-1:], 1)
    return positive(text[:-1] if scale > 1 else text, MOST // scale) * scale


def _dies(text: str) -> int:
    return positive(text, _MOST_DIES)


def explore(subparsers: Any) -> None:
    """Add the command's parser; nothing of the models is loaded before it runs."""
    parser = subparsers.add_parser(
        "explore",
        epilog=_EXAMPLES,
        help="Model near-storage systems and explore their designs.",
        description="Model near-storage systems: time, energy, memory, traffic, cost, wear.",
    )
    actions = parser.add_subparsers(metavar="system", required=True)
    for add in (
        _add_kvnand,
        _add_instinfer,
        _add_training,
        _add_endor,
        _add_engine,
        _add_fleet,
        _add_clusters,
        _add_others,
    ):
        add(actions)


def _action(
    actions: Any, name: str, run: Any, text: str, *, pictures: bool = True, ineffective: Sequence[Ineffective] = ()
) -> Any:
    parser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="Print one JSON object a line.")
    parser.add_argument("--set", action="append", type=_change, default=[], metavar="FILE.PART.KEY=VALUE",
                        help="Take another value of a part: csd.instinfer.clock_hz=3e8 (default: none).")  # fmt: skip
    if pictures:
        parser.add_argument("--png", type=Path, metavar="FILE", help="Draw into this file (.png, .svg or .pdf).")
    parser.set_defaults(run=lambda arguments: _run_changed(run, arguments))
    declare_ineffective(parser, *ineffective)
    return parser.add_argument


def _run_changed(run: Any, arguments: argparse.Namespace) -> int:
    from nearflash.explore.tables import what_if

    for file in (getattr(arguments, "png", None), getattr(arguments, "trace", None)):
        if file is not None:
            check_replaceable(file)
    with what_if(dict(arguments.set)):
        return int(run(arguments))


def _change(text: str) -> tuple[str, float]:
    key, equals, value = text.partition("=")
    try:
        number = int(value) if value.isdecimal() else float(value)
        if not abs(number) <= MOST * 1e9:  # neither NaN nor infinite
            raise ValueError
        return key, number
    except ValueError:
        wrong = f"must be FILE.PART.KEY=NUMBER, not {text!r}" if equals else f"must have a = and a number, not {text!r}"
        raise argparse.ArgumentTypeError(wrong) from None


def _add_kvnand(actions: Any) -> None:
    useless = Ineffective(
        ("context", "without", "png"), lambda given: given.choose, "left out with --choose, which lists contexts"
    )
    text = "In-flash computing without DRAM: all splits of the dies."
    add = _action(actions, "kvnand", _kvnand, text, ineffective=[useless])
    add("--model", default="llama3.1-8b", help="A decoder of models.toml.")
    add(
        "--quant",
        default="w16a16",
        help="Bits of weights and activations: w16a16, w8a8 or w4a16 (default: %(default)s).",
    )
    add("--context", type=amounts, default=amounts("128,1k,10k,100k"), metavar="N[,N]",
        help="Tokens (default: 128,1k,10k,100k).")  # fmt: skip
    add("--dies", type=_dies, default=16, metavar="N", help="Flash dies in all.")
    add("--choose", action="store_true", help="List from which context which arrangement is the fastest, up to 128k.")
    add("--without", action="append", default=[], metavar="NAME",
        help="Switch off pipelined, confined, bounded, streamed, contended or refreshed (default: none).")  # fmt: skip


def _add_instinfer(actions: Any) -> None:
    add = _action(actions, "instinfer", _instinfer, "Decode attention in drives, beside FlexGen and nearflash.")
    add("--model", default="opt-13b", help="A decoder of models.toml.")
    add("--batch", type=amounts, default=amounts("4..256"), metavar="N[..N]",
        help="Sequences at once, doubled over a range (default: 4..256).")  # fmt: skip
    add("--csds", type=parse_ranges, default=parse_ranges("1,2"), metavar="N[..N]", help="Drives (default: 1,2).")
    add("--prompt", type=positive, default=1024, metavar="N", help="Tokens of a prompt.")
    add("--new", type=positive, default=1024, metavar="N", help="Tokens generated for each.")


def _add_training(actions: Any) -> None:
    add = _action(actions, "smart-infinity", _training, "Optimizer state on drives: every method's training step.")
    add("--model", action="append", metavar="NAME", help="A model of trained.toml (default: all).")
    add("--csds", type=parse_ranges, default=parse_ranges("1..10"), metavar="N[..N]", help="Drives (default: 1..10).")
    add("--gpu", default="a5000", help="A GPU of gpu.toml.")
    add("--optimizer", default="adam", help="A row of optimizer.toml.")
    add("--keep", type=float, default=0.01, metavar="F", help="Share of gradients that SU+O+C keeps.")
    add("--congested", action="store_true", help="The GPU sits behind the drives' link too.")
    add("--parameters", choices=("host", "drives"), default="host",
        help="Where fp16 parameters lie between steps (default: %(default)s).")  # fmt: skip


def _add_endor(actions: Any) -> None:
    add = _action(actions, "endor", _endor, "Layers on GPU, host and drive, their weights dense or compressed.")
    add("--model", default="opt-66b", help="A decoder of models.toml.")
    add("--layers", type=_layers, default=_layers("5/8/51"), metavar="GPU/CPU/SSD",
        help="Layers by tier (default: 5/8/51).")  # fmt: skip
    add("--bits", type=int, default=16, choices=(4, 8, 16), help="Bits of a weight.")


def _add_engine(actions: Any) -> None:
    add = _action(actions, "engine", _engine, "Builds of the attend engine under a board's resources.", pictures=False)
    add("--board", default="zynq7045", help="A board of board.toml.")
    add("--context", type=amounts, default=amounts("4096"), metavar="N", help="Tokens of a head (default: 4096).")
    add("--all", action="store_true", help="List builds that do not fit too.")


def _add_fleet(actions: Any) -> None:
    add = _action(actions, "fleet", _fleet, "The optimizer step on drives that compute and plain ones.", pictures=False)
    add("--model", default="gpt2-8.4b", metavar="NAME", help="A model of trained.toml.")
    add(
        "--near",
        type=parse_ranges,
        default=parse_ranges("1..6"),
        metavar="N[..N]",
        help="Drives that compute (default: 1..6).",
    )
    add(
        "--plain",
        type=parse_ranges,
        default=parse_ranges("1..6"),
        metavar="N[..N]",
        help="Plain drives (default: 1..6).",
    )
    add("--optimizer", default="adam", help="A row of optimizer.toml.")


def _add_clusters(actions: Any) -> None:
    text = "Layouts of a cluster that serves a model to users: K and V in GPU memory, host memory, drives."
    add = _action(actions, "serving-cluster", _serving_cluster, text, pictures=False)
    _add_cluster(add)
    add("--users", type=positive, default=100, metavar="N", help="Users at once.")
    add("--rate", type=rate, default=0.0, metavar="R", help="Tokens a second that each user must get.")
    add("--prompt", type=_amount, default=8000, metavar="N", help="Tokens of a prompt.")
    add("--new", type=_amount, default=500, metavar="N", help="Tokens generated for each.")
    add("--weight-bits", type=int, default=16, choices=(4, 8, 16), help="Bits of a weight.")
    text = "Layouts of a cluster that trains a model: optimizer state in GPU memory, host memory, drives."
    add = _action(actions, "training-cluster", _training_cluster, text, pictures=False)
    _add_cluster(add)
    add("--optimizer", default="adam", help="A row of optimizer.toml.")
    add("--tokens", type=positive, default=16_384, metavar="N", help="Tokens of each GPU in a step.")


def _add_cluster(add: Any) -> None:
    add("--model", default="llama3.1-70b", help="A decoder of models.toml.")
    add("--hosts", type=parse_ranges, default=parse_ranges("1..4"), metavar="N[..N]", help="Hosts (default: 1..4).")
    add("--gpus", type=positive, default=8, metavar="N", help="GPUs of each host.")
    add("--drives", type=parse_ranges, default=parse_ranges("4"), metavar="N[..N]",
        help="Drives of each host (default: 4).")  # fmt: skip
    add("--gpu", default="a100", help="A GPU of gpu.toml.")
    add("--dram", type=positive, default=512, metavar="GB", help="DRAM of each host.")
    add("--network", default="ethernet-100g", help="A network of network.toml.")


def _add_others(actions: Any) -> None:
    add = _action(actions, "compare", _compare, "All systems and ours on the papers' workloads.")
    add("--trace", type=Path, metavar="FILE", help="Write a trace for ui.perfetto.dev.")
    text = "The papers' conclusions and figures against ours; exit code 1 for one that is off without a reason."
    add = _action(actions, "check", _check, text, pictures=False)
    add("--blind", type=Path, metavar="FILE", help="Compute the rows of this TOML file in place of it.")
    text = "Write one web page with figures, pictures and assumptions."
    report = actions.add_parser("report", help=text, description=text)
    report.add_argument("-o", "--output", type=Path, default=Path("explore.html"), metavar="FILE",
                        help="Write here (default: explore.html).")  # fmt: skip
    report.set_defaults(run=_report)


def _layers(text: str) -> tuple[int, int, int]:
    parts = text.split("/")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be GPU/CPU/SSD, like 5/8/51, not {text!r}")
    return int(parts[0]), int(parts[1]), int(parts[2])


def _show(rows: Iterable[Mapping[str, Any]], arguments: argparse.Namespace, columns: Sequence[str] = ()) -> list[Any]:
    from nearflash.explore.text import text_table

    shown = list(rows)
    if arguments.json:
        print_rows(map(with_origin, shown), as_json=True)
    else:
        print(text_table(shown, columns))
    return shown


def _draw(arguments: argparse.Namespace, figure: Any) -> None:
    from nearflash.explore.studies.plots import save

    save(figure, arguments.png)
    print(arguments.png, file=sys.stderr)


def _kvnand(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.dse import kvnand_best, kvnand_choice, kvnand_grid, nearflash_row
    from nearflash.explore.studies.plots import heat_map
    from nearflash.explore.systems.ifc import EVERY_MECHANISM

    if arguments.choose:
        _show(kvnand_choice(arguments.model, arguments.quant, arguments.dies), arguments)
        return 0
    mechanisms = EVERY_MECHANISM.without(*arguments.without)
    rows = list(kvnand_grid([arguments.model], arguments.context, [arguments.quant], arguments.dies, mechanisms))
    fastest = {(row["context"], row["arrangement"]) for row in kvnand_best(rows).values()}
    marked = [{**row, "best": (row["context"], row["arrangement"]) in fastest} for row in rows]
    marked += [{**nearflash_row(arguments.model, context), "best": False} for context in arguments.context]
    _show(marked, arguments, ("context", "arrangement", "parallel", "fits", "seconds", "tokens_per_second",
                              "first_token_seconds", "joules_per_token", "joules_per_unit", "usd_per_million",
                              "flash_usd", "base_1_usd", "years_to_wear", "base_1_speed_up", "base_2_speed_up",
                              "best"))  # fmt: skip
    if arguments.png:
        _draw(arguments, heat_map(rows, f"{arguments.model}, {arguments.quant}, {arguments.dies} dies"))
    return 0


def _instinfer(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.plots import curves
    from nearflash.explore.studies.sweeps import instinfer_rows

    rows = _show(
        instinfer_rows(arguments.batch, arguments.csds, arguments.model, arguments.prompt, arguments.new),
        arguments, ("batch", "drives", "system", "seconds", "units_per_second", *_COST, "fits"))  # fmt: skip
    if arguments.png:
        along = "drives" if len(arguments.csds) > 1 else "batch"
        picked = [row for row in rows if along == "batch" or row["batch"] == arguments.batch[-1]]
        title = f"{arguments.model}" + (f", batch {arguments.batch[-1]}" if along == "drives" else "")
        _draw(arguments, curves(_series(picked, along, "units_per_second"), title, along, "token/s in decode"))
    return 0


def _series(rows: Sequence[Mapping[str, Any]], along: str, value: str) -> dict[str, tuple[list[float], list[float]]]:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        x, y = series.setdefault(str(row.get("method") or row["system"].partition(",")[0]), ([], []))
        x.append(row[along])
        y.append(row[value])
    return series


def _training(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.plots import curves
    from nearflash.explore.studies.sweeps import smart_infinity_rows

    rows = _show(
        smart_infinity_rows(arguments.model or [], arguments.csds, arguments.gpu, arguments.optimizer, arguments.keep,
                            arguments.congested, arguments.parameters),
        arguments, ("model", "drives", "method", "seconds", "speed_up", *_COST, "fits"))  # fmt: skip
    if arguments.png:
        model = rows[-1]["model"]
        picked = [row for row in rows if row["model"] == model]
        figure = curves(_series(picked, "drives", "speed_up"), model, "drives", "speed-up over ZeRO-Infinity")
        _draw(arguments, figure)
    return 0


def _fleet(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.sweeps import row_of
    from nearflash.explore.systems.fleet import fleet_step

    _show(
        (row_of(fleet_step(arguments.model, near, plain, arguments.optimizer), near=near, plain=plain)
         for near in arguments.near for plain in arguments.plain),
        arguments, ("model", "near", "plain", "seconds", *_COST, "fits"))  # fmt: skip
    return 0


def _clusters(arguments: argparse.Namespace) -> list[Any]:
    from nearflash.explore.systems.cluster import Cluster

    return [Cluster(hosts, arguments.gpus, drives, arguments.gpu, arguments.network, arguments.dram * 1e9)
            for hosts in arguments.hosts for drives in arguments.drives]  # fmt: skip


def _serving_cluster(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.clusters import cluster_serving_rows
    from nearflash.explore.systems.instinfer import Serving

    serving = Serving(arguments.model, arguments.prompt, arguments.new, arguments.users)
    _show(cluster_serving_rows(serving, _clusters(arguments), arguments.weight_bits, arguments.rate), arguments,
          ("hosts", "drives", "layout", "replicas", "tokens_per_user_second", "first_token_seconds", "usd", *_COST,
           "fits", "serves", "best"))  # fmt: skip
    return 0


def _training_cluster(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.clusters import cluster_training_rows

    rows = cluster_training_rows(arguments.model, _clusters(arguments), arguments.optimizer, arguments.tokens)
    _show(rows, arguments, ("hosts", "drives", "layout", "seconds", "units_per_second", "usd", *_COST, "fits", "best"))
    return 0


def _endor(arguments: argparse.Namespace) -> int:
    from nearflash.explore.outcome import Outcome
    from nearflash.explore.studies.plots import bars
    from nearflash.explore.studies.sweeps import endor_rows
    from nearflash.explore.systems.layered import Placement

    endor = endor_rows(arguments.model, Placement(*arguments.layers), arguments.bits)
    rows = _show(endor, arguments, ("format", "model", "seconds", "speed_up", *_COST, "fits"))
    if arguments.png:
        outcomes = [Outcome(row["format"], row["model"], row["phases"]) for row in rows]
        _draw(arguments, bars(outcomes, f"{arguments.model}, layers {'/'.join(map(str, arguments.layers))}"))
    return 0


def _engine(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.dse import engine_builds

    rows = [row for tokens in arguments.context for row in engine_builds(arguments.board, tokens)]
    _show([row for row in rows if arguments.all or row["fits"]], arguments)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.plots import bars
    from nearflash.explore.studies.sweeps import compare_systems, row_of
    from nearflash.explore.trace import trace_events
    from nearflash.support.trace_events import write_trace

    groups = compare_systems()
    rows = [
        row_of(outcome, workload=title, speed_up=outcome.rate / outcomes[0].rate, assumptions=list(outcome.assumptions))
        for title, outcomes in groups.items()
        for outcome in outcomes
    ]
    _show(rows, arguments, ("workload", "system", "seconds", "units_per_second", "speed_up", *_COST, "fits"))
    if not arguments.json:
        texts = dict.fromkeys(text for row in rows for text in row["assumptions"])
        print("\nassumptions:\n" + "\n".join(f"- {text}" for text in texts))
    if arguments.trace:
        events = trace_events([outcome for outcomes in groups.values() for outcome in outcomes])
        write_trace(arguments.trace, events, mode=PUBLIC_MODE)
    if arguments.png:
        for number, (title, outcomes) in enumerate(groups.items(), 1):
            arguments.png, path = arguments.png.with_stem(f"{arguments.png.stem}-{number}"), arguments.png
            _draw(arguments, bars(outcomes, title))
            arguments.png = path
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.check import conclusions, figures, predictions

    if arguments.blind is not None:
        _show(predictions(arguments.blind), arguments)
        return 0
    found = _show(conclusions(), arguments, ("id", "what", "verdict", "calibrates"))
    if not arguments.json:
        disagreeing = [row for row in found if row["verdict"] != "true"]
        print("".join(f"\n{row['id']}: {row['reason']}; to settle it: {row['settle']}" for row in disagreeing) + "\n")
    rows = _show(figures(), arguments, ("id", "what", "value", "published", "unit", "error"))
    unexplained = [row for row in found if row["verdict"] != "true" and not row["reason"]]
    return int(any(abs(row["error"]) > 0.1 and "explained" not in row for row in rows) or bool(unexplained))


def _report(arguments: argparse.Namespace) -> int:
    from nearflash.explore.studies.report import write_report

    if arguments.output.suffix not in (".html", ".htm"):
        raise CommandError(f"output must end with .html, not {arguments.output.name!r}")
    check_replaceable(arguments.output)
    write_report(arguments.output)
    print(arguments.output)
    return 0
