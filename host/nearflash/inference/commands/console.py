"""Input and output of `nearflash generate`: prompts, the estimate before, progress, figures after."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from nearflash.abi.errors import CommandError, UnknownDeviceError
from nearflash.device import available_devices
from nearflash.device.registry import full_name
from nearflash.inference.policy.estimate import read_seconds
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.io.profile import DriveProfile, find_profile
from nearflash.storage.kv import KvShape
from nearflash.support.files import read_text
from nearflash.support.progress import print_step

if TYPE_CHECKING:
    from nearflash.inference.generate import Generated
    from nearflash.inference.progress import GenerationProgress

__all__ = ["check_device", "estimate", "is_torch", "read_lines", "read_prompts", "report_progress", "summary"]

_INDEX_SHARE = 1 / 8
"""Of int4 index rows, of the bytes of K and V."""
_NOTABLE_BYTES = 64 << 20
"""Of K and V, from which on the drive's rate matters."""


def read_prompts(prompt: str | None, file: Path | None, standard_input: TextIO) -> list[str]:
    """The prompt, the lines of a file, or all of standard input as one prompt. Raises CommandError."""
    if prompt is not None and file is not None:
        raise CommandError("prompts must be left out where a prompt is given")
    if prompt is None and file is None:
        if standard_input.isatty():
            raise CommandError("prompt must be given: as an argument, by --prompts FILE, or on standard input")
        try:
            prompt = standard_input.read()
        except UnicodeDecodeError as error:
            raise CommandError(f"prompt must be UTF-8, but byte {error.start} of standard input is not") from error
    if file is None:
        assert prompt is not None, "read above"
        if not prompt.strip():
            raise CommandError("prompt must be a text, not empty")
        return [prompt.rstrip("\n")]
    return read_lines(file)


def read_lines(file: Path) -> list[str]:
    """Lines of a file that are not blank. Only newlines end one, as a carriage return before one does not.

    Raises CommandError for no regular file, one of more than support.files.MAX_TEXT_BYTES, no UTF-8, and no line.
    """
    try:
        text = read_text(file)
    except OSError as error:
        raise CommandError(f"prompts must be in a readable file, not {str(file)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"prompts must be UTF-8, but byte {error.start} of {str(file)!r} is not") from error
    lines = [line for text_line in text.split("\n") if (line := text_line.removesuffix("\r")).strip()]
    if not lines:
        raise CommandError(f"prompts must be at least one line of {str(file)!r}, not none")
    return lines


def is_torch(device: str) -> bool:
    """Whether torch computes on it: the CPU, or a GPU."""
    return device == "cpu" or device.split(":")[0] == "cuda"


def check_device(device: str) -> None:
    """Raise UnknownDeviceError, before a model is loaded, for a device that is none."""
    if not is_torch(device):
        try:
            full_name(device, "attend")
        except UnknownDeviceError as error:
            names = sorted({name.partition(":")[0] for name in available_devices("attend")})
            raise UnknownDeviceError(
                f"device must be cpu, cuda, cuda:N, or one of {', '.join(names)}, not {device!r}: nearflash devices "
                "lists the last with their builds"
            ) from error


def estimate(
    shape: KvShape, policy: AttentionPolicy, tokens: int, sequences: int, paths: Sequence[Path | None],
    ratio: Sequence[float] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Lines: bytes that will be written, room, and what the drives allow at most, where they were measured.

    tokens: of the longest sequence. paths: the files of pages, None for a temporary one; ratio: KV heads of each.
    """
    folders = [Path(tempfile.gettempdir()) if path is None else path.parent for path in paths]
    dense = policy.mode is AttentionMode.DENSE and not policy.overrides
    kv_bytes = tokens * sequences * shape.token_bytes
    written = kv_bytes * (1 if dense else 1 + _INDEX_SHARE)
    free = [shutil.disk_usage(folder).free if folder.is_dir() else 0 for folder in folders]
    where = " and ".join(
        f"{path or 'a temporary file'} ({free_bytes / 1e9:.1f} GB are free there)"
        for path, free_bytes in zip(paths, free, strict=True)
    )
    yield (
        f"K and V of up to {tokens} tokens x {sequences}: up to {written / 1e6:.1f} MB are written to {where}, "
        "each byte once"
    )
    if kv_bytes < _NOTABLE_BYTES:
        return
    parts, read_bytes = ratio or [1] * len(folders), Counter[DriveProfile]()
    for folder, part in zip(folders, parts, strict=True):
        if (profile := find_profile(folder) if folder.is_dir() else None) is None:
            yield f"the drive's rates are not known: nearflash devices --measure {folder} keeps them for estimates"
            return
        read_bytes[profile] += int(kv_bytes / sequences * part / sum(parts))
    seconds, profile = max(
        ((read_seconds(size_bytes, drive), drive) for drive, size_bytes in read_bytes.items()), key=itemgetter(0)
    )
    yield (
        f"at its {profile.fastest('read'):.1f} GB/s (measured {profile.date}) reading all K and V would take "
        f"{seconds:.3g} s a token at the end: at most {1 / seconds:.3g} tokens/s if nothing stayed in memory"
    )


def report_progress(progress: "GenerationProgress") -> None:
    """A line that is overwritten on a terminal; elsewhere every sixteenth step."""
    line = (
        f"token {progress.step}/{progress.steps}  {progress.tokens_per_s:.1f} tokens/s  "
        f"{progress.flash_bytes_per_token / 1e6:.3f} MB of flash a token  {progress.remaining_s:.0f} s left"
    )
    print_step(line, progress.step, progress.steps, 16)


def summary(done: "Generated") -> str:
    """Rates, seconds by phase, bytes by kind."""
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in done.counters.seconds.items())
    kinds = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in done.counters.flash_bytes.items())
    per_token = f"{done.flash_bytes_per_token / 1e6:.3f} MB of flash a token, in all {kinds}"
    return (
        f"{sum(map(len, done.tokens))} tokens: prefill {done.prefill_s:.1f} s, decode {done.decode_s:.1f} s, "
        f"{done.tokens_per_s:.1f} tokens/s; engine: {phases}\n"
        f"{per_token if kinds else 'all K and V that were attended to were in memory: no flash was read'}"
    )
