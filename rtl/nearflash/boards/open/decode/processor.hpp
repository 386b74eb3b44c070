// The processor system of a Zynq-7000 around a decoded design: registers over M_AXI_GP0, memory behind S_AXI_HP0 and 1.
//
// AXI3: one command at a time at the registers; up to eight bursts in flight at each memory port, whose latency, ready
// and gaps between beats are random, by a seed. A burst that AXI3 forbids, or a WLAST at another beat, is a violation.
// The text before this one has `bits`, `settle()`, `edge()`, `open_level` and a Bus for each group of the block's pins.
// Source: ARM IHI 0022D (AXI3); AMD UG585 (ports of the processor system).
#include <cstring>
#include <deque>

static uint64_t get(const Bus& bus) {
    uint64_t value = 0;
    for (int k = 0; k < bus.width; k++) value |= uint64_t(bus.at[k] < 0 ? 0 : bits[bus.at[k]]) << k;
    return value;
}

static void set(const Bus& bus, uint64_t value) {
    for (int k = 0; k < bus.width; k++)
        if (bus.at[k] >= 0) bits[bus.at[k]] = value >> k & 1;
}

struct Burst { uint64_t address; unsigned beats; uint64_t due; };

struct Memory {
    const MemoryPort& port;
    std::deque<Burst> reads, writes;
    std::deque<uint64_t> answers;
};

static struct Processor {
    uint64_t cycle = 0, base, size, violations = 0, waits = 0;
    uint32_t seed = 1;
    uint8_t* memory = nullptr;
    Memory ports[2] = {{HP0}, {HP1}};
} host;

static unsigned random_bits() { return (host.seed = host.seed * 1664525u + 1013904223u) >> 20; }

static bool is_legal(uint64_t address, uint64_t length, uint64_t size, uint64_t burst) {
    return size == 3 && burst == 1 && (address >> 12) == ((address + 8 * length) >> 12);
}

// Before the edge: what the memory offers in this cycle.
static void offer(Memory& m) {
    const MemoryPort& p = m.port;
    bool ready = !host.waits || random_bits() % host.waits == 0;
    set(p.arready, ready && m.reads.size() < 8);
    set(p.awready, ready && m.writes.size() < 8);
    set(p.wready, ready && !m.writes.empty());
    bool valid = !m.reads.empty() && m.reads.front().due <= host.cycle;
    uint64_t data = 0xDEADBEEFDEADBEEFull, inside = 1;
    if (valid) {
        uint64_t at = m.reads.front().address - host.base;
        inside = at <= host.size - 8;
        if (inside) memcpy(&data, host.memory + at, 8);
    }
    set(p.rvalid, valid);
    set(p.rdata, data);
    set(p.rresp, inside ? 0 : 3);
    set(p.rlast, valid && m.reads.front().beats == 1);
    set(p.bvalid, !m.answers.empty() && m.answers.front() <= host.cycle);
    set(p.bresp, 0);
}

static uint64_t later() { return host.cycle + 20 + random_bits() % 16; }

// After the edge of a cycle, with the signals that were settled before it.
struct Taken { bool ar, r, aw, w, b; uint64_t araddr, arlen, awaddr, awlen, wdata, wstrb, wlast; };

static Taken take(const Memory& m) {
    const MemoryPort& p = m.port;
    Taken t{get(p.arvalid) && get(p.arready), get(p.rvalid) && get(p.rready), get(p.awvalid) && get(p.awready),
            get(p.wvalid) && get(p.wready), get(p.bvalid) && get(p.bready), get(p.araddr), get(p.arlen),
            get(p.awaddr), get(p.awlen), get(p.wdata), get(p.wstrb), get(p.wlast)};
    if (t.ar && !is_legal(t.araddr, t.arlen, get(p.arsize), get(p.arburst))) host.violations++;
    if (t.aw && !is_legal(t.awaddr, t.awlen, get(p.awsize), get(p.awburst))) host.violations++;
    return t;
}

static void apply(Memory& m, const Taken& t) {
    if (t.r) {
        Burst& burst = m.reads.front();
        burst.address += 8;
        burst.due = host.cycle + (host.waits ? random_bits() % host.waits : 0);
        if (--burst.beats == 0) m.reads.pop_front();
    }
    if (t.ar) m.reads.push_back({t.araddr, unsigned(t.arlen) + 1, later()});
    if (t.w) {
        Burst& burst = m.writes.front();
        for (unsigned k = 0; k < 8; k++)
            if (t.wstrb >> k & 1 && burst.address - host.base + k < host.size)
                host.memory[burst.address - host.base + k] = uint8_t(t.wdata >> 8 * k);
        burst.address += 8;
        if (t.wlast != (--burst.beats == 0)) host.violations++;
        if (!burst.beats) { m.writes.pop_front(); m.answers.push_back(later()); }
    }
    if (t.aw) m.writes.push_back({t.awaddr, unsigned(t.awlen) + 1, 0});
    if (t.b) m.answers.pop_front();
}

// One cycle; `look` sees its settled signals before the edge.
template <class F>
static void cycle(F look) {
    for (Memory& m : host.ports) offer(m);
    settle();
    look();
    Taken taken[2] = {take(host.ports[0]), take(host.ports[1])};
    edge();
    host.cycle++;
    for (int n = 0; n < 2; n++) apply(host.ports[n], taken[n]);
}

static void cycles(uint64_t count) {
    while (count--) cycle([] {});
}

constexpr int PATIENCE = 1000;  // cycles that the registers have for an answer

extern "C" {

// Configure the design. `open`: what pins read that nothing drives; `waits`: at most so many cycles of a gap.
void nf_reset(uint8_t* memory, uint64_t base, uint64_t size, int open, uint64_t waits, uint32_t seed) {
    host.memory = memory; host.base = base; host.size = size; host.waits = waits; host.seed = seed;
    open_level = open;
    for (Memory& m : host.ports) { m.reads.clear(); m.writes.clear(); m.answers.clear(); }
    begin();
    set(RESET_N, 0);
    cycles(40);
    set(RESET_N, 1);
    cycles(40);
}

uint64_t nf_cycles() { return host.cycle; }
uint64_t nf_violations() { return host.violations; }
int nf_interrupt() { settle(); return int(get(INTERRUPT)); }

// Run until the interrupt, or for so many cycles; returns how many are left.
uint64_t nf_run(uint64_t count) {
    while (count && !nf_interrupt()) { cycles(1); count--; }
    return count;
}

// A word of the registers, or -1: no answer, -2: another answer than OKAY to the same identifier.
int64_t nf_read(uint32_t address) {
    set(GP0.araddr, address); set(GP0.arlen, 0); set(GP0.arsize, 2); set(GP0.arburst, 1); set(GP0.arid, 0x5A5);
    set(GP0.arvalid, 1); set(GP0.rready, 1);
    for (int k = 0; k < PATIENCE; k++) {
        bool taken = false, answered = false, good = false;
        int64_t value = 0;
        cycle([&] {
            taken = get(GP0.arready);
            answered = get(GP0.rvalid);
            value = int64_t(get(GP0.rdata));
            good = get(GP0.rresp) == 0 && get(GP0.rid) == 0x5A5 && get(GP0.rlast);
        });
        if (taken) set(GP0.arvalid, 0);
        if (answered) { set(GP0.rready, 0); return good ? value : -2; }
    }
    return -1;
}

// 0, or as nf_read.
int nf_write(uint32_t address, uint32_t value) {
    set(GP0.awaddr, address); set(GP0.awlen, 0); set(GP0.awsize, 2); set(GP0.awburst, 1); set(GP0.awid, 0xA5A);
    set(GP0.awvalid, 1);
    set(GP0.wdata, value); set(GP0.wstrb, 15); set(GP0.wlast, 1); set(GP0.wid, 0xA5A); set(GP0.wvalid, 1);
    set(GP0.bready, 1);
    for (int k = 0; k < PATIENCE; k++) {
        bool address_taken = false, data_taken = false, answered = false, good = false;
        cycle([&] {
            address_taken = get(GP0.awready);
            data_taken = get(GP0.wready);
            answered = get(GP0.bvalid);
            good = get(GP0.bresp) == 0 && get(GP0.bid) == 0xA5A;
        });
        if (address_taken) set(GP0.awvalid, 0);
        if (data_taken) set(GP0.wvalid, 0);
        if (answered) { set(GP0.bready, 0); return good ? 0 : -2; }
    }
    return -1;
}

}
