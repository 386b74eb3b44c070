// One NAND channel behind the 64-bit link of nearflash.gateware.nand.link: PHY, bus and luns, with ONFI's grammar and
// waits checked. A violation is kept as the channel's error: the first one, later ones are its consequences.
//
// Per cycle: drive() sets the PHY's outputs from its state alone, the model settles, sample() takes the handshakes, the
// clock edge follows. Times are in nanoseconds since the channel was made.
// What the host asks for wrongly fails by its status, as in a bad block: a page is programmed whole and once between
// erases of its block, and above all pages of the block that were programmed before.
// Limits: no multi-plane, copyback or suspend commands.
// Source: ONFI 4.2, "Command Definition" and "Timing Parameters".
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <unordered_map>
#include <vector>

#include "random.hpp"

// Shared with Python (nand/channel.py: _Settings).
struct NandSettings {
    uint64_t luns, page_bytes, pages_per_block, blocks;  // page_bytes: spare included
    uint64_t seed;
    uint64_t disturb_reads;  // reads of a block since its erase that flip one more bit of each page read; 0: none do
    double clock_hz, link_bytes_per_s;
    double read_ns, program_ns, erase_ns, cache_busy_ns, reset_ns;
    double command_ns, preamble_ns, wb_ns, adl_ns, whr_ns, ccs_ns, rhw_ns;
    double jitter;          // array times are shorter by up to this share
    double bit_error_rate;  // raw, of each read
};

// Shared with Python (nand/channel.py: NandStatistics). The *_cycles add up to `cycles`.
struct NandStatistics {
    uint64_t cycles, data_cycles, command_cycles, wait_cycles, idle_cycles;
    uint64_t read_beats, written_beats, reads, programs, erases, resets, polls, busy_polls, selects, column_changes;
    uint64_t bit_errors;
};

struct NandLinkedUnit {
    enum class Output { none, data, status };

    std::unordered_map<uint32_t, std::vector<uint8_t>> pages;
    std::unordered_map<uint32_t, uint64_t> block_reads, block_erases, reads_since_erase;
    std::set<uint32_t> bad_blocks;
    std::unordered_map<uint32_t, uint64_t> failing_programs, failing_erases;  // of a block, how many are to come
    int64_t busy_left = -1;  // commands that it still finishes, or -1: all

    std::vector<uint8_t> cache, array;    // the register that is read out, the one behind it
    uint32_t cache_row = 0, array_row = 0;
    bool cache_valid = false, array_valid = false;
    double ready_at = 0, array_at = 0;    // SR[6], SR[5]
    double status_from = 0;               // tWB
    bool failed = false;                  // SR[0]
    bool started = false;                 // FFh came

    int command = -1;  // that is under way, or -1
    std::vector<uint8_t> address;
    bool programmed = false;  // data of the command under way came
    std::vector<uint8_t> data;
    Output output = Output::none;
    uint32_t column = 0;
    double data_from = 0;
    const char* data_wait = "";
};

class NandChannel {
  public:
    enum Kind { command, address, read, write };

    NandSettings settings{};
    NandStatistics statistics{};
    std::vector<NandLinkedUnit> luns;
    char error[256] = "";
    std::vector<uint8_t> log;  // {lun, kind, byte} of each bus cycle, while `logging`
    bool logging = false;

    void configure(const NandSettings& wanted) {
        const bool anew = luns.size() != wanted.luns || settings.page_bytes != wanted.page_bytes;
        settings = wanted;
        random.state = wanted.seed;
        cycle_ns = 1e9 / wanted.clock_hz;
        beats_per_cycle = wanted.link_bytes_per_s / wanted.clock_hz / 8;
        draw_next_error();
        *error = 0;
        if (anew) {
            luns.clear();
            luns.resize(wanted.luns);
        }
    }

    // The bus, in three steps a cycle. Pins: cycle_valid, cycle_ready, lun, kind, byte, beats, read_valid, read_ready,
    // read_data, write_valid, write_ready, write_data: accessors of the link's signals.
    template <class Pins>
    void drive(Pins& pins) {
        credit = std::min(credit + beats_per_cycle, 1 + beats_per_cycle);
        const bool flows = active && beats_left && now() >= until && credit >= 1;
        pins.cycle_ready() = active && !beats_left && now() + cycle_ns > until - 1e-6;
        if (!read_held && flows && kind == read) {
            held = next_beat();
            read_held = true;
        }
        pins.read_valid() = read_held;
        pins.read_data() = held;
        pins.write_ready() = flows && kind == write;
    }

    template <class Pins>
    void sample(Pins& pins) {
        if (pins.read_valid() && pins.read_ready()) read_held = false, moved(statistics.read_beats);
        if (pins.write_valid() && pins.write_ready()) take(pins.write_data()), moved(statistics.written_beats);
        if (!active && pins.cycle_valid()) {
            begin(pins.lun(), Kind(pins.kind()), pins.byte(), pins.beats());
        } else if (active && !pins.cycle_valid()) {
            fail("a bus cycle was taken back before it ended");
        }
        ++statistics.cycles;
        ++(active ? (kind >= read && !status_read ? statistics.data_cycles : statistics.command_cycles)
           : now() < wait_until ? statistics.wait_cycles : statistics.idle_cycles);
        const bool ends = active && pins.cycle_valid() && pins.cycle_ready();
        ++cycle;
        if (ends) end();
    }

    void reset() {  // of the controller: the bus is released, the luns keep on
        active = read_held = false;
        command_from = 0;
        for (auto& lun : luns) lun.command = -1;
    }

    double now() const { return double(cycle) * cycle_ns; }

  private:
    Random random{0};
    uint64_t cycle = 0;
    double cycle_ns = 1, beats_per_cycle = 1, credit = 0;
    bool active = false, read_held = false, status_read = false;
    Kind kind = command;
    uint64_t index = 0, beats_left = 0, held = 0;
    uint8_t byte = 0;
    double until = 0;       // end of the cycle, or of the preamble
    double wait_until = 0;  // a wait that the controller has to keep while the bus stands still
    double command_from = 0;
    double next_error = 0;  // bits

    NandLinkedUnit& lun() { return luns[index]; }

    void fail(const char* format, ...) {
        if (*error) return;
        int length = std::snprintf(error, sizeof error, "lun %llu at %.0f ns: ", (unsigned long long)index, now());
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(error + length, sizeof error - length, format, arguments);
        va_end(arguments);
    }

    void moved(uint64_t& count) {
        ++count;
        --beats_left;
        credit -= 1;
        if (!beats_left) until = now();
    }

    void begin(uint64_t number, Kind what, uint8_t value, uint64_t beats) {
        active = true;
        index = number;
        kind = what;
        byte = value;
        beats_left = what >= read ? beats : 0;
        if (logging) log.insert(log.end(), {uint8_t(number), uint8_t(what), value});
        if (number >= luns.size()) {
            index = 0;
            return fail("the lun must be below %zu, not %llu", luns.size(), (unsigned long long)number);
        }
        NandLinkedUnit& u = lun();
        status_read = what == read && u.output == NandLinkedUnit::Output::status;
        until = now() + (what >= read && !status_read ? settings.preamble_ns : settings.command_ns);
        if (what < read) {
            if (now() < command_from - 1e-6) fail("tRHW must pass before a command follows data out");
            return;
        }
        if (!beats) fail("a burst must have at least 1 beat");
        if (now() < u.data_from - 1e-6) fail("%s must pass before data move", u.data_wait);
        if (what == write && !(u.command == 0x80 && u.address.size() == 5)) fail("data in must follow 80h and 5 addresses");
        if (what == read && u.output == NandLinkedUnit::Output::none) fail("data out must follow E0h or a status command");
        if (what == read && !status_read && u.column + 8 * beats > settings.page_bytes)
            fail("data out must end within the page, not at %llu", (unsigned long long)(u.column + 8 * beats));
    }

    void end() {
        active = false;
        NandLinkedUnit& u = lun();
        if (kind == command) {
            on_command(u);
        } else if (kind == address) {
            on_address(u);
        } else if (kind == read) {
            command_from = wait_until = now() + settings.rhw_ns;
        }
    }

    bool ready(const NandLinkedUnit& u) const { return now() >= u.ready_at; }

    uint64_t next_beat() {
        NandLinkedUnit& u = lun();
        if (status_read) {
            ++statistics.polls;
            statistics.busy_polls += !ready(u);
            return uint64_t(0x80 | (ready(u) << 6) | (now() >= u.array_at) << 5 | u.failed);
        }
        uint64_t beat = 0;
        if (u.column + 8 <= u.cache.size()) std::memcpy(&beat, u.cache.data() + u.column, 8);
        u.column += 8;
        return beat;
    }

    void take(uint64_t beat) {
        NandLinkedUnit& u = lun();
        const auto* bytes = reinterpret_cast<const uint8_t*>(&beat);
        u.data.insert(u.data.end(), bytes, bytes + 8);
        u.programmed = true;
    }

    void on_command(NandLinkedUnit& u) {
        const bool status = byte == 0x70 || byte == 0x78;
        if (byte != 0xFF && !u.started) return fail("FFh must be the first command, not %02Xh", byte);
        if (until - settings.command_ns < u.status_from - 1e-6 && byte != 0xFF)
            return fail("tWB must pass before %02Xh", byte);
        if (!ready(u) && !status && byte != 0xFF) return fail("%02Xh must wait until the lun is ready", byte);
        switch (byte) {
            case 0x00: case 0x05: case 0x06: case 0x60: case 0x78: case 0x80:
                if (u.command >= 0) return fail("%02Xh must not follow an unfinished %02Xh", byte, u.command);
                u.command = byte;
                u.address.clear();
                u.data.clear();
                u.programmed = false;
                return;
            case 0x70: return put_status(u);
            case 0x30: return finish(u, 0x00, 5) ? sense(u, row(u, 2)) : void();
            case 0x31: return finish(u, 0x00, 5) ? turn(u, row(u, 2)) : void();
            case 0x3F: return turn(u, -1);
            case 0xE0: return select(u);
            case 0x10: return program(u);
            case 0xD0: return finish(u, 0x60, 3) ? erase(u, row(u, 0)) : void();
            case 0xFF:
                ++statistics.resets;
                u.command = -1;
                u.cache_valid = u.array_valid = u.failed = false;
                u.started = true;
                u.output = NandLinkedUnit::Output::none;
                return busy(u, settings.reset_ns, settings.reset_ns);
            default: return fail("the command must be one of ONFI's, not %02Xh", byte);
        }
    }

    void on_address(NandLinkedUnit& u) {
        if (u.command < 0) return fail("an address must follow a command");
        u.address.push_back(byte);
        if (u.address.size() > 5) return fail("%02Xh must have at most 5 addresses", u.command);
        if (u.command == 0x78 && u.address.size() == 3) put_status(u);
        if (u.command == 0x80 && u.address.size() == 5) data_after(u, settings.adl_ns, "tADL");
    }

    bool finish(NandLinkedUnit& u, int first, size_t addresses) {
        if (u.command != first || u.address.size() != addresses) {
            fail("%02Xh must follow %02Xh and %zu addresses", byte, first, addresses);
            return false;
        }
        u.command = -1;
        return true;
    }

    uint32_t row(const NandLinkedUnit& u, size_t from) const {
        return u.address[from] | u.address[from + 1] << 8 | u.address[from + 2] << 16;
    }

    bool holds(uint32_t row) {
        if (row < settings.blocks * settings.pages_per_block) return true;
        fail("the row must be below %llu, not %u", (unsigned long long)(settings.blocks * settings.pages_per_block), row);
        return false;
    }

    void data_after(NandLinkedUnit& u, double wait_ns, const char* name) {
        u.data_from = wait_until = now() + wait_ns;
        u.data_wait = name;
    }

    void put_status(NandLinkedUnit& u) {
        u.command = -1;
        u.output = NandLinkedUnit::Output::status;
        data_after(u, settings.whr_ns, "tWHR");
    }

    // Ready after `ready_ns`, the array after `array_ns`.
    void busy(NandLinkedUnit& u, double ready_ns, double array_ns) {
        const bool stuck = u.busy_left == 0;
        if (u.busy_left > 0) --u.busy_left;
        u.ready_at = stuck ? HUGE_VAL : now() + ready_ns;
        u.array_at = stuck ? HUGE_VAL : now() + array_ns;
        u.status_from = now() + settings.wb_ns;
    }

    double shortened(double time_ns) { return time_ns * (1 - settings.jitter * random.next32() / 4294967296.0); }

    void load(NandLinkedUnit& u, uint32_t row) {
        const auto found = u.pages.find(row);
        if (found == u.pages.end()) {
            u.array.assign(settings.page_bytes, 0xFF);
        } else {
            u.array = found->second;
        }
        u.array_row = row;
        u.array_valid = true;
        ++u.block_reads[row / settings.pages_per_block];
        ++statistics.reads;
        const double bits = 8.0 * settings.page_bytes;
        for (; next_error < bits; draw_error()) {
            const auto bit = uint64_t(next_error);
            u.array[bit / 8] ^= 1 << bit % 8;
            ++statistics.bit_errors;
        }
        next_error -= bits;
        disturb(u, row / settings.pages_per_block);
    }

    void disturb(NandLinkedUnit& u, uint32_t block) {
        const uint64_t reads = ++u.reads_since_erase[block];
        if (!settings.disturb_reads) return;
        for (uint64_t flips = reads / settings.disturb_reads; flips; --flips, ++statistics.bit_errors) {
            const uint64_t bit = random.next32() % (8 * settings.page_bytes);
            u.array[bit / 8] ^= 1 << bit % 8;
        }
    }

    // Whether one of the failures that were asked for is due.
    static bool due(std::unordered_map<uint32_t, uint64_t>& failing, uint32_t block) {
        const auto found = failing.find(block);
        if (found == failing.end() || !found->second) return false;
        --found->second;
        return true;
    }

    // Gaps between bit errors are geometric: one draw an error, whatever the rate.
    void draw_next_error() { next_error = -1, draw_error(); }

    void draw_error() {
        if (settings.bit_error_rate <= 0) {
            next_error = HUGE_VAL;
            return;
        }
        const double uniform = (random.next32() + 0.5) / 4294967296.0;
        next_error += 1 + std::floor(std::log(uniform) / std::log1p(-settings.bit_error_rate));
    }

    void sense(NandLinkedUnit& u, uint32_t row) {
        if (!holds(row)) return;
        load(u, row);
        u.cache = u.array;
        u.cache_row = row;
        u.cache_valid = true;
        u.output = NandLinkedUnit::Output::none;
        const double time = shortened(settings.read_ns);
        busy(u, time, time);
    }

    // 31h (with the row of the next page) or 3Fh (-1): the page behind comes to the front once it is sensed.
    void turn(NandLinkedUnit& u, int64_t row) {
        if (!u.array_valid) return fail("%02Xh must follow a read", byte);
        if (row >= 0 && !holds(uint32_t(row))) return;
        u.cache = u.array;
        u.cache_row = u.array_row;
        u.cache_valid = true;
        u.output = NandLinkedUnit::Output::none;
        const double ready_ns = std::max(0.0, u.array_at - now()) + settings.cache_busy_ns;
        const double array_ns = row < 0 ? ready_ns : ready_ns + shortened(settings.read_ns);
        if (row >= 0) {
            load(u, uint32_t(row));
        } else {
            u.array_valid = false;
        }
        busy(u, ready_ns, array_ns);
    }

    void select(NandLinkedUnit& u) {
        const bool enhanced = u.command == 0x06;
        if (!finish(u, enhanced ? 0x06 : 0x05, enhanced ? 5 : 2)) return;
        if (!u.cache_valid) return fail("E0h must follow a read");
        if (enhanced && row(u, 2) != u.cache_row) return fail("E0h must name row %u, not %u", u.cache_row, row(u, 2));
        u.column = u.address[0] | u.address[1] << 8;
        u.output = NandLinkedUnit::Output::data;
        ++(enhanced ? statistics.selects : statistics.column_changes);
        data_after(u, settings.ccs_ns, "tCCS");
    }

    void program(NandLinkedUnit& u) {
        if (!finish(u, 0x80, 5)) return;
        const uint32_t row = this->row(u, 2);
        const uint32_t column = u.address[0] | u.address[1] << 8;
        if (!holds(row)) return;
        if (!u.programmed) return fail("10h must follow data");
        if (column + u.data.size() > settings.page_bytes) return fail("data in must end within the page");
        ++statistics.programs;
        u.cache_valid = u.array_valid = false;
        u.output = NandLinkedUnit::Output::none;
        const uint32_t block = row / settings.pages_per_block;
        u.failed = due(u.failing_programs, block) || u.bad_blocks.count(block) || !ascends(u, row);
        if (!u.failed) {
            auto& page = u.pages[row];
            page.assign(settings.page_bytes, 0xFF);
            std::copy(u.data.begin(), u.data.end(), page.begin() + column);
        }
        const double time = shortened(settings.program_ns);
        busy(u, time, time);
    }

    // Whether no page of the block from `row` on is programmed.
    bool ascends(const NandLinkedUnit& u, uint32_t row) const {
        const uint32_t end = (row / settings.pages_per_block + 1) * settings.pages_per_block;
        for (uint32_t page = row; page < end; ++page)
            if (u.pages.count(page)) return false;
        return true;
    }

    void erase(NandLinkedUnit& u, uint32_t row) {
        if (!holds(row)) return;
        const uint32_t block = row / settings.pages_per_block;
        ++statistics.erases;
        u.cache_valid = u.array_valid = false;
        u.output = NandLinkedUnit::Output::none;
        u.failed = due(u.failing_erases, block) || u.bad_blocks.count(block);
        if (!u.failed) {
            for (uint32_t page = 0; page < settings.pages_per_block; ++page)
                u.pages.erase(block * settings.pages_per_block + page);
            ++u.block_erases[block];
            u.reads_since_erase[block] = 0;
        }
        const double time = shortened(settings.erase_ns);
        busy(u, time, time);
    }
};

// For Python (nand/channel.py). A shim that holds channels hands out their addresses.
extern "C" {

void nand_configure(NandChannel* channel, const NandSettings* settings) { channel->configure(*settings); }

const char* nand_error(NandChannel* channel) { return channel->error; }

void nand_statistics(NandChannel* channel, NandStatistics* statistics, int clear) {
    *statistics = channel->statistics;
    if (clear) channel->statistics = {};
}

// Pages of `bytes` each, put in place without time or wear.
void nand_load(NandChannel* channel, uint64_t lun, const uint32_t* rows, uint64_t count, const uint8_t* pages,
               uint64_t bytes) {
    for (uint64_t at = 0; at < count; ++at) {
        auto& page = channel->luns[lun].pages[rows[at]];
        page.assign(channel->settings.page_bytes, 0xFF);
        std::memcpy(page.data(), pages + at * bytes, bytes);
    }
}

// 0 where the page is erased (all ones).
int nand_page(NandChannel* channel, uint64_t lun, uint32_t row, uint8_t* bytes) {
    const auto& pages = channel->luns[lun].pages;
    const auto found = pages.find(row);
    if (found == pages.end()) {
        std::memset(bytes, 0xFF, channel->settings.page_bytes);
        return 0;
    }
    std::memcpy(bytes, found->second.data(), channel->settings.page_bytes);
    return 1;
}

void nand_stick(NandChannel* channel, uint64_t lun, int64_t after) { channel->luns[lun].busy_left = after; }

void nand_spoil(NandChannel* channel, uint64_t lun, uint32_t block) {
    channel->luns[lun].bad_blocks.insert(block);
}

// Bad from the factory: a byte of zeros in the first page, at the column where the spare begins (ONFI).
void nand_mark(NandChannel* channel, uint64_t lun, uint32_t block, uint64_t column) {
    auto& page = channel->luns[lun].pages[block * channel->settings.pages_per_block];
    page.assign(channel->settings.page_bytes, 0xFF);
    page[column] = 0;
    nand_spoil(channel, lun, block);
}

void nand_fail(NandChannel* channel, uint64_t lun, uint32_t block, uint64_t programs, uint64_t erases) {
    channel->luns[lun].failing_programs[block] = programs;
    channel->luns[lun].failing_erases[block] = erases;
}

uint64_t nand_block_reads(NandChannel* channel, uint64_t lun, uint32_t block) {
    return channel->luns[lun].block_reads[block];
}

uint64_t nand_block_erases(NandChannel* channel, uint64_t lun, uint32_t block) {
    return channel->luns[lun].block_erases[block];
}

// Bus cycles since logging began, 3 bytes each; null ends it. Returns the bytes there are.
uint64_t nand_log(NandChannel* channel, uint8_t* bytes, uint64_t size) {
    if (bytes) std::memcpy(bytes, channel->log.data(), std::min<uint64_t>(size, channel->log.size()));
    return channel->log.size();
}

void nand_start_log(NandChannel* channel) { channel->logging = true, channel->log.clear(); }
}
