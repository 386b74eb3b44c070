"""Policy files: what `nearflash calibrate` found for a model: score_dims and top_p of every KV head, the page layout.

JSON, read strictly. A file belongs to a model by the digest of its configuration (`model_digest` in `choose`), and to
its weights by theirs: what a head loses was measured on those. Shipped files lie in the folder `calibrated`, the user's
own in $XDG_DATA_HOME/nearflash/policies (~/.local/share by default). Loads no torch.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nearflash.abi.attention.pages import IndexFormat
from nearflash.abi.errors import CommandError, StateError
from nearflash.inference.policy.policy import AttentionMode, AttentionPolicy
from nearflash.storage.kv import KvLayout, KvShape
from nearflash.support.files import read_text, write_durably
from nearflash.support.folders import user_folder
from nearflash.support.tables import check_fields, read_json

__all__ = ["PolicyFile", "find_policy", "own_folder", "policy_files"]

_VERSION = 2
_SHIPPED = Path(__file__).with_name("calibrated")


@dataclass(frozen=True)
class PolicyFile:
    """A policy for a model, and what is known of it."""

    model: str
    """Its name, for people."""
    digest: str
    """Of its configuration: `model_digest`."""
    policy: AttentionPolicy
    """`sparf-page`, with an override for every (layer, KV head) on flash."""
    layout: KvLayout
    flash_fraction: float
    """Predicted: flash bytes as a fraction of those of all K and V."""
    divergence: float
    """Predicted: from dense attention's predictions, nats a token."""
    made_by: str
    """The command."""
    weights: dict[str, str] = field(default_factory=dict)
    """Of its parameters: their digests in each dtype that a model is loaded in (`weights_digests`), by its name."""

    @classmethod
    def read(cls, path: Path, shape: KvShape | None = None, digest: str | None = None) -> "PolicyFile":
        """Raises StateError, naming file and field, for what is damaged, of another version, of another model (its
        digest) or does not fit the shape."""
        what = f"policy file {path}"
        body = read_json(path, StateError)
        if isinstance(body, dict) and body.get("version") == 1:
            raise StateError(f"{what} must have version {_VERSION}, not 1, which names no weights: calibrate again")
        version, model, model_digest, weights, made_by, fraction, divergence, layout, *settings = check_fields(
            what, body, version=int, model=str, digest=str, weights=dict, made_by=str, flash_fraction=float,
            divergence=float, layout=dict, top_k=float, local_window=int, keep_tail=bool, score_dims=list, top_p=list,
        )  # fmt: skip
        if version != _VERSION:
            raise StateError(f"{what} must have version {_VERSION}, not {version}")
        if not all(isinstance(text, str) for text in weights.values()):
            raise StateError(f"{what} must have text as the digests of weights, not {weights!r:.200}")
        if digest is not None and model_digest != digest:
            raise StateError(f"{what} must be for this model's configuration, but it is for {model!r}: calibrate it")
        try:
            read = cls(
                model, model_digest, _policy(*settings), _layout(what, layout), fraction, divergence, made_by, weights
            )
            if shape is not None:
                read._check(shape)
        except (CommandError, ValueError) as error:
            raise StateError(f"{what} must have settings that make sense: {error}") from error
        return read

    def write(self, path: Path) -> None:
        """Write the file (mode 0600), durably, at once or not at all. Raises StateError."""
        table = self._table()
        body = {
            "version": _VERSION, "model": self.model, "digest": self.digest, "weights": self.weights,
            "made_by": self.made_by, "flash_fraction": float(self.flash_fraction), "divergence": float(self.divergence),
            "layout": asdict(self.layout) | {"index_format": self.layout.index_format.name},
            "top_k": float(self.policy.top_k), "local_window": self.policy.local_window,
            "keep_tail": self.policy.keep_tail,
            "score_dims": [[head.score_dims for head in row] for row in table],
            "top_p": [[head.top_p for head in row] for row in table],
        }  # fmt: skip
        text = json.dumps(body, indent=1).replace("\n   ", " ").replace("\n  ]", "]") + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, text)
        except OSError as error:
            raise StateError(f"policy file {path} must be writable: {error.strerror}") from error

    def _table(self) -> list[list[AttentionPolicy]]:
        """The policies by layer and head."""
        layers = 1 + max(key[0] for key in self.policy.overrides if isinstance(key, tuple))
        heads = len(self.policy.overrides) // layers
        return [[self.policy.at(layer, head) for head in range(heads)] for layer in range(layers)]

    def _check(self, shape: KvShape) -> None:
        table = self._table()
        if (len(table), len(table[0])) != (shape.layers, shape.kv_heads):
            raise CommandError(
                f"score_dims must be of {shape.layers} layers and {shape.kv_heads} KV heads, not of {len(table)} and "
                f"{len(table[0])}"
            )
        self.layout.token_layout(shape.dim)
        self.layout.index_layout(shape.dim)
        for head_policy in self.policy.overrides.values():
            head_policy.resolve(1, shape.dim, self.layout)


def own_folder() -> Path:
    """The folder of the user's policy files."""
    return user_folder("XDG_DATA_HOME") / "policies"


def policy_files() -> Iterator[Path]:
    """The user's files, then the shipped ones."""
    with suppress(OSError):  # a user without a home has none
        yield from sorted(own_folder().glob("*.json"))
    yield from sorted(_SHIPPED.glob("*.json"))


def find_policy(
    digest: str, shape: KvShape | None = None, fits: Callable[[PolicyFile], bool] = lambda _: True
) -> tuple[Path, PolicyFile] | None:
    """The file that belongs to a model and `fits`; of several the user's own.

    Raises StateError for a damaged one of the model.
    """
    for path in policy_files():
        try:
            stated = json.loads(read_text(path)).get("digest")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue  # nothing says that it is this model's
        if stated == digest and fits(policy_file := PolicyFile.read(path, shape, digest)):
            return path, policy_file
    return None


def _policy(
    top_k: float, local_window: int, keep_tail: bool, score_dims: list[Any], top_p: list[Any]
) -> AttentionPolicy:
    base = AttentionPolicy(AttentionMode.SPARF_PAGE, top_k=top_k, local_window=local_window, keep_tail=keep_tail)
    heads: dict[int | tuple[int, int], AttentionPolicy] = {}
    for layer, row in enumerate(zip(score_dims, top_p, strict=True)):
        if any(type(values) is not list for values in row) or len(row[0]) != len(score_dims[0]):
            raise CommandError("score_dims and top_p must be lists of as many numbers for each layer")
        for head, (r, tau) in enumerate(zip(*row, strict=True)):
            if type(r) is not int or type(tau) is not float:
                raise CommandError(f"score_dims must be counts and top_p numbers, not {r!r:.40} and {tau!r:.40}")
            heads[layer, head] = replace(base, score_dims=r, top_p=tau)
    if not heads:
        raise CommandError("score_dims must be of a layer and a KV head at least")
    return replace(base, overrides=heads)


def _layout(what: str, body: Any) -> KvLayout:
    group, interleaved, block, form, page = check_fields(
        f"the layout in {what}", body, group_tokens=int, interleaved=bool, block_tokens=int, index_format=str,
        page_bytes=int,
    )  # fmt: skip
    if form not in IndexFormat.__members__ or not group or not block or not page:
        raise CommandError(f"layout must have sizes above 0 and an index format, not {body!r:.200}")
    return KvLayout(group, interleaved, block, IndexFormat[form], page)
