"""Options of the layers on disk that do not go together, in the same words for a command line and a script."""

from collections.abc import Sequence
from pathlib import Path

from nearflash.abi.errors import CommandError

__all__ = ["check_weight_options"]


def check_weight_options(
    paths: Sequence[Path], ratio: Sequence[int] | None, *, expands: bool, caches_experts: bool,
    paths_name: str = "weights_paths", experts_name: str = "expert_bytes",
) -> None:  # fmt: skip
    """Raise CommandError for a ratio without its paths, and for what an expand device does not read.

    expands: whether there is such a device; caches_experts: whether experts are read as they are routed. *_name: what
    the caller's user calls them.
    """
    if expands and caches_experts:
        raise CommandError(f"{experts_name} must be left out with expand_device: experts are read one by one")
    if expands and paths:
        raise CommandError(f"{paths_name} must be left out with expand_device, which reads from its own drive")
    if ratio is not None and len(paths) != len(ratio):
        raise CommandError(f"weights_ratio must have a number for each {paths_name}")
