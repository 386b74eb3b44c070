// A kernel top as a library: AXI4-Lite control, AXI4 memory ports, models behind other ports, interrupt, statistics,
// waves.
// The generated pins.hpp defines Ports (a tuple of AxiPort), make_ports, Control, interrupt_pin, set_git_revision;
// devices.hpp defines Devices, models behind other ports; waits.hpp, made after Verilator has run, internal_waits.
#include <memory>
#include <tuple>

#include "Vtop.h"
#include "verilated.h"
#if VM_TRACE
#include "verilated_vcd_c.h"
#endif

#include "control.hpp"
#include "devices.hpp"
#include "memory.hpp"
#include "pins.hpp"
#include "waits.hpp"

namespace {

struct Kernel {
    VerilatedContext context;
    Vtop top{&context};
    Memory memory;
    Ports ports;
    Control control{top};
    Devices devices;
#if VM_TRACE
    std::unique_ptr<VerilatedVcdC> trace;
    uint64_t trace_first = 0, trace_end = 0;
#endif

    Kernel(uint8_t* bytes, uint64_t size, uint64_t base)
        : memory{bytes, size, base}, ports(make_ports(top, memory)) {
        memory.port_count = std::tuple_size_v<Ports>;
#if VM_TRACE
        context.traceEverOn(true);
#endif
    }

    template <class F>
    void each_port(F&& f) {
        std::apply([&](auto&... port) { (f(port), ...); }, ports);
    }

    // First half of a cycle: the slave drives, everything settles; handshakes may now be read.
    void settle() {
        memory.total.refill();
        each_port([](auto& port) { port.drive(); });
        devices.drive(top);
        top.clk = 0;
        top.eval();
        dump(2 * memory.cycle);
        each_port([](auto& port) { port.sample(); });
        devices.sample(top);
    }

    // Second half: the clock edge.
    void edge() {
        top.clk = 1;
        top.eval();
        dump(2 * memory.cycle + 1);
        each_port([](auto& port) { port.release(); });
        ++memory.cycle;
    }

    void dump(uint64_t time) {
#if VM_TRACE
        if (trace && memory.cycle >= trace_first && memory.cycle < trace_end) trace->dump(time);
#else
        (void)time;
#endif
    }

    void reset() {
        each_port([](auto& port) { port.reset(); });
        devices.reset();
        control.idle();
        top.rst = 1;
        for (int cycle = 0; cycle < 4; ++cycle) {
            top.clk = 0;
            top.eval();
            top.clk = 1;
            top.eval();
        }
        top.rst = 0;
        *memory.error = 0;
    }
};

}  // namespace

extern "C" {

Kernel* kernel_new(uint8_t* bytes, uint64_t size, uint64_t base, uint32_t git_revision) {
    auto* kernel = new Kernel(bytes, size, base);
    set_git_revision(kernel->top, git_revision);
    kernel->reset();
    return kernel;
}

void kernel_free(Kernel* kernel) {
#if VM_TRACE
    if (kernel->trace) kernel->trace->close();
#endif
    Verilated::threadContextp(&kernel->context);  // scopes leave the context of the thread
    kernel->top.final();
    delete kernel;
}

void kernel_reset(Kernel* kernel) { kernel->reset(); }

void kernel_configure(Kernel* kernel, const MemorySettings* settings) {
    kernel->memory.settings = *settings;
    kernel->memory.random.state = settings->seed;
    int beats = 0;
    kernel->each_port([&](auto& port) { port.configure(), beats += port.beat_bytes; });
    kernel->memory.total.set(settings->total_bytes_per_cycle, beats);
}

// Both return the AXI response, or -1 when there was none within `limit` cycles.
int kernel_write(Kernel* kernel, uint32_t offset, uint32_t value, uint64_t limit) {
    Control& control = kernel->control;
    control.begin_write(offset, value);
    for (; limit; --limit) {
        kernel->settle();
        const int response = control.sample_write();
        kernel->edge();
        control.release();
        if (response >= 0) return response;
    }
    control.idle();
    return -1;
}

int kernel_read(Kernel* kernel, uint32_t offset, uint32_t* value, uint64_t limit) {
    Control& control = kernel->control;
    control.begin_read(offset);
    for (; limit; --limit) {
        kernel->settle();
        const int response = control.sample_read(value);
        kernel->edge();
        control.release();
        if (response >= 0) return response;
    }
    control.idle();
    return -1;
}

// Runs until the interrupt is high (if asked), a protocol error, or `limit` cycles; returns the cycles run.
uint64_t kernel_run(Kernel* kernel, uint64_t limit, int until_interrupt) {
    uint64_t cycles = 0;
    while (cycles < limit && !(until_interrupt && interrupt_pin(kernel->top)) && !*kernel->memory.error) {
        kernel->settle();
        kernel->edge();
        ++cycles;
    }
    return cycles;
}

void* kernel_device(Kernel* kernel, int index) { return kernel->devices.at(index); }

int kernel_interrupt(Kernel* kernel) { return interrupt_pin(kernel->top); }

uint64_t kernel_cycles(Kernel* kernel) { return kernel->memory.cycle; }

const char* kernel_error(Kernel* kernel) { return kernel->memory.error; }

void kernel_statistics(Kernel* kernel, PortStatistics* statistics) {
    kernel->each_port([&](auto& port) { *statistics++ = port.statistics; });
}

// What waits now: first the memory ports, then the streams inside; "; " after each.
void kernel_waits(Kernel* kernel, char* text, int size) {
    int length = 0;
    kernel->each_port([&](auto& port) { length += port.waits(text + length, size - length); });
    internal_waits(kernel->top, text + length, size - length);
}

// Write the waves of `count` cycles from cycle `first` on; returns 0 where tracing is not compiled in.
int kernel_trace(Kernel* kernel, const char* path, uint64_t first, uint64_t count) {
#if VM_TRACE
    if (kernel->trace) kernel->trace->close();
    kernel->trace = std::make_unique<VerilatedVcdC>();
    kernel->top.trace(kernel->trace.get(), 99);
    kernel->trace->open(path);
    kernel->trace_first = first;
    kernel->trace_end = first + count;
    return 1;
#else
    return 0;
#endif
}

void kernel_trace_close(Kernel* kernel) {
#if VM_TRACE
    if (kernel->trace) kernel->trace->close();
    kernel->trace.reset();
#endif
}
}
