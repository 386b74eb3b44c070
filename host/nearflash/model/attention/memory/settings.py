"""How one head is attended to: the fields of a descriptor beside addresses."""

from dataclasses import dataclass, fields

from nearflash.abi.attention.codeword import PageTag
from nearflash.abi.attention.descriptor import AttendDescriptor, Mode
from nearflash.abi.attention.pages import DEVICE_GROUP_TOKENS, IndexFormat, IndexLayout, TokenLayout
from nearflash.abi.errors import CommandError
from nearflash.abi.formats import fp32_round
from nearflash.abi.python310 import Self
from nearflash.model.attention.numerics.logit import SCALE_LEAST, SCALE_LIMIT

__all__ = ["Addresses", "HeadSettings"]


@dataclass(frozen=True)
class Addresses:
    """Device byte addresses of a descriptor, as in AttendDescriptor."""

    q: int = 0
    v_mean: int = 0
    out: int = 0
    index_table: int = 0
    token_table: int = 0


@dataclass(frozen=True)
class HeadSettings:
    """Fields of AttendDescriptor, with its meanings. Raises CommandError where they do not fit together.

    `sparq` and `sparf` are mode 0 or PROBABILITY (the pages that sparf reads change no number), `sparf-page` has PAGE,
    dense attention DENSE | REFERENCE.
    """

    mode: Mode
    dim: int
    scale: float
    """log2(e) times the softmax scaling; rounded to fp32."""
    score_dims: int = 0
    top_k: int = 0
    local_window: int = 1
    top_p: int = 0
    group_tokens: int = 16
    interleaved: bool = False
    block_tokens: int = 256
    index_format: IndexFormat = IndexFormat.FP16
    page_bytes: int = 4096
    reference: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", fp32_round(self.scale))
        dense = bool(self.mode & Mode.DENSE)
        rules = {
            "dim": (self.dim % 4 == 0 and 4 <= self.dim <= 256, "a multiple of 4, 4 to 256"),
            "scale": (SCALE_LEAST <= self.scale < SCALE_LIMIT, "at least 2^-14 and below 2^8"),
            "score_dims": (dense or 1 <= self.score_dims <= self.dim, "1 to dim"),
            "top_k": (dense or self.top_k >= 1, "at least 1"),
            "local_window": (self.local_window >= 0, "0 or more"),
            "top_p": (
                self.top_p == 0 or (0 < self.top_p < 1 << 16 and self.mode & Mode.PROBABILITY),
                "0, or 1 to 65535 with PROBABILITY",
            ),
            "reference": (bool(self.reference) == bool(self.mode & Mode.REFERENCE), "given exactly with REFERENCE"),
            "mode": (not dense or self.mode & Mode.REFERENCE, "with REFERENCE where DENSE"),
            "group_tokens": (self.group_tokens <= DEVICE_GROUP_TOKENS, f"at most {DEVICE_GROUP_TOKENS}"),
            "block_tokens": (dense or self.block_tokens % self.group_tokens == 0, "a multiple of group_tokens"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise CommandError(f"{name} must be {rule}, not {getattr(self, name)!r}")

    @classmethod
    def of(cls, descriptor: AttendDescriptor) -> Self:
        """The settings of a descriptor. Raises CommandError as the class does."""
        return cls(**{field.name: getattr(descriptor, field.name) for field in fields(cls)})

    @property
    def token_layout(self) -> TokenLayout:
        """Layout of the KV page groups. Raises CommandError where they do not fit a page."""
        return TokenLayout(self.page_bytes, self.dim, self.group_tokens, self.interleaved)

    @property
    def index_layout(self) -> IndexLayout:
        """Layout of the index pages. Raises CommandError where they do not fit a page."""
        return IndexLayout(self.page_bytes, self.dim, self.block_tokens, self.index_format)

    @property
    def entry_tokens(self) -> int:
        """Tokens that an entry of the selection can hold: n in page selection, else 1."""
        return self.group_tokens if self.mode & Mode.PAGE else 1

    def entries(self, tokens: int) -> int:
        """Entries of the selection over S = `tokens` tokens."""
        return -(-tokens // self.entry_tokens)

    def count_scanned(self, tokens: int) -> int:
        """Tokens that the index covers: whole blocks; 0 for dense attention."""
        return 0 if self.mode & Mode.DENSE else tokens // self.block_tokens * self.block_tokens

    def descriptor(self, page_tag: PageTag, tokens: int, group: int, at: Addresses) -> AttendDescriptor:
        """The descriptor of one head of S = `tokens` tokens and `group` query heads."""
        return AttendDescriptor(
            self.mode, page_tag, self.dim, tokens, group, self.score_dims, self.top_k, self.local_window,
            self.group_tokens, self.interleaved, self.block_tokens, self.index_format, self.page_bytes, self.scale,
            at.q, at.v_mean, at.out, at.index_table, at.token_table, self.top_p, self.reference,
        )  # fmt: skip
