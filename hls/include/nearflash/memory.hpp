// load and store: memory in port words, streams in words of the lanes.
//
// A stream carries whole port words: `port_words` says how many words of the lanes those are for a count of elements.
#pragma once

#include <cstdint>

#include "nearflash/stream.hpp"

namespace nearflash {

constexpr std::uint32_t ceil_div(std::uint32_t n, std::uint32_t d) { return n / d + (n % d != 0); }

// Words of Lanes elements that `count` elements take in port words of Wide elements.
constexpr std::uint32_t port_words(std::uint32_t count, int wide, int lanes) {
    return ceil_div(count, wide) * (wide / lanes);
}

// `count` elements of memory as words of Narrow, whole port words of Wide.
template <typename T, int Wide, int Narrow>
void load(const Pack<T, Wide>* memory, std::uint32_t count, Stream<Pack<T, Narrow>>& out) {
    static_assert(Wide % Narrow == 0, "a port word must hold whole words of the lanes");
    const std::uint32_t ports = ceil_div(count, Wide);
    // Invariant: before step i, the port words [0, i) are in `out`.
    for (std::uint32_t i = 0; i < ports; ++i) {
#pragma HLS PIPELINE II = Wide / Narrow
        const Pack<T, Wide> port = memory[i];
        for (int part = 0; part < Wide; part += Narrow) {
#pragma HLS UNROLL
            Pack<T, Narrow> word;
            for (int k = 0; k < Narrow; ++k) word.lane[k] = port.lane[part + k];
            out.write(word);
        }
    }
}

template <typename T, int Wide, int Narrow>
Pack<T, Wide> gather(Stream<Pack<T, Narrow>>& in) {
#pragma HLS INLINE
    Pack<T, Wide> port;
    for (int part = 0; part < Wide; part += Narrow) {
#pragma HLS UNROLL
        const Pack<T, Narrow> word = in.read();
        for (int k = 0; k < Narrow; ++k) port.lane[part + k] = word.lane[k];
    }
    return port;
}

// The first `count` elements of whole port words to memory.
template <typename T, int Wide, int Narrow>
void store(Stream<Pack<T, Narrow>>& in, std::uint32_t count, Pack<T, Wide>* memory) {
    const std::uint32_t whole = count / Wide, rest = count % Wide;
    // Invariant: before step i, the port words [0, i) are in memory.
    for (std::uint32_t i = 0; i < whole; ++i) {
#pragma HLS PIPELINE II = Wide / Narrow
        memory[i] = gather<T, Wide>(in);
    }
    if (rest == 0) return;
    const Pack<T, Wide> port = gather<T, Wide>(in);
    Pack<T, Wide> last = memory[whole];
    for (std::uint32_t k = 0; k < rest; ++k) last.lane[k] = port.lane[k];
    memory[whole] = last;
}

}  // namespace nearflash
