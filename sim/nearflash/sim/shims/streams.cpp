// A component with valid/ready streams as a library: whole bursts per call, under stall patterns.
// The generated streams.hpp defines each_source(top, f) and each_sink(top, f), which call
// f(slot, valid, ready, payload bytes) for every stream; devices.hpp defines Devices, models behind other streams.
#include <cstdint>
#include <cstring>

#include "ports.hpp"
#include "random.hpp"

// A stream's payload inside the model; its size is a constant, so that copies become moves.
template <int bytes>
struct Payload {
    uint8_t* data;
    static constexpr int size = bytes;
};

#include "devices.hpp"
#include "streams.hpp"

namespace {

// One side of a stream, shared with Python. Chances are of 2^32.
struct End {
    uint8_t* items;
    uint64_t count;
    uint64_t moved;
    uint64_t chance_after_run;
    uint64_t chance_after_stall;
    uint64_t stalled;

    bool draw_stall(Random& random) {
        const uint64_t chance = stalled ? chance_after_stall : chance_after_run;
        stalled = chance && random.next32() < chance;
        return stalled;
    }
};

struct Unit {
    VerilatedContext context;
    Vtop top{&context};
    Devices devices;

    void settle() {
        devices.drive(top);
        set_clock(top, 0);
        top.eval();
    }

    void edge() {
        devices.sample(top);
        set_clock(top, 1);
        top.eval();
    }

    void reset() {
        each_source(top, [](int, auto& valid, const auto&, auto) { valid = 0; });
        each_sink(top, [](int, const auto&, auto& ready, auto) { ready = 0; });
        set_reset(top, 1);
        for (int cycle = 0; cycle < 2; ++cycle) settle(), edge();
        set_reset(top, 0);
        devices.reset();
    }
};

}  // namespace

extern "C" {

Unit* unit_new() { return new Unit; }

void* unit_device(Unit* unit, int index) { return unit->devices.at(index); }

void unit_free(Unit* unit) {
    unit->top.final();
    delete unit;
}

// Reset, then run until every item has moved and `quiet` more cycles have passed, or for `limit` cycles.
// `hold` are the values of the inputs that belong to no stream. Returns the cycles.
uint64_t unit_run(Unit* unit, End* sources, End* sinks, void* const* hold, uint64_t limit, uint64_t quiet,
                  uint64_t seed) {
    Vtop& top = unit->top;
    Random random{seed};
    uint64_t left = 0, cycle = 0, quiet_left = quiet;
    each_source(top, [&](int slot, auto&, const auto&, auto) { left += sources[slot].count; });
    each_sink(top, [&](int slot, const auto&, auto&, auto) { left += sinks[slot].count; });
    set_inputs(top, hold, 0);
    unit->reset();
    for (; cycle < limit && quiet_left; ++cycle) {
        const bool busy = left;
        each_source(top, [&](int slot, auto& valid, const auto&, auto payload) {
            End& end = sources[slot];
            if (valid || end.moved == end.count || end.draw_stall(random)) return;  // valid stays until ready
            std::memcpy(payload.data, end.items + end.moved * payload.size, payload.size);
            valid = 1;
        });
        each_sink(top, [&](int slot, const auto&, auto& ready, auto) { ready = !sinks[slot].draw_stall(random); });
        unit->settle();
        // Handshakes are read before the edge, inputs change after it.
        uint32_t taken = 0;
        each_source(top, [&](int slot, auto& valid, const auto& ready, auto) {
            if (!(valid && ready)) return;
            ++sources[slot].moved, --left;
            taken |= 1u << slot;
        });
        each_sink(top, [&](int slot, const auto& valid, auto& ready, auto payload) {
            End& end = sinks[slot];
            if (!(valid && ready)) return;
            if (end.moved < end.count) {
                std::memcpy(end.items + end.moved * payload.size, payload.data, payload.size);
                --left;
            }
            ++end.moved;
        });
        unit->edge();
        each_source(top, [&](int slot, auto& valid, const auto&, auto) {
            if (taken >> slot & 1) valid = 0;
        });
        if (!busy) --quiet_left;
    }
    return cycle;
}
}
