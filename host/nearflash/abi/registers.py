"""Register maps of the kernels.

Layout: XRT control words (UG1393, ap_ctrl_chain), then blocks that each begin TYPE, VERSION, SIZE. Block 0 is the
identity: magic, ABI version, git revision, config digest. The same map serves XRT and PYNQ.
"""

from nearflash.abi import ABI_VERSION
from nearflash.abi.counters import ATTEND_COUNTERS, EXPAND_COUNTERS, UPDATE_COUNTERS
from nearflash.abi.fields import Access, Field, Register, RegisterMap

__all__ = [
    "ALL_REGISTERS",
    "ATTEND",
    "DELTA_BIT",
    "EXPAND",
    "FACTOR_BITS",
    "MAGIC",
    "REGISTER_MAPS",
    "SPLIT_BIT",
    "SPLIT_UPDATE",
    "UPDATE",
    "fourcc",
]


def fourcc(text: str) -> int:
    """Four characters as a little-endian word: block types are readable in a hex dump."""
    return int.from_bytes(text.encode("ascii"), "little")


MAGIC = fourcc("NFSH")
FACTOR_BITS = 51
"""Significand bits of the denominator's factor: enough for a product to be a division (docs/contracts/numerics.md)."""
DELTA_BIT = 18
"""Of register `program`, in builds with deltas: write what the copy changes in its place (docs/contracts/gradients.md).

No field of the map, which is that of builds without, too: their digests, and bitstreams, stay as they are."""
SPLIT_BIT = 19
"""Of register `program`, in builds with split masters: `p_address` and `p_out_address` are those of its weights."""
_RW, _RO, _CONTROL = Access.RW, Access.RO, Access.CONTROL


def _control() -> tuple[Register, ...]:
    return (
        Register("control", 0x00, 32, _CONTROL, "XRT kernel control", (
            Field("ap_start", 0, 1, "write 1 to start; reads 1 until the kernel has taken its arguments"),
            Field("ap_done", 1, 1, "the kernel has finished; cleared by reading"),
            Field("ap_idle", 2, 1, "the kernel is idle"),
            Field("ap_ready", 3, 1, "the kernel takes new arguments"),
            Field("ap_continue", 4, 1, "write 1 to acknowledge ap_done (ap_ctrl_chain)"),
            Field("auto_restart", 7, 1, "start again when done"),
        )),
        Register("interrupt_enable", 0x04, 32, _CONTROL, "global interrupt enable", (
            Field("enable", 0, 1, "interrupts on"),)),
        Register("interrupt_mask", 0x08, 32, _CONTROL, "which events raise the interrupt", (
            Field("done", 0, 1, "ap_done"), Field("ready", 1, 1, "ap_ready"))),
        Register("interrupt_status", 0x0C, 32, _CONTROL, "events seen; write 1 to toggle", (
            Field("done", 0, 1, "ap_done"), Field("ready", 1, 1, "ap_ready"))),
    )  # fmt: skip


def _block_header(prefix: str, offset: int, kind: str, version: int, size_bytes: int) -> tuple[Register, ...]:
    return (
        Register(f"{prefix}_type", offset, 32, _RO, f"block type, '{kind}'", reset=fourcc(kind)),
        Register(f"{prefix}_version", offset + 4, 32, _RO, "block version", reset=version),
        Register(f"{prefix}_size", offset + 8, 32, _RO, "block size, bytes", reset=size_bytes),
    )


def _identity(offset: int) -> tuple[Register, ...]:
    return (
        *_block_header("identity", offset, "IDEN", 1, 0x20),
        Register("magic", offset + 0x0C, 32, _RO, "'NFSH'", reset=MAGIC),
        Register("abi_version", offset + 0x10, 32, _RO, "version of the contract", reset=ABI_VERSION),
        Register("git_revision", offset + 0x14, 32, _RO, "first 32 bits of the git revision; 0 in simulation"),
        Register("config_digest", offset + 0x18, 64, _RO, "first 64 bits of the build config's digest"),
    )


def _counters(offset: int, names: dict[str, str]) -> tuple[Register, ...]:
    size_bytes = 0x10 + 8 * len(names)
    return (
        *_block_header("counters", offset, "CNTR", 1, size_bytes),
        *(Register(name, offset + 0x10 + 8 * i, 64, _RO, doc) for i, (name, doc) in enumerate(names.items())),
    )


PROGRAM_FIELDS = (
    Field("decay_mode", 0, 2, "0: p·decay; 1: p·decay + p; 2: gradient becomes p·decay + g"),
    Field("decay_fused", 2, 1, "decay rounds once"),
    Field("m_difference", 3, 1, "m's second factor is g - m instead of g"),
    Field("m_fused", 4, 1, "m's product and sum round once"),
    Field("v_square_first", 5, 1, "v adds (g·g)·v_gain instead of (v_gain·g)·g"),
    Field("v_fused", 6, 1, "v's second product and sum round once"),
    Field("denominator_fused", 7, 1, "sqrt(v)·factor + eps rounds once"),
    Field("p_fused", 8, 1, "the last product and sum round once"),
    Field("copy_format", 9, 2, "low-precision copy of p: 0 none, 1 fp16, 2 bf16"),
    Field("topk", 11, 1, "gradients are a Top-K stream"),
    Field("direction", 12, 2, "0: m / (sqrt(v)·factor + eps); 1: m; 2: m·factor + g; 3: sign of a second average of m"),
    Field("m_absent", 14, 1, "m is neither read nor written, and zero"),
    Field("v_absent", 15, 1, "v is neither read nor written, and zero"),
    Field("state_format", 16, 2, "m and v are stored as: 0 fp32, 1 bf16, 2 mx8"),
)

_ADDRESSES = {
    "g_address": "gradients, fp32, or a Top-K stream, read",
    "p_address": "parameters, fp32, read",
    "m_address": "first moments (exp_avg), read",
    "v_address": "second moments (exp_avg_sq), read",
    "p_out_address": "parameters, fp32, written",
    "m_out_address": "first moments, written",
    "v_out_address": "second moments, written",
    "copy_out_address": "fp16 or bf16 copy of the parameters, written",
}
_SCALE_ADDRESSES = {
    "m_scale_address": "scales of first moments, read",
    "v_scale_address": "scales of second moments, read",
    "m_scale_out_address": "scales of first moments, written",
    "v_scale_out_address": "scales of second moments, written",
}
_SCALARS = {
    "decay": "factor of the decay operation",
    "m_decay": "factor of m",
    "m_gain": "factor of g or g - m",
    "v_decay": "factor of v",
    "v_gain": "factor of g or g·g",
    "eps": "added to the denominator",
    "pre_scale": "factor of m before the division",
    "post_scale": "factor of the quotient",
}


def _update(offset: int) -> tuple[Register, ...]:
    base = offset + 0x10
    return (
        *_block_header("update", offset, "UPDT", 2, 0xC0),
        Register("program", offset + 0x0C, 32, _RW, "operation order", PROGRAM_FIELDS),
        Register("params", base, 32, _RW, "number of parameters"),
        Register("gradient_bytes", base + 4, 32, _RW, "bytes of a Top-K stream"),
        *(Register(name, base + 8 + 8 * i, 64, _RW, doc + "; a byte address, a multiple of the port width"
                   + ("; narrow state: of a half (bf16) or a quarter (mx8) of it" if name[0] in "mv" else ""))
          for i, (name, doc) in enumerate(_ADDRESSES.items())),
        *(Register(name, base + 0x48 + 4 * i, 32, _RW, doc + " (fp32 bits)")
          for i, (name, doc) in enumerate(_SCALARS.items())),
        Register("denominator_factor", base + 0x68, 64, _RW, "factor of sqrt(v): 51-bit significand, signed exponent", (
            Field("significand", 0, FACTOR_BITS, "normalised: bit 50 is set"),
            Field("exponent", FACTOR_BITS, 10, "two's complement power of two of bit 50"),
        )),
        Register("status", base + 0x70, 32, _RO, "0 while all is well, else the status code of the first fault"),
        Register("fault_address", base + 0x78, 64, _RO, "byte address of the first fault"),
        *(Register(name, base + 0x80 + 8 * i, 64, _RW, doc + "; mx8 only, any byte address")
          for i, (name, doc) in enumerate(_SCALE_ADDRESSES.items())),
        Register("step", base + 0xA0, 32, _RW, "step, for the dither of narrow state; its low 32 bits"),
        Register("first_param", base + 0xA8, 64, _RW, "first parameter's index in the flat vector, for the dither"),
    )  # fmt: skip


UPDATE = RegisterMap(
    "update", 0x1000, (*_control(), *_identity(0x10), *_update(0x40), *_counters(0x100, UPDATE_COUNTERS))
)


def _master(offset: int) -> tuple[Register, ...]:
    doc = "rests of a split master, {}; builds with them only; a byte address, a multiple of half the port width"
    return (
        *_block_header("master", offset, "MSTR", 1, 0x20),
        Register("rest_address", offset + 0x10, 64, _RW, doc.format("read")),
        Register("rest_out_address", offset + 0x18, 64, _RW, doc.format("written")),
    )


SPLIT_UPDATE = RegisterMap("update", UPDATE.size_bytes, (*UPDATE, *_master(0x180)))
"""Map of builds with split masters; the others lack its last block, and so keep their digests."""


def _attend(offset: int) -> tuple[Register, ...]:
    return (
        *_block_header("attend", offset, "ATTN", 1, 0x40),
        Register("count", offset + 0x0C, 32, _RW, "number of descriptors or page operations"),
        Register("descriptors_address", offset + 0x10, 64, _RW, "descriptors, 128 bytes each, a multiple of 128; "
                 "page operations: 32 bytes"),
        Register("completions_address", offset + 0x18, 64, _RW, "completions, 32 bytes each, a multiple of 32; "
                 "of page operations: 8 bytes"),
        Register("contexts", offset + 0x20, 32, _RW, "heads in flight: a power of two up to the build's contexts"),
        Register("watchdog", offset + 0x24, 32, _RW, "cycles without progress until heads in flight fail; 0: never"),
        Register("status", offset + 0x28, 32, _RO, "0 while all is well, else the status code of the first fault"),
        Register("waiting", offset + 0x2C, 32, _RO, "what waits now (not latched)", (
            Field("memory", 0, 1, "a memory request"),
            Field("prepare", 1, 1, "a head in preparation"),
            Field("scan", 2, 1, "a head in its scan"),
            Field("select", 3, 1, "a head in its selection"),
            Field("gather", 4, 1, "a head in its gather"),
            Field("finish", 5, 1, "a head being finished"),
            Field("pages", 6, 1, "a page operation"),
            Field("channels", 16, 16, "channels with requests in flight, one bit each"),
        )),
        Register("fault_address", offset + 0x30, 64, _RO, "byte address of the first memory fault"),
        Register("command", offset + 0x38, 32, _RW, "what a start does: 0 attention of heads, 1 page operations"),
    )  # fmt: skip


ATTEND = RegisterMap(
    "attend", 0x1000, (*_control(), *_identity(0x10), *_attend(0x40), *_counters(0x100, ATTEND_COUNTERS))
)


def _expand(offset: int) -> tuple[Register, ...]:
    return (
        *_block_header("expand", offset, "EXPD", 1, 0x40),
        Register("format", offset + 0x0C, 32, _RW, "what the matrix's header must state", (
            Field("element", 0, 8, "elements: 1 fp16, 2 bf16, 3 int8, 4 int4"),
            Field("coding", 8, 8, "coding of the values: 0 plain, 1 coded exponents"),
            Field("output", 16, 8, "what scaled elements expand to: 1 fp16, 2 bf16; 0: elements without scales"),
        )),
        Register("in_address", offset + 0x10, 64, _RW, "bitmap matrix, read; a byte address, a multiple of 64"),
        Register("out_address", offset + 0x18, 64, _RW, "dense rows, written; a byte address, a multiple of 64"),
        Register("in_bytes", offset + 0x20, 32, _RW, "bytes of the matrix, its header included"),
        Register("rows", offset + 0x24, 32, _RW, "rows of the matrix"),
        Register("columns", offset + 0x28, 32, _RW, "columns of the matrix"),
        Register("status", offset + 0x2C, 32, _RO, "0 while all is well, else the status code of the first fault"),
        Register("fault_address", offset + 0x30, 64, _RO, "byte address of the first fault"),
    )  # fmt: skip


EXPAND = RegisterMap(
    "expand", 0x1000, (*_control(), *_identity(0x10), *_expand(0x40), *_counters(0x100, EXPAND_COUNTERS))
)

REGISTER_MAPS = {"update": UPDATE, "attend": ATTEND, "expand": EXPAND}
ALL_REGISTERS = REGISTER_MAPS | {"update": SPLIT_UPDATE}
"""Maps with every block that some build of a kernel has, for readers."""
