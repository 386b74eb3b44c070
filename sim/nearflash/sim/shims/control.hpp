// An AXI4-Lite master that drives one register access at a time.
#pragma once
#include <cstdint>

// `Pins` is generated: one accessor per signal.
template <class Pins>
struct LiteMaster {
    Pins pins;
    bool took_aw = false, took_w = false, took_ar = false, ended = false;

    void idle() {
        pins.awvalid() = pins.wvalid() = pins.bready() = pins.arvalid() = pins.rready() = 0;
        took_aw = took_w = took_ar = ended = false;
    }

    void begin_write(uint32_t offset, uint32_t value) {
        pins.awaddr() = offset;
        pins.wdata() = value;
        pins.wstrb() = 15;
        pins.awvalid() = pins.wvalid() = pins.bready() = 1;
    }

    void begin_read(uint32_t offset) {
        pins.araddr() = offset;
        pins.arvalid() = pins.rready() = 1;
    }

    int sample_write() {
        took_aw = pins.awvalid() && pins.awready();
        took_w = pins.wvalid() && pins.wready();
        ended = pins.bvalid();
        return ended ? int(pins.bresp()) : -1;
    }

    int sample_read(uint32_t* value) {
        took_ar = pins.arvalid() && pins.arready();
        ended = pins.rvalid();
        if (ended) *value = pins.rdata();
        return ended ? int(pins.rresp()) : -1;
    }

    // After the clock edge.
    void release() {
        if (took_aw) pins.awvalid() = 0;
        if (took_w) pins.wvalid() = 0;
        if (took_ar) pins.arvalid() = 0;
        if (ended) pins.bready() = pins.rready() = 0;
        took_aw = took_w = took_ar = ended = false;
    }
};
