"""`nearflash bitstream`: boards, what was built for them, and how it gets there."""

import argparse
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from nearflash.abi.errors import BitstreamError, CommandError, DigestError
from nearflash.abi.kernel.config import CONFIGS
from nearflash.cli.costs import show_costs
from nearflash.support.arguments import Ineffective, declare_ineffective
from nearflash.support.ssh import HOST, ssh_command

__all__ = ["add", "load_function"]

GROUP = "nearflash.bitstream"
"""Entry points of the packages that emit, build, lint and estimate: they need Amaranth and Yosys, commands do not."""
_EXAMPLES = """examples:
  nearflash bitstream list
  nearflash bitstream list pynq-z2 --cost
  nearflash bitstream build zynq7045
  nearflash bitstream verify pynq-z2
  nearflash bitstream prove pynq-z2 --kernel expand
  nearflash bitstream deploy pynq-z2 --kernel update --to xilinx@pynq:nearflash
"""
_TARGET = re.compile(rf"({HOST}):([\w./~-]+)")


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("bitstream", epilog=_EXAMPLES)
    actions = parser.add_subparsers(metavar="action", required=True)

    def action(name: str, run: Callable[[argparse.Namespace], int], text: str, *, optional: bool) -> Any:
        action_parser = actions.add_parser(name, help=text, description=text)
        action_parser.add_argument("board", nargs="?" if optional else None, help="Board: a folder of bitstreams/.")
        action_parser.set_defaults(run=run)
        return action_parser

    listing = action("list", _list, "List boards and kernels: evidence, Fmax, resources, files.", optional=True)
    listing.add_argument("--cost", action="store_true", help="Show cells, clock, bound of the rate, price of the part.")
    listing.add_argument("--json", action="store_true", help="With --cost: write one JSON object a line.")
    declare_ineffective(
        listing, Ineffective(("json",), lambda given: not given.cost, "given with --cost, whose lines it writes")
    )
    build = action("build", _build, "Build a board's bitstreams, or what its vendor's tools need.", optional=False)
    build.add_argument("--kernel", help="Build this kernel only (boards of the open flow).")
    build.add_argument("--package-only", action="store_true", help="Write the package and run no vendor tool.")
    declare_ineffective(
        build,
        Ineffective(
            ("kernel",), lambda given: not _is_open(given.board), "left out, as the vendor's tools build all kernels"
        ),
        Ineffective(
            ("package_only",), lambda given: _is_open(given.board), "left out, as the open flow has no package"
        ),
    )
    prove = action("prove", _prove, "Decode bitstreams, compare them with what was routed, run them.", optional=False)
    prove.add_argument("--kernel", help="Prove this kernel only (default: all that were built).")
    prove.add_argument("--mutants", type=int, default=200, help="Flips of one used bit that must be seen.")
    prove.add_argument("--json", action="store_true", help="Print the figures as JSON, one object a kernel.")
    action("verify", _verify, "Compare configurations and files with the manifests.", optional=True)
    deploy = action("deploy", _deploy, "Load a verified bitstream on this machine's board, or copy it.", optional=False)
    deploy.add_argument("--kernel", required=True, help="The kernel to load.")
    deploy.add_argument(
        "--to", metavar="USER@HOST:FOLDER", help="Copy it there by ssh instead, into a folder of bitstreams."
    )
    deploy.add_argument("--backend", help="Load it by this device, such as zynq without PYNQ (default: the board's).")
    estimate = action("estimate", _estimate, "Synthesise with Yosys and keep the figures as manifest.", optional=False)
    estimate.add_argument("--kernel", help="Estimate this kernel only.")
    lint = actions.add_parser("lint", help="Check the Verilog of kernels with Verilator and Yosys.")
    lint.add_argument("configs", nargs="*", metavar="CONFIG", help="Build configurations (default: all).")
    lint.set_defaults(run=_lint)


def load_function(name: str, command: str = "bitstream") -> Callable[..., Any]:
    """A function that `command` calls, of the packages with gateware. Raises CommandError where they are missing."""
    try:
        function: Callable[..., Any] = next(iter(entry_points(group=GROUP, name=name))).load()
    except StopIteration:
        raise CommandError(f"{command} {name} must be registered under {GROUP}: install nearflash again") from None
    except ImportError as missing:
        raise CommandError(
            f"{command} {name} needs the package {missing.name!r}; pip install 'nearflash[dev]'"
        ) from None
    return function


def _choose_boards(arguments: argparse.Namespace) -> list[Any]:
    from nearflash.device.bitstreams import boards, load_board

    return [load_board(name) for name in ([arguments.board] if arguments.board else boards())]


def _is_open(name: str) -> bool:
    from nearflash.device.bitstreams import load_board

    return bool(load_board(name).flow == "open")


def _kernels(board: Any) -> list[str]:
    return [CONFIGS[name].kernel for name in board.kernels]


def _list(arguments: argparse.Namespace) -> int:
    from nearflash.device.bitstreams import load_manifest

    if arguments.cost:
        return show_costs(_choose_boards(arguments), as_json=arguments.json)
    for board in _choose_boards(arguments):
        print(f"{board.name}: {board.title}, {board.part}, {board.flow} flow")
        for kernel in _kernels(board):
            try:
                manifest = load_manifest(board, kernel)
            except BitstreamError:
                print(f"  {kernel:<8}not built")
                continue
            used, there = manifest.utilisation, board.resources
            clocks = f"Fmax {manifest.fmax_hz / 1e6:.1f} MHz, runs at {manifest.clock_hz / 1e6:.1f} MHz"
            fmax = clocks if manifest.fmax_hz else "no Fmax"
            cells = ", ".join(
                f"{getattr(used, name):g} {name.upper()} ({getattr(used, name) / getattr(there, name):.0%})"
                for name in ("lut", "ff", "dsp", "bram36")
            )
            files = ", ".join(name for name in manifest.files if (manifest.folder / name).is_file()) or "no files"
            print(f"  {kernel:<8}{manifest.evidence}, {fmax}, {cells}; {files}")
    return 0


def _build(arguments: argparse.Namespace) -> int:
    from nearflash.device.bitstreams import load_board

    for line in load_function("build")(
        load_board(arguments.board), arguments.kernel, package_only=arguments.package_only
    ):
        print(line)
    return 0


def _prove(arguments: argparse.Namespace) -> int:
    from nearflash.device.bitstreams import load_board

    board, figures, wrong = load_board(arguments.board), {}, 0
    for kernel in [arguments.kernel] if arguments.kernel else _kernels(board):
        try:
            proof = load_function("prove")(board, kernel, mutants=arguments.mutants)
            figures[kernel], holds = proof.to_dict(), proof.holds
            state = "proved by decoding" if holds else "not proved"
        except BitstreamError as error:
            figures[kernel], holds, state = {"error": str(error)}, False, "not proved"
        wrong += not holds
        if not arguments.json:
            text = ", ".join(f"{name} {value}" for name, value in figures[kernel].items())
            print(f"{board.name}/{kernel}: {state}: {text}")
    if arguments.json:
        print(json.dumps(figures, indent=2))
    return 1 if wrong else 0


def _verify(arguments: argparse.Namespace) -> int:
    from nearflash.device.bitstreams import load_manifest

    wrong = 0
    for board in _choose_boards(arguments):
        for kernel in _kernels(board):
            try:
                manifest = load_manifest(board, kernel)
                manifest.verify()
                manifest.check_limits(board)
            except (BitstreamError, DigestError, OSError) as error:
                missing = not (board.folder / f"{kernel}.json").exists()
                wrong += not missing or bool(arguments.board)
                print(f"{board.name}/{kernel}: {'not built' if missing and not arguments.board else error}")
                continue
            print(f"{board.name}/{kernel}: {manifest.evidence}, {len(manifest.files)} files as built")
    return 1 if wrong else 0


def _deploy(arguments: argparse.Namespace) -> int:
    from nearflash.device.bitstreams import load_board, load_manifest
    from nearflash.device.registry import device_class

    board = load_board(arguments.board)
    manifest = load_manifest(board, arguments.kernel)
    manifest.verify()
    if not manifest.files:
        raise BitstreamError(f"{board.name}/{manifest.kernel} must have been built, not only {manifest.evidence}")
    if arguments.to:
        _copy(manifest, arguments.to, _device(manifest, arguments.backend))
        return 0
    with device_class(_device(manifest, arguments.backend)).load(manifest.config) as device:
        identity = device.identity
        print(f"{identity.name}: loaded, digest {identity.digest64:016x}, git {identity.git_revision:08x}")
    return 0


def _copy(manifest: Any, target: str, device: str) -> None:
    """Copy what the driver needs of a board and one kernel into a folder of bitstreams there, and compare digests.

    One connection, so that a password is asked for once.
    """
    from nearflash.device.bitstreams.manifest import sha256

    matched = _TARGET.fullmatch(target)
    if not matched:
        raise CommandError(f"--to must be USER@HOST:FOLDER, not {target!r}")
    host, folder = matched.groups()
    names = ["board.toml", f"{manifest.kernel}.json", *manifest.files]
    paths = {f"{manifest.board}/{name}": manifest.folder / name for name in names}
    packed = io.BytesIO()
    with tarfile.TarFile(fileobj=packed, mode="w") as archive:
        for name, path in paths.items():
            archive.add(path, name, filter=_without_owner)
    command = f"mkdir -p -- {folder} && tar -xf - -C {folder} && cd -- {folder} && sha256sum -- {' '.join(paths)}"
    done = subprocess.run(ssh_command(host, command), input=packed.getvalue(), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise BitstreamError(f"ssh must copy {', '.join(names)} to {target}; it failed, see its message")
    arrived = dict(line.split(maxsplit=1)[::-1] for line in done.stdout.decode("utf-8", "replace").splitlines())
    if wrong := [name for name, path in paths.items() if arrived.get(name) != sha256(path)]:
        raise BitstreamError(f"{wrong[0]} must have the same SHA-256 in {target} as here, not another: copy it again")
    print(f"{', '.join(names)}: in {target}/{manifest.board}, with the same SHA-256 as here")
    print(f"there: sudo NEARFLASH_BITSTREAMS={folder} nearflash selftest --device {device}")


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _device(manifest: Any, backend: str | None) -> str:
    from nearflash.device.bitstreams import load_board

    return f"{backend or load_board(manifest.board).backend}:{manifest.config}"


def _estimate(arguments: argparse.Namespace) -> int:
    from nearflash.device.bitstreams import load_board

    board = load_board(arguments.board)
    for kernel in [arguments.kernel] if arguments.kernel else _kernels(board):
        manifest = load_function("estimate")(board, kernel)
        print(f"{manifest.config}: {manifest.utilisation.lut:g} LUT, {manifest.logic_depth:g} levels")
    return 0


def _lint(arguments: argparse.Namespace) -> int:
    complaints = 0
    for report in load_function("lint")(arguments.configs or None):
        waived = ", ".join(f"{count} {rule}" for rule, count in sorted(report.waived.items()))
        print(f"{report.name}: {len(report.complaints)} complaints; waived: {waived or 'none'}")
        for line in report.complaints:
            print(f"  {line}")
        complaints += len(report.complaints)
    return 1 if complaints else 0
