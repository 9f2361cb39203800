// C functions that compute the kernels for CPU tensors. cpu.py calls them; reference.py specifies their results.
//
// A tensor is (outer, channels, inner) values in memory. If inner is large, a run is `inner` contiguous values of one
// channel ("runs"). Else a row is the (channels, inner) values at one outer index ("rows"), and several short rows form
// a long row.
//
// The loops process one block of channels at a time. In a large tensor with many channels a block is some columns of
// each row.
//
// Sums are doubles, added up from partial sums whose ranges depend only on the sizes. So a result does not depend on
// the number of threads. Only sums use fma (-ffp-contract=off), so that all functions and all processors compute the
// same relu mask.
//
// No function allocates or throws: callers pass `scratch`, whose size in bytes syncbn_scratch returns. The arguments
// are a Kind, which is the same for many calls, and a struct of addresses for one call. cpu.py packs both.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__) && !defined(__clang__)  // clang does not have the target pragma
#define GCC_TARGETS                            // compile for instruction sets above the baseline
#include <immintrin.h>
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define INLINED __attribute__((always_inline))  // the bodies of loops, which GCC must inline

// Part of libtorch_cpu since torch 2.10. Calls body(begin, end, context) for ranges of at least `grain`, on torch's
// threads.
extern "C" int32_t torch_parallel_for(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                      void* context);

namespace {

enum Status : int { OK, NO_THREADS, NOT_FINITE };  // the same values as in cpu.py
enum Dtype : int { NONE = -1, FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum BFloat16 : uint16_t {};
enum Half : uint16_t {};
template <typename T> using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int64_t GRAIN = 32768;              // minimum number of values per thread
constexpr int64_t PART = 2 * GRAIN;           // values per partial sum
constexpr int64_t SHORTEST_RUN = 32;          // values; tensors with a smaller inner are processed in rows
constexpr int64_t LONG_ROW = 64;              // values; shorter rows are combined into long rows
constexpr int64_t SUMMED = 1024;              // maximum number of columns whose sums fit in the L1 cache
constexpr int64_t MAPPED = 2048;              // maximum number of columns whose coefficients fit in the L1 cache
constexpr int64_t AHEAD = 4096;               // minimum prefetch distance, in values, of sums over several rows
constexpr int64_t FORWARDS = 1 << 20;         // values per step; maps run backwards over steps, and forwards in a step
constexpr int64_t PADDING = 16;               // values; the length of the widest vector
constexpr int64_t LEAST_VALUES = 512;         // minimum number of values per channel of a partial sum over runs
constexpr int64_t LEAST_ROWS = 32;            // minimum number of rows per partial sum, whose size is 16 B per column
constexpr int64_t STREAMED_BYTES = 16 << 20;  // larger outputs bypass the caches, which would not keep them
constexpr int64_t ALIGNED = 64;               // bytes; alignment of outputs that bypass the caches
constexpr int64_t ZEROS_BEHIND_ONES[2 * PADDING] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
constexpr int64_t WIDTH_OF_SUMS = SUMMED + PADDING;
constexpr int64_t OWN_SCRATCH = 8192;  // doubles on the stack, used if the caller passes no scratch
constexpr int64_t TIMES_N = 4;  // N_COPIES of statistics.py: n is stored four times

// Positions in the trailer that follows the 2 C sums of a payload, see payload.py. tests/test_kernels.py compares them.
enum Trailer : int64_t { NUM_VALUES, COUNT, IS_SIGNED, SIGNATURE, SQUARE };

int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

struct Sizes {
  int64_t outer, channels, inner;

  int64_t numel() const { return outer * channels * inner; }
  int64_t columns() const { return channels * inner; }
  bool in_runs() const { return inner >= SHORTEST_RUN; }

  // Number of short rows in a long row, such that vectors fill the long row. The last long row may be shorter.
  int64_t rows_in_one() const { return columns() < LONG_ROW ? std::clamp<int64_t>(outer, 1, PADDING) : 1; }
  int64_t row() const { return in_runs() ? columns() : columns() * rows_in_one(); }
  int64_t rows() const { return in_runs() ? outer : inner ? divided_up(outer, rows_in_one()) : 0; }
  int64_t columns_of_channel() const { return in_runs() ? 1 : inner * rows_in_one(); }

  // Number of channels per block with at most `columns` columns of a row. Only the last block is smaller.
  int64_t channels_of_block(int64_t columns) const {
    int64_t most = in_runs() ? columns : columns / std::max<int64_t>(1, inner) / PADDING * PADDING;
    int64_t each = divided_up(channels, std::max<int64_t>(1, divided_up(channels, most)));
    return std::max<int64_t>(1, divided_up(each, PADDING)) * PADDING;
  }

  // Over runs a partial sum covers some outer indices of some channels, as contiguous in memory as possible. Over rows
  // it covers some rows of a block.
  int64_t outers_of_part() const {
    int64_t least = std::min(divided_up(LEAST_VALUES, inner), outer);
    return std::max<int64_t>(1, std::clamp(PART / std::max<int64_t>(1, columns()), least, outer));
  }
  int64_t channels_of_part() const {
    if (!in_runs()) return channels_of_block(SUMMED);
    return std::clamp<int64_t>(PART / (outers_of_part() * inner), 1, SUMMED);
  }
  int64_t rows_of_part() const {
    int64_t columns = std::max<int64_t>(1, std::min(channels, channels_of_block(SUMMED)) * columns_of_channel());
    return std::max(LEAST_ROWS, PART / columns / LEAST_ROWS * LEAST_ROWS);
  }
  int64_t num_parts() const {  // number of partial sums per channel
    return in_runs() ? divided_up(outer, outers_of_part()) : divided_up(rows(), rows_of_part());
  }

  // Expand `count` values, one per channel, to one value per column of a long row, in place. Append PADDING zeros.
  template <typename Number> void spread(int64_t count, Number* numbers) const {
    if (in_runs()) return;
    if (inner > 1)
      for (int64_t channel = count; channel--;) {
        Number number = numbers[channel];
        std::fill_n(numbers + channel * inner, inner, number);
      }
    int64_t length = count * inner;
    for (int64_t row = 1; row < rows_in_one(); ++row) std::copy_n(numbers, length, numbers + row * length);
    std::fill_n(numbers + rows_in_one() * length, PADDING, Number(0));
  }
  // The reverse of `spread`: add up the values of the columns of each channel.
  void gather(int64_t count, double* numbers) const {
    if (columns_of_channel() == 1) return;
    for (int64_t channel = 0; channel < count; ++channel) {
      double sum = 0;
      for (int64_t row = 0; row < rows_in_one(); ++row)
        for (int64_t index = 0; index < inner; ++index) sum += numbers[(row * count + channel) * inner + index];
      numbers[channel] = sum;
    }
  }
};

// The config of a forward or backward; cpu.py packs the same fields.
struct Kind {
  Sizes sizes;
  double eps;
  int32_t dtype, weight_dtype, bias_dtype, mean_dtype, var_dtype, grad_weight_dtype, grad_bias_dtype;  // or NONE
  int32_t relu, averages;  // averages: momentum is 1 / counter, so that the running statistics average all batches
  // Backward computes a fused relu's mask from y; or from x, scale and shift, which forward appends to `statistics`.
  int32_t masks_by_y, masks_by_x;
};

struct Sums {  // forward uses only x, sums, scratch, count and signature; in backward count is 0
  const void *dy, *x, *y;
  const double* statistics;
  double* sums;
  void *grad_weight, *grad_bias;
  double* scratch;
  int64_t count, signature;
};
struct ForwardOutputs {
  const void* x;
  const double* total;
  const void *residual, *weight, *bias;
  void *running_mean, *running_var;
  int64_t* counter;
  void* y;
  double *statistics, momentum;  // statistics: see statistics.py
};
struct BackwardOutputs {
  const void *dy, *x, *y;
  const double *statistics, *total;
  const void* weight;
  void *grad_x, *grad_residual;
};

// Write the trailer of a payload: see `sign` in payload.py. Without a signature only n differs from 0.
void write_trailer(const Sums& call, int64_t channels, double num_values) {
  double *trailer = call.sums + 2 * channels, s = double(call.signature);
  trailer[NUM_VALUES] = num_values, trailer[COUNT] = s != 0 ? double(call.count) : 0;
  trailer[IS_SIGNED] = s != 0, trailer[SIGNATURE] = s, trailer[SQUARE] = s * s;
}

// The loops for tensors of one dtype.
struct Loops {
  Status (*sum)(const Kind&, const Sums&, bool backward, double* scratch);
  Status (*normalize)(const Kind&, const ForwardOutputs&);
  Status (*input_gradient)(const Kind&, const BackwardOutputs&);
};

template <typename Body> Status parallel(int64_t count, int64_t values_each, const Body& body) {
  int64_t grain = std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, values_each));
  if (count <= grain) return body(0, count), OK;
  auto call = [](int64_t begin, int64_t end, void* context) { (*static_cast<const Body*>(context))(begin, end); };
  return torch_parallel_for(0, count, grain, call, const_cast<Body*>(&body)) ? NO_THREADS : OK;
}

namespace baseline {
#define WIDTH 16
#include "cpu_vectors.h"
#include "cpu_channels.h"
#include "cpu_loops.h"
}  // namespace baseline

#if defined(GCC_TARGETS)
constexpr int TO_NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace avx2 {
#define WIDTH 32
#include "cpu_vectors.h"
#include "cpu_channels.h"
#include "cpu_loops.h"
}  // namespace avx2
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
namespace avx512 {
#define WIDTH 64
#include "cpu_vectors.h"
#include "cpu_channels.h"
#include "cpu_loops.h"
}  // namespace avx512
#pragma GCC pop_options
#endif

// Return the loops, indexed by Dtype, for ATEN_CPU_CAPABILITY or else for the best instruction set of this processor.
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

}  // namespace

// The version of the functions' parameters; cpu.py refuses a library with another version.
EXPORTED int syncbn_interface() noexcept { return 13; }

// Return the bytes of scratch that the sums need; 0 if OWN_SCRATCH is enough.
EXPORTED int64_t syncbn_scratch(const Kind* kind) noexcept {
  int64_t doubles = 2 * kind->sizes.channels * kind->sizes.num_parts();
  return doubles > OWN_SCRATCH ? doubles * sizeof(double) : 0;
}

EXPORTED int syncbn_forward_sums(const Kind* kind, const Sums* call) noexcept {
  double own[OWN_SCRATCH];
  return loops[kind->dtype].sum(*kind, *call, false, call->scratch ? call->scratch : own);
}

EXPORTED int syncbn_forward_outputs(const Kind* kind, const ForwardOutputs* call) noexcept {
  int64_t channels = kind->sizes.channels;
  const double *total = call->total, *trailer = total + 2 * channels;
  std::fill_n(call->statistics + 3 * channels, TIMES_N, trailer[NUM_VALUES]);
  if (Status status = loops[kind->dtype].normalize(*kind, *call); status != OK) return status;
  if (call->counter) ++*call->counter;
  bool is_signed = trailer[IS_SIGNED] != 0;
  return is_signed && !std::all_of(total, trailer, [](double sum) { return std::isfinite(sum); }) ? NOT_FINITE : OK;
}

EXPORTED int syncbn_backward_sums(const Kind* kind, const Sums* call) noexcept {
  double own[OWN_SCRATCH];
  return loops[kind->dtype].sum(*kind, *call, true, call->scratch ? call->scratch : own);
}

EXPORTED int syncbn_backward_outputs(const Kind* kind, const BackwardOutputs* call) noexcept {
  return call->grad_x ? loops[kind->dtype].input_gradient(*kind, *call) : OK;
}
