"""C++ of an update kernel's top: ports, pragmas and stages, from the names of an optimizer's arrays and scalars."""

import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["update_kernel"]

_TEXT = """\
// update_{name}: one step of {optimizer} over `params` consecutive parameters.
//
// Reads g and {arrays}, all fp32; writes the arrays (over what was read, or elsewhere), and `copy` where
// copy_format is not none. Made by `nearflash hls kernel`. Build: -DNEARFLASH_CONFIG=<one of nearflash_config.hpp>.
#include "{header}"
#include "nearflash/updater.hpp"

#ifndef NEARFLASH_CONFIG
#define NEARFLASH_CONFIG update_smartssd
#endif

namespace {{
using namespace nearflash;
using Update = Updater<{optimizer}, NEARFLASH_CONFIG::lanes, NEARFLASH_CONFIG::port_bits>;
using State = Update::State;
static_assert(Update::arrays == {array_count}, "{optimizer}::State must have the fields {arrays}");
static_assert(fields<Update::Scalars, Real> == {scalar_count},
{scalar_names}

{inner}
#pragma HLS DATAFLOW
    Stream<Update::Word> gradients("g"), in[{array_count}], out[{array_count}];
    Stream<Update::CopyWord> narrow("copy");
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(g, params, gradients));
{loads}
    NEARFLASH_STAGE(Update::update<{members}>(
        params, scalars, copy_format, gradients, in, out, narrow, nonfinite_gradients, copy_overflows));
{stores}
    NEARFLASH_STAGE(store(narrow, copies, copy));
    NEARFLASH_JOIN
}}
}}  // namespace

{outer}
{pragmas}
    Update::Scalars scalars;
{assignments}
    const std::uint32_t copies = copy_format == Copy::none ? 0 : params;
{call}
}}
"""
_COUNTERS = ("nonfinite_gradients", "copy_overflows")


def update_kernel(name: str, optimizer: str, header: str, arrays: Sequence[str], scalars: Sequence[str]) -> str:
    """Text of hls/kernels/update_<name>.cpp.

    optimizer: the struct template of `header`; arrays: fields of its State, p first; scalars: fields of its Scalars.
    """
    outputs = [f"{array}_out" for array in arrays]
    pointers = [f"const Update::Port* {array}" for array in ("g", *arrays)]
    pointers += [*(f"Update::Port* {output}" for output in outputs), "Update::CopyPort* copy"]
    counters = [f"std::uint32_t* {counter}" for counter in _COUNTERS]
    counts = ["std::uint32_t params", "Copy copy_format"]
    inner = [*pointers, "std::uint32_t params", "std::uint32_t copies", "Copy copy_format", "Update::Scalars scalars"]
    passed = ["g", *arrays, *outputs, "copy", "params", "copies", "copy_format", "scalars", *_COUNTERS]
    registers = ["params", "copy_format", *scalars, *_COUNTERS, "return"]
    reads, writes = ["g", *arrays], ["copy", *outputs]
    pragmas = [
        f"#pragma HLS INTERFACE m_axi port = {port} bundle = gmem{k} offset = slave max_{kind}_burst_length = 64"
        for k, pair in enumerate(zip(reads, writes, strict=True))
        for port, kind in zip(pair, ("read", "write"), strict=True)
    ]
    pragmas += [f"#pragma HLS INTERFACE s_axilite port = {register}" for register in registers]
    return _TEXT.format(
        name=name,
        optimizer=optimizer,
        header=header,
        arrays=", ".join(arrays),
        array_count=len(arrays),
        scalar_count=len(scalars),
        scalar_names=_literal(f"{optimizer}::Scalars must have the fields {', '.join(scalars)}"),
        inner=_wrapped("void run(", [*inner, *counters], ") {"),
        loads=_stages(f"load({array}, params, in[{k}])" for k, array in enumerate(arrays)),
        members=", ".join(f"&State::{array}" for array in arrays),
        stores=_stages(f"store(out[{k}], params, {output})" for k, output in enumerate(outputs)),
        outer=_wrapped(
            f'extern "C" void update_{name}(', [*pointers, *counts, *(f"Real {x}" for x in scalars), *counters], ") {"
        ),
        pragmas="\n".join([*pragmas, "#pragma HLS INTERFACE ap_ctrl_chain port = return"]),
        assignments="\n".join(f"    scalars.{scalar} = {scalar};" for scalar in scalars),
        call=_wrapped("    run(", passed, ");"),
    )


def _stages(calls: Iterable[str]) -> str:
    return "\n".join(f"    NEARFLASH_STAGE({call});" for call in calls)


def _literal(message: str) -> str:
    """The message of a static_assert on lines of its own, and the end of the assertion."""
    lines = textwrap.wrap(message, 96, drop_whitespace=False)
    return "\n".join(f'              "{line}"' for line in lines) + ");"


def _wrapped(head: str, items: Iterable[str], tail: str) -> str:
    """A call or declaration, its items behind the parenthesis, broken between them."""
    glued = ", ".join(item.replace(" ", "\0") for item in items)
    text = textwrap.fill(head.replace(" ", "\0") + glued + tail.replace(" ", "\0"), 118, break_on_hyphens=False,
                         break_long_words=False, subsequent_indent="\1" * len(head))  # fmt: skip
    return text.replace("\0", " ").replace("\1", " ")
