// C ABI of the operation counter: one step of OPTIMIZER on given values, counted.
//
// HEADER declares OPTIMIZER; FILL_STATE and FILL_SCALARS name the fields in the order of `values`.
#include <algorithm>
#include <cstring>

#include "nearflash/counted.hpp"
#include HEADER

using nearflash::Counted;
using Step = nearflash::OPTIMIZER<Counted>;

#define FIELD(name) into.name = Counted(*values++);

// values: g, then the fields of State, then of Scalars. counts: by Operation; returns the latest result's cycle.
extern "C" int hls_count(const int* latency, const float* values, int* counts) {
    std::copy_n(latency, Counted::latency.size(), Counted::latency.begin());
    Counted::counts = {};
    const Counted g(*values++);
    Step::State state;
    {
        auto& into = state;
        FILL_STATE
    }
    Step::Scalars scalars;
    {
        auto& into = scalars;
        FILL_SCALARS
    }
    const Step::State next = Step::step(state, g, scalars);
    Counted results[sizeof next / sizeof(Counted)];
    std::memcpy(static_cast<void*>(results), &next, sizeof next);
    std::copy(Counted::counts.begin(), Counted::counts.end(), counts);
    return std::max_element(std::begin(results), std::end(results), [](const Counted& a, const Counted& b) {
               return a.ready < b.ready;
           })->ready;
}
