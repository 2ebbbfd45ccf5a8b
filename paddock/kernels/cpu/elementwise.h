// RMSNorm, LayerNorm and rotary embedding.
#pragma once
#include "pool.h"
#include "vec.h"

constexpr double COST = 16;  // of an element, in multiplications
constexpr long SOME_ROWS = 16;  // of a task

// Calls row(m) for M rows of `elements` elements.
template <class F> inline void for_rows(long M, long elements, F row) {
  parallel((M + SOME_ROWS - 1) / SOME_ROWS, COST * M * elements, [&](long task) {
    for (long m = task * SOME_ROWS; m < std::min(M, (task + 1) * SOME_ROWS); m++) row(m);
  });
}

// One row of RMSNorm; it is rounded to T before the weight multiplies it, as the reference does.
template <class T> inline void rms_norm_row(long D, const T* x, const T* weight, float eps, T* out) {
  vec squares = {};
  long d = 0;
  for (; d + LANES <= D; d += LANES) { vec v = load(x + d); squares += v * v; }
  if (d < D) { vec v = load_some(x + d, D - d); squares += v * v; }
  float scale = 1.0f / std::sqrt(sum(squares) / D + eps);
  auto normed = [&](vec v) {
    v = v * scale;
    if (sizeof(T) == 2) { T rounded[LANES]; store(rounded, v); v = load(rounded); }
    return v;
  };
  for (d = 0; d + LANES <= D; d += LANES) store(out + d, normed(load(x + d)) * load(weight + d));
  if (d < D) {
    int some = (int)(D - d);
    store_some(out + d, normed(load_some(x + d, some)) * load_some(weight + d, some), some);
  }
}

template <class T> void rms_norm(long M, long D, const T* x, long ldx, const T* weight, float eps, T* out, long ldo) {
  for_rows(M, D, [&](long m) { rms_norm_row(D, x + m * ldx, weight, eps, out + m * ldo); });
}

// One row of LayerNorm, in float32.
template <class T> inline void layer_norm_row(long D, const T* x, const T* weight, const T* bias, float eps, T* out) {
  auto for_vectors = [&](auto take) {
    for (long d = 0; d < D; d += LANES) take(d, (int)std::min<long>(LANES, D - d));
  };
  vec total = {}, squares = {};
  for_vectors([&](long d, int some) { total += load_some(x + d, some); });
  float mean = sum(total) / D;
  for_vectors([&](long d, int some) {
    vec v = load_some(x + d, some) - mean;
    if (some < LANES)
      for (int i = some; i < LANES; i++) v[i] = 0;
    squares += v * v;
  });
  float scale = 1.0f / std::sqrt(sum(squares) / D + eps);
  for_vectors([&](long d, int some) {
    vec v = (load_some(x + d, some) - mean) * scale;
    store_some(out + d, v * load_some(weight + d, some) + load_some(bias + d, some), some);
  });
}

template <class T>
void layer_norm(long M, long D, const T* x, long ldx, const T* weight, const T* bias, float eps, T* out, long ldo) {
  for_rows(M, D, [&](long m) { layer_norm_row(D, x + m * ldx, weight, bias, eps, out + m * ldo); });
}

// Rotates the 2 P dims of `x` in place. Pairs are (0, 1), (2, 3), ... or (0, P), (1, P + 1), ...
template <class T> inline void rotate(T* x, const float* cos, const float* sin, long P, bool interleaved) {
  static const ivec EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, ODD = EVEN + 1;
  static const ivec LOW = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, HIGH = LOW + 8;
  for (long p = 0; p < P; p += LANES) {
    int some = (int)std::min<long>(LANES, P - p), low = std::min(2 * some, LANES), high = 2 * some - low;
    T *a = x + (interleaved ? 2 * p : p), *b = interleaved ? a + LANES : a + P;
    vec u = load_some(a, interleaved ? low : some), v = load_some(b, interleaved ? high : some);
    vec c = load_some(cos + p, some), s = load_some(sin + p, some);
    if (interleaved) {
      vec pairs = u;
      u = __builtin_shuffle(pairs, v, EVEN), v = __builtin_shuffle(pairs, v, ODD);
    }
    vec first = u * c - v * s, second = u * s + v * c;
    if (interleaved) {
      vec rotated = first;
      first = __builtin_shuffle(rotated, second, LOW), second = __builtin_shuffle(rotated, second, HIGH);
    }
    store_some(a, first, interleaved ? low : some), store_some(b, second, interleaved ? high : some);
  }
}

// A copy of H heads of D dims of every token with dims [first, first + 2 P) rotated.
template <class T>
void rope(long M, long H, long D, const T* x, long ldx, long ldh, T* out, long first, const float* cos,
          const float* sin, long P, bool interleaved) {
  for_rows(M, H * D, [&](long m) {
    for (long h = 0; h < H; h++) {
      T* to = out + (m * H + h) * D;
      memcpy(to, x + m * ldx + h * ldh, D * sizeof(T));
      rotate(to + first, cos + m * P, sin + m * P, P, interleaved);
    }
  });
}

// Of rows [query heads | key heads | value heads]: rotated queries to `query`, rotated keys and the
// values to their slots of the KV cache.
template <class T>
void rope_and_cache(long M, long H, long G, long D, const T* qkv, const float* cos, const float* sin, long P,
                    bool interleaved, const int64_t* slot, T* query, T* key, T* value) {
  for_rows(M, (H + 2 * G) * D, [&](long m) {
    const T* row = qkv + m * (H + 2 * G) * D;
    T* to = query + m * H * D;
    memcpy(to, row, H * D * sizeof(T));
    for (long h = 0; h < H; h++) rotate(to + h * D, cos + m * P, sin + m * P, P, interleaved);
    T* stored = key + slot[m] * G * D;
    memcpy(stored, row + H * D, G * D * sizeof(T));
    for (long g = 0; g < G; g++) rotate(stored + g * D, cos + m * P, sin + m * P, P, interleaved);
    memcpy(value + slot[m] * G * D, row + (H + G) * D, G * D * sizeof(T));
  });
}
