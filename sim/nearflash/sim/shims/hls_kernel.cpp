// C ABI of an HLS kernel: hls_run calls KERNEL with one 64-bit word for each argument, in order.
//
// A word is an address (pointers), the value itself (integers and enumerations), or the bits of a scalar (structs).
// KERNEL is declared by the file KERNEL_FILE. Returns null, or what a stage threw.
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <tuple>
#include <type_traits>

#include KERNEL_FILE

namespace {

template <typename T>
T argument(std::uint64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
        return static_cast<T>(word);
    } else {
        static_assert(sizeof(T) <= sizeof word && std::is_trivially_copyable_v<T>, "a scalar must fit a word");
        T value;
        std::memcpy(&value, &word, sizeof value);
        return value;
    }
}

template <typename... Arguments>
void call(void (*kernel)(Arguments...), const std::uint64_t* words) {
    std::apply(kernel, std::tuple<Arguments...>{argument<Arguments>(*words++)...});
}

template <typename... Arguments>
constexpr int count(void (*)(Arguments...)) {
    return sizeof...(Arguments);
}

thread_local std::string error;

}  // namespace

extern "C" int hls_arguments() { return count(KERNEL); }

extern "C" const char* hls_run(const std::uint64_t* words) {
    try {
        call(KERNEL, words);
    } catch (const std::exception& thrown) {
        error = thrown.what();
        return error.c_str();
    }
    return nullptr;
}
