"""One language: words that are not the field's stay out of public names, help texts and documentation."""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

from nearflash.bench.options import options_of
from nearflash.bench.runner import bench_names, load_bench, summary
from nearflash.cli.main import make_parser

#: Words of a public name (module, class, function, method, parameter, dataclass field), and what to write.
NAMES = {
    "doors": "integrations",
    "storey": "component",
    "house": "architecture",
    "guess": "speculative step",
    "guesses": "mispredictions",
    "judge": "validate",
    "stepping": "StepRunner",
    "deal": "stripe, demux",
    "dealt": "striped",
    "whole": "valid",
    "blank": "erased",
    "foreign": "misdirected",
    "told": "reported",
    "says": "states",
    "mend": "correct, repair",
    "turns": "interleaved",
    "afresh": "again",
    "anew": "again",
    "behind": "after",
    "mass": "top_p",
    "budget": "top_k",
    "harvest": "score readout",
    "phrase": "command sequence",
    "phrases": "command sequences",
    "ones": "popcount",
    "spread": "scatter network",
    "cut": "truncate",
    "answer": "response",
    "answers": "responses",
    "ask": "request",
    "asks": "requests",
    "asked": "requested",
    "draw": "random_vectors",
    "drawn": "random_vectors",
    "extra": "metadata",
}
#: Names of more words, or that mean something else in another package: where they are, and what to write.
SCOPED = {
    "take": (("training",), "claim, reload"),
    "owner": (("abi", "storage", "inference", "model", "gateware.nand", "gateware.attention", "sim.nand"), "page_tag"),
    "owners": (
        ("abi", "storage", "inference", "model", "gateware.nand", "gateware.attention", "sim.nand"),
        "page_tags",
    ),
    "fresh": (("training", "storage", "cli"), "no_resume"),
    "least": (("inference", "cli", "abi.attention", "model.attention", "gateware.attention"), "min_…"),
    "copy": (("training.optimizers",), "param_dtype"),
    "unit": (("storage", "device", "abi.attention", "gateware.nand", "model.nand"), "lun"),
    "units": (("storage", "device", "abi.attention", "gateware.nand", "model.nand"), "luns"),
    "lane": (("storage", "gateware.nand", "model.nand"), "lun_queue"),
    "lanes": (("storage", "gateware.nand", "model.nand"), "lun_queues"),
    "tail": (("storage", "inference"), "unindexed suffix"),
    "tails": (("storage", "inference"), "unindexed suffixes"),
    "group_memory": (("",), "page_cache"),
    "token_group": (("",), "page_group"),
    "embedding_block": (("",), "index_block"),
    "take_store": (("",), "reload"),
    "channels": (("inference.policy",), "score_dims"),
}
#: Whole names of a class.
CLASSES = {"Master": "OptimizerState", "Stepping": "StepRunner", "Numbers": "ResolvedPolicy", "Case": "TestVector"}
#: Whole names of a parameter or a dataclass field.
PARAMETERS = {"local": "local_window"}
#: Options of commands.
OPTIONS = {
    "--least": "--min-tokens",
    "--mass": "--top-p",
    "--local": "--local-window",
    "--tail": "--keep-tail",
    "--memory": "--cache-size",
    "--devices": "--num-devices",
    "--channels": "--score-dims",
    "--budget": "--top-k",
    "--fresh": "--no-resume",
    "--copy": "--param-dtype",
}
#: Words of prose, as regular expressions.
PROSE = {
    r"doors?": "integrations",
    r"store(y|ys|ies)": "components",
    r"house": "architecture",
    r"guess(es|ed)?": "speculative step, misprediction",
    r"judge[sd]?": "validate",
    r"deal(s|t)?": "stripe, demux",
    r"blank": "erased",
    r"foreign": "misdirected",
    r"owners?": "page tag",
    r"told": "reported",
    r"tells?": "reports",
    r"says?": "states",
    r"(is|are) said": "states",
    r"refused? by name": "rejected with a named error",
    r"mend(s|ed|ing)?": "correct, repair, fix",
    r"by turns": "interleaved",
    r"afresh": "again",
    r"anew": "again",
    r"under way": "in flight",
    r"going on from": "resuming from",
    r"token groups?": "KV page group",
    r"embedding blocks?": "index block",
    r"group memory": "KV page cache",
    r"phrases?": "ONFI command sequence",
    r"harvest(s|ed)?": "score readout",
}
#: Names, and places, where the word means what it means in the field, each with its reason.
JUSTIFIED = {
    "extra_info": "a parameter of SGLang's interface",
    "copy_format": "the device contract's CopyFormat",
    "keep_tail": "the glossary's own name for attending to the unindexed suffix",
    "write_behind": "a cache's write-behind",
    "WriteBehind": "a cache's write-behind",
    "select_mass": "selects by probability mass, the term of statistics",
    "nearflash.model.attention.select.entries.Entries.mass": "probability mass",
    "nearflash.model.attention.select.select.select_mass(mass)": "probability mass",
    "nearflash.model.attention.select.selection.selection(mass)": "probability mass",
}


#: Names that are still to be renamed: this list only shrinks.
PENDING = {
    "Answer",
    "Phrase",
    "PhraseKind",
    "PhrasePlayer",
    "ask",
    "budget",
    "cut_cycles",
    "identity_states_what_was_built",
    "judge",
    "mass",
    "unit_requests",
}


def words(name: str) -> list[str]:
    """The words of a name, in lower case."""
    return re.findall(r"[a-z]+|[0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower())


def public(name: str) -> bool:
    return not name.startswith("_")


def names_in(module: str, tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Kind, name and place of each public name that a module defines."""
    yield "module", module.rpartition(".")[2], module
    yield from _names(tree.body, module, in_class=False)


def _names(body: list[ast.stmt], place: str, *, in_class: bool) -> Iterator[tuple[str, str, str]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and public(node.name):
            yield "class", node.name, f"{place}.{node.name}"
            yield from _names(node.body, f"{place}.{node.name}", in_class=True)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if public(node.name) and not node.name.startswith("test_"):
                yield "function", node.name, f"{place}.{node.name}"
            if public(node.name) or node.name == "__init__":
                arguments = node.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    if public(argument.arg):
                        yield "parameter", argument.arg, f"{place}.{node.name}({argument.arg})"
        elif in_class and isinstance(node, ast.AnnAssign) and public(field := ast.unparse(node.target)):
            yield "parameter", field, f"{place}.{field}"


def replacement(kind: str, name: str, module: str) -> str | None:
    """What to write in place of a name, or None where it may stay."""
    exact = {"class": CLASSES, "parameter": PARAMETERS}.get(kind, {})
    if name in exact:
        return exact[name]
    parts = words(name)
    for word in parts:
        if word in NAMES:
            return NAMES[word]
    joined = "_".join(["", *parts, ""])
    for word, (packages, instead) in SCOPED.items():
        inside = any(f"{module}.".startswith(f"nearflash.{package}") for package in packages)
        if inside and f"_{word}_" in joined:
            return instead
    return None


def help_texts(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Command and text of every help string, of subcommands too."""
    yield parser.prog, " ".join(filter(None, (parser.description, parser.epilog)))
    for action in parser._actions:
        if action.help not in (None, argparse.SUPPRESS):
            yield parser.prog, " ".join([*action.option_strings, str(action.help)])
        if isinstance(action, argparse._SubParsersAction):
            for pseudo in action._choices_actions:
                yield parser.prog, str(pseudo.help)
            for sub in action.choices.values():
                yield from help_texts(sub)


def banned(text: str) -> Iterator[str]:
    """Banned words of a text, with what to write."""
    for pattern, instead in PROSE.items():
        for found in re.finditer(rf"(?<![\w-]){pattern}(?![\w-])", text, re.IGNORECASE):
            yield f"{found.group()!r} (write: {instead})"
    for option in re.findall(r"(?<![\w-])--[a-z-]+", text):
        if option in OPTIONS:
            yield f"{option} (write: {OPTIONS[option]})"


def test_public_names_are_the_fields(modules):
    wrong = []
    for module, tree in modules.items():
        for kind, name, place in names_in(module, tree):
            instead = replacement(kind, name, module)
            if instead and not {name, place} & (JUSTIFIED.keys() | PENDING):
                wrong.append(f"{place}: {kind} {name!r} (write: {instead})")
    assert not wrong, f"{len(wrong)} names:\n" + "\n".join(wrong)


def test_help_texts_are_the_fields():
    texts = list(help_texts(make_parser(everything=True)))
    for bench in bench_names():
        options = options_of(load_bench(bench)).values()
        texts += [(f"bench {bench}", text) for text in (summary(bench), *(option.help for option in options))]
    wrong = [f"{command}: {word} in {text!r}" for command, text in texts for word in banned(text)]
    assert not wrong, "\n".join(wrong)


def documents(root: Path) -> list[Path]:
    folders = ("docs", "host", "rtl", "sim", "hls", "tests")
    return [root / "README.md", *(path for top in folders for path in sorted((root / top).rglob("*.md")))]


def test_documents_are_the_fields(root):
    wrong = []
    for path in documents(root):
        if path.name == "glossary.md":
            continue  # it lists the words
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            wrong += [f"{path.relative_to(root)}:{number}: {word}" for word in banned(line)]
    assert not wrong, f"{len(wrong)} words:\n" + "\n".join(wrong)


def test_exceptions_exist(modules):
    found = {text for module, tree in modules.items() for _, *texts in names_in(module, tree) for text in texts}
    assert JUSTIFIED.keys() <= found
