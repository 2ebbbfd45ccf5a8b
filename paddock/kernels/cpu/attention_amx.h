// A block of attention in bfloat16 by AMX tiles: 64 keys and some rows (queries of the heads that
// share a key head).
//
//     score[k, r] = key[k] . q[r]            keys are read where they are stored
//     out[r, v]  += sum_k p[r, k] value[k, v]
//
// Softmax runs over the keys of 16 rows at a time, one row a lane. Rows are padded to 16.
#pragma once
#if defined(__AMX_BF16__)
#include <vector>
#include "amx.h"

constexpr int AMX_KEYS = 64, MAX_AMX_ROWS = 48, ROW_GROUP = 16;

constexpr long MAX_DIMS = 1024;

inline bool amx_attention_suits(long D, long V) {
  return D % AMX_INPUTS == 0 && V % AMX_INPUTS == 0 && std::max(D, V) <= MAX_DIMS && amx_allowed();
}

// What was stored before is in memory: the compiler does not know that tiles are loaded from there.
inline void before_tile_loads() { __asm__ volatile("" : : : "memory"); }

// The buffers of a task. q_pairs: q transposed, pairs of dims together, [groups][D / 2][16] words.
struct AmxRows {
  std::vector<uint32_t> q_pairs, value_pairs;  // values: pairs of keys together, [32][V] words
  alignas(64) float score[AMX_KEYS * MAX_AMX_ROWS];
  alignas(64) uint32_t p[MAX_AMX_ROWS * AMX_KEYS / 2];  // [rows][keys] in bfloat16
  alignas(64) bf16 some_keys[ROW_GROUP * MAX_DIMS];

  // `row(r)` is the query of row r.
  template <class F> void take_queries(int rows, long D, F row) {
    q_pairs.assign((rows + ROW_GROUP - 1) / ROW_GROUP * ROW_GROUP * D / 2, 0);
    for (int r = 0; r < rows; r++) {
      uint32_t* to = q_pairs.data() + r / ROW_GROUP * ROW_GROUP * D / 2 + r % ROW_GROUP;
      const bf16* q = row(r);
      for (long d = 0; d < D / 2; d++) memcpy(to + d * ROW_GROUP, q + 2 * d, 4);
    }
  }
};

// Where 16 rows of keys can be loaded as a tile: in place if they lie at equal distances.
inline const bf16* key_tile(const bf16* const* key, int n, long D, long ldk, bf16* copy, long& stride) {
  bool in_place = n >= ROW_GROUP;
  for (int k = 1; in_place && k < ROW_GROUP; k++) in_place = key[k] == key[0] + k * ldk;
  stride = in_place ? ldk : D;
  if (in_place) return key[0];
  for (int k = 0; k < ROW_GROUP; k++)
    if (k < n) memcpy(copy + k * D, key[k], D * sizeof(bf16)); else memset(copy + k * D, 0, D * sizeof(bf16));
  return copy;
}

inline void amx_scores(AmxRows& s, int groups, long D, long ldk, const bf16* const* key, int n) {
  constexpr long BYTES = MAX_AMX_ROWS * 4;
  long words = ROW_GROUP * D / 2;
  for (int k = 0; k < n; k += ROW_GROUP) {
    long stride;
    const bf16* keys = key_tile(key + k, n - k, D, ldk, s.some_keys, stride);
    before_tile_loads();
    for (int g = 0; g < groups; g += 3) {
      const uint32_t* q = s.q_pairs.data() + g * words;
      float* to = s.score + k * MAX_AMX_ROWS + g * ROW_GROUP;
      bool two = groups > g + 1, three = groups > g + 2;
      _tile_zero(0); _tile_zero(1); _tile_zero(2);
      for (long d = 0; d < D; d += AMX_INPUTS, q += ROW_GROUP * ROW_GROUP) {
        _tile_loadd(4, keys + d, stride * 2);
        _tile_loadd(5, q, 64); _tile_dpbf16ps(0, 4, 5);
        if (two) { _tile_loadd(6, q + words, 64); _tile_dpbf16ps(1, 4, 6); }
        if (three) { _tile_loadd(7, q + 2 * words, 64); _tile_dpbf16ps(2, 4, 7); }
      }
      _tile_stored(0, to, BYTES);
      if (two) { _tile_stored(1, to + ROW_GROUP, BYTES); }
      if (three) { _tile_stored(2, to + 2 * ROW_GROUP, BYTES); }
    }
  }
}

// Pairs of keys of every value dim side by side; keys from n on count as zeros.
inline void pair_values(AmxRows& s, long V, const bf16* const* value, int n) {
  alignas(64) static const bf16 zeros[MAX_DIMS] = {};
  alignas(64) uint16_t low[32], high[32];
  for (int i = 0; i < 16; i++) low[2 * i] = i, low[2 * i + 1] = 32 + i, high[2 * i] = 16 + i, high[2 * i + 1] = 48 + i;
  __m512i low_half = _mm512_load_si512(low), high_half = _mm512_load_si512(high);
  s.value_pairs.resize(AMX_KEYS / 2 * V);
  for (int k = 0; k < n; k += 2) {
    const bf16 *even = value[k], *odd = k + 1 < n ? value[k + 1] : zeros;
    uint32_t* to = s.value_pairs.data() + k / 2 * V;
    for (long v = 0; v < V; v += 32) {
      __m512i a = _mm512_loadu_si512(even + v), b = _mm512_loadu_si512(odd + v);
      _mm512_storeu_si512(to + v, _mm512_permutex2var_epi16(a, low_half, b));
      _mm512_storeu_si512(to + v + 16, _mm512_permutex2var_epi16(a, high_half, b));
    }
  }
}

// 2^x, to a few units of float32's last place but one, far below a rounding to bfloat16.
inline vec exp2(vec x) {
  x = max(x, splat(-200));  // of -inf there would be no remainder
  vec r = x - (vec)_mm512_roundscale_ps((__m512)x, 0), p = splat(1.339887440e-3f);
  p = p * r + 9.618437357e-3f;
  p = p * r + 5.550332548e-2f;
  p = p * r + 2.402264791e-1f;
  p = p * r + 6.931472028e-1f;
  p = p * r + 1.0f;
  return (vec)_mm512_scalef_ps((__m512)p, (__m512)(x - r));
}

// Which of 16 rows attend to key k.
inline __mmask16 attends(const int* from, const int* to, const uint64_t* selected, int k) {
  __m512i key = _mm512_set1_epi32(k);
  __mmask16 seen = _mm512_cmple_epi32_mask(_mm512_loadu_si512(from), key) & _mm512_cmplt_epi32_mask(key, _mm512_loadu_si512(to));
  if (!selected) return seen;
  __m512i bit = _mm512_set1_epi64((int64_t)(uint64_t(1) << k));
  return seen & (__mmask16)(_mm512_test_epi64_mask(_mm512_loadu_si512(selected), bit) |
                            _mm512_test_epi64_mask(_mm512_loadu_si512(selected + 8), bit) << 8);
}

// Softmax of 16 rows over n keys: s.p, and the running maximum, in powers of two, and sum. Returns how much earlier
// sums of each row shrink.
inline vec amx_softmax(AmxRows& s, int group, int n, float scale, bool all, const int* from, const int* to,
                       const uint64_t* selected, float* top, float* total) {
  float* score = s.score + group * ROW_GROUP;
  vec most = splat(-INFINITY);
  for (int k = 0; k < n; k++) {
    vec x = load(score + k * MAX_AMX_ROWS);
    if (!all) {
      x = (vec)_mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), attends(from, to, selected, k), (__m512)x);
      store(score + k * MAX_AMX_ROWS, x);
    }
    most = max(most, x);
  }
  scale *= 1.44269504f;
  most = max(load(top), most * scale);
  vec safe = most > splat(-INFINITY) ? most : vec{};  // a row that has seen nothing yet
  vec shrink = exp2(load(top) - safe), sum = {};
  vec words[ROW_GROUP];  // of 16 pairs of keys; transposed: of 16 rows
  for (int half = 0; half < n; half += 2 * ROW_GROUP) {
    for (int pair = 0; pair < ROW_GROUP; pair++) {
      int k = half + 2 * pair;
      vec p[2] = {};
      for (int i = 0; i < 2; i++)
        if (k + i < n) sum += p[i] = exp2(load(score + (k + i) * MAX_AMX_ROWS) * scale - safe);
      __m512i even = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)p[0]));
      __m512i odd = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)p[1]));
      words[pair] = (vec)_mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
    }
    transpose(words);
    for (int r = 0; r < ROW_GROUP; r++)
      store((float*)s.p + (group * ROW_GROUP + r) * AMX_KEYS / 2 + half / 2, words[r]);
  }
  store(top, most), store(total, load(total) * shrink + sum);
  return shrink;
}

// `top`, `total` and `out` [rows][V] are those of all rows, padded to 16.
inline void amx_block(AmxRows& s, int rows, long D, long V, float scale, long ldk, const bf16* const* key, const bf16* const* value,
                      int n, const int* from, const int* to, const uint64_t* selected, float* top, float* total, float* out) {
  int groups = (rows + ROW_GROUP - 1) / ROW_GROUP;
  bool all = !selected;
  for (int r = 0; r < rows; r++) all &= from[r] <= 0 && to[r] >= n;
  amx_scores(s, groups, D, ldk, key, n);
  pair_values(s, V, value, n);
  long steps = (n + AMX_INPUTS - 1) / AMX_INPUTS;
  if (n % AMX_INPUTS) std::fill(s.value_pairs.begin() + (n + 1) / 2 * V, s.value_pairs.begin() + steps * ROW_GROUP * V, 0);
  for (int g = 0; g < groups; g++) {
    int first = g * ROW_GROUP;
    float* sums = out + first * V;
    vec shrink = amx_softmax(s, g, n, scale, all, from + first, to + first, selected ? selected + first : nullptr,
                             top + first, total + first);
    for (int r = 0; r < ROW_GROUP; r++)
      if (shrink[r] != 1.0f)
        for (long v = 0; v < V; v += LANES) store(sums + r * V + v, load(sums + r * V + v) * shrink[r]);
    const uint32_t *p = s.p + first * AMX_KEYS / 2, *pairs = s.value_pairs.data();
    before_tile_loads();
    _tile_loadd(4, p, AMX_KEYS * 2);
    if (steps > 1) _tile_loadd(5, p + ROW_GROUP, AMX_KEYS * 2);
    for (long v = 0; v < V; v += ROW_GROUP) {
      _tile_loadd(0, sums + v, V * 4);
      _tile_loadd(6, pairs + v, V * 4); _tile_dpbf16ps(0, 4, 6);
      if (steps > 1) { _tile_loadd(7, pairs + ROW_GROUP * V + v, V * 4); _tile_dpbf16ps(0, 5, 7); }
      _tile_stored(0, sums + v, V * 4);
    }
  }
}
#endif
