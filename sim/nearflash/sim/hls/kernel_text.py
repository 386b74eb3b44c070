"""C++ of an update kernel's top: ports, pragmas and stages, from the names of an optimizer's arrays and scalars."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from nearflash.abi.optimizers import MasterFormat

__all__ = ["update_kernel"]

_TEXT = """\
// update_{name}: one step of {optimizer} over `params` consecutive parameters.
//
// Reads {gradient} and {arrays}, all fp32; writes the arrays (over what was read, or elsewhere),
// and {copies}.{fault_text}
// Made by `nearflash hls kernel`. Build with -DNEARFLASH_CONFIG=<one of nearflash_config.hpp>.
#include "{header}"
{include}#include "nearflash/updater.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {{
using namespace nearflash;
using Update = Updater<{optimizer}, NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
using State = Update::State;
{types}static_assert(Update::arrays == {array_count}, "{optimizer}::State must have the fields {arrays}");
static_assert(fields<Update::Scalars, Real> == {scalar_count},
{scalar_names}

{inner}
#pragma HLS DATAFLOW
{streams}    Stream<Update::Word> gradients("g"), in[{array_count}], out[{array_count}];
{copy_streams}
    NEARFLASH_DATAFLOW
{source}
{loads}
    NEARFLASH_STAGE(Update::{update}<{members}>(
        params, scalars, {format}, gradients, in, out, {given}, nonfinite_gradients, copy_overflows));
{stores}
{copy_stores}
    NEARFLASH_JOIN
}}
}}  // namespace

{outer}
{pragmas}
    Update::Scalars scalars;
{assignments}
{copy_count}{call}
}}
"""
_DENSE: dict[str, Any] = {
    "gradient": "g", "port": "Update::Port", "counts": (), "results": (),
    "fault_text": "", "include": "", "types": "", "streams": "",
    "source": "    NEARFLASH_STAGE(load(g, params, gradients));",
}  # fmt: skip
_TOPK: dict[str, Any] = {
    "gradient": "the Top-K stream g", "port": "StreamPort", "counts": ("bytes",), "results": ("fault",),
    "fault_text": " Where fault (nearflash.abi.topk, StreamFault) is not 0,\n// nothing that was written may be used.",
    "include": '#include "nearflash/topk.hpp"\n',
    "types": """\
constexpr int port_bits = NEARFLASH_CONFIG::port_bits, lanes = NEARFLASH_CONFIG::lanes;
using Expand = Expander<TopK, lanes>;
using StreamPort = Pack<std::uint64_t, port_bits / 64>;
""",
    "streams": """\
    Expand::In stream("stream");
    Stream<TopK::Pair, 4096> pairs("pairs");
""",
    "source": """\
    NEARFLASH_STAGE(load(g, bytes / 8, stream));
    NEARFLASH_STAGE(Expand::parse(stream, port_words(bytes / 8, port_bits / 64, 1), bytes, params, pairs, fault));
    NEARFLASH_STAGE(Expand::scatter(pairs, params, port_words(params, port_bits / 32, lanes), gradients));""",
}  # fmt: skip
_COPY: dict[str, Any] = {
    "copies": "`copy` where copy_format is not none", "copy_port": "Update::CopyPort", "copy_counts": ["copies"],
    "copy_include": "", "copy_types": "", "update": "update", "given": "narrow",
    "copy_streams": '    Stream<Update::CopyWord> narrow("copy");',
    "copy_stores": "    NEARFLASH_STAGE(store(narrow, copies, copy));",
    "copy_count": "    const std::uint32_t copies = copy_format == Copy::none ? 0 : params;\n",
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "copies": "in the place of `copy` the delta of it (fp16 or bf16)", "copy_port": "DeltaPort", "copy_counts": [],
    "copy_include": '#include "nearflash/delta.hpp"\n', "update": "update_delta", "given": "before, narrow",
    "copy_types": """\
using Packing = Packer<NEARFLASH_CONFIG::lanes>;
using DeltaPort = Pack<std::uint64_t, NEARFLASH_CONFIG::port_bits / 64>;
static_assert(NEARFLASH_CONFIG::delta, "the configuration must be one with deltas");
""",
    "copy_streams": """\
    Stream<Update::CopyWord> before("old"), narrow("copy");
    Packing::Out words("delta");
    Stream<Delta::Part> parts("parts");""",
    "copy_stores": """\
    NEARFLASH_STAGE(Packing::pack(before, narrow, params, std::uint32_t(copy_format), words, parts));
    NEARFLASH_STAGE(store_delta(words, parts, copy));""",
    "copy_count": "",
}  # fmt: skip
_SPLIT: dict[str, Any] = _COPY | {
    "copies": "no copy: p is a split master, and its bf16 weights are one", "copy_counts": [], "copy_count": "",
    "copy_include": '#include "nearflash/split.hpp"\n',
    "copy_types": """\
using Split = Halves<NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
""",
    "copy_streams": """\
    Stream<Update::CopyWord> narrow("copy"), weights("weights"), rests("rests");
    Stream<Update::CopyWord> new_weights("new weights"), new_rests("new rests");""",
    "copy_stores": """\
    NEARFLASH_STAGE(Split::split(params, out[0], narrow, new_weights, new_rests));
    NEARFLASH_STAGE(store(new_weights, params, weight_out));
    NEARFLASH_STAGE(store(new_rests, params, rest_out));""",
}  # fmt: skip
_SPLIT_LOADS = """\
    NEARFLASH_STAGE(load(weight, params, weights));
    NEARFLASH_STAGE(load(rest, params, rests));
    NEARFLASH_STAGE(Split::join(params, weights, rests, in[0]));"""


def update_kernel(
    name: str, optimizer: str, header: str, arrays: Sequence[str], scalars: Sequence[str], *, topk: bool = False,
    delta: bool = False, split: bool = False,
) -> str:  # fmt: skip
    """Text of hls/kernels/update_<name>.cpp.

    optimizer: the struct template of `header`; arrays: fields of its State, p first; scalars: fields of its Scalars.
    topk: the gradient is a Top-K stream, expanded on its way to the lanes. delta: what the copy changes is written.
    split: p comes and goes as the weights and the rests of a split master, without a copy.
    """
    gradient, copy = _TOPK if topk else _DENSE, _SPLIT if split else _DELTA if delta else _COPY
    types = {array: "Update::Port" for array in arrays[split:]}
    types = (dict.fromkeys(MasterFormat.SPLIT.arrays, "Split::Port") if split else {}) | types
    outputs = [f"{array}_out" for array in types]
    pointers = [f"const {gradient['port']}* g", *(f"const {port}* {array}" for array, port in types.items())]
    pointers += [f"{port}* {output}" for output, port in zip(outputs, types.values(), strict=True)]
    copies, form = ([], []) if split else (["copy"], ["copy_format"])
    pointers += [f"{copy['copy_port']}* {one}" for one in copies]
    counts = [*gradient["counts"], "params"]
    results = [*gradient["results"], "nonfinite_gradients", "copy_overflows"]
    tail = [f"std::uint32_t* {result}" for result in results]
    passed = ["g", *types, *outputs, *copies, *counts, *copy["copy_counts"], *form, "scalars", *results]
    inner = [*pointers, *(f"std::uint32_t {count}" for count in [*counts, *copy["copy_counts"]])]
    inner += [*(f"Copy {one}" for one in form), "Update::Scalars scalars"]
    outer = [*pointers, *(f"std::uint32_t {count}" for count in counts), *(f"Copy {one}" for one in form)]
    outer += [f"Real {scalar}" for scalar in scalars]
    stages = [(k, array) for k, array in enumerate(arrays) if array in types]
    return _TEXT.format(
        name=name,
        optimizer=optimizer,
        header=header,
        **{key: gradient[key] for key in ("gradient", "fault_text", "streams", "source")},
        **{key: copy[key] for key in ("copies", "update", "given", "copy_streams", "copy_stores", "copy_count")},
        include=copy["copy_include"] + gradient["include"],
        types=gradient["types"] + copy["copy_types"],
        arrays=", ".join(arrays),
        array_count=len(arrays),
        scalar_count=len(scalars),
        scalar_names=_literal(f"{optimizer}::Scalars must have the fields {', '.join(scalars)}"),
        inner=_wrap("void run(", [*inner, *tail], ") {"),
        loads=_join(_SPLIT_LOADS if split else "", _stages(f"load({array}, params, in[{k}])" for k, array in stages)),
        format="Copy::bf16" if split else "copy_format",
        members=", ".join(f"&State::{array}" for array in arrays),
        stores=_join(_stages(f"store(out[{k}], params, {array}_out)" for k, array in stages)),
        outer=_wrap(f'extern "C" void update_{name}(', [*outer, *tail], ") {"),
        pragmas=_pragmas(types, copies, [*counts, *form, *scalars, *results, "return"]),
        assignments="\n".join(f"    scalars.{scalar} = {scalar};" for scalar in scalars),
        call=_wrap("    run(", passed, ");"),
    )


def _pragmas(arrays: Iterable[str], copies: Sequence[str], registers: Sequence[str]) -> str:
    """Ports: g and the copy on gmem0, each array in and out on one of its own, both halves of p on one."""
    bundles, ports = {"weight": 1, "rest": 1, "p": 1}, [(0, "g", "read"), *((0, copy, "write") for copy in copies)]
    for array in arrays:
        bundle = bundles.setdefault(array, max(bundle for bundle, *_ in ports) + 1)
        ports += [(bundle, array, "read"), (bundle, f"{array}_out", "write")]
    lines = [
        f"#pragma HLS INTERFACE m_axi port = {port} bundle = gmem{bundle} offset = slave max_{kind}_burst_length = 64"
        for bundle, port, kind in ports
    ]
    lines += [f"#pragma HLS INTERFACE s_axilite port = {register}" for register in registers]
    return "\n".join([*lines, "#pragma HLS INTERFACE ap_ctrl_chain port = return"])


def _join(*stages: str) -> str:
    return "\n".join(filter(None, stages))


def _stages(calls: Iterable[str]) -> str:
    return "\n".join(f"    NEARFLASH_STAGE({call});" for call in calls)


def _literal(message: str) -> str:
    """The message of a static_assert on lines of its own, and the end of the assertion."""
    lines = textwrap.wrap(message, 96, drop_whitespace=False)
    return "\n".join(f'              "{line}"' for line in lines) + ");"


def _wrap(head: str, items: Iterable[str], tail: str) -> str:
    """A call or declaration, its items behind the parenthesis, broken between them."""
    glued = ", ".join(item.replace(" ", "\0") for item in items)
    text = textwrap.fill(head.replace(" ", "\0") + glued + tail.replace(" ", "\0"), 118, break_on_hyphens=False,
                         break_long_words=False, subsequent_indent="\1" * len(head))  # fmt: skip
    return text.replace("\0", " ").replace("\1", " ")
