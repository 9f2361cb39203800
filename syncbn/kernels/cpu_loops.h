// The loops over memory, with vectors of WIDTH bytes. cpu.cpp includes this file once for each instruction set, within
// a namespace; hence no include guard and no other include. Sums take LANES values at a time, as Floats or as
// doubles (Wide); maps a vector of Floats, or of Doubles.

constexpr int64_t LANES = WIDTH / sizeof(float);
static_assert(LANES <= SHORTEST_RUN && LANES <= PADDING);

typedef float Floats __attribute__((vector_size(WIDTH)));
typedef uint32_t Words __attribute__((vector_size(WIDTH)));
typedef double Doubles __attribute__((vector_size(WIDTH)));
typedef float HalfOfFloats __attribute__((vector_size(WIDTH / 2)));
typedef uint16_t Shorts __attribute__((vector_size(WIDTH / 2)));

template <typename V> struct Pair {
  V first = {}, second = {};
};
template <typename V> Pair<V> operator+(Pair<V> a, Pair<V> b) { return {a.first + b.first, a.second + b.second}; }
template <typename V> Pair<V> operator-(Pair<V> a, Pair<V> b) { return {a.first - b.first, a.second - b.second}; }
template <typename V> Pair<V> operator*(Pair<V> a, Pair<V> b) { return {a.first * b.first, a.second * b.second}; }
using Wide = Pair<Doubles>;  // not one vector of twice the width: GCC makes much slower code of that

// A tensor may begin anywhere, also between the places of its numbers.
template <typename Vector> inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}
template <typename Vector> inline void store(void* to, Vector vector) { std::memcpy(to, &vector, sizeof(vector)); }

// What each instruction set does in its own way. GCC 12 makes four or five instructions of __builtin_convertvector
// where there is one. A stream goes past the caches: the processor does not read what it overwrites.
#if WIDTH == 64
inline Doubles doubles(HalfOfFloats values) { return _mm512_cvtps_pd(values); }
inline Words words(Shorts shorts) { return (Words)_mm512_cvtepu16_epi32((__m256i)shorts); }
inline Shorts shorts(Words words) { return (Shorts)_mm512_cvtepi32_epi16((__m512i)words); }
inline Floats floats_of_halves(Shorts halves) { return _mm512_cvtph_ps((__m256i)halves); }
inline Shorts halves(Floats values) { return (Shorts)_mm512_cvtps_ph(values, TO_NEAREST); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
inline void stream(float* to, Floats values) { _mm512_stream_ps(to, values); }
inline void stream(double* to, Doubles values) { _mm512_stream_pd(to, values); }
#elif WIDTH == 32
inline Doubles doubles(HalfOfFloats values) { return _mm256_cvtps_pd(values); }
inline Words words(Shorts shorts) { return (Words)_mm256_cvtepu16_epi32((__m128i)shorts); }
inline Shorts shorts(Words words) {
  auto all = (__m256i)words;
  return (Shorts)_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
}
inline Floats floats_of_halves(Shorts halves) { return _mm256_cvtph_ps((__m128i)halves); }
inline Shorts halves(Floats values) { return (Shorts)_mm256_cvtps_ph(values, TO_NEAREST); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm256_fmadd_pd(a, b, c); }
inline void stream(float* to, Floats values) { _mm256_stream_ps(to, values); }
inline void stream(double* to, Doubles values) { _mm256_stream_pd(to, values); }
#else
inline Doubles doubles(HalfOfFloats values) { return __builtin_convertvector(values, Doubles); }
inline Words words(Shorts shorts) { return __builtin_convertvector(shorts, Words); }
inline Shorts shorts(Words words) { return __builtin_convertvector(words, Shorts); }
inline Floats floats_of_halves(Shorts halves) {
  Words bits = words(halves), magnitude = bits & 0x7fff;
  // 2^112 is the difference of the exponents' biases; the product is exact, also of a subnormal.
  Words finite = (Words)((Floats)(magnitude << 13) * 0x1p112f);
  Words value = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : finite;
  return (Floats)(value | (bits & 0x8000) << 16);
}
inline Shorts halves(Floats values) {
  Words bits = (Words)values, magnitude = bits & 0x7fffffff;
  Words normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);  // to nearest, ties to even
  // Beside 0.5 the last bit of a float is worth 2^-24, as that of a subnormal half.
  Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
  Words rounded = magnitude < 0x38800000 ? subnormal : normal;
  rounded = magnitude >= 0x47800000 ? Words{} + 0x7c00 : rounded;
  rounded = magnitude > 0x7f800000 ? Words{} + 0x7e00 : rounded;
  return shorts(rounded | (bits >> 16 & 0x8000));
}
template <typename V> inline V fma(V a, V b, V c) { return a * b + c; }  // std::fma would be a slow call
#endif
inline Wide fma(Wide a, Wide b, Wide c) { return {fma(a.first, b.first, c.first), fma(a.second, b.second, c.second)}; }

inline Floats floats(const float* from) { return load<Floats>(from); }
inline Floats floats(const BFloat16* from) { return (Floats)(words(load<Shorts>(from)) << 16); }
inline Floats floats(const Half* from) { return floats_of_halves(load<Shorts>(from)); }
inline Wide wide(Wide values) { return values; }
inline Wide wide(Floats values) {
  std::array<HalfOfFloats, 2> halves = load<std::array<HalfOfFloats, 2>>(&values);
  return {doubles(halves[0]), doubles(halves[1])};
}
template <typename V, typename T> inline V read(const T* from) {
  if constexpr (std::is_same_v<V, Doubles>) return load<Doubles>(from);
  else if constexpr (std::is_same_v<V, Floats>) return floats(from);
  else if constexpr (sizeof(T) == 8) return {load<Doubles>(from), load<Doubles>(from + LANES / 2)};
  else return wide(floats(from));
}

inline void write(double* to, Doubles values) { store(to, values); }
inline void write(float* to, Floats values) { store(to, values); }
inline void write(BFloat16* to, Floats values) {
  Words bits = (Words)values, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;  // to nearest, ties to even
  store(to, shorts(values == values ? rounded : Words{} + 0x7fc0));                  // NaN
}
inline void write(Half* to, Floats values) { store(to, halves(values)); }
inline void write(double* to, Wide values) { store(to, values.first), store(to + LANES / 2, values.second); }
template <typename T> inline void write(T* to, Wide values) {  // by way of float, as torch rounds a double
  HalfOfFloats halves[] = {__builtin_convertvector(values.first, HalfOfFloats),
                           __builtin_convertvector(values.second, HalfOfFloats)};
  write(to, load<Floats>(halves));
}
template <typename T, typename V> inline void stream(T* to, V values) { write(to, values); }

// How a loop body touches memory. What is known of it when it is compiled costs nothing.
struct Memory {
  int64_t count = LANES;  // of values at the address; the other lanes read 0
  bool streams = false;
  int64_t ahead = 0;  // if not 0, the numbers so far ahead are fetched to the second cache; sums fill the first

  template <typename V, typename T> INLINED V get(const T* from) const {
    if (ahead) __builtin_prefetch(from + ahead, 0, 2);
    if (count == LANES) return read<V>(from);
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return read<V>(padded);
  }
  template <typename T, typename V> INLINED void set(T* to, V values) const {
    if (count == LANES) return streams ? stream(to, values) : write(to, values);
    T padded[LANES];
    write(padded, values);
    std::memcpy(to, padded, count * sizeof(T));
  }
};

// A number of a channel, in all lanes; or those of columns.
inline Wide operator-(double number, Wide zero) { return {number - zero.first, number - zero.second}; }
template <typename V, bool of_channel, typename Numbers, size_t num>
INLINED inline std::array<V, num> coefficients(const std::array<Numbers, num>& numbers, int64_t at) {
  std::array<V, num> vectors;
  for (size_t which = 0; which < num; ++which)
    if constexpr (of_channel) vectors[which] = numbers[which][at] - V{};
    else vectors[which] = read<V>(numbers[which] + at);
  return vectors;
}

template <typename V> inline V behind_relu(V gradient, V y, float zero = 0) { return y <= zero ? V{} : gradient; }
inline Wide behind_relu(Wide gradient, Wide y, float zero = 0) {
  return {behind_relu(gradient.first, y.first, zero), behind_relu(gradient.second, y.second, zero)};
}
// The largest number that becomes 0 as a T.
template <typename T>
constexpr float ZERO = std::is_same_v<T, Half> ? 0x1p-25f : std::is_same_v<T, BFloat16> ? 0x1p-134f : 0;

// For the last LANES of `length` values: ones where whole vectors have the value already, else zeros.
template <typename V> inline V mask_of_counted(int64_t length) {
  using Number = std::conditional_t<std::is_same_v<V, Floats>, float, double>;
  return read<V>((const Number*)(ZEROS_BEHIND_ONES + PADDING) - LANES + length % LANES);
}
template <typename V> inline V masked(V values, V mask) { return (V)((Words)values & ~(Words)mask); }
inline Wide masked(Wide of, Wide mask) { return {masked(of.first, mask.first), masked(of.second, mask.second)}; }
template <typename V> Pair<V> masked(Pair<V> of, V mask) { return {masked(of.first, mask), masked(of.second, mask)}; }
template <typename V> inline Pair<Wide> wide(Pair<V> sums) { return {wide(sums.first), wide(sums.second)}; }

// x and x^2; backward, where there is a coefficient, dy and dy * (x - center), of dy behind the relu.
template <typename T, int num_coefficients, bool has_y> struct Term {
  // Numbers of 16 bits are first added in float, FEW at a time. Then the sum of squares of similar values is exact: a
  // square has 16 bits (BFloat16) or 22 (Half), and a float 24.
  static constexpr bool IN_FLOAT = sizeof(T) == 2;
  static constexpr int64_t FEW = std::is_same_v<T, BFloat16> ? 8 : 4;
  using V = std::conditional_t<IN_FLOAT, Floats, Wide>;
  using Mapped = std::conditional_t<std::is_same_v<T, double>, Wide, Floats>;  // in what the forward computed y
  const T *dy, *x, *y;
  std::array<const Compute<T>*, num_coefficients> numbers;  // center; for a relu without y, scale and shift

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

// The two sums of a channel over `count` of its runs, which begin `stride` values apart.
template <typename Term>
void sum_channel(const Term& term, int64_t channel, int64_t start, int64_t length, int64_t count, int64_t stride,
                 double& first, double& second) {
  using V = typename Term::V;
  constexpr int64_t few = Term::FEW;
  int64_t blocks_of_rest = divided_up(length % (few * LANES), LANES), blocks_in_rest = 0;
  V mask = mask_of_counted<V>(length);
  auto of = coefficients<typename Term::Mapped, true>(term.numbers, channel);
  // In float the sums of a few blocks and of rests, else two chains of additions, to hide their latency.
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

// Adds the sums of each column of `rows` rows, which are `length` apart, to first and second. Several rows prefetch the
// next ones: a processor does not see by itself that these follow.
template <int64_t rows, typename Term>
INLINED inline void add_rows(const Term& term, int64_t start, int64_t length, double* first, double* second) {
  using V = typename Term::V;
  auto sum = [&](Memory memory, int64_t column, Pair<V> sums) INLINED {
    auto of = coefficients<typename Term::Mapped, false>(term.numbers, column);
    for (int64_t row = 0; row < rows; ++row) term.add(memory, start + row * length + column, of, sums);
    return sums;
  };
  auto get = [&](int64_t at) INLINED { return Pair<Wide>{read<Wide>(first + at), read<Wide>(second + at)}; };
  auto set = [&](int64_t at, Pair<Wide> of) INLINED { write(first + at, of.first), write(second + at, of.second); };
  int64_t column = 0;
  const Memory memory = {LANES, false, rows > 1 ? std::max(AHEAD, 2 * rows * length) : 0};
  for (; column + LANES <= length; column += LANES)
    if constexpr (Term::IN_FLOAT) set(column, get(column) + wide(sum(memory, column, {})));
    else set(column, sum(memory, column, get(column)));
  if (column == length) return;
  if (length < LANES) return set(0, get(0) + wide(sum({length}, 0, {})));
  column = length - LANES;
  set(column, get(column) + wide(masked(sum({}, column, {}), mask_of_counted<V>(length))));
}

template <typename Term>
void sum_runs(const Sizes& sizes, const Term& term, int64_t part, int64_t block, double* first, double* second) {
  int64_t outer = part * sizes.outers_of_part(), count = std::min(sizes.outers_of_part(), sizes.outer - outer);
  int64_t some = sizes.channels_of_part(), end = std::min(sizes.channels, (block + 1) * some);
  for (int64_t channel = block * some; channel < end; ++channel)
    sum_channel(term, channel, (outer * sizes.channels + channel) * sizes.inner, sizes.inner, count, sizes.columns(),
                first[channel], second[channel]);
}

template <typename Term>
void sum_rows(const Sizes& sizes, const Term& term, int64_t part, double* first, double* second) {
  std::fill_n(first, 2 * sizes.spread_size(), 0.0);
  int64_t row = sizes.piece(), start = part * sizes.values_of_part();
  int64_t end = std::min(sizes.numel(), start + sizes.values_of_part());
  for (; start + Term::FEW * row <= end; start += Term::FEW * row) add_rows<Term::FEW>(term, start, row, first, second);
  for (; start < end; start += row) add_rows<1>(term, start, std::min(row, end - start), first, second);
}

// Adds the sums of each channel to `sums`, (2, channels).
template <typename Term> Status sum_all(const Sizes& sizes, const Term& term, double* parts, double* sums) {
  if (!sizes.numel()) return OK;
  int64_t width = sizes.spread_size(), blocks = sizes.blocks();
  Status status = parallel(sizes.num_parts() * blocks, sizes.values_of_part(), [&](int64_t begin, int64_t end) {
    const Term own = term;  // as far as the compiler knows, what is written could lie in `term`
    for (int64_t index = begin; index < end; ++index) {
      double *first = parts + index / blocks * 2 * width, *second = first + width;
      if (sizes.in_runs()) sum_runs(sizes, own, index / blocks, index % blocks, first, second);
      else sum_rows(sizes, own, index, first, second);
    }
  });
  for (int64_t part = 0; part < 2 * sizes.num_parts(); ++part)
    sizes.gather(parts + part * width, sums + part % 2 * sizes.channels);
  return status;
}

template <typename T> Status sum(const Kind& kind, const Sums& call, bool backward, double* scratch) {
  const Sizes& sizes = kind.sizes;
  int64_t width = sizes.spread_size();
  double* trailer = std::fill_n(call.sums, 2 * sizes.channels, 0.0);
  if (kind.is_signed || !backward) *trailer = backward ? 0 : double(sizes.outer * sizes.inner);  // n
  if (kind.is_signed) std::copy_n(call.signature, SIGNATURE, trailer + 1);
  auto sum_of = [&](auto term) {
    term.dy = (const T*)call.dy, term.x = (const T*)call.x, term.y = (const T*)call.y;
    for (size_t which = 0; which < term.numbers.size(); ++which) {
      const double* numbers = call.statistics + (which ? (2 + which) * sizes.channels + 1 : 0);  // mean, scale, shift
      term.numbers[which] = sizes.spread(numbers, (Compute<T>*)scratch + which * width);
    }
    return sum_all(sizes, term, scratch + 3 * width, call.sums);
  };
  if (!backward) return sum_of(Term<T, 0, false>{});
  if (kind.masks_by_y()) return sum_of(Term<T, 1, true>{});
  return kind.masks_by_x() ? sum_of(Term<T, 3, false>{}) : sum_of(Term<T, 1, false>{});
}

template <typename T> using MapVector = std::conditional_t<std::is_same_v<T, double>, Doubles, Floats>;

// Calls body(memory, index, coefficients) for the vectors of a run of a channel, or of some rows. The last vector ends
// where the piece ends, and has values of the one before.
template <typename V, bool in_runs, bool streams, int64_t rows, typename Numbers, typename Body>
INLINED inline void map_piece(const Numbers& numbers, int64_t channel, int64_t start, int64_t length,
                              const Body& body) {
  constexpr int64_t step = sizeof(V) / sizeof(*numbers[0]);
  auto of = coefficients<V, in_runs>(numbers, in_runs ? channel : 0);
  auto apply = [&](Memory memory, int64_t column) INLINED {
    if constexpr (!in_runs) of = coefficients<V, false>(numbers, column);
    for (int64_t row = 0; row < rows; ++row) body(memory, start + row * length + column, of);
  };
  int64_t i = 0;
  for (; i + step <= length; i += step) apply({LANES, streams}, i);
  if (i == length) return;
  if (length < step) return apply({length}, 0);
  apply({}, length - step);
}

// `of_channels` are `num` numbers of each channel; `outputs` the addresses that are written, or-ed.
template <typename T, size_t num, typename Body>
Status map_all(const Sizes& sizes, const double* of_channels, double* scratch, uintptr_t outputs, const Body& body) {
  using V = MapVector<T>;
  std::array<const Compute<T>*, num> coefficients;
  for (size_t which = 0; which < num; ++which, of_channels += sizes.channels)
    coefficients[which] = sizes.spread(of_channels, (Compute<T>*)scratch + which * sizes.spread_size());
  int64_t piece = std::max<int64_t>(1, sizes.piece()), step = std::max(ROWS, FORWARDS / piece);
  int64_t numel = sizes.numel(), rest = numel % piece;
  auto map = [&](auto in_runs, auto streams) {
    return parallel(numel / piece, piece, [&](int64_t begin, int64_t end) {
      const auto own = coefficients;  // as in sum_all
      const Body own_body = body;
      // The last block first, as of a large tensor the caches hold what was added up last.
      for (; end > begin; end -= step)
        for (int64_t index = std::max(begin, end - step); index < end;) {
          bool some = !in_runs.value && piece >= WIDE_ROW && index + ROWS <= end;
          int64_t channel = index % sizes.channels, start = index * piece;
          if (some) map_piece<V, false, streams.value, ROWS>(own, channel, start, piece, own_body);
          else map_piece<V, in_runs.value, streams.value, 1>(own, channel, start, piece, own_body);
          index += some ? ROWS : 1;
        }
#if WIDTH > 16
      if (streams.value) _mm_sfence();
#endif
    });
  };
  if (rest) map_piece<V, false, false, 1>(coefficients, 0, numel - rest, rest, body);
  if (numel * int64_t(sizeof(T)) >= STREAMED_BYTES && outputs % ALIGNED == 0 && piece % LANES == 0)
    return sizes.in_runs() ? map(std::true_type{}, std::true_type{}) : map(std::false_type{}, std::true_type{});
  return sizes.in_runs() ? map(std::true_type{}, std::false_type{}) : map(std::false_type{}, std::false_type{});
}

template <typename T>
Status normalize(const Kind& kind, const ForwardOutputs& call, const double* coefficients, double* scratch) {
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
  return map_all<T, 3>(kind.sizes, coefficients, scratch, (uintptr_t)y, body);
}

template <typename T>
Status input_gradient(const Kind& kind, const BackwardOutputs& call, const double* coefficients, double* scratch) {
  using V = MapVector<T>;
  auto *dy = (const T*)call.dy, *x = (const T*)call.x, *y = kind.masks_by_y() ? (const T*)call.y : nullptr;
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
    return map_all<T, num>(kind.sizes, coefficients, scratch, (uintptr_t)grad_x | (uintptr_t)grad_residual, body);
  };
  return kind.masks_by_x() ? map(std::integral_constant<size_t, 6>{}) : map(std::integral_constant<size_t, 4>{});
}

template <typename From, typename To> To* convert(const From* from, int64_t count, To* to) {
  for (int64_t i = 0; i < count; i += LANES) {
    Memory memory{std::min(LANES, count - i)};
    memory.set(to + i, memory.get<Wide>(from + i));
  }
  return to + count;
}
template <typename T> void widen(const void* from, int64_t count, double* to) { convert((const T*)from, count, to); }
template <typename T> void* narrow(const double* from, int64_t count, void* to) { return convert(from, count, (T*)to); }

template <typename T> constexpr Loops OF = {sum<T>, normalize<T>, input_gradient<T>, widen<T>, narrow<T>};
constexpr Loops LOOPS[] = {OF<float>, OF<double>, OF<BFloat16>, OF<Half>};
#undef WIDTH
