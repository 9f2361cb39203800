// The loops over contiguous memory, for vectors of WIDTH bytes and scalars T in memory. cpu.cpp includes this file once
// for each instruction set, within a namespace; hence no include guard and no other include.
//
// Sums are made in vectors of doubles, maps in vectors of the compute type: double for double, else float.

constexpr int64_t WIDE = WIDTH / sizeof(double);  // doubles in a vector

template <typename Scalar, int64_t count>
struct VectorOf {
  typedef Scalar type __attribute__((vector_size(count * sizeof(Scalar))));
};
template <typename Scalar, int64_t count>
using Vector = typename VectorOf<Scalar, count>::type;

using Doubles = Vector<double, WIDE>;
using Floats = Vector<float, 2 * WIDE>;
struct Halves {
  Vector<float, WIDE> low, high;
};

template <typename To, typename From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// A tensor may begin anywhere, also between the places of its numbers.

template <typename Value>
inline Value load(const void* from) {
  Value value;
  std::memcpy(&value, from, sizeof(Value));
  return value;
}

template <typename Value>
inline void store(void* to, Value value) {
  std::memcpy(to, &value, sizeof(Value));
}

// Vectors in memory of each scalar type: `count` of them from an address, and back.

template <int64_t count>
inline Vector<double, count> read(const double* from) {
  return load<Vector<double, count>>(from);
}

template <int64_t count>
inline Vector<float, count> read(const float* from) {
  return load<Vector<float, count>>(from);
}

// Conversions that GCC 12 makes of four or five instructions when it is left to __builtin_convertvector.

template <int64_t count>
inline Vector<uint32_t, count> widened(Vector<uint16_t, count> bits) {
#if WIDTH == 64
  if constexpr (count == 16) return bits_as<Vector<uint32_t, count>>(_mm512_cvtepu16_epi32(bits_as<__m256i>(bits)));
#endif
#if WIDTH > 16
  if constexpr (count == 8) return bits_as<Vector<uint32_t, count>>(_mm256_cvtepu16_epi32(bits_as<__m128i>(bits)));
#endif
  return __builtin_convertvector(bits, Vector<uint32_t, count>);
}

template <int64_t count>
inline Vector<uint16_t, count> narrowed(Vector<uint32_t, count> bits) {
#if WIDTH == 64
  if constexpr (count == 16) return bits_as<Vector<uint16_t, count>>(_mm512_cvtepi32_epi16(bits_as<__m512i>(bits)));
#endif
#if WIDTH == 32
  if constexpr (count == 8) {
    auto words = bits_as<__m256i>(bits);
    return bits_as<Vector<uint16_t, count>>(
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
#endif
  return __builtin_convertvector(bits, Vector<uint16_t, count>);
}

inline Doubles to_doubles(Doubles values) { return values; }
inline Doubles to_doubles(Vector<float, WIDE> values) {
#if WIDTH == 64
  return _mm512_cvtps_pd(values);
#elif WIDTH == 32
  return _mm256_cvtps_pd(values);
#else
  return __builtin_convertvector(values, Doubles);
#endif
}

template <int64_t count>
inline Vector<float, count> read(const BFloat16* from) {
  return bits_as<Vector<float, count>>(widened<count>(load<Vector<uint16_t, count>>(from)) << 16);
}

#if WIDTH > 16  // with F16C

template <int64_t count>
inline Vector<float, count> read(const Half* from) {
  if constexpr (count == 4) {
    return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  } else if constexpr (count == 8) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  } else {
#if WIDTH == 64
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#endif
  }
}

#else

template <int64_t count>
inline Vector<float, count> read(const Half* from) {
  auto bits = __builtin_convertvector(load<Vector<uint16_t, count>>(from), Vector<uint32_t, count>);
  auto magnitude = bits & 0x7fff;
  // 2^112 is the difference of the exponents' biases; the product is exact, also of a subnormal.
  auto finite = bits_as<Vector<uint32_t, count>>(bits_as<Vector<float, count>>(magnitude << 13) * 0x1p112f);
  auto value = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : finite;
  return bits_as<Vector<float, count>>(value | (bits & 0x8000) << 16);
}

#endif

template <int64_t count>
inline void write(double* to, Vector<double, count> values) {
  store(to, values);
}

template <int64_t count>
inline void write(float* to, Vector<float, count> values) {
  store(to, values);
}

template <int64_t count>
inline void write(BFloat16* to, Vector<float, count> values) {
  auto bits = bits_as<Vector<uint32_t, count>>(values);
  auto rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  rounded = values == values ? rounded : (bits & 0) + 0x7fc0;  // NaN
  store(to, narrowed<count>(rounded));
}

#if WIDTH > 16

template <int64_t count>
inline void write(Half* to, Vector<float, count> values) {
  constexpr int ROUNDING = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  if constexpr (count == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(values, ROUNDING));
  } else {
#if WIDTH == 64
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(values, ROUNDING));
#endif
  }
}

#else

template <int64_t count>
inline void write(Half* to, Vector<float, count> values) {
  auto bits = bits_as<Vector<uint32_t, count>>(values);
  auto magnitude = bits & 0x7fffffff;
  auto normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);  // to nearest, ties to even
  // Beside 0.5 the last bit of a float is worth 2^-24, as that of a subnormal half.
  auto subnormal = bits_as<Vector<uint32_t, count>>(bits_as<Vector<float, count>>(magnitude) + 0.5f) - 0x3f000000;
  auto rounded = magnitude < 0x38800000 ? subnormal : normal;
  rounded = magnitude >= 0x47800000 ? (bits & 0) + 0x7c00 : rounded;
  rounded = magnitude > 0x7f800000 ? (bits & 0) + 0x7e00 : rounded;
  rounded |= bits >> 16 & 0x8000;
  store(to, __builtin_convertvector(rounded, Vector<uint16_t, count>));
}

#endif

// How a loop body touches memory: whole vectors; or the `count` scalars that are left, read as if zeros followed.

static_assert(SHORTEST_RUN >= WIDTH / int64_t(sizeof(float)) && PADDING >= WIDTH / int64_t(sizeof(float)));

struct Whole {
  template <int64_t lanes, typename T>
  auto values(const T* from) const {
    return read<lanes>(from);
  }
  template <int64_t lanes, typename T, typename V>
  void set(T* to, V values) const {
    write<lanes>(to, values);
  }
};

struct PastCaches : Whole {  // for which the processor need not read what it overwrites
  template <int64_t lanes, typename T, typename V>
  void set(T* to, V values) const {
#if WIDTH == 64
    if constexpr (sizeof(T) > 2) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), bits_as<__m512i>(values));
#elif WIDTH == 32
    if constexpr (sizeof(T) > 2) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), bits_as<__m256i>(values));
#endif
    write<lanes>(to, values);
  }
};

template <typename V>
using LanesOf = std::conditional_t<sizeof(std::declval<V>()[0]) == 8, int64_t, int32_t>;

struct Tail {  // of values of which there is a vector before
  int64_t count;

  template <int64_t lanes, typename T>
  auto values(const T* from) const {
    auto values = read<lanes>(from + count - lanes);
    using Lane = LanesOf<decltype(values)>;
    Vector<Lane, lanes> lane;
    for (int64_t index = 0; index < lanes; ++index) lane[index] = Lane(index);
    return lane < Lane(lanes - count) ? decltype(values){} : values;
  }
};

struct Part {
  int64_t count;

  template <int64_t lanes, typename T>
  auto values(const T* from) const {
    T padded[lanes] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return read<lanes>(padded);
  }
  template <int64_t lanes, typename T, typename V>
  void set(T* to, V values) const {
    T padded[lanes];
    write<lanes>(padded, values);
    std::memcpy(to, padded, count * sizeof(T));
  }
};

// What is done to a value may depend on numbers of its channel. A run has one channel, a row one in each column.

template <typename V, size_t num, typename Number>
inline void numbers_of_channel(const Number* const (&of_channels)[num], int64_t channel, V (&numbers)[num]) {
  for (size_t index = 0; index < num; ++index) numbers[index] = of_channels[index][channel] - V{};
}

template <typename V, size_t num, typename Number>
inline void numbers_of_columns(const Number* const (&of_columns)[num], int64_t column, V (&numbers)[num]) {
  for (size_t index = 0; index < num; ++index)
    numbers[index] = read<sizeof(V) / sizeof(Number)>(of_columns[index] + column);
}

// Terms of two sums. Numbers of 16 bits are first added in float, which is fast, and as FEW at a time as keep the sum of
// their squares exact while they are of one magnitude: a square has 16 bits (BFloat16) or 22 (Half), a float 24.

template <typename T>
constexpr bool IS_SHORT = sizeof(T) == 2;
template <typename T>
constexpr int64_t FEW = std::is_same_v<T, BFloat16> ? 8 : 4;

template <typename T>
struct Squares {  // x, x^2
  using Scalar = T;
  const T* x;

  Doubles center_of_channel(int64_t) const { return Doubles{}; }
  Doubles centers_of_columns(int64_t) const { return Doubles{}; }
  Floats float_centers(int64_t) const { return Floats{}; }

  template <typename Memory>
  void add(Memory memory, int64_t index, Doubles, Doubles& first, Doubles& second) const {
    auto value = to_doubles(memory.template values<WIDE>(x + index));
    first += value;
    second += value * value;
  }

  void add_floats(int64_t index, Floats, Floats& first, Floats& second) const {
    Floats value = read<2 * WIDE>(x + index);
    first += value;
    second += value * value;
  }
};

template <typename T, bool behind_relu>
struct Products {  // dy, dy * (x - center), of dy behind the relu
  using Scalar = T;
  const T *dy, *x, *y;
  const Compute<T>* center;  // of channels or columns

  Doubles center_of_channel(int64_t channel) const { return double(center[channel]) - Doubles{}; }
  Doubles centers_of_columns(int64_t column) const { return to_doubles(read<WIDE>(center + column)); }
  Floats float_centers(int64_t column) const { return read<2 * WIDE>(center + column); }

  template <typename Memory>
  void add(Memory memory, int64_t index, Doubles center, Doubles& first, Doubles& second) const {
    auto passed = memory.template values<WIDE>(dy + index);
    if constexpr (behind_relu) passed = memory.template values<WIDE>(y + index) <= 0 ? decltype(passed){} : passed;
    auto gradient = to_doubles(passed);
    first += gradient;
    second += gradient * (to_doubles(memory.template values<WIDE>(x + index)) - center);
  }

  void add_floats(int64_t index, Floats center, Floats& first, Floats& second) const {
    Floats gradient = read<2 * WIDE>(dy + index);
    if constexpr (behind_relu) gradient = read<2 * WIDE>(y + index) <= 0 ? Floats{} : gradient;
    first += gradient;
    second += gradient * (read<2 * WIDE>(x + index) - center);
  }
};

inline void add_halves(Floats sums, Doubles& low, Doubles& high) {
  auto halves = bits_as<Halves>(sums);
  low += to_doubles(halves.low);
  high += to_doubles(halves.high);
}

inline double sum_of_lanes(Doubles values) {
  double sum = 0;
  for (int64_t lane = 0; lane < WIDE; ++lane) sum += values[lane];
  return sum;
}

// The two sums of a channel over `count` of its runs, which begin `stride` values apart.
template <typename Term>
void sum_channel(const Term& term, int64_t channel, int64_t start, int64_t length, int64_t count, int64_t stride,
                 double& first, double& second) {
  constexpr int64_t CHAINS = 4, few = FEW<typename Term::Scalar>;  // independent additions, to hide their latency
  Doubles center = term.center_of_channel(channel), firsts[CHAINS] = {}, seconds[CHAINS] = {};
  for (int64_t run = 0; run < count; ++run, start += stride) {
    int64_t i = 0;
    if constexpr (IS_SHORT<typename Term::Scalar>)
      for (; i + few * 2 * WIDE <= length; i += few * 2 * WIDE) {
        Floats few_firsts = {}, few_seconds = {}, float_center = float(center[0]) - Floats{};
        for (int64_t index = 0; index < few; ++index)
          term.add_floats(start + i + index * 2 * WIDE, float_center, few_firsts, few_seconds);
        add_halves(few_firsts, firsts[0], firsts[1]);
        add_halves(few_seconds, seconds[0], seconds[1]);
      }
    for (; i + CHAINS * WIDE <= length; i += CHAINS * WIDE)
      for (int64_t chain = 0; chain < CHAINS; ++chain)
        term.add(Whole{}, start + i + chain * WIDE, center, firsts[chain], seconds[chain]);
    for (int64_t chain = 2; i + WIDE <= length; i += WIDE, chain ^= 1)
      term.add(Whole{}, start + i, center, firsts[chain], seconds[chain]);
    if (i < length) term.add(Tail{length - i}, start + i, center, firsts[1], seconds[1]);
  }
  first = sum_of_lanes((firsts[0] + firsts[1]) + (firsts[2] + firsts[3]));
  second = sum_of_lanes((seconds[0] + seconds[1]) + (seconds[2] + seconds[3]));
}

// Adds the sums of each column of `rows` rows, which are `length` apart, to first and second.
template <int64_t rows, typename Term>
void add_rows(const Term& term, int64_t start, int64_t length, double* first, double* second) {
  auto add = [&](double* to, Doubles sums) INLINED { store(to, load<Doubles>(to) + sums); };
  int64_t column = 0;
  if constexpr (IS_SHORT<typename Term::Scalar> && rows > 1)
    for (; column + 2 * WIDE <= length; column += 2 * WIDE) {
      Floats center = term.float_centers(column), firsts = {}, seconds = {};
      for (int64_t row = 0; row < rows; ++row) term.add_floats(start + row * length + column, center, firsts, seconds);
      Doubles low = {}, high = {}, low_seconds = {}, high_seconds = {};
      add_halves(firsts, low, high);
      add_halves(seconds, low_seconds, high_seconds);
      add(first + column, low);
      add(first + column + WIDE, high);
      add(second + column, low_seconds);
      add(second + column + WIDE, high_seconds);
    }
  auto add_column = [&](auto memory) INLINED {
    Doubles center = term.centers_of_columns(column), firsts = {}, seconds = {};
    for (int64_t row = 0; row < rows; ++row)
      term.add(memory, start + row * length + column, center, firsts, seconds);
    add(first + column, firsts);
    add(second + column, seconds);
  };
  for (; column + WIDE <= length; column += WIDE) add_column(Whole{});
  if (column < length) add_column(Part{length - column});
}

template <typename Term>
Status sum_runs(Sizes sizes, const Term& term, double* parts, double* sums) {
  int64_t channels = sizes.channels, outers = sizes.outers_of_part(), some = sizes.channels_of_part();
  int64_t num_outers = divided_up(sizes.outer, outers), num_blocks = divided_up(channels, some);
  Status status = parallel(num_outers * num_blocks, outers * some * sizes.inner, [&](int64_t begin, int64_t end) {
    const Term own = term;
    for (int64_t part = begin; part < end; ++part) {
      int64_t outer = part / num_blocks * outers, channel = part % num_blocks * some;
      int64_t count = std::min(outers, sizes.outer - outer), last_channel = std::min(channel + some, channels);
      double *first = parts + part / num_blocks * 2 * channels, *second = first + channels;
      for (; channel < last_channel; ++channel)
        sum_channel(own, channel, (outer * channels + channel) * sizes.inner, sizes.inner, count, sizes.columns(),
                    first[channel], second[channel]);
    }
  });
  for (int64_t part = 0; part < num_outers; ++part)
    for (int64_t index = 0; index < 2 * channels; ++index) sums[index] += parts[part * 2 * channels + index];
  return status;
}

template <typename Term>
Status sum_rows(Sizes sizes, const Term& term, double* parts, double* sums) {
  constexpr int64_t AT_ONCE = std::max<int64_t>(4, FEW<typename Term::Scalar>);
  int64_t length = sizes.long_row(), rows = sizes.long_rows(), columns = sizes.columns();
  int64_t rows_of_part = sizes.rows_of_part(), num_parts = divided_up(rows, rows_of_part);
  auto sum_part = [&](int64_t start, int64_t num_columns, int64_t num_rows, double* first) {
    const Term own = term;
    double* second = first + num_columns + PADDING;
    std::fill_n(first, 2 * (num_columns + PADDING), 0.0);
    int64_t row = 0;
    for (; row + AT_ONCE <= num_rows; row += AT_ONCE)
      add_rows<AT_ONCE>(own, start + row * num_columns, num_columns, first, second);
    for (; row < num_rows; ++row) add_rows<1>(own, start + row * num_columns, num_columns, first, second);
  };
  auto add = [&](const double* of_part, int64_t num_columns) {  // of both sums
    for (int64_t which = 0; which < 2; ++which, of_part += PADDING)
      for (int64_t row = 0; row < num_columns / columns; ++row)
        for (int64_t channel = 0; channel < sizes.channels; ++channel)
          for (int64_t index = 0; index < sizes.inner; ++index) sums[which * sizes.channels + channel] += *of_part++;
  };
  Status status = parallel(num_parts, rows_of_part * length, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      int64_t row = part * rows_of_part;
      sum_part(row * length, length, std::min(rows_of_part, rows - row), parts + part * 2 * (length + PADDING));
    }
  });
  for (int64_t part = 0; part < num_parts; ++part) add(parts + part * 2 * (length + PADDING), length);
  if (int64_t start = rows * length; start < sizes.numel()) {  // the short rows that are left
    sum_part(start, columns, (sizes.numel() - start) / columns, parts);
    add(parts, columns);
  }
  return status;
}

// Adds the sums of each channel to `sums`, (2, channels). `parts` has room for size_of_parts(sizes).
template <typename Term>
Status sum(Sizes sizes, const Term& term, double* parts, double* sums) {
  if (!sizes.numel()) return OK;
  return sizes.in_runs() ? sum_runs(sizes, term, parts, sums) : sum_rows(sizes, term, parts, sums);
}

// Maps.

template <typename T>
struct Normalize {
  using Number = Compute<T>;
  static constexpr int64_t LANES = WIDTH / sizeof(Number), NUMBERS = 3;
  using Values = Vector<Number, LANES>;
  const T *x, *residual;
  bool relu;
  T* y;
  const Number* numbers[NUMBERS];  // center, scale, shift

  bool is_aligned() const { return reinterpret_cast<uintptr_t>(y) % ALIGNED == 0; }

  template <typename Memory>
  void apply(Memory memory, int64_t index, const Values (&numbers)[NUMBERS]) const {
    auto [center, scale, shift] = numbers;
    Values value = (memory.template values<LANES>(x + index) - center) * scale + shift;
    if (residual) value += memory.template values<LANES>(residual + index);
    if (relu) value = value <= 0 ? Values{} : value;
    memory.template set<LANES>(y + index, value);
  }
};

template <typename T>
struct InputGradient {
  using Number = Compute<T>;
  static constexpr int64_t LANES = WIDTH / sizeof(Number), NUMBERS = 4;
  using Values = Vector<Number, LANES>;
  const T *dy, *x, *y;
  T *grad_x, *grad_residual;
  const Number* numbers[NUMBERS];  // center, a, b, c

  bool is_aligned() const {
    return (reinterpret_cast<uintptr_t>(grad_x) | reinterpret_cast<uintptr_t>(grad_residual)) % ALIGNED == 0;
  }

  template <typename Memory>
  void apply(Memory memory, int64_t index, const Values (&numbers)[NUMBERS]) const {
    auto [center, a, b, c] = numbers;
    Values gradient = memory.template values<LANES>(dy + index);
    if (y) gradient = memory.template values<LANES>(y + index) <= 0 ? Values{} : gradient;
    if (grad_residual) memory.template set<LANES>(grad_residual + index, gradient);
    Values value = memory.template values<LANES>(x + index) - center;
    memory.template set<LANES>(grad_x + index, gradient * a + value * b + c);
  }
};

// A map may be applied twice to a value, so the last vector of a run or row ends where the run or row ends.

template <typename Memory, typename Map>
INLINED void map_run(Memory memory, const Map& map, int64_t channel, int64_t start, int64_t length) {
  typename Map::Values numbers[Map::NUMBERS];
  numbers_of_channel(map.numbers, channel, numbers);
  int64_t i = 0;
  for (; i + Map::LANES <= length; i += Map::LANES) map.apply(memory, start + i, numbers);
  if (i < length) map.apply(Whole{}, start + length - Map::LANES, numbers);
}

template <typename Memory, typename Map>
INLINED void map_row(Memory all, const Map& map, int64_t start, int64_t length) {
  auto map_column = [&](auto memory, int64_t column) INLINED {
    typename Map::Values numbers[Map::NUMBERS];
    numbers_of_columns(map.numbers, column, numbers);
    map.apply(memory, start + column, numbers);
  };
  int64_t column = 0;
  for (; column + Map::LANES <= length; column += Map::LANES) map_column(all, column);
  if (column == length) return;
  if (length >= Map::LANES)
    map_column(Whole{}, length - Map::LANES);
  else
    map_column(Part{length}, 0);
}

// Each thread has a copy of the map: as far as the compiler knows, what is written could lie in the one behind `map`,
// and every vector would ask for its pointers again.
template <typename Map>
Status apply(Sizes sizes, Map map, const void* coefficients, double* scratch) {
  using Number = typename Map::Number;
  int64_t length = sizes.long_row(), rows = sizes.long_rows();
  for (int64_t index = 0; index < Map::NUMBERS; ++index) {
    map.numbers[index] = static_cast<const Number*>(coefficients) + index * sizes.channels;
    if (sizes.needs_spread())
      map.numbers[index] = sizes.spread(map.numbers[index], reinterpret_cast<Number*>(scratch) + index * sizes.spread_size());
  }
  // Backwards, as of a large tensor the caches hold what was added up last.
  auto backwards = [](int64_t begin, int64_t end, int64_t values_each, auto body) {
    int64_t step = std::max<int64_t>(1, GRAIN / 2 / std::max<int64_t>(1, values_each));
    for (; end > begin; end -= step)
      for (int64_t index = std::max(begin, end - step); index < end; ++index) body(index);
  };
  int64_t piece = sizes.in_runs() ? sizes.inner : length, count = sizes.in_runs() ? sizes.outer * sizes.channels : rows;
  bool past_caches = sizes.numel() * sizeof(*map.x) >= STREAMED_BYTES && map.is_aligned() && piece % Map::LANES == 0;
  auto map_all = [&](auto memory) {
    return parallel(count, piece, [&](int64_t begin, int64_t end) {
      const Map own = map;
      if (sizes.in_runs())
        backwards(begin, end, piece, [&](int64_t run)
                      INLINED { map_run(memory, own, run % sizes.channels, run * piece, piece); });
      else
        backwards(begin, end, piece, [&](int64_t row) INLINED { map_row(memory, own, row * piece, piece); });
#if WIDTH > 16
      if (past_caches) _mm_sfence();
#endif
    });
  };
  Status status = past_caches ? map_all(PastCaches{}) : map_all(Whole{});
  for (int64_t index = count * piece; index < sizes.numel(); index += sizes.columns())
    map_row(Whole{}, map, index, sizes.columns());
  return status;
}
