// A datapath with a fixed latency as a library: one input vector a clock, whole bursts per call.
// The generated ports.hpp defines set_inputs(top, arrays, index), get_outputs(top, arrays, index), set_clock, set_reset.
#include <cstdint>

#include "ports.hpp"

namespace {

struct Unit {
    VerilatedContext context;
    Vtop top{&context};

    void reset() {
        set_reset(top, 1);
        for (int cycle = 0; cycle < 2; ++cycle) {
            set_clock(top, 0);
            top.eval();
            set_clock(top, 1);
            top.eval();
        }
        set_reset(top, 0);
    }
};

}  // namespace

extern "C" {

Unit* unit_new() {
    Unit* unit = new Unit;
    unit->reset();
    return unit;
}

void unit_free(Unit* unit) {
    unit->top.final();
    delete unit;
}

void unit_reset(Unit* unit) { unit->reset(); }

// Vector k goes in at cycle k and out[k] is what the outputs show at cycle k + latency, just before that clock edge.
// The last inputs are held while the pipeline drains.
void unit_run(Unit* unit, void* const* in, void* const* out, uint64_t count, uint64_t latency) {
    Vtop& top = unit->top;
    for (uint64_t cycle = 0; cycle < count + latency; ++cycle) {
        if (cycle < count) set_inputs(top, in, cycle);
        set_clock(top, 0);
        top.eval();
        if (cycle >= latency) get_outputs(top, out, cycle - latency);
        set_clock(top, 1);
        top.eval();
    }
}
}
