// Hard blocks of the 7 series as a decoded bitstream uses them. A block's `edge` is one clock edge, with the inputs that
// were set before; what it gives is a function of its state, and of its inputs where registers are left out.
// Source: AMD UG479 (DSP48E1), UG473 (RAMB18E1).
#include <cstdint>

namespace nearflash {

inline int64_t extend(uint64_t value, int bits) { return int64_t(value << (64 - bits)) >> (64 - bits); }

constexpr uint64_t MASK48 = (1ull << 48) - 1;

template <int AREG, int BREG, int CREG, int MREG, int PREG>
struct Dsp {
    uint64_t A, B, C, PCIN, ACIN;
    unsigned INMODE, OPMODE, ALUMODE, CARRYIN, CEA1, CEA2, CEB1, CEB2, CEC, CEM, CEP, RSTA, RSTB, RSTC, RSTM, RSTP;
    bool cascade;  // A comes from the slice below
    bool early;    // the first of two registers of A goes on to the slice above
    uint64_t a1 = 0, a2 = 0, b1 = 0, b2 = 0, c = 0, m = 0, p = 0, P = 0, ACOUT = 0;

    uint64_t a_in() const { return cascade ? ACIN : A; }
    uint64_t a_out() const { return AREG ? a2 : a_in(); }
    uint64_t b_out() const { return BREG ? b2 : B; }

    uint64_t product() const {
        uint64_t a = INMODE & 2 ? 0 : (INMODE & 1 && AREG == 2) ? a1 : a_out();
        uint64_t b = (INMODE & 16 && BREG == 2) ? b1 : b_out();
        return uint64_t(extend(a & 0x1ffffff, 25) * extend(b & 0x3ffff, 18)) & MASK48;
    }

    uint64_t sum() const {
        uint64_t product_ = MREG ? m : product(), c_ = CREG ? c : C;
        unsigned x = OPMODE & 3, y = OPMODE >> 2 & 3;
        uint64_t X = x == 0 ? 0 : x == 1 ? (y == 1 ? product_ : 0) : x == 2 ? p
                   : ((a_out() & 0x3fffffff) << 18 | (b_out() & 0x3ffff));
        uint64_t Y = y == 3 ? c_ : y == 2 ? MASK48 : 0, Z = 0;
        switch (OPMODE >> 4 & 7) {
            case 1: Z = PCIN; break;
            case 2: case 4: Z = p; break;
            case 3: Z = c_; break;
            case 5: Z = uint64_t(extend(PCIN, 48) >> 17); break;
            case 6: Z = uint64_t(extend(p, 48) >> 17); break;
        }
        switch (ALUMODE) {
            case 0: return (Z + X + Y + CARRYIN) & MASK48;
            case 1: return (~Z + X + Y + CARRYIN) & MASK48;
            case 2: return ~(Z + X + Y + CARRYIN) & MASK48;
            case 3: return (Z - (X + Y + CARRYIN)) & MASK48;
        }
        uint64_t z = ALUMODE & 1 ? ~Z : Z;  // the logic unit
        uint64_t r = (ALUMODE & 12) == 4 ? (Y ? ~(X ^ z) : X ^ z) : (Y ? X | z : X & z);
        return (ALUMODE & 2 ? ~r : r) & MASK48;
    }

    void settle() { P = PREG ? p : sum(); ACOUT = early ? a1 : a_out(); }

    void edge() {
        uint64_t next = sum(), product_ = product();
        if (PREG) p = RSTP ? 0 : CEP ? next : p;
        if (MREG) m = RSTM ? 0 : CEM ? product_ : m;
        step(AREG, a1, a2, a_in(), RSTA, CEA1, CEA2);
        step(BREG, b1, b2, B, RSTB, CEB1, CEB2);
        if (CREG) c = RSTC ? 0 : CEC ? C : c;
        P = p;
        ACOUT = early ? a1 : a2;
    }

    static void step(int registers, uint64_t& one, uint64_t& two, uint64_t in, unsigned reset, unsigned ce1,
                     unsigned ce2) {
        uint64_t before = registers == 2 ? one : in;
        if (reset) { one = two = 0; return; }
        if (ce2) two = before;
        if (ce1) one = in;
    }
};

enum WriteMode { WRITE_FIRST, READ_FIRST, NO_CHANGE };

// Half a block RAM: 1,024 words of 16 bits and 2 of parity. A width of 36 is that of the simple dual port: reads at A,
// writes at B. A port's value is data in the low 32 bits, parity above. A strobe is of four bits: a RAMB36E1 has half of
// each of its bytes in each half, the parity of every other byte in each; a RAMB18E1 has two strobes of each byte.
struct Ram {
    struct Port { int read, write; WriteMode mode; unsigned enable, reset, address, strobe; uint64_t in; };
    Port a, b;
    int half;  // the lower one, or the upper
    uint64_t A = 0, B = 0;
    uint16_t data[1024] = {};
    uint8_t parity[1024] = {};

    uint64_t read(unsigned address, int width) const {
        unsigned word = address >> 4 & 1023, byte = address >> 3 & 1;
        switch (width) {
            case 36: word &= ~1u;
                return data[word] | uint64_t(data[word + 1]) << 16 | uint64_t(parity[word] | parity[word + 1] << 2) << 32;
            case 18: return data[word] | uint64_t(parity[word]) << 32;
            case 9: return (data[word] >> 8 * byte & 255) | uint64_t(parity[word] >> byte & 1) << 32;
        }
        return data[word] >> (address & 15 & ~(width - 1)) & ((1u << width) - 1);
    }

    void write(unsigned address, int width, uint64_t in, unsigned strobe) {
        if (width < 9) {
            if (!(strobe & 1)) return;
            unsigned word = address >> 4 & 1023, shift = address & 15 & ~(width - 1), mask = ((1u << width) - 1) << shift;
            data[word] = uint16_t((data[word] & ~mask) | (unsigned(in) << shift & mask));
            return;
        }
        unsigned bytes = width / 9, first = (address >> 3 & 2047) & ~(bytes - 1);
        for (unsigned k = 0; k < 2 * bytes; k++)
            if (strobe >> k & 1) {
                unsigned byte = first + k / 2, shift = 8 * (byte & 1) + 4 * (k & 1);
                data[byte >> 1] = uint16_t((data[byte >> 1] & ~(15u << shift)) | (unsigned(in >> 4 * k) & 15) << shift);
            }
        for (unsigned k = 0; k < bytes; k++)
            if (strobe >> (2 * k + half) & 1) {
                unsigned byte = first + k, bit = byte & 1;
                parity[byte >> 1] = uint8_t((parity[byte >> 1] & ~(1u << bit)) | unsigned(in >> (32 + k) & 1) << bit);
            }
    }

    void edge() {
        uint64_t old_a = read(a.address, a.read), old_b = read(b.address, b.read);
        if (a.enable) write(a.address, a.write, a.in, a.strobe);
        if (b.enable) write(b.address, b.write, b.in, b.strobe);
        settle(a, A, old_a);
        settle(b, B, old_b);
    }

    void settle(const Port& port, uint64_t& out, uint64_t old) {
        if (!port.enable) return;
        if (port.reset) out = 0;
        else if (!port.strobe || port.mode == READ_FIRST) out = old;
        else if (port.mode == WRITE_FIRST) out = read(port.address, port.read);
    }
};

}  // namespace nearflash
