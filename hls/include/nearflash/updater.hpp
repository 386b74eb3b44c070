// Updater<Optimizer, Lanes, PortBits>: the stages of an optimizer step over consecutive parameters.
//
//     memory ─► load ─► words of Lanes ─► update (Lanes at once, II 1) ─► words ─► store ─► memory
//
// One load and one store an array; a kernel's top (hls/kernels/) names the arrays and their ports. Whole port words are
// read; the last is written with what lay past the end. Counts: non-finite gradients, finite parameters whose copy is
// infinite.
#pragma once

#include <cstdint>

#include "nearflash/memory.hpp"
#include "nearflash/narrow.hpp"
#include "nearflash/optimizer.hpp"

namespace nearflash {

enum class Copy : std::uint32_t { none = 0, fp16 = 1, bf16 = 2 };

template <template <typename> class Optimizer, int Lanes, int PortBits = 32 * Lanes>
struct Updater {
    static_assert(Lanes > 0 && PortBits % (32 * Lanes) == 0, "PortBits must be a multiple of 32 bits a lane");

    using Step = Optimizer<Real>;
    using State = typename Step::State;
    using Scalars = typename Step::Scalars;
    using Port = Pack<Real, PortBits / 32>;
    using CopyPort = Pack<std::uint16_t, PortBits / 16>;
    using Word = Pack<Real, Lanes>;
    using CopyWord = Pack<std::uint16_t, Lanes>;
    static constexpr int arrays = fields<State, Real>;

    // Words of g and of each array in, of each array and the copy out; Field are the arrays' fields of State, p first.
    // Padding behind `params` is computed and not counted.
    template <auto... Field>
    static void update(std::uint32_t params, Scalars scalars, Copy copy_format, Stream<Word>& g,
                       Stream<Word> (&in)[arrays], Stream<Word> (&out)[arrays], Stream<CopyWord>& copy,
                       std::uint32_t* nonfinite_gradients, std::uint32_t* copy_overflows) {
#pragma HLS INLINE
        const std::uint32_t copy_words = copy_format == Copy::none ? 0 : port_words(params, PortBits / 16, Lanes);
        run<false, Field...>(params, copy_words, scalars, copy_format, g, in, out, copy, copy, nonfinite_gradients,
                             copy_overflows);
    }

    // The same, and copies of p as it was: both are words for a Packer (delta.hpp), without a port's padding.
    template <auto... Field>
    static void update_delta(std::uint32_t params, Scalars scalars, Copy copy_format, Stream<Word>& g,
                             Stream<Word> (&in)[arrays], Stream<Word> (&out)[arrays], Stream<CopyWord>& old,
                             Stream<CopyWord>& copy, std::uint32_t* nonfinite_gradients,
                             std::uint32_t* copy_overflows) {
#pragma HLS INLINE
        run<true, Field...>(params, ceil_div(params, Lanes), scalars, copy_format, g, in, out, old, copy,
                            nonfinite_gradients, copy_overflows);
    }

  private:
    template <bool Old, auto... Field>
    static void run(std::uint32_t params, std::uint32_t copy_words, Scalars scalars, Copy copy_format, Stream<Word>& g,
                    Stream<Word> (&in)[arrays], Stream<Word> (&out)[arrays], Stream<CopyWord>& old,
                    Stream<CopyWord>& copy, std::uint32_t* nonfinite_gradients, std::uint32_t* copy_overflows) {
        static_assert(sizeof...(Field) == arrays, "every field of State must be named once");
        const std::uint32_t words = port_words(params, PortBits / 32, Lanes);
        std::uint32_t nonfinite = 0, overflows = 0;
        // Invariant: before step i, words [0, i) of every output are written; the counts are those of their parameters.
        for (std::uint32_t i = 0; i < (words > copy_words ? words : copy_words); ++i) {
#pragma HLS PIPELINE II = 1
            CopyWord narrow = {}, before = {};
            if (i < words) {
                const Word gradient = g.read();
                Word state[arrays];
                for (int a = 0; a < arrays; ++a) state[a] = in[a].read();
                for (int k = 0; k < Lanes; ++k) {
#pragma HLS UNROLL
                    if (Old) before.lane[k] = low_precision(state[0].lane[k], copy_format);
                    const State next = Step::step(state_of<Field...>(state, k), gradient.lane[k], scalars);
                    int a = 0;
                    ((state[a++].lane[k] = one_nan(next.*Field)), ...);
                    const bool counts = i * Lanes + k < params, finite = is_finite(state[0].lane[k]);
                    narrow.lane[k] = low_precision(state[0].lane[k], copy_format);
                    nonfinite += counts && !is_finite(gradient.lane[k]);
                    overflows += counts && finite && is_infinite(narrow.lane[k], copy_format);
                }
                for (int a = 0; a < arrays; ++a) out[a].write(state[a]);
            }
            if (Old && i < copy_words) old.write(before);
            if (i < copy_words) copy.write(narrow);
        }
        *nonfinite_gradients = nonfinite;
        *copy_overflows = overflows;
    }

    template <auto... Field>
    static State state_of(const Word (&words)[arrays], int k) {
#pragma HLS INLINE
        State state;
        int a = 0;
        ((state.*Field = words[a++].lane[k]), ...);
        return state;
    }

    static std::uint16_t low_precision(Real p, Copy format) {
#pragma HLS INLINE
        return format == Copy::fp16 ? half::round_real(p).bits : bfloat16::round_real(p).bits;
    }

    static bool is_infinite(std::uint16_t copy, Copy format) {
#pragma HLS INLINE
        return format == Copy::fp16 ? half{copy}.is_infinite() : format == Copy::bf16 && bfloat16{copy}.is_infinite();
    }
};

}  // namespace nearflash
