// A free-running datapath, computed for a block of cycles at once, as many as a vector register holds side by side.
//
// Its results are LATENCY cycles later than its inputs, so a block of them waits until the first is due: by then all of
// the block's inputs are there. Generated text follows (nearflash.sim.verilator.datapaths).
#include <bit>
#include <cstdint>
#include <cstring>

#include "svdpi.h"

#if __AVX512DQ__
constexpr int vector_cycles = 8;
#elif __AVX2__
constexpr int vector_cycles = 4;
#else
constexpr int vector_cycles = 2;
#endif
typedef uint64_t V __attribute__((vector_size(8 * vector_cycles)));
typedef int64_t Signed __attribute__((vector_size(8 * vector_cycles)));

inline V repeat(uint64_t value) { return V{} + value; }
inline V bit(Signed condition) { return V(condition) & 1; }
inline V load(const uint64_t* words) {
    V value;
    std::memcpy(&value, words, sizeof value);
    return value;
}
inline void save(uint64_t* words, V value) { std::memcpy(words, &value, sizeof value); }
inline V look_up(const uint64_t* table, V index) {
    V value{};
    for (int k = 0; k < vector_cycles; ++k) value[k] = table[index[k]];
    return value;
}

// `Net` is generated: numbers of 64-bit words, and compute(inputs, held, outputs) for one vector of cycles.
template <class Net>
class Datapath {
    static constexpr unsigned step = 8, latency = Net::latency;
    static constexpr unsigned block = (latency < 64 ? latency : 64) / step * step;
    static constexpr unsigned size = std::bit_ceil(latency + block);
    static_assert(block > 0 && step % vector_cycles == 0);

    // A result lies where its input lay. The first input comes `latency` - 1 cycles after the first result is due.
    unsigned input_at = latency - 1, result_at = 0, left = 0;
    uint64_t inputs[Net::input_words][size] = {}, results[Net::result_words][size] = {}, held[Net::held_words] = {};

  public:
    bool is_due() const { return left == 0; }

    void hold(const svBitVecVal* words) { std::memcpy(held, words, sizeof held); }

    // One cycle: what the outputs show after the edge.
    void advance(const svBitVecVal* input, svBitVecVal* result) {
        for (int k = 0; k < Net::input_words; ++k) std::memcpy(&inputs[k][input_at], input + 2 * k, 8);
        if (left == 0) compute();
        for (int k = 0; k < Net::result_words; ++k) std::memcpy(result + 2 * k, &results[k][result_at], 8);
        input_at = (input_at + 1) % size;
        result_at = (result_at + 1) % size;
        --left;
    }

  private:
    void compute() {
        for (unsigned cycle = 0; cycle < block; cycle += vector_cycles) {
            const unsigned at = (result_at + cycle) % size;  // a multiple of `step`: no vector runs over the end
            const uint64_t* from[Net::input_words];
            uint64_t* to[Net::result_words];
            for (int k = 0; k < Net::input_words; ++k) from[k] = &inputs[k][at];
            for (int k = 0; k < Net::result_words; ++k) to[k] = &results[k][at];
            Net::compute(from, held, to);
        }
        left = block;
    }
};
