// Per-channel mathematics in vectors of double: sums of partial sums, statistics, coefficients of maps. One block of
// channels is processed at a time, so that its values stay in the L1 and L2 caches. See cpu_vectors.h.

// Call body(address) for per-channel values of any dtype, starting at channel `first`.
template <typename Body> inline void with_dtype(int dtype, const void* numbers, int64_t first, const Body& body) {
  auto* bytes = (char*)numbers;
  if (dtype == FLOAT32) body((float*)bytes + first);
  if (dtype == FLOAT64) body((double*)bytes + first);
  if (dtype == BFLOAT16) body((BFloat16*)bytes + first);
  if (dtype == FLOAT16) body((Half*)bytes + first);
}

// Per-channel values of any dtype as doubles; `otherwise` if the address is null.
struct Widened {
  double numbers[MAPPED];

  Widened(const void* of_channels, int dtype, int64_t first, int64_t count, double otherwise) {
    if (!of_channels) std::fill_n(numbers, count, otherwise);
    else with_dtype(dtype, of_channels, first, [&](auto* from) { convert(from, count, numbers); });
  }
};
inline void narrow(const double* numbers, void* of_channels, int dtype, int64_t first, int64_t count) {
  if (of_channels) with_dtype(dtype, of_channels, first, [&](auto* to) { convert(numbers, count, to); });
}

// Coefficients of a block: one value per channel or, after `spread`, per column.
template <typename T, size_t num> struct Coefficients {
  Compute<T> numbers[num][MAPPED + PADDING];
  std::array<const Compute<T>*, num> addresses() const {
    std::array<const Compute<T>*, num> each;
    for (size_t which = 0; which < num; ++which) each[which] = numbers[which];
    return each;
  }
  void spread(const Sizes& sizes, int64_t count) {
    for (auto* of : numbers) sizes.spread(count, of);
  }
};

// The center: the mean rounded to the type of computation, in which x - center is exact.
template <typename T> inline Wide center_of(Wide mean) {
  if constexpr (std::is_same_v<T, double>) return mean;
  else return wide(narrowed(mean));
}

// running = (1 - momentum) * running + momentum * statistic * factor.
inline void update(void* running, int dtype, int64_t first, int64_t count, const double* statistic, double factor,
                   double momentum) {
  Widened some(running, dtype, first, count, 0);
  double* numbers = some.numbers;
  for_vectors(count, [=](Memory memory, int64_t i) INLINED {
    Wide value = wide(momentum) * (memory.get<Wide>(statistic + i) * wide(factor));
    memory.set(numbers + i, wide(1 - momentum) * memory.get<Wide>(numbers + i) + value);
  });
  narrow(numbers, running, dtype, first, count);
}

// Compute center, scale and shift. With `writes`, which is true in one thread per block, also write the statistics and
// the running statistics.
template <typename T>
void coefficients_of(const Kind& kind, const ForwardOutputs& call, int64_t first, int64_t count, bool writes,
                     Coefficients<T, 3>& to) {
  int64_t channels = kind.sizes.channels;
  double num_values = call.total[2 * channels + NUM_VALUES], eps = kind.eps;
  const double *sums = call.total + first, *squares = sums + channels;
  double *all_mean = call.statistics + first, *all_var = all_mean + channels, *all_invstd = all_var + channels;
  double* of_relu = kind.masks_by_x ? all_invstd + channels + TIMES_N : nullptr;
  Widened weight(call.weight, kind.weight_dtype, first, count, 1), bias(call.bias, kind.bias_dtype, first, count, 0);
  for_vectors(count, [&](Memory memory, int64_t i) INLINED {
    Wide n = wide(std::max(1.0, num_values));
    Wide mean = memory.get<Wide>(sums + i) / n, var = memory.get<Wide>(squares + i) / n - mean * mean;
    var = not_negative(var);
    Wide invstd = wide(1.0) / root(var + wide(eps)), center = center_of<T>(mean);
    Wide scale = invstd * memory.get<Wide>(weight.numbers + i);
    Wide shift = memory.get<Wide>(bias.numbers + i) - (mean - center) * scale;
    memory.set(to.numbers[0] + i, center), memory.set(to.numbers[1] + i, scale), memory.set(to.numbers[2] + i, shift);
    if (!writes) return;
    memory.set(all_mean + i, mean), memory.set(all_var + i, var), memory.set(all_invstd + i, invstd);
    if (of_relu) memory.set(of_relu + i, scale), memory.set(of_relu + channels + i, shift);
  });
  if (!writes) return;
  double momentum = kind.averages && call.counter ? 1.0 / double(*call.counter + 1) : call.momentum;
  if (call.running_mean && num_values > 0)
    update(call.running_mean, kind.mean_dtype, first, count, all_mean, 1, momentum);
  if (call.running_var && num_values > 1)
    update(call.running_var, kind.var_dtype, first, count, all_var, num_values / (num_values - 1), momentum);
}

// Compute center, a, b and c; for a relu without y also scale and shift.
template <typename T, size_t num>
void coefficients_of(const Kind& kind, const BackwardOutputs& call, int64_t first, int64_t count, bool,
                     Coefficients<T, num>& to) {
  int64_t channels = kind.sizes.channels;
  const double *all_mean = call.statistics + first, *all_invstd = all_mean + 2 * channels;
  const double *sum_dy = call.total + first, *sum_dy_xmu = sum_dy + channels;
  double num_values = std::max(1.0, call.statistics[3 * channels]);
  Widened weight(call.weight, kind.weight_dtype, first, count, 1);
  for_vectors(count, [&](Memory memory, int64_t i) INLINED {
    Wide n = wide(num_values), mean = memory.get<Wide>(all_mean + i), invstd = memory.get<Wide>(all_invstd + i);
    Wide center = center_of<T>(mean), a = invstd * memory.get<Wide>(weight.numbers + i);
    Wide b = Wide{} - a * invstd * invstd * (memory.get<Wide>(sum_dy_xmu + i) / n);
    Wide c = Wide{} - a * (memory.get<Wide>(sum_dy + i) / n) - b * (mean - center);
    memory.set(to.numbers[0] + i, center), memory.set(to.numbers[1] + i, a);
    memory.set(to.numbers[2] + i, b), memory.set(to.numbers[3] + i, c);
  });
  for (size_t which = 4; which < num; ++which)
    convert(all_invstd + TIMES_N + (which - 3) * channels, count, to.numbers[which]);
}

// The partial sums of a block: (num_parts, 2, width).
struct Parts {
  const double* sums;
  int64_t num_parts, width;
};

// Add up the partial sums. Backward converts sum dy * (x - center) to sum dy * (x - mean), and computes the gradients
// of weight and bias.
template <typename T>
void finish(const Kind& kind, const Sums& call, bool backward, Parts parts, int64_t first, int64_t count) {
  double *sums = call.sums + first, *seconds = sums + kind.sizes.channels, grad_weight[MAPPED];
  const double *all_mean = call.statistics + first, *all_invstd = all_mean + 2 * kind.sizes.channels;
  for_vectors(count, [&](Memory memory, int64_t i) INLINED {
    Pair<Wide> total;
    for (int64_t part = 0; part < parts.num_parts; ++part) {
      const double* of_part = parts.sums + part * 2 * parts.width + i;
      total = total + Pair<Wide>{memory.get<Wide>(of_part), memory.get<Wide>(of_part + parts.width)};
    }
    if (backward) {
      Wide mean = memory.get<Wide>(all_mean + i), rest = mean - center_of<T>(mean);
      total.second = total.second - unless_zero(rest, rest * total.first);  // 0 times an infinite sum is NaN
      memory.set(grad_weight + i, total.second * memory.get<Wide>(all_invstd + i));
    }
    memory.set(sums + i, total.first), memory.set(seconds + i, total.second);
  });
  narrow(grad_weight, call.grad_weight, kind.grad_weight_dtype, first, count);
  narrow(sums, call.grad_bias, kind.grad_bias_dtype, first, count);
}
