// Vectors of WIDTH bytes, and how loops read and write them. cpu.cpp includes this file, cpu_channels.h and cpu_loops.h
// once for each instruction set, within a namespace, so the files have no include guards and include nothing. Sums and
// per-channel values are processed LANES at a time, as Floats or doubles (Wide); maps use Floats or Doubles.

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
template <typename V> Pair<V> operator/(Pair<V> a, Pair<V> b) { return {a.first / b.first, a.second / b.second}; }
using Wide = Pair<Doubles>;  // two vectors: GCC generates much slower code for one vector of twice the width

// A tensor may begin at any address, also at one that is not aligned to its dtype.
template <typename Vector> inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}
template <typename Vector> inline void store(void* to, Vector vector) { std::memcpy(to, &vector, sizeof(vector)); }

// Operations that differ between instruction sets. An intrinsic is one instruction where GCC 12 compiles four or five
// for __builtin_convertvector. `stream` bypasses the caches: the processor does not read the memory that it overwrites.
#if WIDTH == 64
inline Doubles doubles(HalfOfFloats values) { return _mm512_cvtps_pd(values); }
inline Words words(Shorts shorts) { return (Words)_mm512_cvtepu16_epi32((__m256i)shorts); }
inline Shorts shorts(Words words) { return (Shorts)_mm512_cvtepi32_epi16((__m512i)words); }
inline Floats floats_of_halves(Shorts halves) { return _mm512_cvtph_ps((__m256i)halves); }
inline Shorts halves(Floats values) { return (Shorts)_mm512_cvtps_ph(values, TO_NEAREST); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Doubles fma(Doubles a, Doubles b, Doubles c) { return _mm512_fmadd_pd(a, b, c); }
inline HalfOfFloats narrowed(Doubles values) { return _mm512_cvtpd_ps(values); }
inline Doubles root(Doubles values) { return _mm512_sqrt_pd(values); }
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
inline HalfOfFloats narrowed(Doubles values) { return _mm256_cvtpd_ps(values); }
inline Doubles root(Doubles values) { return _mm256_sqrt_pd(values); }
inline void stream(float* to, Floats values) { _mm256_stream_ps(to, values); }
inline void stream(double* to, Doubles values) { _mm256_stream_pd(to, values); }
#else
inline Doubles doubles(HalfOfFloats values) { return __builtin_convertvector(values, Doubles); }
inline Words words(Shorts shorts) { return __builtin_convertvector(shorts, Words); }
inline Shorts shorts(Words words) { return __builtin_convertvector(words, Shorts); }
inline Floats floats_of_halves(Shorts halves) {
  Words bits = words(halves), magnitude = bits & 0x7fff;
  // 112 is the difference of the exponents' biases; the product is exact, also for subnormal values.
  Words finite = (Words)((Floats)(magnitude << 13) * 0x1p112f);
  Words value = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : finite;
  return (Floats)(value | (bits & 0x8000) << 16);
}
inline Shorts halves(Floats values) {
  Words bits = (Words)values, magnitude = bits & 0x7fffffff;
  Words normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);  // to nearest, ties to even
  // At 0.5 the last bit of a float has the value 2^-24, like the last bit of a subnormal half.
  Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
  Words rounded = magnitude < 0x38800000 ? subnormal : normal;
  rounded = magnitude >= 0x47800000 ? Words{} + 0x7c00 : rounded;
  rounded = magnitude > 0x7f800000 ? Words{} + 0x7e00 : rounded;
  return shorts(rounded | (bits >> 16 & 0x8000));
}
template <typename V> inline V fma(V a, V b, V c) { return a * b + c; }  // std::fma would be a slow call
inline HalfOfFloats narrowed(Doubles values) { return __builtin_convertvector(values, HalfOfFloats); }
inline Doubles root(Doubles values) {
  for (int64_t i = 0; i < LANES / 2; ++i) values[i] = std::sqrt(values[i]);
  return values;
}
#endif
inline Wide fma(Wide a, Wide b, Wide c) { return {fma(a.first, b.first, c.first), fma(a.second, b.second, c.second)}; }

inline Wide root(Wide values) { return {root(values.first), root(values.second)}; }

inline Floats floats(const float* from) { return load<Floats>(from); }
inline Floats floats(const BFloat16* from) { return (Floats)(words(load<Shorts>(from)) << 16); }
inline Floats floats(const Half* from) { return floats_of_halves(load<Shorts>(from)); }
inline Wide operator-(double number, Wide zero) { return {number - zero.first, number - zero.second}; }
inline Wide wide(double number) { return number - Wide{}; }
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
inline Floats narrowed(Wide values) {
  std::array<HalfOfFloats, 2> halves = {narrowed(values.first), narrowed(values.second)};
  return load<Floats>(&halves);
}
// A double is rounded to float first, as in torch.
template <typename T> inline void write(T* to, Wide values) { write(to, narrowed(values)); }
template <typename T, typename V> inline void stream(T* to, V values) { write(to, values); }

// How a loop body reads and writes memory. Fields that are known at compile time cost nothing.
struct Memory {
  int64_t count = LANES;  // number of values at the address; the other lanes read 0
  bool streams = false;
  int64_t ahead = 0;  // prefetch distance in values, into the L2 cache because sums fill L1; 0: no prefetch

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

template <typename V> inline V behind_relu(V gradient, V y, float zero = 0) { return y <= zero ? V{} : gradient; }
inline Wide behind_relu(Wide gradient, Wide y, float zero = 0) {
  return {behind_relu(gradient.first, y.first, zero), behind_relu(gradient.second, y.second, zero)};
}
template <typename V> inline V unless_zero(V divisor, V values) { return divisor == 0 ? V{} : values; }
inline Wide unless_zero(Wide of, Wide values) {
  return {unless_zero(of.first, values.first), unless_zero(of.second, values.second)};
}
template <typename V> inline V not_negative(V values) { return values < 0 ? V{} : values; }  // NaN is kept
inline Wide not_negative(Wide of) { return {not_negative(of.first), not_negative(of.second)}; }
// The largest float that rounds to 0 as a T.
template <typename T>
constexpr float ZERO = std::is_same_v<T, Half> ? 0x1p-25f : std::is_same_v<T, BFloat16> ? 0x1p-134f : 0;

// Return the mask of the lanes that the last vector of `length` values shares with the one before: `masked` drops them.
template <typename V> inline V mask_of_counted(int64_t length) {
  using Number = std::conditional_t<std::is_same_v<V, Floats>, float, double>;
  return read<V>((const Number*)(ZEROS_BEHIND_ONES + PADDING) - LANES + length % LANES);
}
template <typename V> inline V masked(V values, V mask) { return (V)((Words)values & ~(Words)mask); }
inline Wide masked(Wide of, Wide mask) { return {masked(of.first, mask.first), masked(of.second, mask.second)}; }
template <typename V> Pair<V> masked(Pair<V> of, V mask) { return {masked(of.first, mask), masked(of.second, mask)}; }
template <typename V> inline Pair<Wide> wide(Pair<V> sums) { return {wide(sums.first), wide(sums.second)}; }

// Call body(memory, index) for each vector of LANES of `count` values.
template <typename Body> INLINED inline void for_vectors(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) body(Memory{}, i);
  if (i < count) body(Memory{count - i}, i);
}
template <typename From, typename To> void convert(const From* from, int64_t count, To* to) {
  for_vectors(count, [=](Memory memory, int64_t i) INLINED { memory.set(to + i, memory.get<Wide>(from + i)); });
}
