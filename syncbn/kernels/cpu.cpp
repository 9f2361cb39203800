// The kernels for CPU tensors, as torch operators on torch's stable ABI (torch >= 2.11).
//
// A tensor is (outer, channel, inner) numbers in memory. Where inner is large, each run of it has one channel ("runs").
// Else a row of (channel, inner) has channel and inner in its columns ("rows"); several short rows make a long one.
//
// Sums are doubles, made of parts that depend on the sizes only: a result does not depend on the number of threads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <cstdlib>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

constexpr int64_t GRAIN = 32768;      // values that are worth the start of a thread
constexpr int64_t SHORTEST_RUN = 32;  // values
constexpr int64_t LONG_ROW = 64;      // values, so that what is left behind whole vectors counts little
constexpr int64_t PADDING = 16;       // numbers, as many as the widest vector has
constexpr int64_t ROWS_AT_ONCE = 4;
constexpr int64_t FETCHED_AHEAD = 2048;  // values, at least

struct Sizes {
  int64_t outer, channels, inner;

  int64_t numel() const { return outer * channels * inner; }
  bool in_runs() const { return inner >= SHORTEST_RUN; }
  int64_t columns() const { return channels * inner; }
  int64_t rows_in_one() const { return columns() < LONG_ROW ? PADDING : 1; }  // whole vectors, whatever the columns
  int64_t long_row() const { return columns() * rows_in_one(); }
  int64_t long_rows() const { return outer / rows_in_one(); }

  // One number of each channel -> of each channel, or of each column of a long row.
  template <typename Number>
  std::vector<Number> spread(const std::vector<double>& of_channel) const {
    if (in_runs()) return {of_channel.begin(), of_channel.end()};
    std::vector<Number> of_column(long_row() + PADDING);
    int64_t column = 0;
    for (int64_t row = 0; row < rows_in_one(); ++row)
      for (double number : of_channel)
        for (int64_t index = 0; index < inner; ++index) of_column[column++] = number;
    return of_column;
  }
};

// How many things of `values` each make a part of a sum.
int64_t part_of(int64_t values) {
  return std::max<int64_t>(ROWS_AT_ONCE, 2 * GRAIN / std::max<int64_t>(1, values) / ROWS_AT_ONCE * ROWS_AT_ONCE);
}

template <typename Body>
void parallel(int64_t count, int64_t values_each, const Body& body) {
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, values_each)), body);
}

namespace baseline {
#define WIDTH 16
#include "cpu_loops.h"
#undef WIDTH
}  // namespace baseline

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define WIDTH 32
#include "cpu_loops.h"
#undef WIDTH
}  // namespace avx2
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")
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
  std::string_view capability = asked ? asked : "";
  if (capability == "default") return Instructions::BASELINE;
#if defined(__x86_64__)
  if (capability != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    return Instructions::AVX512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Instructions::AVX2;
#endif
  return Instructions::BASELINE;
}

const Instructions instructions = best_instructions();

// Runs a statement in which SET is the namespace of the best instructions.
#if defined(__x86_64__)
#define WITH_BEST_INSTRUCTIONS(...)                                            \
  do {                                                                         \
    if (instructions == Instructions::AVX512) {                                \
      namespace SET = avx512;                                                  \
      __VA_ARGS__;                                                             \
    } else if (instructions == Instructions::AVX2) {                           \
      namespace SET = avx2;                                                    \
      __VA_ARGS__;                                                             \
    } else {                                                                   \
      namespace SET = baseline;                                                \
      __VA_ARGS__;                                                             \
    }                                                                          \
  } while (false)
#else
#define WITH_BEST_INSTRUCTIONS(...) \
  do {                              \
    namespace SET = baseline;       \
    __VA_ARGS__;                    \
  } while (false)
#endif

// Arguments.

template <typename Body>
void with_dtype(const Tensor& tensor, const Body& body) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: body(float{}); break;
    case ScalarType::Double: body(double{}); break;
    case ScalarType::BFloat16: body(BFloat16{}); break;
    case ScalarType::Half: body(Half{}); break;
    default: STD_TORCH_CHECK(false, "expected float16, bfloat16, float32 or float64");
  }
}

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

// Per-channel numbers of a user: any float dtype, any stride.
std::vector<double> numbers_of(const Tensor& tensor, int64_t count, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.dim() == 1 && tensor.numel() == count, "expected ", name, " of ", count,
                  " numbers on the CPU, got ", tensor.numel());
  std::vector<double> numbers(count);
  with_dtype(tensor, [&](auto zero) {
    auto* data = static_cast<const decltype(zero)*>(tensor.const_data_ptr());
    for (int64_t index = 0; index < count; ++index) numbers[index] = to_double(data[index * tensor.stride(0)]);
  });
  return numbers;
}

const double* doubles_of(const Tensor& tensor, int64_t count, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == count &&
                      tensor.scalar_type() == ScalarType::Double,
                  "expected ", name, " of ", count, " contiguous float64 numbers on the CPU, got ", tensor.numel());
  return static_cast<const double*>(tensor.const_data_ptr());
}

Sizes sizes_of(const Tensor& x) {
  STD_TORCH_CHECK(x.is_cpu() && x.is_contiguous() && x.dim() == 3,
                  "expected a contiguous input (outer, channel, inner) on the CPU");
  return {x.size(0), x.size(1), x.size(2)};
}

void check_like(const Tensor& x, const Tensor& other, const char* name) {
  STD_TORCH_CHECK(other.is_cpu() && other.is_contiguous() && other.scalar_type() == x.scalar_type() &&
                      std::ranges::equal(other.sizes(), x.sizes()),
                  "expected ", name, " with the dtype, sizes and layout of the input");
}

template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

template <typename T>
T* mutable_data_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->mutable_data_ptr()) : nullptr;
}

std::vector<double> weights_of(const std::optional<Tensor>& weight, int64_t channels) {
  return weight ? numbers_of(*weight, channels, "weight") : std::vector<double>(channels, 1.0);
}

// The operators.

Tensor channel_sums(Tensor x) {
  Sizes sizes = sizes_of(x);
  Tensor sums = torch::stable::empty({2 * sizes.channels + 1}, ScalarType::Double);
  auto* packed = mutable_data_of<double>(sums);
  std::fill_n(packed, 2 * sizes.channels, 0.0);
  packed[2 * sizes.channels] = sizes.outer * sizes.inner;
  auto zeros = sizes.spread<double>(std::vector<double>(sizes.channels));
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    WITH_BEST_INSTRUCTIONS(SET::sum(sizes, SET::Squares<T>{data_of<T>(x), {zeros.data()}}, packed));
  });
  return sums;
}

void normalize(Tensor x, Tensor mean, Tensor invstd, std::optional<Tensor> weight, std::optional<Tensor> bias,
               std::optional<Tensor> residual, bool relu, Tensor out) {
  Sizes sizes = sizes_of(x);
  int64_t channels = sizes.channels;
  check_like(x, out, "out");
  if (residual) check_like(x, *residual, "residual");
  const double *means = doubles_of(mean, channels, "mean"), *invstds = doubles_of(invstd, channels, "invstd");
  auto weights = weights_of(weight, channels);
  auto biases = bias ? numbers_of(*bias, channels, "bias") : std::vector<double>(channels);
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    using Number = Compute<T>;
    std::vector<double> center(channels), scale(channels), shift(channels);
    for (int64_t channel = 0; channel < channels; ++channel) {
      center[channel] = Number(means[channel]);
      scale[channel] = weights[channel] * invstds[channel];
      shift[channel] = biases[channel] - (means[channel] - center[channel]) * scale[channel];
    }
    auto centers = sizes.spread<Number>(center), scales = sizes.spread<Number>(scale),
         shifts = sizes.spread<Number>(shift);
    WITH_BEST_INSTRUCTIONS(
        SET::apply(sizes, SET::Normalize<T>{data_of<T>(x), data_of<T>(residual), relu, mutable_data_of<T>(out),
                                            {centers.data(), scales.data(), shifts.data()}}));
  });
}

Tensor gradient_sums(Tensor dy, Tensor x, std::optional<Tensor> y, Tensor mean) {
  Sizes sizes = sizes_of(x);
  int64_t channels = sizes.channels;
  check_like(x, dy, "dy");
  if (y) check_like(x, *y, "y");
  const double* means = doubles_of(mean, channels, "mean");
  std::vector<double> center(means, means + channels);
  if (x.scalar_type() != ScalarType::Double)
    for (double& one : center) one = float(one);
  auto centers = sizes.spread<double>(center);
  Tensor sums = torch::stable::empty({2 * channels}, ScalarType::Double);
  auto* packed = mutable_data_of<double>(sums);
  std::fill_n(packed, 2 * channels, 0.0);
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    WITH_BEST_INSTRUCTIONS(
        SET::sum(sizes, SET::Products<T>{data_of<T>(dy), data_of<T>(x), data_of<T>(y), {centers.data()}}, packed));
  });
  for (int64_t channel = 0; channel < channels; ++channel)
    packed[channels + channel] -= (means[channel] - center[channel]) * packed[channel];
  return sums;
}

void input_gradient(Tensor dy, Tensor x, std::optional<Tensor> y, Tensor mean, Tensor invstd,
                    std::optional<Tensor> weight, Tensor sums, Tensor num_values, Tensor out,
                    std::optional<Tensor> residual_out) {
  Sizes sizes = sizes_of(x);
  int64_t channels = sizes.channels;
  check_like(x, dy, "dy");
  check_like(x, out, "out");
  if (y) check_like(x, *y, "y");
  if (residual_out) check_like(x, *residual_out, "residual_out");
  const double *means = doubles_of(mean, channels, "mean"), *invstds = doubles_of(invstd, channels, "invstd");
  const double* totals = doubles_of(sums, 2 * channels, "sums");
  double count = std::max(1.0, *doubles_of(num_values, 1, "num_values"));
  auto weights = weights_of(weight, channels);
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    using Number = Compute<T>;
    std::vector<double> center(channels), a(channels), b(channels), c(channels);
    for (int64_t channel = 0; channel < channels; ++channel) {
      double mean_dy = totals[channel] / count, mean_dy_xmu = totals[channels + channel] / count;
      center[channel] = Number(means[channel]);
      a[channel] = weights[channel] * invstds[channel];
      b[channel] = -a[channel] * invstds[channel] * invstds[channel] * mean_dy_xmu;
      c[channel] = -a[channel] * mean_dy - b[channel] * (means[channel] - center[channel]);
    }
    auto centers = sizes.spread<Number>(center), as = sizes.spread<Number>(a), bs = sizes.spread<Number>(b),
         cs = sizes.spread<Number>(c);
    WITH_BEST_INSTRUCTIONS(SET::apply(
        sizes, SET::InputGradient<T>{data_of<T>(dy), data_of<T>(x), data_of<T>(y), mutable_data_of<T>(out),
                                     mutable_data_of<T>(residual_out),
                                     {centers.data(), as.data(), bs.data(), cs.data()}}));
  });
}

// mean, var and 1 / sqrt(var + eps) of the packed sums.
std::tuple<Tensor, Tensor, Tensor> moments(Tensor sums, double eps) {
  int64_t channels = sums.numel() / 2;
  const double* packed = doubles_of(sums, 2 * channels + 1, "sums");
  double count = std::max(1.0, packed[2 * channels]);
  Tensor mean = torch::stable::empty({channels}, ScalarType::Double), var = torch::stable::empty_like(mean),
         invstd = torch::stable::empty_like(mean);
  auto *means = mutable_data_of<double>(mean), *vars = mutable_data_of<double>(var),
       *invstds = mutable_data_of<double>(invstd);
  for (int64_t channel = 0; channel < channels; ++channel) {
    means[channel] = packed[channel] / count;
    double spread = packed[channels + channel] / count - means[channel] * means[channel];
    vars[channel] = spread < 0 ? 0 : spread;  // NaN stays
    invstds[channel] = 1 / std::sqrt(vars[channel] + eps);
  }
  return {mean, var, invstd};
}

void move_towards(Tensor running, const std::vector<double>& statistic, double momentum) {
  auto old = numbers_of(running, statistic.size(), "running statistics");
  with_dtype(running, [&](auto zero) {
    auto* data = mutable_data_of<decltype(zero)>(running);
    for (size_t index = 0; index < statistic.size(); ++index)
      data[index * running.stride(0)] =
          from_double<decltype(zero)>((1 - momentum) * old[index] + momentum * statistic[index]);
  });
}

void update_running_stats(Tensor running_mean, Tensor running_var, Tensor mean, Tensor var, Tensor num_values,
                          double momentum) {
  double count = *doubles_of(num_values, 1, "num_values");
  int64_t channels = mean.numel();
  const double *means = doubles_of(mean, channels, "mean"), *vars = doubles_of(var, channels, "var");
  std::vector<double> unbiased(vars, vars + channels);
  for (double& one : unbiased) one *= count / (count - 1);
  if (count > 0) move_towards(running_mean, {means, means + channels}, momentum);
  if (count > 1) move_towards(running_var, unbiased, momentum);
}

}  // namespace

STABLE_TORCH_LIBRARY(syncbn, library) {
  library.def("moments(Tensor sums, float eps) -> (Tensor, Tensor, Tensor)");
  library.def(
      "update_running_stats(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor mean, Tensor var, "
      "Tensor num_values, float momentum) -> ()");
  library.def("channel_sums(Tensor x) -> Tensor");
  library.def(
      "normalize(Tensor x, Tensor mean, Tensor invstd, Tensor? weight, Tensor? bias, Tensor? residual, bool relu, "
      "Tensor(a!) out) -> ()");
  library.def("gradient_sums(Tensor dy, Tensor x, Tensor? y, Tensor mean) -> Tensor");
  library.def(
      "input_gradient(Tensor dy, Tensor x, Tensor? y, Tensor mean, Tensor invstd, Tensor? weight, Tensor sums, "
      "Tensor num_values, Tensor(a!) out, Tensor(b!)? residual_out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, library) {
  library.impl("moments", TORCH_BOX(&moments));
  library.impl("update_running_stats", TORCH_BOX(&update_running_stats));
  library.impl("channel_sums", TORCH_BOX(&channel_sums));
  library.impl("normalize", TORCH_BOX(&normalize));
  library.impl("gradient_sums", TORCH_BOX(&gradient_sums));
  library.impl("input_gradient", TORCH_BOX(&input_gradient));
}
