// What a user's optimizer must be, checked where it is declared.
//
//     template <typename F>
//     struct Sign {
//         struct Scalars { F lr; };              // the same for all parameters of a step
//         struct State { F p; };                 // p and the arrays beside it, as many as are used
//         static State step(State s, F g, Scalars c) { return {g > F(0) ? s.p - c.lr : s.p + c.lr}; }
//     };
//     NEARFLASH_OPTIMIZER(Sign);
//
// `step` is one parameter's step. Every operation is rounded on its own (profile ieee), unless fma(a, b, c) is written.
#pragma once

#include <type_traits>
#include <utility>

#include "nearflash/real.hpp"

namespace nearflash {

constexpr int most_arrays = 8;

// Operation orders of docs/contracts/numerics.md. A user's optimizer has one order, as written: ieee.
enum class Profile { ieee, torch_fused, deepspeed };

// Fields of a struct that holds F's and nothing else.
template <typename Struct, typename F>
constexpr int fields = int(sizeof(Struct) / sizeof(F));

namespace detail {

template <typename F, std::size_t>
using Repeat = F;

template <typename Struct, typename F, typename Indices, typename = void>
struct MadeOf : std::false_type {};
template <typename Struct, typename F, std::size_t... I>
struct MadeOf<Struct, F, std::index_sequence<I...>, std::void_t<decltype(Struct{std::declval<Repeat<F, I>>()...})>>
    : std::true_type {};

}  // namespace detail

// Struct is an aggregate of F's alone.
template <typename Struct, typename F>
constexpr bool made_of = std::is_aggregate_v<Struct> && std::is_standard_layout_v<Struct> &&
                         detail::MadeOf<Struct, F, std::make_index_sequence<fields<Struct, F>>>::value;

template <template <typename> class Optimizer, typename F>
constexpr bool has_step = std::is_invocable_r_v<typename Optimizer<F>::State, decltype(Optimizer<F>::step),
                                                typename Optimizer<F>::State, F, typename Optimizer<F>::Scalars>;

#define NEARFLASH_OPTIMIZER(Name)                                                                                     \
    static_assert(::nearflash::made_of<Name<float>::State, float>, #Name "::State must hold F's alone");              \
    static_assert(::nearflash::made_of<Name<float>::Scalars, float>, #Name "::Scalars must hold F's alone");          \
    static_assert(::nearflash::fields<Name<float>::State, float> <= ::nearflash::most_arrays,                         \
                  #Name "::State must have 8 fields at most, p among them");                                          \
    static_assert(::nearflash::has_step<Name, float>, #Name "::step must be static State step(State, F g, Scalars)")

}  // namespace nearflash
