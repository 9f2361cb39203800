// The kernels for CPU tensors: plain C functions over addresses and sizes, which cpu.py calls. What each computes is said
// in reference.py.
//
// A tensor is (outer, channels, inner) numbers in memory. Where inner is large, each run of it has one channel ("runs").
// Else a row of (channels, inner) has channel and inner in its columns ("rows"); several short rows make a long one.
//
// Sums are doubles, made of parts that depend on the sizes only: a result does not depend on the number of threads. No
// multiplication is fused with an addition (-ffp-contract=off), so that unlike processors of one job agree.
//
// Nothing here allocates or throws: callers bring `scratch` of as many bytes as syncbn_scratch says. A function takes a
// Plan, which is the same for all calls of a kind, and what differs from call to call: addresses, packed by cpu.py. It
// returns a Status. The only symbol of torch is declared here, so that the functions are built without it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) && !defined(__clang__)  // which has no such pragma
#define GCC_TARGETS                            // instruction sets beside the baseline
#include <immintrin.h>
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

// In libtorch_cpu from torch 2.10: calls body(begin, end, context) for ranges of at least `grain`, on torch's threads.
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                      void* context);

namespace {

// The last four: of what all ranks have sent, see syncbn_forward_outputs.
enum Status : int { OK, UNKNOWN_DTYPE, NO_THREADS, NO_MEMORY, RANKS_DIFFER, FAULT, ONE_VALUE, NOT_FINITE };
enum Dtype : int { NONE = -1, FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int64_t GRAIN = 32768;          // values that are worth the start of a thread
constexpr int64_t SHORTEST_RUN = 32;      // values
constexpr int64_t LONG_ROW = 64;          // values, so that the rest behind whole vectors is small
constexpr int64_t PADDING = 16;           // numbers, as many as the widest vector has
constexpr int64_t LEAST_VALUES = 512;     // of a channel in a part of a sum over runs, which is two doubles
constexpr int64_t STREAMED_BYTES = 16 << 20;  // of an output, from which on it is not found in the caches again
constexpr int64_t ALIGNED = 64;           // bytes
constexpr int64_t LEAST_ROWS = 32;        // in a part of a sum, whose two doubles for each column are half a byte a value
constexpr int64_t MOST_COEFFICIENTS = 4;  // of a map
constexpr int64_t OWN_SCRATCH = 4096;     // doubles

int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

struct Sizes {
  int64_t outer, channels, inner;

  int64_t numel() const { return outer * channels * inner; }
  bool in_runs() const { return inner >= SHORTEST_RUN; }
  int64_t columns() const { return channels * inner; }
  // As many as make whole vectors, whatever the columns.
  int64_t rows_in_one() const { return columns() < LONG_ROW && outer >= PADDING ? PADDING : 1; }
  int64_t long_row() const { return columns() * rows_in_one(); }
  int64_t long_rows() const { return outer / rows_in_one(); }

  // A part of a sum: of runs some outers of some channels, one behind another in memory as far as may be; or some rows.
  int64_t outers_of_part() const {
    int64_t least = std::min(divided_up(LEAST_VALUES, inner), outer);
    return std::clamp(2 * GRAIN / std::max<int64_t>(1, columns()), std::max<int64_t>(1, least), std::max<int64_t>(1, outer));
  }
  int64_t channels_of_part() const {
    return std::clamp<int64_t>(2 * GRAIN / (outers_of_part() * inner), 1, std::max<int64_t>(1, channels));
  }
  int64_t rows_of_part() const {
    return std::max(LEAST_ROWS, 2 * GRAIN / std::max<int64_t>(1, long_row()) / LEAST_ROWS * LEAST_ROWS);
  }
  // The doubles that are the parts of both sums.
  int64_t size_of_parts() const {
    if (in_runs()) return divided_up(outer, outers_of_part()) * 2 * channels;
    return (long_rows() / rows_of_part() + 1) * 2 * (long_row() + PADDING);
  }

  // Whether a map's coefficients must be copied out, one for each column: for rows with inner > 1, and for short rows.
  bool needs_spread() const { return !in_runs() && (inner != 1 || channels < LONG_ROW); }

  // One number of each channel -> of each channel in runs, else of each column of a long row, then PADDING more.
  template <typename Number, typename From>
  const Number* spread(const From* of_channel, Number* to) const {
    int64_t repeats = in_runs() ? 1 : inner, column = 0;
    for (int64_t row = 0; row < (in_runs() ? 1 : rows_in_one()); ++row)
      for (int64_t channel = 0; channel < channels; ++channel)
        for (int64_t index = 0; index < repeats; ++index) to[column++] = Number(of_channel[channel]);
    std::fill_n(to + column, PADDING, Number(0));
    return to;
  }
  int64_t spread_size() const { return (in_runs() ? channels : long_row()) + PADDING; }
};

template <typename Body>
Status parallel(int64_t count, int64_t values_each, const Body& body) {
  int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, values_each));
  if (count <= grain) {
    if (count > 0) body(0, count);
    return OK;
  }
  auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); };
  return torch_parallel_for(0, count, grain, call, const_cast<Body*>(&body)) ? NO_THREADS : OK;
}

// What GCC must inline: the bodies of loops.
#define INLINED __attribute__((always_inline))

namespace baseline {
#define WIDTH 16
#include "cpu_loops.h"
#undef WIDTH
}  // namespace baseline

#if defined(GCC_TARGETS)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define WIDTH 32
#include "cpu_loops.h"
#undef WIDTH
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
namespace avx512 {
#define WIDTH 64
#include "cpu_loops.h"
#undef WIDTH
}  // namespace avx512
#pragma GCC pop_options
#endif

enum class Instructions { BASELINE, AVX2, AVX512 };

// The best that the processor has, or what torch's own variable asks for.
Instructions best_instructions() {
  const char* asked = std::getenv("ATEN_CPU_CAPABILITY");
  if (!asked) asked = "";
  if (!std::strcmp(asked, "default")) return Instructions::BASELINE;
#if defined(GCC_TARGETS)
  if (std::strcmp(asked, "avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Instructions::AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Instructions::AVX2;
#endif
  return Instructions::BASELINE;
}

const Instructions instructions = best_instructions();

// Runs a statement in which SET is the namespace of the best instructions.
#if defined(GCC_TARGETS)
#define WITH_BEST_INSTRUCTIONS(...)                \
  if (instructions == Instructions::AVX512) {      \
    namespace SET = avx512;                        \
    __VA_ARGS__;                                   \
  } else if (instructions == Instructions::AVX2) { \
    namespace SET = avx2;                          \
    __VA_ARGS__;                                   \
  } else {                                         \
    namespace SET = baseline;                      \
    __VA_ARGS__;                                   \
  }
#else
#define WITH_BEST_INSTRUCTIONS(...) \
  {                                 \
    namespace SET = baseline;       \
    __VA_ARGS__;                    \
  }
#endif

template <typename Body>
Status with_dtype(int dtype, const Body& body) {
  switch (dtype) {
    case FLOAT32: return body(float{});
    case FLOAT64: return body(double{});
    case BFLOAT16: return body(BFloat16{});
    case FLOAT16: return body(Half{});
    default: return UNKNOWN_DTYPE;
  }
}

// The numbers of channels that a user brings, of any dtype.

double to_double(float number) { return number; }
double to_double(double number) { return number; }
double to_double(BFloat16 number) {
  uint32_t bits = uint32_t(number.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}
double to_double(Half number) {
  Half two[2] = {number, {0}};
  return baseline::read<2>(two)[0];
}

// Rounded by way of float, as torch rounds a double.
template <typename T>
T from_double(double number) {
  if constexpr (std::is_same_v<T, double>) {
    return number;
  } else {
    T rounded[2];
    baseline::write<2>(rounded, baseline::Vector<float, 2>{float(number), 0});
    return rounded[0];
  }
}

// Those that a user brings, of any dtype, as doubles; `otherwise` where there are none.
void widen_numbers(const void* numbers, int dtype, int64_t channels, double otherwise, double* to) {
  if (!numbers) {
    std::fill_n(to, channels, otherwise);
    return;
  }
  with_dtype(dtype, [&](auto zero) {
    auto* from = static_cast<const decltype(zero)*>(numbers);
    for (int64_t channel = 0; channel < channels; ++channel)
      to[channel] = to_double(baseline::load<decltype(zero)>(from + channel));
    return OK;
  });
}

// numbers = of(channel), rounded, where there are numbers.
template <typename Of>
void set_numbers(void* numbers, int dtype, int64_t channels, const Of& of) {
  if (!numbers) return;
  with_dtype(dtype, [&](auto zero) {
    auto* to = static_cast<decltype(zero)*>(numbers);
    for (int64_t channel = 0; channel < channels; ++channel)
      baseline::store(to + channel, from_double<decltype(zero)>(of(channel)));
    return OK;
  });
}

// The memory that a caller brought, or where that is none some on the stack.
struct Scratch {
  double own[OWN_SCRATCH];
  double* doubles;

  explicit Scratch(void* given) : doubles(given ? static_cast<double*>(given) : own) {}
};

// mean, var, invstd and n, packed; see moments.py.
template <typename Number>
struct Statistics {
  Number *mean, *var, *invstd, *num_values;

  Statistics(Number* packed, int64_t channels)
      : mean(packed), var(mean + channels), invstd(var + channels), num_values(invstd + channels) {}
};

// What all calls of a kind have in common; cpu.py has the same fields.
struct Plan {
  int64_t outer, channels, inner;
  double eps;
  int32_t dtype, weight_dtype, bias_dtype, mean_dtype, var_dtype, grad_weight_dtype, grad_bias_dtype;  // or NONE
  int32_t has_residual, has_y, has_counter;
  int32_t relu;           // y = max(0, y)
  int32_t averages;       // the running statistics are the average of all batches: momentum is 1 / counter
  int32_t is_signed;      // a signature follows the sums and n

  Sizes sizes() const { return {outer, channels, inner}; }
};

constexpr int64_t SIGNATURE = 3;  // doubles

struct ForwardSums {
  const void* x;
  double* sums;
  void* scratch;
  double signature[SIGNATURE];
};

struct ForwardOutputs {
  const void* x;
  const double* total;
  const void *residual, *weight, *bias;
  void *running_mean, *running_var;
  int64_t* counter;
  void* y;
  double* statistics;
  void* scratch;
  double momentum;
  int64_t compares;
};

struct BackwardSums {
  const void *dy, *x, *y;
  const double* statistics;
  double* sums;
  void *grad_weight, *grad_bias, *scratch;
  double signature[SIGNATURE];
};

struct BackwardOutputs {
  const void *dy, *x, *y;
  const double *statistics, *total;
  const void* weight;
  void *grad_x, *grad_residual, *scratch;
  int64_t compares;
};

// Ranks sign with 1, s and s^2, or with zeros. By Cauchy and Schwarz sum 1 * sum s^2 = (sum s)^2 only where all s are
// the same. A rank with a fault sends NaN for n.
Status compare(const double* behind) {
  if (behind[1] * behind[3] != behind[2] * behind[2]) return RANKS_DIFFER;
  if (behind[0] != behind[0]) return FAULT;
  return behind[0] == 1 ? ONE_VALUE : OK;
}

// Whether a tensor of `count` numbers that exists has no memory.
bool lacks(const void* address, bool exists, int64_t count) { return !address && exists && count; }

void move(void* running, int dtype, int64_t channels, const double* statistic, double factor, double momentum) {
  if (!running) return;
  with_dtype(dtype, [&](auto zero) {
    auto* numbers = static_cast<const decltype(zero)*>(running);
    set_numbers(running, dtype, channels, [&](int64_t channel) {
      double before = to_double(baseline::load<decltype(zero)>(numbers + channel));
      return (1 - momentum) * before + momentum * (statistic[channel] * factor);
    });
    return OK;
  });
}

void move_running_stats(const Plan& plan, void* running_mean, void* running_var, const double* packed,
                        double momentum) {
  Statistics statistics(packed, plan.channels);
  double count = *statistics.num_values;
  if (count > 0) move(running_mean, plan.mean_dtype, plan.channels, statistics.mean, 1, momentum);
  if (count > 1)
    move(running_var, plan.var_dtype, plan.channels, statistics.var, count / (count - 1), momentum);
}

}  // namespace

// Changes with the parameters of the functions: cpu.py compares it with its own.
EXPORTED int syncbn_interface() noexcept { return 2; }

// How many bytes of scratch the functions that add up need, or those that map; 0 where what they have is enough.
EXPORTED int64_t syncbn_scratch(const Plan* plan, int adds) noexcept {
  Sizes sizes = plan->sizes();
  int64_t doubles = (MOST_COEFFICIENTS + 2) * sizes.channels;  // and weight and bias
  if (adds)
    doubles = sizes.spread_size() + sizes.size_of_parts();
  else if (sizes.needs_spread())
    doubles += MOST_COEFFICIENTS * sizes.spread_size();
  return doubles > OWN_SCRATCH ? doubles * sizeof(double) : 0;
}

EXPORTED int syncbn_forward_sums(const Plan* plan, const ForwardSums* call) noexcept {
  Sizes sizes = plan->sizes();
  if (lacks(call->x, true, sizes.numel())) return NO_MEMORY;
  Scratch scratch(call->scratch);
  double *sums = call->sums, *behind = sums + 2 * sizes.channels;
  std::fill_n(sums, 2 * sizes.channels, 0.0);
  *behind = double(sizes.outer * sizes.inner);
  if (plan->is_signed) std::copy_n(call->signature, SIGNATURE, behind + 1);
  return with_dtype(plan->dtype, [&](auto zero) {
    using T = decltype(zero);
    WITH_BEST_INSTRUCTIONS(
        return SET::sum(sizes, SET::Squares<T>{static_cast<const T*>(call->x)}, scratch.doubles, sums));
  });
}

EXPORTED int syncbn_forward_outputs(const Plan* plan, const ForwardOutputs* call) noexcept {
  Sizes sizes = plan->sizes();
  int64_t channels = sizes.channels;
  const double *total = call->total, *behind = total + 2 * channels;
  if (lacks(call->x, true, sizes.numel()) || lacks(call->residual, plan->has_residual, sizes.numel()) ||
      lacks(call->weight, plan->weight_dtype != NONE, channels) ||
      lacks(call->bias, plan->bias_dtype != NONE, channels) ||
      lacks(call->running_mean, plan->mean_dtype != NONE, channels) ||
      lacks(call->running_var, plan->var_dtype != NONE, channels) || lacks(call->counter, plan->has_counter, 1) ||
      lacks(total, true, channels))
    return NO_MEMORY;
  if (plan->is_signed && call->compares) {
    if (Status status = compare(behind); status != OK) return status;
    double zero = 0;
    for (int64_t index = 0; index < 2 * channels; ++index) zero += total[index] * 0;  // NaN where one is not finite
    if (zero != 0 && behind[1] != 0) return NOT_FINITE;
  }

  Scratch scratch(call->scratch);
  Statistics statistics(call->statistics, channels);
  *statistics.num_values = *behind;
  double count = std::max(1.0, *behind);
  double *weight = scratch.doubles + MOST_COEFFICIENTS * channels, *bias = weight + channels;
  widen_numbers(call->weight, plan->weight_dtype, channels, 1, weight);
  widen_numbers(call->bias, plan->bias_dtype, channels, 0, bias);
  Status status = with_dtype(plan->dtype, [&](auto zero) {
    using T = decltype(zero);
    auto* center = reinterpret_cast<Compute<T>*>(scratch.doubles);
    auto *scale = center + channels, *shift = scale + channels;
    for (int64_t channel = 0; channel < channels; ++channel) {
      double mean = total[channel] / count, var = total[channels + channel] / count - mean * mean;
      var = var < 0 ? 0 : var;  // NaN stays
      double invstd = 1 / std::sqrt(var + plan->eps), wide_scale = invstd * weight[channel];
      statistics.mean[channel] = mean;
      statistics.var[channel] = var;
      statistics.invstd[channel] = invstd;
      center[channel] = Compute<T>(mean);
      scale[channel] = Compute<T>(wide_scale);
      shift[channel] = Compute<T>(bias[channel] - (mean - center[channel]) * wide_scale);
    }
    WITH_BEST_INSTRUCTIONS({
      SET::Normalize<T> map{static_cast<const T*>(call->x), static_cast<const T*>(call->residual), plan->relu != 0,
                            static_cast<T*>(call->y), {}};
      return SET::apply(sizes, map, center, bias + channels);
    });
  });
  if (status != OK) return status;
  double momentum = plan->averages && call->counter ? 1.0 / double(*call->counter + 1) : call->momentum;
  move_running_stats(*plan, call->running_mean, call->running_var, call->statistics, momentum);
  if (call->counter) ++*call->counter;
  return OK;
}

EXPORTED int syncbn_backward_sums(const Plan* plan, const BackwardSums* call) noexcept {
  Sizes sizes = plan->sizes();
  int64_t channels = sizes.channels;
  if (lacks(call->x, true, sizes.numel()) || lacks(call->dy, true, sizes.numel()) ||
      lacks(call->y, plan->has_y, sizes.numel()) || lacks(call->statistics, true, channels))
    return NO_MEMORY;
  Scratch scratch(call->scratch);
  Statistics statistics(call->statistics, channels);
  double* sums = call->sums;
  std::fill_n(sums, 2 * channels, 0.0);
  if (plan->is_signed) {  // 0 stands for the count: all payloads of a layer have one length
    sums[2 * channels] = 0;
    std::copy_n(call->signature, SIGNATURE, sums + 2 * channels + 1);
  }
  Status status = with_dtype(plan->dtype, [&](auto zero) {
    using T = decltype(zero);
    auto* center = sizes.spread(statistics.mean, reinterpret_cast<Compute<T>*>(scratch.doubles));
    WITH_BEST_INSTRUCTIONS({
      auto *dy = static_cast<const T*>(call->dy), *x = static_cast<const T*>(call->x);
      auto* y = static_cast<const T*>(call->y);
      double* parts = scratch.doubles + sizes.spread_size();
      if (y) return SET::sum(sizes, SET::Products<T, true>{dy, x, y, center}, parts, sums);
      return SET::sum(sizes, SET::Products<T, false>{dy, x, y, center}, parts, sums);
    });
  });
  double *sum_dy = sums, *sum_dy_xmu = sums + channels;
  for (int64_t channel = 0; channel < channels; ++channel) {
    double mean = statistics.mean[channel], rest = plan->dtype == FLOAT64 ? 0 : mean - float(mean);
    sum_dy_xmu[channel] -= rest == 0 ? 0 : rest * sum_dy[channel];  // 0 times an infinite sum is NaN
  }
  set_numbers(call->grad_weight, plan->grad_weight_dtype, channels,
              [&](int64_t channel) { return sum_dy_xmu[channel] * statistics.invstd[channel]; });
  set_numbers(call->grad_bias, plan->grad_bias_dtype, channels, [&](int64_t channel) { return sum_dy[channel]; });
  return status;
}

EXPORTED int syncbn_backward_outputs(const Plan* plan, const BackwardOutputs* call) noexcept {
  Sizes sizes = plan->sizes();
  int64_t channels = sizes.channels;
  if (lacks(call->x, true, sizes.numel()) || lacks(call->dy, true, sizes.numel()) ||
      lacks(call->y, plan->has_y, sizes.numel()) || lacks(call->weight, plan->weight_dtype != NONE, channels) ||
      lacks(call->total, true, channels) || lacks(call->statistics, true, channels))
    return NO_MEMORY;
  const double* total = call->total;
  if (plan->is_signed && call->compares)
    if (Status status = compare(total + 2 * channels); status != OK) return status;
  if (!call->grad_x) return OK;
  Scratch scratch(call->scratch);
  Statistics statistics(call->statistics, channels);
  double count = std::max(1.0, *statistics.num_values), *weight = scratch.doubles + MOST_COEFFICIENTS * channels;
  widen_numbers(call->weight, plan->weight_dtype, channels, 1, weight);
  return with_dtype(plan->dtype, [&](auto zero) {
    using T = decltype(zero);
    auto *center = reinterpret_cast<Compute<T>*>(scratch.doubles), *a = center + channels, *b = a + channels;
    auto* c = b + channels;
    for (int64_t channel = 0; channel < channels; ++channel) {
      double mean = statistics.mean[channel], invstd = statistics.invstd[channel], wide_a = invstd * weight[channel];
      double wide_b = -wide_a * invstd * invstd * (total[channels + channel] / count);
      center[channel] = Compute<T>(mean);
      a[channel] = Compute<T>(wide_a);
      b[channel] = Compute<T>(wide_b);
      c[channel] = Compute<T>(-wide_a * (total[channel] / count) - wide_b * (mean - center[channel]));
    }
    WITH_BEST_INSTRUCTIONS({
      SET::InputGradient<T> map{static_cast<const T*>(call->dy), static_cast<const T*>(call->x),
                                static_cast<const T*>(call->y),  static_cast<T*>(call->grad_x),
                                static_cast<T*>(call->grad_residual), {}};
      return SET::apply(sizes, map, center, weight + 2 * channels);
    });
  });
}

// Of the plan only channels and the buffers' dtypes are read.
EXPORTED int syncbn_update_running_stats(const Plan* plan, void* running_mean, void* running_var,
                                         const double* statistics, double momentum) noexcept {
  move_running_stats(*plan, running_mean, running_var, statistics, momentum);
  return OK;
}
