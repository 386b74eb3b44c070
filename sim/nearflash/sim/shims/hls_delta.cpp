// C ABI of the delta's packer, over arrays of words: what the tests compare with the model. Returns the delta's words.
#include "nearflash/delta.hpp"

using namespace nearflash;
using Packing = Packer<NEARFLASH_LANES>;

extern "C" std::uint32_t pack_delta(const std::uint16_t* old, const std::uint16_t* now, std::uint32_t params,
                                    std::uint32_t format, std::uint64_t* delta) {
    Stream<Packing::Word> before("old"), after("new");
    Packing::Out words("words");
    Stream<Delta::Part> parts("parts");
    std::uint32_t total = 0;
    const auto load = [&](const std::uint16_t* from, Stream<Packing::Word>& to, std::uint16_t spare) {
        for (std::uint32_t i = 0; i < params; i += NEARFLASH_LANES) {
            Packing::Word word;
            for (std::uint32_t k = 0; k < NEARFLASH_LANES; ++k) word.lane[k] = i + k < params ? from[i + k] : spare;
            to.write(word);
        }
    };
    const auto put = [&] {
        for (Delta::Part part{1, 0}; part.first != 0;) {
            part = parts.read();
            for (std::uint32_t i = 0; i < part.words; ++i) delta[part.first + i] = words.read().lane[0];
            total += part.words;
        }
    };
    NEARFLASH_DATAFLOW
    NEARFLASH_STAGE(load(old, before, 1));
    NEARFLASH_STAGE(load(now, after, 2));
    NEARFLASH_STAGE(Packing::pack(before, after, params, format, words, parts));
    NEARFLASH_STAGE(put());
    NEARFLASH_JOIN
    return total;
}
