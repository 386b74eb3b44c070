"""Options that would be without effect: refused by name, by the rules that commands declare."""

import argparse
from collections.abc import Iterator

import pytest

from nearflash.cli import main as cli

REFUSED = {
    "bitstream list --json": "given with --cost, whose lines it writes",
    "bitstream build pynq-z2 --package-only": "left out, as the open flow has no package",
    "bitstream build smartssd --kernel update": "left out, as the vendor's tools build all kernels",
    "compress DIR -o OUT --method magnitude --windows 9": "given with --texts, which are cut into them",
    "compress DIR -o OUT --lossless --tokens 99": "given with --texts, which are cut into them",
    "compress DIR -o OUT --lossless --device cuda": "left out with --lossless: nothing is pruned or measured (--texts)",
    "compress DIR -o OUT --lossless --compute fp16": "left out with --lossless: nothing is computed (--texts, "
    "--evaluate)",
    "devices --measure DIR --kernel update": "left out with --measure, which lists nothing",
    "explore kvnand --choose --context 1k": "left out with --choose, which lists contexts",
    "explore kvnand --choose --without bounded": "left out with --choose, which lists contexts",
    "explore kvnand --choose --png OUT": "left out with --choose, which lists contexts",
    "generate --model DIR text --attention dense --read-ahead": "left out with --attention dense, which chooses "
    "nothing, and kvswap, which reads ahead",
    "generate --model DIR text --session-tokens 64": "given with --session, whose file they are of",
    "generate --model DIR text --kv-device model --cache-size 2G": "left out where K and V are in a device's memory or "
    "NAND, or given with --path, whose window it is",
    "kv verify FILE --json --heads": "left out with --json, which prints one object a file",
    "plan DIR --hardware t4 --folder DIR": "left out with a machine's profile (--hardware), as nothing is measured",
    "tune DIR --hardware t4 --folder DIR": "left out with a machine's profile (--hardware), as nothing is measured",
    "preflight DIR --params 7M --optimizer sgd --state-format mx8": "left out with --optimizer sgd, "
    "which has no moments without momentum",
    "selftest --device model:attend-tiny --params 9": "left out but for a kernel update, which has them",
    "selftest --tokens 9": "left out but for a kernel attend, which has them",
    "selftest --kernel attend --columns 9": "left out but for a kernel expand, which has them",
    "sim --waves": "given with a testbench, which runs",
    "sim --seed 3": "given with a testbench, which runs",
    "state reshard FILE --to OUT --ranks 2 --stripe-ratio 2,1": "left out with --ranks: each rank has one file",
    "train --model DIR --data TEXT --path DIR --topk-residual fp32": "given with --topk, the share that is sent",
    "train --model DIR --data TEXT --path DIR --topk-values fp16": "given with --topk, the share that is sent",
    "train --model DIR --data TEXT --path DIR --topk-warmup 3": "given with --topk, the share that is sent",
    "train --model DIR --data TEXT --path DIR --topk-unsaved": "given with --topk, the share that is sent",
    "train --model DIR --data TEXT --path DIR --topk .1 --topk-residual none --topk-unsaved": "left out with "
    "--topk-residual none, which holds nothing",
    "train --model DIR --data TEXT --path DIR --optimizer sgd --state-format mx8": "left out with --optimizer sgd, "
    "which has no moments without momentum",
}
"""By command line, what its last option must be."""


@pytest.mark.parametrize("line", REFUSED)
def test_an_option_without_effect_is_refused(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(line.split()) == 2
    assert capsys.readouterr().err == f"nearflash: {_last_option(line)} must be {REFUSED[line]}\n"
    assert not list(tmp_path.iterdir())


def test_every_declared_rule_is_tried():
    """A rule of a command is in the table, for each of its options."""
    tried = {(_command(line), _last_option(line), rule) for line, rule in REFUSED.items()}
    assert tried == set(_declared(cli.make_parser(everything=True)))


def test_an_option_at_its_default_is_none_that_was_given(capsys):
    assert cli.main(["sim", "--seed", "0"]) == 0
    assert "gateware.bus.read" in capsys.readouterr().out


def _declared(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Command, option and rule, of a parser and all below it."""
    own, rules = parser.get_default("ineffective") or (parser, ())
    for rule in rules:
        yield from (
            (own.prog.removeprefix("nearflash "), f"--{name.replace('_', '-')}", rule.rule) for name in rule.names
        )
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _declared(below)


def _command(line: str) -> str:
    """The command that a line begins with, its action included."""
    words = line.split()
    return " ".join(words[: 2 if words[0] in ("bitstream", "explore", "kv", "state") else 1])


def _last_option(line: str) -> str:
    return [word for word in line.split() if word.startswith("--")][-1]
