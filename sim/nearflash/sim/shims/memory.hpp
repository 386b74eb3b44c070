// An AXI4 memory behind any number of ports: latency, bandwidth, stalls, byte strobes, protocol checks.
//
// Per cycle: drive() sets the slave's outputs from its state alone (they are registered), the model settles, sample()
// takes the handshakes, the clock edge follows. Answers come in order; all queues are fixed rings; nothing allocates.
// Limits: INCR bursts of full beats; the bits of an address inside a beat are ignored.
// Source: AMBA AXI specification, IHI 0022, chapters A3 and A4.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "random.hpp"

// Shared with Python (kernel.py: MemorySettings).
struct MemorySettings {
    uint64_t read_latency_cycles;
    uint64_t write_latency_cycles;
    double port_bytes_per_cycle;
    double total_bytes_per_cycle;
    uint64_t outstanding_bursts;
    uint64_t stall_percent;
    uint64_t seed;
};

// Shared with Python (kernel.py: PortStatistics).
struct PortStatistics {
    uint64_t read_bytes, written_bytes, read_bursts, write_bursts;
};

// Bytes that may pass, refilled each cycle; a rate of 0 is no limit.
struct TokenBucket {
    double rate = 0, level = 0, limit = 0;

    void set(double bytes_per_cycle, double largest_beat) {
        rate = bytes_per_cycle;
        limit = level = rate + largest_beat;
    }
    void refill() {
        if (rate) level = level + rate < limit ? level + rate : limit;
    }
    bool has(double bytes) const { return !rate || level >= bytes; }
    void spend(double bytes) {
        if (rate) level -= bytes;
    }
};

struct Memory {
    uint8_t* bytes;
    uint64_t size;
    uint64_t base;
    uint64_t cycle = 0;
    MemorySettings settings{};
    uint64_t port_count = 1;
    TokenBucket total;
    Random random{0};
    char error[256] = "";

    bool holds(uint64_t address, uint64_t count) const {
        return address >= base && count <= size && address - base <= size - count;
    }
    bool stalls() { return settings.stall_percent && random.next32() % 100 < settings.stall_percent; }

    // The first error is kept: later ones are its consequences.
    void fail(const char* port, const char* format, ...) {
        if (*error) return;
        int length = std::snprintf(error, sizeof error, "%s: at cycle %llu, ", port, (unsigned long long)cycle);
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(error + length, sizeof error - length, format, arguments);
        va_end(arguments);
    }
};

constexpr uint64_t max_outstanding_bursts = 64;

struct Burst {
    uint64_t address;
    uint64_t beats;
    uint64_t moved;
    uint64_t due_cycle;  // reads: first data; writes: the response
    bool is_outside;
    uint8_t id;
};

struct BurstRing {
    Burst items[max_outstanding_bursts];
    uint64_t head = 0, tail = 0;

    uint64_t count() const { return tail - head; }
    Burst& at(uint64_t index) { return items[index % max_outstanding_bursts]; }
    Burst& front() { return at(head); }
    void push(const Burst& burst) { at(tail++) = burst; }
    void pop() { ++head; }
};

// Valid must stay, with the same address, until ready.
struct Held {
    bool waits = false;
    uint64_t address = 0;

    void check(Memory& memory, const char* port, const char* channel, bool valid, bool ready, uint64_t now) {
        if (waits && (!valid || now != address)) {
            memory.fail(port, "%svalid and its payload must stay until %sready", channel, channel);
        }
        waits = valid && !ready;
        address = now;
    }
};

// `Pins` is generated: one accessor per signal, `bytes` per beat, the port's `name`.
template <class Pins>
class AxiPort {
public:
    static constexpr int beat_bytes = Pins::bytes;
    PortStatistics statistics{};

    AxiPort(Vtop& top, Memory& memory, uint64_t index) : pins{top}, memory(memory), index(index) {}

    void configure() { bucket.set(memory.settings.port_bytes_per_cycle, Pins::bytes); }

    void reset() {
        reads = writes = BurstRing{};
        receiving = 0;
        held_ar = held_aw = held_w = Held{};
        pins.arready() = pins.rvalid() = pins.awready() = pins.wready() = pins.bvalid() = 0;
    }

    void drive() {
        const MemorySettings& settings = memory.settings;
        bucket.refill();
        pins.arready() = reads.count() < settings.outstanding_bursts && !memory.stalls();
        pins.awready() = writes.count() < settings.outstanding_bursts && !memory.stalls();
        if (!pins.rvalid() && reads.count() && memory.cycle >= reads.front().due_cycle && may_move() && !memory.stalls())
            present_read();
        // The wait for an address is a slave's right; it tells the model where the data goes.
        pins.wready() = receiving != writes.tail && may_move() && !memory.stalls();
        if (!pins.bvalid() && writes.head != receiving && memory.cycle >= writes.front().due_cycle && !memory.stalls()) {
            pins.bvalid() = 1;
            pins.bid() = writes.front().id;
            pins.bresp() = writes.front().is_outside ? decode_error : 0;
        }
    }

    void sample() {
        held_ar.check(memory, Pins::name, "ar", pins.arvalid(), pins.arready(), pins.araddr() + pins.arlen());
        held_aw.check(memory, Pins::name, "aw", pins.awvalid(), pins.awready(), pins.awaddr() + pins.awlen());
        held_w.check(memory, Pins::name, "w", pins.wvalid(), pins.wready(), pins.wlast());
        if (pins.arvalid() && pins.arready()) {
            accept(reads, "ar", pins.araddr(), pins.arlen(), pins.arsize(), pins.arburst(), pins.arid());
            reads.at(reads.tail - 1).due_cycle = memory.cycle + memory.settings.read_latency_cycles;
            ++statistics.read_bursts;
        }
        if (pins.rvalid() && pins.rready()) {
            took_r = true;
            statistics.read_bytes += Pins::bytes;
            if (++reads.front().moved == reads.front().beats) reads.pop();
        }
        if (pins.awvalid() && pins.awready()) {
            accept(writes, "aw", pins.awaddr(), pins.awlen(), pins.awsize(), pins.awburst(), pins.awid());
            ++statistics.write_bursts;
        }
        if (pins.wvalid() && pins.wready()) receive_write();
        if (pins.bvalid() && pins.bready()) {
            took_b = true;
            writes.pop();
        }
    }

    // After the clock edge: a beat that was taken is no longer offered.
    void release() {
        if (took_r) pins.rvalid() = 0;
        if (took_b) pins.bvalid() = 0;
        took_r = took_b = false;
    }

    // Appends what this port waits for, "; " after each.
    int waits(char* text, int size) {
        int length = 0;
        auto add = [&](const char* format, auto... values) {
            if (length < size) length += std::snprintf(text + length, size - length, format, Pins::name, values...);
        };
        if (pins.arvalid() && !pins.arready()) add("%s.ar waits for ready; ");
        if (pins.awvalid() && !pins.awready()) add("%s.aw waits for ready; ");
        if (pins.wvalid() && !pins.wready()) add("%s.w waits for ready; ");
        if (pins.rvalid() && !pins.rready()) add("%s.r waits for the kernel's ready; ");
        if (pins.bvalid() && !pins.bready()) add("%s.b waits for the kernel's ready; ");
        if (reads.count() && !pins.rvalid())
            add("%s.r waits for data: %d of %d beats; ", int(reads.front().moved), int(reads.front().beats));
        if (receiving != writes.tail && !pins.wvalid()) {
            add("%s.w waits for data: %d of %d beats; ", int(writes.at(receiving).moved),
                int(writes.at(receiving).beats));
        }
        return length < size ? length : size;
    }

private:
    static constexpr int decode_error = 3;

    Pins pins;
    Memory& memory;
    uint64_t index;
    TokenBucket bucket;
    BurstRing reads, writes;
    uint64_t receiving = 0;  // index in `writes` of the burst whose data comes next
    Held held_ar, held_aw, held_w;
    bool took_r = false, took_b = false;

    // Shared bandwidth goes round: the port whose turn it is needs one beat's worth, the next one two, and so on.
    bool may_move() const {
        if (!bucket.has(Pins::bytes)) return false;
        return !memory.total.rate || memory.total.has(Pins::bytes * (1 + (index + memory.cycle) % memory.port_count));
    }

    void spend() {
        bucket.spend(Pins::bytes);
        memory.total.spend(Pins::bytes);
    }

    uint8_t* beat(const Burst& burst) { return memory.bytes + (burst.address - memory.base) + burst.moved * Pins::bytes; }

    void accept(BurstRing& ring, const char* channel, uint64_t address, int len, int size, int type, uint8_t id) {
        const uint64_t beats = len + 1, start = address & ~uint64_t(Pins::bytes - 1);
        if (type != 1) memory.fail(Pins::name, "%sburst must be INCR (1), not %d", channel, type);
        if (1 << size != Pins::bytes) memory.fail(Pins::name, "%ssize must be a full beat, not %d", channel, size);
        if (start % 4096 + beats * Pins::bytes > 4096) {
            memory.fail(Pins::name, "%s burst must not cross a 4 KB boundary, not %llu beats at 0x%llx", channel,
                        (unsigned long long)beats, (unsigned long long)address);
        }
        ring.push({start, beats, 0, 0, !memory.holds(start, beats * Pins::bytes), id});
    }

    void present_read() {
        Burst& burst = reads.front();
        spend();
        pins.rvalid() = 1;
        pins.rid() = burst.id;
        pins.rlast() = burst.moved + 1 == burst.beats;
        pins.rresp() = burst.is_outside ? decode_error : 0;
        if (burst.is_outside) std::memset(pins.rdata(), 0, Pins::bytes);
        else std::memcpy(pins.rdata(), beat(burst), Pins::bytes);
    }

    void receive_write() {
        Burst& burst = writes.at(receiving);
        const bool is_last = burst.moved + 1 == burst.beats;
        if (bool(pins.wlast()) != is_last) {
            memory.fail(Pins::name, "wlast must come with beat %llu, not %s %llu", (unsigned long long)burst.beats,
                        is_last ? "be missing at" : "at", (unsigned long long)burst.moved + 1);
        }
        spend();
        if (!burst.is_outside) store(beat(burst), pins.wdata(), pins.wstrb());
        statistics.written_bytes += Pins::bytes;
        ++burst.moved;
        if (is_last) {
            burst.due_cycle = memory.cycle + memory.settings.write_latency_cycles;
            ++receiving;
        }
    }

    static void store(uint8_t* target, const uint8_t* source, uint64_t strobes) {
        constexpr uint64_t all = Pins::bytes == 64 ? ~uint64_t(0) : (uint64_t(1) << Pins::bytes % 64) - 1;
        if (strobes == all) {
            std::memcpy(target, source, Pins::bytes);
            return;
        }
        for (int index = 0; index < Pins::bytes; ++index) {
            if (strobes >> index & 1) target[index] = source[index];
        }
    }
};
