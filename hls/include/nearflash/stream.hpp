// Stream<T, Depth> and dataflow: hardware under Vitis, threads and blocking queues under any C++17 compiler.
//
// A kernel declares its streams, then writes
//
//     NEARFLASH_DATAFLOW
//     NEARFLASH_STAGE(read(memory, words, in));
//     NEARFLASH_STAGE(scale(in, words, out));
//     NEARFLASH_JOIN
//
// Under Vitis a stage is a plain call in a DATAFLOW region; in simulation it is a thread, so that too shallow a stream
// or a stage that reads too much shows there: a stage that waits for a minute ends with an error that says for what.
// Every stream has one writing and one reading stage.
#pragma once

#if defined(__SYNTHESIS__) || defined(__VITIS_HLS__)
#define NEARFLASH_SYNTHESIS 1
#include <hls_stream.h>  // Vitis brings it
#else
#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>
#endif

namespace nearflash {

#ifdef NEARFLASH_SYNTHESIS

template <typename T, int Depth = 512>
using Stream = hls::stream<T, Depth>;

#define NEARFLASH_DATAFLOW
#define NEARFLASH_STAGE(...) __VA_ARGS__
#define NEARFLASH_JOIN

#else

#ifndef NEARFLASH_PATIENCE_S
#define NEARFLASH_PATIENCE_S 60
#endif

constexpr std::chrono::seconds patience{NEARFLASH_PATIENCE_S};

// Blocking queue of Depth elements between two threads.
template <typename T, int Depth = 512>
class Stream {
    static_assert(Depth > 0, "a stream's Depth must be at least 1");

  public:
    explicit Stream(const char* name = "stream") : name_(name) {}
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    // Invariant of both: written_ - read_ is the number of elements in the queue, 0 to Depth.
    void write(const T& value) {
        const auto at = written_.load(std::memory_order_relaxed);
        wait("full", [&] { return at - read_.load(std::memory_order_acquire) < Depth; });
        slots_[at % Depth] = value;
        written_.store(at + 1, std::memory_order_release);
    }

    T read() {
        const auto at = read_.load(std::memory_order_relaxed);
        wait("empty", [&] { return at != written_.load(std::memory_order_acquire); });
        const T value = slots_[at % Depth];
        read_.store(at + 1, std::memory_order_release);
        return value;
    }

    bool empty() const { return read_.load(std::memory_order_acquire) == written_.load(std::memory_order_acquire); }

  private:
    template <typename Ready>
    void wait(const char* state, Ready ready) const {
        for (int spin = 0; spin < 64; ++spin) {
            if (ready()) return;
            std::this_thread::yield();
        }
        const auto limit = std::chrono::steady_clock::now() + patience;
        while (!ready()) {
            if (std::chrono::steady_clock::now() > limit)
                throw std::runtime_error(std::string(name_) + " must move within " + std::to_string(patience.count()) +
                                         " s, not stay " + state);
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    const char* name_;
    std::vector<T> slots_ = std::vector<T>(Depth);
    alignas(64) std::atomic<std::size_t> written_{0};
    alignas(64) std::atomic<std::size_t> read_{0};
};

// The stages of one kernel call; join() waits for all and throws the first error of any.
class Dataflow {
  public:
    void stage(std::function<void()> work) {
        threads_.emplace_back([this, work] {
            try {
                work();
            } catch (...) {
                const std::lock_guard<std::mutex> hold(mutex_);
                if (!error_) error_ = std::current_exception();
            }
        });
    }

    void join() {
        for (auto& thread : threads_) thread.join();
        threads_.clear();
        if (error_) std::rethrow_exception(error_);
    }

  private:
    std::mutex mutex_;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
};

#define NEARFLASH_DATAFLOW ::nearflash::Dataflow nearflash_dataflow;
#define NEARFLASH_STAGE(...) nearflash_dataflow.stage([&] { __VA_ARGS__; })
#define NEARFLASH_JOIN nearflash_dataflow.join();

#endif

// Fields that lie next to each other in memory and travel together.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
    T lane[N];
};

}  // namespace nearflash
