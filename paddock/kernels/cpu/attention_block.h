// Attention of a few rows to one block of keys: queries of one sequence in the heads that share a key
// head. Softmax is taken block by block: a row keeps its maximum, its sum and its weighted values.
#pragma once
#include <vector>
#include "attention_amx.h"
#include "linear.h"

constexpr int KEYS = 64;            // of a block
constexpr int FEW_ROWS = 8;         // up to here keys are read once in place, without transposing them
constexpr int MAX_ROWS = 48;        // of a task

struct AttentionShape { long H, G, D, V; float scale; long window; };

// Where the keys and values of a block lie.
template <class T> struct Block { const T *key[KEYS], *value[KEYS]; };

// Asks for a row of `dims` that is read soon: pages are anywhere, nobody but us knows which lines come next.
template <class T> inline void prefetch_row(const T* row, long dims) {
  for (long d = 0; d < dims; d += 64 / sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// acc[r][v] += sum_k p[r, k] * value[k][v] over rows of values that lie apart; asks for those of `next` meanwhile
template <int R, int C, class T>
inline void weigh(const float* p, const T* const* value, long col, int some, int n, const T* const* next, float* out, long ldo) {
  vec acc[R][C];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < C; v++) acc[r][v] = load(out + r * ldo + col + v * LANES);
  for (int k = 0; k < n; k++) {
    if (next) prefetch_row(next[k] + col, C > 1 ? C * LANES : some);
    vec b[C];
    for (int v = 0; v < C; v++) b[v] = C > 1 ? load(value[k] + col + v * LANES) : load_some(value[k] + col, some), keep(b[v]);
    for (int r = 0; r < R; r++) {
      vec a = splat(p[r * KEYS + k]);
      for (int v = 0; v < C; v++) acc[r][v] += a * b[v];
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < C; v++) store(out + r * ldo + col + v * LANES, acc[r][v]);
}

#if defined(__AVX512BF16__)
// The same for bfloat16 as it is, two dims at a time; D is a multiple of 32.
template <int R> inline void pair_dots(const bf16* q, long D, const bf16* const* key, float* scores) {
  vec acc[R][4] = {};
  for (long d = 0; d < D; d += 2 * LANES) {
    __m512bh k[4];
    for (int j = 0; j < 4; j++) k[j] = (__m512bh)_mm512_loadu_si512(key[j] + d), keep(k[j]);
    for (int r = 0; r < R; r++) {
      __m512bh a = (__m512bh)_mm512_loadu_si512(q + r * D + d);
      for (int j = 0; j < 4; j++) acc[r][j] = (vec)_mm512_dpbf16_ps((__m512)acc[r][j], a, k[j]);
    }
  }
  for (int r = 0; r < R; r++) {
    four dot = sum_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    memcpy(scores + r * KEYS, dot.at, sizeof dot);
  }
}

// acc[r][v] += sum_k p[r, k] * value[k][v] for 64 dims, two keys at a time; p in bfloat16
template <int R>
inline void pair_weigh(const bf16* p, const bf16* const* value, long col, int n, const bf16* const* next, float* out, long ldo) {
  __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i first_dims = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(32)), 16));
  __m512i last_dims = _mm512_add_epi16(first_dims, _mm512_set1_epi16(16));
  vec acc[R][4];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 4; v++) acc[r][v] = load(out + r * ldo + col + v * LANES);
  static const bf16 NOTHING[4 * LANES] = {};
  for (int k = 0; k < n; k += 2) {
    const bf16 *even = value[k] + col, *odd = k + 1 < n ? value[k + 1] + col : NOTHING;
    if (next) prefetch_row(next[k] + col, 4 * LANES), prefetch_row(next[k + 1] + col, 4 * LANES);
    __m512bh b[4];
#pragma GCC unroll 2
    for (int v = 0; v < 2; v++) {
      __m512i x = _mm512_loadu_si512(even + v * 32), y = _mm512_loadu_si512(odd + v * 32);
      b[2 * v] = (__m512bh)_mm512_permutex2var_epi16(x, first_dims, y);
      b[2 * v + 1] = (__m512bh)_mm512_permutex2var_epi16(x, last_dims, y);
    }
    for (int r = 0; r < R; r++) {
      int32_t both;
      memcpy(&both, p + r * KEYS + k, 4);
      __m512bh a = (__m512bh)_mm512_set1_epi32(both);
      for (int v = 0; v < 4; v++) acc[r][v] = (vec)_mm512_dpbf16_ps((__m512)acc[r][v], a, b[v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < 4; v++) store(out + r * ldo + col + v * LANES, acc[r][v]);
}
#endif

// Whether a few rows of bfloat16 are multiplied in pairs.
template <class T> inline bool in_pairs(int rows, long D, long V) {
#if defined(__AVX512BF16__)
  return sizeof(T) == 2 && rows <= FEW_ROWS && D % (2 * LANES) == 0 && V % (4 * LANES) == 0;
#else
  return false;
#endif
}

// The rows of one task: scaled queries, running maximum, sum and weighted values.
struct Rows {
  std::vector<float> q, scores, out, key_T;
  std::vector<bf16> q_half;        // of a few rows, not scaled
  bf16 p_half[FEW_ROWS * KEYS];
  float top[MAX_ROWS], total[MAX_ROWS];

  // Begin with `rows` rows, padded to whole vectors of rows.
  void reset(const AttentionShape& a, int rows) {
    long padded_rows = std::min<long>(MAX_ROWS, rows + LANES);
    q.resize(MAX_ROWS * padded(a.D)), scores.resize(MAX_ROWS * KEYS), key_T.resize(padded(a.D) * KEYS);
    q_half.resize(FEW_ROWS * a.D), out.resize(MAX_ROWS * padded(a.V));
    std::fill(top, top + padded_rows, -INFINITY), std::fill(total, total + padded_rows, 0.0f);
    std::fill(out.begin(), out.begin() + padded_rows * padded(a.V), 0.0f);
  }
  // `row(r)` is the query of row r.
  template <class T, class F> void take_queries(const AttentionShape& a, int rows, F row) {
    for (int r = 0; r < rows; r++) {
      const T* from = row(r);
      if constexpr (sizeof(T) == 2)
        if (in_pairs<T>(rows, a.D, a.V)) {
          memcpy(q_half.data() + r * a.D, from, a.D * sizeof(T));
          continue;
        }
      for (long d = 0; d < a.D; d += LANES)
        store(q.data() + r * padded(a.D) + d, load_some(from + d, (int)std::min<long>(LANES, a.D - d)) * a.scale);
    }
  }
};

// Calls dots(four, j) for four keys from j on at a time, of n, and asks for those of `next` meanwhile.
template <class T, class F> inline void by_fours(const T* const* key, int n, long D, const T* const* next, F dots) {
  const T* four[4];
  for (int j = 0; j < n; j += 4) {
    for (int i = 0; next && i < 4; i++) prefetch_row(next[j + i], D);
    for (int i = 0; i < 4; i++) four[i] = key[std::min(j + i, n - 1)];
    dots(four, j);
  }
}

// scores[r][k] = q[r] . key[k] for n keys; rows of scores have KEYS columns
template <class T>
void key_dots(const float* q, int rows, long D, const T* const* key, int n, float* key_T, float* scores, const T* const* next = nullptr) {
  if (rows <= FEW_ROWS)
    return by_fours(key, n, D, next, [&](const T* const* four, int j) {
      by_rows(rows, [&](auto R, long r) { dots<R>(q + r * padded(D), D, four, scores + r * KEYS + j, KEYS); });
    });
  for (int k = 0; k < n; k += LANES)
    for (long d = 0; d < D; d += LANES) {
      vec tile[LANES] = {};
      int some = (int)std::min<long>(LANES, D - d);
      for (int i = 0; i < std::min(LANES, n - k); i++) tile[i] = load_some(key[k + i] + d, some);
      transpose(tile);
      for (int i = 0; i < some; i++) store(key_T + (d + i) * KEYS + k, tile[i]);
    }
  for (int c = 0; c < KEYS / LANES && c * LANES < n; c += COLUMNS)
    by_rows(rows, [&](auto R, long r) {
      vec acc[R][COLUMNS] = {};
      multiply<R>(q + r * padded(D), padded(D), key_T + c * LANES, KEYS, D, acc);
      for (int i = 0; i < R; i++)
        for (int v = 0; v < COLUMNS; v++) store(scores + (r + i) * KEYS + (c + v) * LANES, acc[i][v]);
    });
}

// `next` is the block read after this one, or null.
template <class T>
void attend_block(Rows& s, int rows, const AttentionShape& a, const Block<T>& block, const Block<T>* next, int n,
                  const int* seen_from, const int* seen_to, const uint64_t* selected) {
  const T *const *key = block.key, *const *value = block.value;
  const T *const *next_key = next ? next->key : nullptr, *const *next_value = next ? next->value : nullptr;
  bool pairs = in_pairs<T>(rows, a.D, a.V);
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2)
    if (pairs)
      by_fours(key, n, a.D, next_key, [&](const bf16* const* four, int j) {
        by_rows(rows, [&](auto R, long r) { pair_dots<R>(s.q_half.data() + r * a.D, a.D, four, s.scores.data() + r * KEYS + j); });
      });
#endif
  if (!pairs) key_dots(s.q.data(), rows, a.D, key, n, s.key_T.data(), s.scores.data(), next_key);
  float scale = pairs ? a.scale : 1.0f;  // else the queries are scaled
  long V = padded(a.V);
  for (int r = 0; r < rows; r++) {
    float* score = s.scores.data() + r * KEYS;
    for (int k = 0; k < std::min(seen_from[r], n); k++) score[k] = -INFINITY;
    for (int k = std::max(0, seen_to[r]); k < (n + LANES - 1) / LANES * LANES; k++) score[k] = -INFINITY;
    if (selected)
      for (int k = 0; k < n; k++)
        if (!(selected[r] >> k & 1)) score[k] = -INFINITY;
    vec most = splat(-INFINITY);
    for (int k = 0; k < n; k += LANES) {
      vec x = load(score + k) * scale;
      store(score + k, x);
      most = max(most, x);
    }
    float top = std::max(s.top[r], largest(most));
    if (top == -INFINITY) {  // nothing seen yet
      memset(score, 0, KEYS * sizeof(float));
      if (pairs) memset(s.p_half + r * KEYS, 0, KEYS * sizeof(bf16));
      continue;
    }
    vec total = {};
    for (int k = 0; k < n; k += LANES) {
      vec p = exp(load(score + k) - top);
      if (pairs) store(s.p_half + r * KEYS + k, p); else store(score + k, p);
      total += p;
    }
    float shrink = std::exp(s.top[r] - top);
    s.total[r] = s.total[r] * shrink + sum(total);
    s.top[r] = top;
    if (shrink != 1.0f)
      for (long v = 0; v < V; v += LANES) store(s.out.data() + r * V + v, load(s.out.data() + r * V + v) * shrink);
  }
  long col = 0;
#if defined(__AVX512BF16__)
  if constexpr (sizeof(T) == 2)
    for (; pairs && col < a.V; col += 4 * LANES)
      by_rows(rows, [&](auto R, long r) { pair_weigh<R>(s.p_half + r * KEYS, value, col, n, r ? nullptr : next_value, s.out.data() + r * V, V); });
#endif
  for (; col + COLUMNS * LANES <= a.V; col += COLUMNS * LANES)
    by_rows(rows, [&](auto R, long r) { weigh<R, COLUMNS>(s.scores.data() + r * KEYS, value, col, LANES, n, r ? nullptr : next_value, s.out.data() + r * V, V); });
  for (; col < a.V; col += LANES)
    by_rows(rows, [&](auto R, long r) {
      weigh<R, 1>(s.scores.data() + r * KEYS, value, col, (int)std::min<long>(LANES, a.V - col), n, r ? nullptr : next_value,
                  s.out.data() + r * V, V);
    });
}
