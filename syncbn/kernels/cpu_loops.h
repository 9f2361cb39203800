// The loops over tensors: sums and maps (elementwise loops). See cpu_vectors.h.

// Load one value per coefficient for all lanes, if a vector lies in one channel; else one value per lane.
template <typename V, bool of_channel, typename Numbers, size_t num>
INLINED inline std::array<V, num> coefficients(const std::array<Numbers, num>& numbers, int64_t at) {
  std::array<V, num> vectors;
  for (size_t which = 0; which < num; ++which)
    if constexpr (of_channel) vectors[which] = numbers[which][at] - V{};
    else vectors[which] = read<V>(numbers[which] + at);
  return vectors;
}

// The terms of the sums. Forward, without coefficients: x and x^2. Backward: dy and dy * (x - center). A relu masks dy.
template <typename T, int num_coefficients, bool has_y> struct Term {
  // 16-bit values are first added in float, FEW at a time. The sum of squares of similar values is then exact: a square
  // has 16 bits (BFloat16) or 22 bits (Half), and a float 24.
  static constexpr bool IN_FLOAT = sizeof(T) == 2;
  static constexpr int64_t FEW = std::is_same_v<T, BFloat16> ? 8 : 4;
  using V = std::conditional_t<IN_FLOAT, Floats, Wide>;
  using Mapped = std::conditional_t<std::is_same_v<T, double>, Wide, Floats>;  // the type in which forward computed y
  const T *dy, *x, *y;
  std::array<const Compute<T>*, num_coefficients> numbers;  // center and, for a relu without y, scale and shift

  static V summed(Mapped values) {
    if constexpr (IN_FLOAT) return values;
    else return wide(values);
  }
  INLINED void add(Memory memory, int64_t index, const std::array<Mapped, num_coefficients>& of, Pair<V>& sums) const {
    auto values = memory.get<Mapped>(x + index);
    V value = summed(values), factor = value;
    if constexpr (num_coefficients > 0) {
      auto gradient = memory.get<Mapped>(dy + index);
      if constexpr (has_y) gradient = behind_relu(gradient, memory.get<Mapped>(y + index));
      else if constexpr (num_coefficients > 1)
        gradient = behind_relu(gradient, (values - of[0]) * of[1] + of[2], ZERO<T>);
      value = value - summed(of[0]);
      factor = summed(gradient);
    }
    sums.first = sums.first + factor;
    sums.second = fma(factor, value, sums.second);
  }
};

// Compute the two sums of a channel over `count` of its runs, whose starts are `stride` values apart.
template <typename Term>
void sum_channel(const Term& term, int64_t channel, int64_t start, int64_t length, int64_t count, int64_t stride,
                 double& first, double& second) {
  using V = typename Term::V;
  constexpr int64_t few = Term::FEW;
  int64_t blocks_of_rest = divided_up(length % (few * LANES), LANES), blocks_in_rest = 0;
  V mask = mask_of_counted<V>(length);
  auto of = coefficients<typename Term::Mapped, true>(term.numbers, channel);
  // In float: `even` adds a few blocks, `rest` the rests of runs. In double: two independent chains of additions, which
  // hide the latency.
  Pair<V> even, odd, &other = Term::IN_FLOAT ? even : odd, &rest = Term::IN_FLOAT ? odd : even;
  Pair<Wide> total;
  auto empty = [&](Pair<V>& sums) INLINED { total = total + wide(sums), sums = {}; };
  for (int64_t run = 0; run < count; ++run, start += stride) {
    int64_t i = 0;
    for (; i + few * LANES <= length; i += few * LANES) {
      for (int64_t block = 0; block < few; block += 2) {
        term.add({}, start + i + block * LANES, of, even);
        term.add({}, start + i + (block + 1) * LANES, of, other);
      }
      if constexpr (Term::IN_FLOAT) empty(even);
    }
    if (i == length) continue;
    if (Term::IN_FLOAT && (blocks_in_rest += blocks_of_rest) > few) {
      empty(rest);
      blocks_in_rest = blocks_of_rest;
    }
    for (; i + LANES <= length; i += LANES) term.add({}, start + i, of, rest);
    if (i == length) continue;
    Pair<V> last;
    term.add({}, start + length - LANES, of, last);
    odd = odd + masked(last, mask);
  }
  if (!Term::IN_FLOAT) empty(even);
  empty(odd);
  Doubles firsts = total.first.first + total.first.second, seconds = total.second.first + total.second.second;
  for (int64_t half = LANES / 4; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) firsts[i] += firsts[i + half], seconds[i] += seconds[i + half];
  first = firsts[0], second = seconds[0];
}

// Add the sums of each column of `rows` rows, `stride` values apart, to first and second. With several rows the next
// rows are prefetched, because the hardware prefetcher does not predict them.
template <int64_t rows, typename Term>
INLINED inline void add_rows(const Term& term, int64_t start, int64_t stride, int64_t length, double* first,
                             double* second) {
  using V = typename Term::V;
  auto sum = [&](Memory memory, int64_t column, Pair<V> sums) INLINED {
    auto of = coefficients<typename Term::Mapped, false>(term.numbers, column);
    for (int64_t row = 0; row < rows; ++row) term.add(memory, start + row * stride + column, of, sums);
    return sums;
  };
  auto get = [&](int64_t at) INLINED { return Pair<Wide>{read<Wide>(first + at), read<Wide>(second + at)}; };
  auto set = [&](int64_t at, Pair<Wide> of) INLINED { write(first + at, of.first), write(second + at, of.second); };
  int64_t column = 0;
  const Memory memory = {LANES, false, rows > 1 ? std::max(AHEAD, 2 * rows * stride) : 0};
  for (; column + LANES <= length; column += LANES)
    if constexpr (Term::IN_FLOAT) set(column, get(column) + wide(sum(memory, column, {})));
    else set(column, sum(memory, column, get(column)));
  if (column == length) return;
  if (length < LANES) return set(0, get(0) + wide(sum({length}, 0, {})));
  column = length - LANES;
  set(column, get(column) + wide(masked(sum({}, column, {}), mask_of_counted<V>(length))));
}

// Compute partial sums of `count` channels over runs.
template <typename Term>
void sum_runs(const Sizes& sizes, const Term& term, int64_t part, int64_t first, int64_t count, double* sums) {
  int64_t outer = part * sizes.outers_of_part(), runs = std::min(sizes.outers_of_part(), sizes.outer - outer);
  int64_t start = (outer * sizes.channels + first) * sizes.inner;
  for (int64_t channel = 0; channel < count; ++channel)
    sum_channel(term, channel, start + channel * sizes.inner, sizes.inner, runs, sizes.columns(), sums[channel],
                sums[WIDTH_OF_SUMS + channel]);
}

// Compute partial sums of `count` channels over rows.
template <typename Term>
void sum_rows(const Sizes& sizes, const Term& term, int64_t part, int64_t first, int64_t count, double* sums) {
  double* seconds = sums + WIDTH_OF_SUMS;
  int64_t numel = sizes.numel(), stride = sizes.row(), length = count * sizes.columns_of_channel();
  int64_t start = part * sizes.rows_of_part() * stride + first * sizes.inner;
  int64_t end = std::min(numel, (part + 1) * sizes.rows_of_part() * stride);
  int64_t several = (Term::FEW - 1) * stride + length;
  std::fill_n(sums, length, 0.0), std::fill_n(seconds, length, 0.0);
  for (; start + several <= end; start += Term::FEW * stride)
    add_rows<Term::FEW>(term, start, stride, length, sums, seconds);
  for (; start < end; start += stride) add_rows<1>(term, start, stride, std::min(length, end - start), sums, seconds);
  sizes.gather(count, sums), sizes.gather(count, seconds);
}

// Compute the sums of all channels and, in backward, the gradients of weight and bias.
template <typename T, typename Term>
Status sum_all(const Kind& kind, const Sums& call, bool backward, const Term& term, double* scratch) {
  const Sizes& sizes = kind.sizes;
  int64_t num_parts = sizes.num_parts(), some = sizes.channels_of_part(), channels = sizes.channels;
  int64_t blocks = divided_up(channels, some), pieces = num_parts * blocks;
  constexpr size_t num = std::tuple_size_v<decltype(Term::numbers)>;
  Status status = parallel(pieces, sizes.numel() / std::max<int64_t>(1, pieces), [&](int64_t begin, int64_t end) {
    double sums[2 * WIDTH_OF_SUMS];
    Coefficients<T, std::max<size_t>(1, num)> of;
    Term own = term;  // a local copy, which writes cannot alias
    for (size_t which = 0; which < num; ++which) own.numbers[which] = of.numbers[which];
    for (int64_t index = begin; index < end; ++index) {
      int64_t part = index / blocks, first = index % blocks * some, count = std::min(some, channels - first);
      if (num && (index == begin || blocks > 1)) {
        for (size_t which = 0; which < num; ++which)  // mean; scale and shift
          convert(call.statistics + (which ? (2 + which) * channels + TIMES_N : 0) + first, count, of.numbers[which]);
        of.spread(sizes, count);
      }
      if (sizes.in_runs()) sum_runs(sizes, own, part, first, count, sums);
      else sum_rows(sizes, own, part, first, count, sums);
      if (num_parts == 1) finish<T>(kind, call, backward, {sums, 1, WIDTH_OF_SUMS}, first, count);
      else for (int64_t which : {0, 1})
          std::copy_n(sums + which * WIDTH_OF_SUMS, count, scratch + (2 * part + which) * channels + first);
    }
  });
  for (int64_t first = 0; num_parts != 1 && first < channels; first += MAPPED)
    finish<T>(kind, call, backward, {scratch + first, num_parts, channels}, first, std::min(MAPPED, channels - first));
  return status;
}

template <typename T> Status sum(const Kind& kind, const Sums& call, bool backward, double* scratch) {
  const Sizes& sizes = kind.sizes;
  write_trailer(call, sizes.channels, backward ? 0 : double(sizes.outer * sizes.inner));
  auto sum_of = [&](auto term) {
    term.dy = (const T*)call.dy, term.x = (const T*)call.x, term.y = (const T*)call.y;
    return sum_all<T>(kind, call, backward, term, scratch);
  };
  if (!backward) return sum_of(Term<T, 0, false>{});
  if (kind.masks_by_y) return sum_of(Term<T, 1, true>{});
  return kind.masks_by_x ? sum_of(Term<T, 3, false>{}) : sum_of(Term<T, 1, false>{});
}

template <typename T> using MapVector = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;

// Call body(memory, index, coefficients) for the vectors of a run, or of some columns of a row. The last vector ends at
// the end of the piece, so it may overlap the previous vector. `ahead`: see Memory.
template <typename V, bool in_runs, bool streams, typename Numbers, typename Body>
INLINED inline void map_piece(const Numbers& numbers, int64_t channel, int64_t start, int64_t length, int64_t ahead,
                              const Body& body) {
  constexpr int64_t step = sizeof(V) / sizeof(*numbers[0]);
  auto of = coefficients<V, in_runs>(numbers, in_runs ? channel : 0);
  auto apply = [&](Memory memory, int64_t i) INLINED {
    if constexpr (!in_runs) of = coefficients<V, false>(numbers, i);
    body(memory, start + i, of);
  };
  int64_t i = 0;
  for (; i + step <= length; i += step) apply({LANES, streams, ahead}, i);
  if (i == length) return;
  if (length < step) return apply({length}, 0);
  apply({}, length - step);
}

// For each block call coefficients_of for its channels, then body for its values. `outputs`: the bitwise or of the
// addresses that are written. The order is reversed, because the caches hold the values that the sums have read last.
template <typename T, size_t num, typename Call, typename Body>
Status map_all(const Kind& kind, const Call& call, uintptr_t outputs, const Body& body) {
  const Sizes& sizes = kind.sizes;
  int64_t some = sizes.channels_of_block(MAPPED), rows = std::max<int64_t>(1, sizes.rows()), numel = sizes.numel();
  int64_t values = std::max<int64_t>(1, some * sizes.columns_of_channel());  // per piece
  int64_t of_block = rows, pieces = rows * divided_up(sizes.channels, some);
  if (sizes.in_runs()) values = sizes.inner, of_block = rows * some, pieces = rows * sizes.channels;
  int64_t step = std::max<int64_t>(1, FORWARDS / values);
  auto map = [&](auto in_runs, auto streams) {
    return parallel(pieces, values, [&](int64_t begin, int64_t end) {
      Coefficients<T, num> coefficients;
      const auto numbers = coefficients.addresses();
      const Body own = body;  // a local copy, which writes cannot alias
      const int64_t inner = sizes.inner, stride = sizes.row();
      // Prefetch the next row: the hardware prefetcher does not detect the jump from a part of a row to the next row.
      const int64_t ahead = in_runs.value || some >= sizes.channels ? 0 : stride;
      while (begin < end) {
        int64_t start_of_block = (end - 1) / of_block * of_block, start = std::max(begin, start_of_block);
        int64_t first = start_of_block / of_block * some, count = std::min(some, sizes.channels - first);
        int64_t length = in_runs.value ? inner : count * sizes.columns_of_channel();
        coefficients_of(kind, call, first, count, start == start_of_block, coefficients);
        coefficients.spread(sizes, count);
        for (; start < end; end = std::max(start, end - step))
          for (int64_t index = std::max(start, end - step); index < end; ++index) {
            int64_t row = index - start_of_block, channel = 0;
            if (in_runs.value) channel = row % count, row /= count;
            int64_t from = row * stride + (first + channel) * inner;
            int64_t there = std::clamp<int64_t>(numel - from, 0, length);  // the last long row may be shorter
            map_piece<MapVector<T>, in_runs.value, streams.value>(numbers, channel, from, there, ahead, own);
          }
      }
#if WIDTH > 16
      if (streams.value) _mm_sfence();
#endif
    });
  };
  bool streams = numel * int64_t(sizeof(T)) >= STREAMED_BYTES && outputs % ALIGNED == 0;
  if (streams && (sizes.in_runs() ? sizes.inner : sizes.row()) % LANES == 0)
    return sizes.in_runs() ? map(std::true_type{}, std::true_type{}) : map(std::false_type{}, std::true_type{});
  return sizes.in_runs() ? map(std::true_type{}, std::false_type{}) : map(std::false_type{}, std::false_type{});
}

template <typename T> Status normalize(const Kind& kind, const ForwardOutputs& call) {
  using V = MapVector<T>;
  auto *x = (const T*)call.x, *residual = (const T*)call.residual;
  auto* y = (T*)call.y;
  bool relu = kind.relu;
  auto body = [=](Memory memory, int64_t index, const std::array<V, 3>& of) INLINED {
    V center = of[0], scale = of[1], shift = of[2], value = (memory.get<V>(x + index) - center) * scale + shift;
    if (residual) value = value + memory.get<V>(residual + index);
    if (relu) value = behind_relu(value, value);
    memory.set(y + index, value);
  };
  return map_all<T, 3>(kind, call, (uintptr_t)y, body);
}

template <typename T> Status input_gradient(const Kind& kind, const BackwardOutputs& call) {
  using V = MapVector<T>;
  auto *dy = (const T*)call.dy, *x = (const T*)call.x, *y = kind.masks_by_y ? (const T*)call.y : nullptr;
  auto *grad_x = (T*)call.grad_x, *grad_residual = (T*)call.grad_residual;
  auto map = [&](auto num) {
    auto body = [=](Memory memory, int64_t index, const std::array<V, num>& of) INLINED {
      V center = of[0], a = of[1], b = of[2], c = of[3], gradient = memory.get<V>(dy + index);
      V value = memory.get<V>(x + index) - center;
      if constexpr (num > 4) gradient = behind_relu(gradient, value * of[4] + of[5], ZERO<T>);
      else if (y) gradient = behind_relu(gradient, memory.get<V>(y + index));
      if (grad_residual) memory.set(grad_residual + index, gradient);
      memory.set(grad_x + index, gradient * a + value * b + c);
    };
    return map_all<T, num>(kind, call, (uintptr_t)grad_x | (uintptr_t)grad_residual, body);
  };
  return kind.masks_by_x ? map(std::integral_constant<size_t, 6>{}) : map(std::integral_constant<size_t, 4>{});
}

template <typename T> constexpr Loops OF = {sum<T>, normalize<T>, input_gradient<T>};
constexpr Loops LOOPS[] = {OF<float>, OF<double>, OF<BFloat16>, OF<Half>};
#undef WIDTH
