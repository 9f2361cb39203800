// The kernels for CPU tensors: plain C functions over addresses and sizes, which cpu.py calls. What each computes is
// said in reference.py.
//
// A tensor is (outer, channels, inner) numbers in memory. Where inner is large, each run of it has one channel
// ("runs"). Else a row of (channels, inner) has channel and inner in its columns ("rows"); short rows make a long one.
//
// Sums are doubles, made of parts that depend on the sizes only: a result does not depend on the number of threads.
// Only sums fuse products (fma; -ffp-contract=off): all functions find the same relu mask, and unlike processors agree.
//
// Nothing here allocates or throws: callers bring `scratch` of as many bytes as syncbn_scratch says. A function takes a
// Kind, which many calls have in common, and what differs from call to call: addresses, packed by cpu.py.

#include <algorithm>
#include <array>
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
#define INLINED __attribute__((always_inline))  // the bodies of loops, which GCC must inline

// In libtorch_cpu from torch 2.10: calls body(begin, end, context) for ranges of at least `grain`, on torch's threads.
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                      void* context);

namespace {

enum Status : int { OK, NO_THREADS, NO_MEMORY, NOT_FINITE };  // cpu.py has the same numbers
enum Dtype : int { NONE = -1, FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum BFloat16 : uint16_t {};
enum Half : uint16_t {};
template <typename T> using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int64_t GRAIN = 32768;              // values that are worth the start of a thread
constexpr int64_t PART = 2 * GRAIN;           // values of a part of a sum
constexpr int64_t SHORTEST_RUN = 32;          // values
constexpr int64_t LONG_ROW = 64;              // values, so that the rest behind whole vectors is small
constexpr int64_t WIDE_ROW = 2048;            // values, whose coefficients fill the first cache
constexpr int64_t ROWS = 4;                   // that a map takes at once where they are wide
constexpr int64_t AHEAD = 4096;               // values, at least, that several rows of a sum are fetched ahead
constexpr int64_t FORWARDS = 1 << 20;         // values of a block; a map takes the last block first, each forwards
constexpr int64_t PADDING = 16;               // numbers, as many as the widest vector has
constexpr int64_t LEAST_VALUES = 512;         // of a channel in a part of a sum over runs: its result is two doubles
constexpr int64_t LEAST_ROWS = 32;            // in a part of a sum, whose two doubles a column are half a byte a value
constexpr int64_t STREAMED_BYTES = 16 << 20;  // of an output, from which on it is not found in the caches again
constexpr int64_t ALIGNED = 64;               // bytes
constexpr int64_t MOST_COEFFICIENTS = 6;      // of a map
constexpr int64_t ZEROS_BEHIND_ONES[2 * PADDING] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
constexpr int64_t OWN_SCRATCH = 8192;         // doubles

int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

struct Sizes {
  int64_t outer, channels, inner;

  int64_t numel() const { return outer * channels * inner; }
  int64_t columns() const { return channels * inner; }
  bool in_runs() const { return inner >= SHORTEST_RUN; }

  // A piece is a run or a row. So many short rows make a long one that whole vectors fill it; the last may be shorter.
  int64_t rows_in_one() const { return columns() < LONG_ROW ? std::clamp<int64_t>(outer, 1, PADDING) : 1; }
  int64_t piece() const { return in_runs() ? inner : columns() * rows_in_one(); }

  // A part of a sum: of runs some outers of some channels, one behind another in memory as far as may be; or some rows.
  int64_t outers_of_part() const {
    int64_t least = std::min(divided_up(LEAST_VALUES, inner), outer);
    return std::max<int64_t>(1, std::clamp(PART / std::max<int64_t>(1, columns()), least, outer));
  }
  int64_t channels_of_part() const {
    return std::max<int64_t>(1, std::min(PART / (outers_of_part() * inner), channels));
  }
  int64_t rows_of_part() const {
    return std::max(LEAST_ROWS, PART / std::max<int64_t>(1, piece()) / LEAST_ROWS * LEAST_ROWS);
  }
  int64_t values_of_part() const {
    return in_runs() ? outers_of_part() * channels_of_part() * inner : rows_of_part() * std::max<int64_t>(1, piece());
  }
  int64_t num_parts() const {  // of the sums of a channel
    return in_runs() ? divided_up(outer, outers_of_part()) : divided_up(numel(), values_of_part());
  }
  int64_t blocks() const { return in_runs() ? divided_up(channels, channels_of_part()) : 1; }  // of channels

  // Calls body(column, channel) for each channel in runs, else for each column of a long row.
  template <typename Body> void for_columns(const Body& body) const {
    int64_t rows = in_runs() ? 1 : rows_in_one(), repeats = in_runs() ? 1 : inner, column = 0;
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t channel = 0; channel < channels; ++channel)
        for (int64_t index = 0; index < repeats; ++index) body(column++, channel);
  }
  int64_t spread_size() const { return (in_runs() ? channels : piece()) + PADDING; }
  // One number of each channel -> of each such column, then PADDING more.
  template <typename Number> const Number* spread(const double* of_channels, Number* to) const {
    for_columns([&](int64_t column, int64_t channel) { to[column] = Number(of_channels[channel]); });
    std::fill_n(to + spread_size() - PADDING, PADDING, Number(0));
    return to;
  }
  // And back: adds what columns have to what channels have.
  void gather(const double* of_columns, double* of_channels) const {
    for_columns([&](int64_t column, int64_t channel) { of_channels[channel] += of_columns[column]; });
  }
};

// What all calls of a kind have in common; cpu.py has the same fields.
struct Kind {
  Sizes sizes;
  double eps;
  int32_t dtype, weight_dtype, bias_dtype, mean_dtype, var_dtype, grad_weight_dtype, grad_bias_dtype;  // or NONE
  int32_t relu, has_residual, has_counter;
  int32_t averages;   // the running statistics are the average of all batches: momentum is 1 / counter
  int32_t is_signed;  // a signature follows the sums and n
  bool masks_by_y() const { return relu && has_residual; }
  bool masks_by_x() const { return relu && !has_residual; }  // by scale and shift, which follow the statistics
  int64_t numbers(int32_t dtype) const { return dtype == NONE ? 0 : sizes.channels; }
};

constexpr int64_t SIGNATURE = 3;  // doubles
struct Sums {  // forward has x, sums, scratch and signature alone
  const void *dy, *x, *y;
  const double* statistics;
  double* sums;
  void *grad_weight, *grad_bias;
  double *scratch, signature[SIGNATURE];
};
struct ForwardOutputs {
  const void* x;
  const double* total;
  const void *residual, *weight, *bias;
  void *running_mean, *running_var;
  int64_t* counter;
  void* y;
  double *statistics, *scratch, momentum;  // statistics: see statistics.py
};
struct BackwardOutputs {
  const void *dy, *x, *y;
  const double *statistics, *total;
  const void* weight;
  void *grad_x, *grad_residual;
  double* scratch;
};

// The loops over tensors, and over per-channel values, of a dtype.
struct Loops {
  Status (*sum)(const Kind&, const Sums&, bool backward, double* scratch);
  Status (*normalize)(const Kind&, const ForwardOutputs&, const double* coefficients, double* scratch);
  Status (*input_gradient)(const Kind&, const BackwardOutputs&, const double* coefficients, double* scratch);
  void (*widen)(const void* from, int64_t count, double* to);
  void* (*narrow)(const double* from, int64_t count, void* to);  // returns where what it wrote ends
};

template <typename Body> Status parallel(int64_t count, int64_t values_each, const Body& body) {
  int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, values_each));
  if (count <= grain) return body(0, count), OK;
  auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); };
  return torch_parallel_for(0, count, grain, call, const_cast<Body*>(&body)) ? NO_THREADS : OK;
}

namespace baseline {
#define WIDTH 16
#include "cpu_loops.h"
}  // namespace baseline

#if defined(GCC_TARGETS)
constexpr int TO_NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define WIDTH 32
#include "cpu_loops.h"
}  // namespace avx2
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#define WIDTH 64
#include "cpu_loops.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

// The loops for the best instruction set of this processor, or the one that ATEN_CPU_CAPABILITY names; by Dtype.
const Loops* best_loops() {
  const char* asked = std::getenv("ATEN_CPU_CAPABILITY");
  if (asked && !std::strcmp(asked, "default")) return baseline::LOOPS;
#if defined(GCC_TARGETS)
  if (!(asked && !std::strcmp(asked, "avx2")) && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return avx512::LOOPS;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return avx2::LOOPS;
#endif
  return baseline::LOOPS;
}

const Loops* const loops = best_loops();

// Numbers of channels that a user brings, of any dtype; `otherwise` where there are none.
void widen(const void* numbers, int dtype, int64_t channels, double otherwise, double* to) {
  if (!numbers) std::fill_n(to, channels, otherwise);
  else loops[dtype].widen(numbers, channels, to);
}

// What kernels subtract: all but those of double compute in float, where x - center is exact.
double center_of(double mean, int dtype) { return dtype == FLOAT64 ? mean : float(mean); }

// Whether any tensor, (address, number of values), has values but no memory.
bool lack_memory(std::initializer_list<std::pair<const void*, int64_t>> tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](auto one) { return !one.first && one.second; });
}

// running = (1 - momentum) * running + momentum * statistic * factor.
void update(void* running, int dtype, int64_t channels, const double* statistic, double factor, double momentum) {
  double some[512];
  for (int64_t count; channels; channels -= count, statistic += count) {
    count = std::min<int64_t>(channels, std::size(some));
    loops[dtype].widen(running, count, some);
    for (int64_t i = 0; i < count; ++i) some[i] = (1 - momentum) * some[i] + momentum * (statistic[i] * factor);
    running = loops[dtype].narrow(some, count, running);
  }
}

}  // namespace

// Changes with the parameters of the functions: cpu.py compares it with its own.
EXPORTED int syncbn_interface() noexcept { return 6; }

// How many bytes of scratch each function needs; 0 where what they have is enough.
EXPORTED int64_t syncbn_scratch(const Kind* kind) noexcept {
  const Sizes& sizes = kind->sizes;
  int64_t to_map = MOST_COEFFICIENTS * (sizes.channels + sizes.spread_size()) + 2 * sizes.channels;
  int64_t doubles = std::max(to_map, sizes.spread_size() * (3 + 2 * sizes.num_parts()));
  return doubles > OWN_SCRATCH ? doubles * sizeof(double) : 0;
}

EXPORTED int syncbn_forward_sums(const Kind* kind, const Sums* call) noexcept {
  if (lack_memory({{call->x, kind->sizes.numel()}})) return NO_MEMORY;
  double own[OWN_SCRATCH];
  return loops[kind->dtype].sum(*kind, *call, false, call->scratch ? call->scratch : own);
}

EXPORTED int syncbn_forward_outputs(const Kind* kind, const ForwardOutputs* call) noexcept {
  int64_t channels = kind->sizes.channels, numel = kind->sizes.numel();
  const double *total = call->total, *trailer = total + 2 * channels;
  if (lack_memory({{call->x, numel}, {call->residual, kind->has_residual * numel}, {total, channels},
                   {call->weight, kind->numbers(kind->weight_dtype)}, {call->bias, kind->numbers(kind->bias_dtype)},
                   {call->running_mean, kind->numbers(kind->mean_dtype)}, {call->counter, kind->has_counter},
                   {call->running_var, kind->numbers(kind->var_dtype)}}))
    return NO_MEMORY;

  double own[OWN_SCRATCH], *scratch = call->scratch ? call->scratch : own;
  double *center = scratch, *scale = center + channels, *shift = scale + channels;
  double *weight = center + MOST_COEFFICIENTS * channels, *bias = weight + channels;
  double *all_mean = call->statistics, *all_var = all_mean + channels, *all_invstd = all_var + channels;
  double count = std::max(1.0, *trailer);
  all_invstd[channels] = *trailer;
  widen(call->weight, kind->weight_dtype, channels, 1, weight);
  widen(call->bias, kind->bias_dtype, channels, 0, bias);
  for (int64_t channel = 0; channel < channels; ++channel) {
    double mean = total[channel] / count, var = total[channels + channel] / count - mean * mean;
    var = var < 0 ? 0 : var;  // NaN stays
    double invstd = 1 / std::sqrt(var + kind->eps);
    all_mean[channel] = mean, all_var[channel] = var, all_invstd[channel] = invstd;
    center[channel] = center_of(mean, kind->dtype);
    scale[channel] = invstd * weight[channel];
    shift[channel] = bias[channel] - (mean - center[channel]) * scale[channel];
  }
  if (kind->masks_by_x()) std::copy_n(scale, 2 * channels, all_invstd + channels + 1);
  if (Status status = loops[kind->dtype].normalize(*kind, *call, center, bias + channels); status != OK) return status;
  double momentum = kind->averages && call->counter ? 1.0 / double(*call->counter + 1) : call->momentum;
  if (call->running_mean && *trailer > 0) update(call->running_mean, kind->mean_dtype, channels, all_mean, 1, momentum);
  if (call->running_var && *trailer > 1)
    update(call->running_var, kind->var_dtype, channels, all_var, *trailer / (*trailer - 1), momentum);
  if (call->counter) ++*call->counter;
  bool is_signed = kind->is_signed && trailer[1] != 0;
  return is_signed && !std::all_of(total, trailer, [](double sum) { return std::isfinite(sum); }) ? NOT_FINITE : OK;
}

EXPORTED int syncbn_backward_sums(const Kind* kind, const Sums* call) noexcept {
  int64_t channels = kind->sizes.channels, numel = kind->sizes.numel();
  if (lack_memory({{call->x, numel}, {call->dy, numel}, {call->y, kind->masks_by_y() * numel},
                   {call->statistics, channels}}))
    return NO_MEMORY;
  double *sum_dy = call->sums, *sum_dy_xmu = sum_dy + channels;
  double own[OWN_SCRATCH], *scratch = call->scratch ? call->scratch : own, *grad_weight = scratch;
  const double *mean = call->statistics, *invstd = mean + 2 * channels;
  Status status = loops[kind->dtype].sum(*kind, *call, true, scratch);
  for (int64_t channel = 0; channel < channels; ++channel) {
    double rest = mean[channel] - center_of(mean[channel], kind->dtype);
    sum_dy_xmu[channel] -= rest == 0 ? 0 : rest * sum_dy[channel];  // 0 times an infinite sum is NaN
    grad_weight[channel] = sum_dy_xmu[channel] * invstd[channel];
  }
  if (call->grad_weight) loops[kind->grad_weight_dtype].narrow(grad_weight, channels, call->grad_weight);
  if (call->grad_bias) loops[kind->grad_bias_dtype].narrow(sum_dy, channels, call->grad_bias);
  return status;
}

EXPORTED int syncbn_backward_outputs(const Kind* kind, const BackwardOutputs* call) noexcept {
  int64_t channels = kind->sizes.channels, numel = kind->sizes.numel();
  const double *total = call->total, *all_mean = call->statistics, *all_invstd = all_mean + 2 * channels;
  if (lack_memory({{call->x, numel}, {call->dy, numel}, {call->y, kind->masks_by_y() * numel}, {total, channels},
                   {all_mean, channels}, {call->weight, kind->numbers(kind->weight_dtype)}}))
    return NO_MEMORY;
  if (!call->grad_x) return OK;
  double own[OWN_SCRATCH], *scratch = call->scratch ? call->scratch : own;
  double *center = scratch, *a = center + channels, *b = a + channels, *c = b + channels;
  double *weight = center + MOST_COEFFICIENTS * channels, count = std::max(1.0, all_invstd[channels]);
  if (kind->masks_by_x()) std::copy_n(all_invstd + channels + 1, 2 * channels, c + channels);
  widen(call->weight, kind->weight_dtype, channels, 1, weight);
  for (int64_t channel = 0; channel < channels; ++channel) {
    double mean = all_mean[channel], invstd = all_invstd[channel];
    center[channel] = center_of(mean, kind->dtype);
    a[channel] = invstd * weight[channel];
    b[channel] = -a[channel] * invstd * invstd * (total[channels + channel] / count);
    c[channel] = -a[channel] * (total[channel] / count) - b[channel] * (mean - center[channel]);
  }
  return loops[kind->dtype].input_gradient(*kind, *call, center, weight + channels);
}
