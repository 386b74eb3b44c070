"""How commands read: options by their whole names; help with examples as written, and the default of each option."""

import argparse

__all__ = ["HelpFormatter", "set_conventions"]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, and adds `(default: …)` where a default is worth reading."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        silent = default in (None, argparse.SUPPRESS, []) or isinstance(default, bool)
        if text is None or silent or not action.option_strings or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return text + f" (default: {shown.replace('%', '%%')})"


def set_conventions(parser: argparse.ArgumentParser) -> None:
    """Give a parser and all its subcommands this formatter, and options that are written out: `--prompt TEXT` is no
    short form of `--prompts FILE`, and a script does not stop as options are added.
    """
    parser.formatter_class, parser.allow_abbrev = HelpFormatter, False
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for action_parser in action.choices.values():
                set_conventions(action_parser)
