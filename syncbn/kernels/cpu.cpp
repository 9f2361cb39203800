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

#if defined(__x86_64__) && !defined(__clang__)  // which has no such pragma
#define GCC_TARGETS                            // instruction sets beside the baseline
#include <immintrin.h>
#endif

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
constexpr int64_t FETCHED_AHEAD = 2048;  // values, at least
constexpr int64_t LEAST_RUNS = 8;        // of a channel in a part of a sum
constexpr int64_t LEAST_ROWS = 32;       // in a part of a sum, whose two doubles for each column are half a byte a value

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

// How many things of `values` each make a part of a sum, a multiple of `least`.
int64_t part_of(int64_t values, int64_t least) {
  return std::max(least, 2 * GRAIN / std::max<int64_t>(1, values) / least * least);
}

template <typename Body>
void parallel(int64_t count, int64_t values_each, const Body& body) {
  torch::stable::parallel_for(0, count, std::max<int64_t>(1, GRAIN / std::max<int64_t>(1, values_each)), body);
}

// Into the second cache, as several rows of three tensors do not fit into the first.
#define FETCH(address) __builtin_prefetch(address, 0, 2)
// What GCC must inline: a function that only fetches, as it leaves out calls of what has no effect; and loops of maps.
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
  std::string_view capability = asked ? asked : "";
  if (capability == "default") return Instructions::BASELINE;
#if defined(GCC_TARGETS)
  if (capability != "avx2" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
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
  const int64_t stride = tensor.stride(0);
  with_dtype(tensor, [&](auto zero) {
    auto* data = static_cast<const decltype(zero)*>(tensor.const_data_ptr());
    for (int64_t index = 0; index < count; ++index)
      numbers[index] = to_double(baseline::load<decltype(zero)>(data + index * stride));
  });
  return numbers;
}

void set_numbers(Tensor& tensor, const std::vector<double>& numbers) {
  const int64_t stride = tensor.stride(0);
  with_dtype(tensor, [&](auto zero) {
    auto* data = static_cast<decltype(zero)*>(tensor.mutable_data_ptr());
    for (size_t index = 0; index < numbers.size(); ++index)
      baseline::store(data + index * stride, from_double<decltype(zero)>(numbers[index]));
  });
}

const double* doubles_of(const Tensor& tensor, int64_t count, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous() && tensor.numel() == count &&
                      tensor.scalar_type() == ScalarType::Double,
                  "expected ", name, " of ", count, " contiguous float64 numbers on the CPU, got ", tensor.numel());
  return static_cast<const double*>(tensor.const_data_ptr());
}

// That x lies in memory as (outer, channel, inner), contiguous or with the channels innermost, and others as x does.
struct Layout {
  const Tensor& x;
  Sizes sizes;

  Layout(const Tensor& x, int64_t outer, int64_t channels, int64_t inner) : x(x), sizes{outer, channels, inner} {
    STD_TORCH_CHECK(outer >= 0 && channels >= 0 && inner >= 0 && x.numel() == sizes.numel(), "expected an input of ",
                    outer, " * ", channels, " * ", inner, " numbers, got ", x.numel());
    STD_TORCH_CHECK(x.is_cpu() && (x.is_contiguous() || channels_innermost()),
                    "expected an input on the CPU, contiguous or with the channels innermost");
  }

  // One dim is that of the channels, whose numbers are neighbours; the others are contiguous around it.
  bool channels_innermost() const {
    if (sizes.inner != 1) return false;
    int64_t channel_dim = -1, stride = sizes.channels;
    for (int64_t dim = 0; dim < x.dim(); ++dim)
      if (x.size(dim) == sizes.channels && x.stride(dim) == 1) channel_dim = dim;
    for (int64_t dim = x.dim() - 1; dim >= 0; --dim) {
      if (dim == channel_dim || x.size(dim) == 1) continue;
      if (x.stride(dim) != stride) return false;
      stride *= x.size(dim);
    }
    return channel_dim >= 0;
  }

  bool lies_as_x(const Tensor& tensor) const {
    if (!std::ranges::equal(tensor.sizes(), x.sizes())) return false;
    for (int64_t dim = 0; dim < x.dim(); ++dim)
      if (x.numel() > 0 && x.size(dim) != 1 && tensor.stride(dim) != x.stride(dim)) return false;
    return true;
  }

  void check(const Tensor& other, const char* name) const {
    STD_TORCH_CHECK(other.is_cpu() && other.scalar_type() == x.scalar_type() && lies_as_x(other), "expected ", name,
                    " with the dtype, sizes and layout of the input");
  }
  void check(const std::optional<Tensor>& other, const char* name) const {
    if (other) check(*other, name);
  }

  Tensor empty() const {
    Tensor other = torch::stable::empty_like(x);
    check(other, "memory");
    return other;
  }
};

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

Tensor empty_doubles(int64_t count) { return torch::stable::empty({count}, ScalarType::Double); }

// The operators: what they compute is said in reference.py.

Tensor channel_sums(Tensor x, int64_t outer, int64_t channels, int64_t inner) {
  Sizes sizes = Layout(x, outer, channels, inner).sizes;
  Tensor sums = empty_doubles(2 * sizes.channels + 1);
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

// mean, var and their n of a packed tensor; see moments.py.
struct Statistics {
  const double *means, *vars;
  double num_values, eps;

  Statistics(const Tensor& packed, int64_t channels, double eps)
      : means(doubles_of(packed, 2 * channels + 1, "statistics")),
        vars(means + channels),
        num_values(means[2 * channels]),
        eps(eps) {}

  double invstd(int64_t channel) const { return 1 / std::sqrt(vars[channel] + eps); }
};

std::tuple<Tensor, Tensor> normalize(Tensor x, int64_t outer, int64_t channels, int64_t inner, Tensor sums, double eps,
                                     std::optional<Tensor> weight, std::optional<Tensor> bias,
                                     std::optional<Tensor> residual, bool relu) {
  Layout layout(x, outer, channels, inner);
  layout.check(residual, "residual");
  Sizes sizes = layout.sizes;
  const double* totals = doubles_of(sums, 2 * channels + 1, "sums");
  auto weights = weights_of(weight, channels);
  auto biases = bias ? numbers_of(*bias, channels, "bias") : std::vector<double>(channels);
  Tensor y = layout.empty(), packed = empty_doubles(2 * channels + 1);
  auto *means = mutable_data_of<double>(packed), *vars = means + channels;
  means[2 * channels] = totals[2 * channels];
  double count = std::max(1.0, totals[2 * channels]);
  for (int64_t channel = 0; channel < channels; ++channel) {
    means[channel] = totals[channel] / count;
    double spread = totals[channels + channel] / count - means[channel] * means[channel];
    vars[channel] = spread < 0 ? 0 : spread;  // NaN stays
  }
  Statistics statistics(packed, channels, eps);
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    using Number = Compute<T>;
    std::vector<double> center(channels), scale(channels), shift(channels);
    for (int64_t channel = 0; channel < channels; ++channel) {
      center[channel] = Number(means[channel]);
      scale[channel] = weights[channel] * statistics.invstd(channel);
      shift[channel] = biases[channel] - (means[channel] - center[channel]) * scale[channel];
    }
    auto centers = sizes.spread<Number>(center), scales = sizes.spread<Number>(scale),
         shifts = sizes.spread<Number>(shift);
    WITH_BEST_INSTRUCTIONS(
        SET::apply(sizes, SET::Normalize<T>{data_of<T>(x), data_of<T>(residual), relu, mutable_data_of<T>(y),
                                            {centers.data(), scales.data(), shifts.data()}}));
  });
  return {y, packed};
}

std::tuple<Tensor, std::optional<Tensor>, std::optional<Tensor>> gradient_sums(
    Tensor dy, Tensor x, std::optional<Tensor> y, int64_t outer, int64_t channels, int64_t inner,
    Tensor packed_statistics, double eps, std::optional<ScalarType> weight_dtype, std::optional<ScalarType> bias_dtype) {
  Layout layout(x, outer, channels, inner);
  layout.check(dy, "dy");
  layout.check(y, "y");
  Sizes sizes = layout.sizes;
  Statistics statistics(packed_statistics, channels, eps);
  std::vector<double> center(statistics.means, statistics.means + channels);
  if (x.scalar_type() != ScalarType::Double)
    for (double& one : center) one = float(one);
  auto centers = sizes.spread<double>(center);
  Tensor sums = empty_doubles(2 * channels);
  auto* packed = mutable_data_of<double>(sums);
  std::fill_n(packed, 2 * channels, 0.0);
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    WITH_BEST_INSTRUCTIONS(
        SET::sum(sizes, SET::Products<T>{data_of<T>(dy), data_of<T>(x), data_of<T>(y), {centers.data()}}, packed));
  });
  std::vector<double> of_weight(channels);
  for (int64_t channel = 0; channel < channels; ++channel) {
    double rest = statistics.means[channel] - center[channel];
    if (rest != 0) packed[channels + channel] -= rest * packed[channel];  // 0 times an infinite sum is NaN
    of_weight[channel] = packed[channels + channel] * statistics.invstd(channel);
  }
  auto in_dtype = [&](std::optional<ScalarType> dtype, const std::vector<double>& numbers) -> std::optional<Tensor> {
    if (!dtype) return std::nullopt;
    Tensor gradient = torch::stable::empty({channels}, *dtype);
    set_numbers(gradient, numbers);
    return gradient;
  };
  return {sums, in_dtype(weight_dtype, of_weight), in_dtype(bias_dtype, {packed, packed + channels})};
}

std::tuple<Tensor, std::optional<Tensor>> input_gradient(Tensor dy, Tensor x, std::optional<Tensor> y,
                                                         int64_t outer, int64_t channels, int64_t inner,
                                                         Tensor packed_statistics, double eps,
                                                         std::optional<Tensor> weight, Tensor sums, bool of_residual) {
  Layout layout(x, outer, channels, inner);
  layout.check(dy, "dy");
  layout.check(y, "y");
  Sizes sizes = layout.sizes;
  Statistics statistics(packed_statistics, channels, eps);
  const double* totals = doubles_of(sums, 2 * channels, "sums");
  double count = std::max(1.0, statistics.num_values);
  auto weights = weights_of(weight, channels);
  Tensor grad_x = layout.empty();
  std::optional<Tensor> grad_residual;
  if (of_residual) grad_residual = layout.empty();
  with_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    using Number = Compute<T>;
    std::vector<double> center(channels), a(channels), b(channels), c(channels);
    for (int64_t channel = 0; channel < channels; ++channel) {
      double mean_dy = totals[channel] / count, mean_dy_xmu = totals[channels + channel] / count;
      double mean = statistics.means[channel], invstd = statistics.invstd(channel);
      center[channel] = Number(mean);
      a[channel] = weights[channel] * invstd;
      b[channel] = -a[channel] * invstd * invstd * mean_dy_xmu;
      c[channel] = -a[channel] * mean_dy - b[channel] * (mean - center[channel]);
    }
    auto centers = sizes.spread<Number>(center), as = sizes.spread<Number>(a), bs = sizes.spread<Number>(b),
         cs = sizes.spread<Number>(c);
    WITH_BEST_INSTRUCTIONS(SET::apply(
        sizes, SET::InputGradient<T>{data_of<T>(dy), data_of<T>(x), data_of<T>(y), mutable_data_of<T>(grad_x),
                                     mutable_data_of<T>(grad_residual),
                                     {centers.data(), as.data(), bs.data(), cs.data()}}));
  });
  return {grad_x, grad_residual};
}

void update_running_stats(Tensor running_mean, Tensor running_var, Tensor packed_statistics, double momentum) {
  int64_t channels = packed_statistics.numel() / 2;
  Statistics statistics(packed_statistics, channels, 0);
  double count = statistics.num_values;
  auto means = numbers_of(running_mean, channels, "running_mean");
  auto vars = numbers_of(running_var, channels, "running_var");
  for (int64_t channel = 0; channel < channels; ++channel) {
    means[channel] = (1 - momentum) * means[channel] + momentum * statistics.means[channel];
    double unbiased_var = statistics.vars[channel] * (count / (count - 1));
    vars[channel] = (1 - momentum) * vars[channel] + momentum * unbiased_var;
  }
  if (count > 0) set_numbers(running_mean, means);
  if (count > 1) set_numbers(running_var, vars);
}

}  // namespace

STABLE_TORCH_LIBRARY(syncbn, library) {
  library.def("channel_sums(Tensor x, SymInt outer, SymInt channels, SymInt inner) -> Tensor");
  library.def(
      "normalize(Tensor x, SymInt outer, SymInt channels, SymInt inner, Tensor sums, float eps, Tensor? weight, "
      "Tensor? bias, Tensor? residual, bool relu) -> (Tensor, Tensor)");
  library.def(
      "gradient_sums(Tensor dy, Tensor x, Tensor? y, SymInt outer, SymInt channels, SymInt inner, Tensor statistics, "
      "float eps, ScalarType? weight_dtype, ScalarType? bias_dtype) -> (Tensor, Tensor?, Tensor?)");
  library.def(
      "input_gradient(Tensor dy, Tensor x, Tensor? y, SymInt outer, SymInt channels, SymInt inner, Tensor statistics, "
      "float eps, Tensor? weight, Tensor sums, bool of_residual) -> (Tensor, Tensor?)");
  library.def(
      "update_running_stats(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor statistics, float momentum) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(syncbn, CPU, library) {
  library.impl("channel_sums", TORCH_BOX(&channel_sums));
  library.impl("normalize", TORCH_BOX(&normalize));
  library.impl("gradient_sums", TORCH_BOX(&gradient_sums));
  library.impl("input_gradient", TORCH_BOX(&input_gradient));
  library.impl("update_running_stats", TORCH_BOX(&update_running_stats));
}
