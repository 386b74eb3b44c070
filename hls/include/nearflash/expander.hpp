// Expander<Format, Lanes>: compressed numbers to dense ones, Lanes a cycle, for TopK (topk.hpp) and Bitmap (bitmap.hpp).
#pragma once

namespace nearflash {

template <typename Format, int Lanes>
struct Expander;

}  // namespace nearflash
