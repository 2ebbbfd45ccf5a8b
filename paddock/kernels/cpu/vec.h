// Vectors of 16 floats, by compiler extensions: any machine that GCC or Clang knows. Where AVX-512
// has a better instruction it is used.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(64), aligned(4), may_alias));
struct bf16 { uint16_t bits; };
struct int8 { int8_t value; };

constexpr int LANES = 16;

inline vec splat(float x) { return vec{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline vec load(const float* p) { return *(const vec*)p; }
inline vec load(const bf16* p) {
  return (vec)(__builtin_convertvector(*(const hvec*)p, uvec) << 16);
}
inline void store(float* p, vec v) { *(vec*)p = v; }
inline void store(bf16* p, vec v) {  // rounds to nearest even; no NaN is expected
#if defined(__AVX512BF16__)
  *(hvec*)p = (hvec)_mm512_cvtneps_pbh((__m512)v);
#else
  uvec u = (uvec)v;
  u = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  *(hvec*)p = __builtin_convertvector(u, hvec);
#endif
}
inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  uint32_t u = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
inline void narrow(float x, float* p) { *p = x; }
inline void narrow(float x, bf16* p) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
inline vec exp(vec x);
inline vec max(vec a, vec b) { return a > b ? a : b; }
inline vec sigmoid(vec x) { return 1.0f / (1.0f + exp(-max(x, splat(-87.0f)))); }  // exp ends at 88
inline vec silu(vec x) { return x * sigmoid(x); }
// The first n of 16 elements; the others are zero, or not written.
template <class T> inline vec load_some(const T* p, int n) {
  if (n == LANES) return load(p);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (vec)_mm512_maskz_loadu_ps((__mmask16)((1 << n) - 1), p);
#endif
  T buffer[LANES] = {};
  memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T> inline void store_some(T* p, vec v, int n) {
  if (n == LANES) return store(p, v);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, (__mmask16)((1 << n) - 1), (__m512)v);
#endif
  T buffer[LANES];
  store(buffer, v);
  memcpy(p, buffer, n * sizeof(T));
}

// Row i of 16 becomes column i.
inline void transpose(vec (&row)[LANES]) {
#pragma GCC unroll 4
  for (int half = 1; half < LANES; half *= 2) {
    ivec even, odd;
    for (int l = 0; l < LANES; l++) {
      even[l] = l & half ? LANES + l - half : l;
      odd[l] = l & half ? LANES + l : l + half;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
      if (i & half) continue;
      vec a = row[i], b = row[i + half];
      row[i] = __builtin_shuffle(a, b, even), row[i + half] = __builtin_shuffle(a, b, odd);
    }
  }
}

// Always the same tree, so that a sum does not depend on where it is taken.
inline float sum(vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) v[i] += v[i + half];
  return v[0];
#endif
}
// The sums of four vectors, each by the tree of `sum_four` whatever the others are.
struct four { float at[4]; };
inline four sum_four(vec a, vec b, vec c, vec d) {
  four result;
#if defined(__AVX512DQ__)
  auto halve = [](vec v) {
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  };
  __m256 ab = _mm256_hadd_ps(halve(a), halve(b)), cd = _mm256_hadd_ps(halve(c), halve(d));
  __m256 all = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(result.at, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  result = {{sum(a), sum(b), sum(c), sum(d)}};
#endif
  return result;
}
inline float largest(vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
  return m;
#endif
}

// exp(x) to about one unit in the last place; 0 below -87.
inline vec exp(vec x) {
  vec low = splat(-87.3f);
  ivec tiny = x < low;
  x = max(x, low);
  vec n = x * 1.44269504f;
#if defined(__AVX512F__)
  n = (vec)_mm512_roundscale_ps((__m512)n, 0);
#else
  for (int i = 0; i < LANES; i++) n[i] = nearbyintf(n[i]);
#endif
  vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ivec e = (__builtin_convertvector(n, ivec) + 127) << 23;
  vec result = p * (vec)e;
  return (vec)((ivec)result & ~tiny);
}
