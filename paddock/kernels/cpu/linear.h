// Matrix products with packed weights.
//
// A weight [N, K] is stored as panels of 64 outputs: [ceil(N / 64)][K][64], padded with zeros. Of
// bfloat16 two neighbouring inputs lie together, [K / 2][64][2], as vdpbf16ps takes them. A tile
// holds a few rows and one panel in registers and adds over the inputs in ascending order. So a
// row's result does not depend on how many rows there are.
//
// 8-bit weights: a panel is 64 scales in float32, then [K / 2][64][2] integers. They are widened in
// registers, exactly, and a sum is multiplied by its output's scale.
#pragma once
#include <type_traits>
#include <vector>
#include "amx.h"
#include "pool.h"
#include "vec.h"

constexpr int PANEL = 64;
#if defined(__AVX512F__)
constexpr int COLUMNS = 4, ROWS = 6;  // vectors and rows in registers: 24 of 32 are sums
#else
constexpr int COLUMNS = 1, ROWS = 5;
#endif

// Weights that a loop over the inputs asks for before they are read: LINES cache lines at each step, `apart` bytes apart.
template <int LINES> struct Ahead {
  const char* at = nullptr;
  long apart = 64;

  void step(long bytes) {
#pragma GCC unroll 4
    for (int i = 0; i < LINES; i++) __builtin_prefetch(at + i * apart, 0, 2);
    at += bytes;
  }
};

// Hold a vector in a register: for up to four rows the compiler would load it again for each of them.
template <class V> inline void keep(V& v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#endif
}

// acc[r][v] += sum_k x[r, k] * w[k, v]
template <int R, int LINES = 0>
[[gnu::always_inline]] inline void multiply(const float* x, long ldx, const float* w, long ldw, long K, vec (&acc)[R][COLUMNS], Ahead<LINES> ahead = {}) {
  for (long k = 0; k < K; k++, w += ldw) {
    ahead.step(ldw * sizeof(float));
    vec b[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; v++) b[v] = load(w + v * LANES), keep(b[v]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vec a = splat(x[r * ldx + k]);
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; v++) acc[r][v] += a * b[v];
    }
  }
}

template <int R, int LINES = 0>
[[gnu::always_inline]] inline void multiply(const bf16* x, long ldx, const bf16* w, long ldw, long K, vec (&acc)[R][COLUMNS], Ahead<LINES> ahead = {}) {
  for (long k = 0; k < K; k += 2, w += 2 * ldw) {
    ahead.step(2 * ldw * sizeof(bf16));
#if defined(__AVX512BF16__)
    __m512bh b[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; v++) b[v] = (__m512bh)_mm512_loadu_si512(w + 2 * v * LANES), keep(b[v]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, x + r * ldx + k, 4);
      __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; v++) acc[r][v] = (vec)_mm512_dpbf16_ps((__m512)acc[r][v], a, b[v]);
    }
#else
    vec even[COLUMNS], odd[COLUMNS];
    for (int v = 0; v < COLUMNS; v++) {
      uvec both = *(const uvec*)(w + 2 * v * LANES);
      even[v] = (vec)(both << 16);
      odd[v] = (vec)(both & 0xffff0000u);
    }
    for (int r = 0; r < R; r++) {
      vec first = splat(widen(x[r * ldx + k])), second = splat(widen(x[r * ldx + k + 1]));
      for (int v = 0; v < COLUMNS; v++) acc[r][v] += first * even[v], acc[r][v] += second * odd[v];
    }
#endif
  }
}

// Eight bits of weights for 16 outputs, two inputs of each side by side.
inline void widen(const int8* w, vec& even, vec& odd) {
#if defined(__AVX512F__)
  __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i*)w));
  even = (vec)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24));
  odd = (vec)_mm512_cvtepi32_ps(_mm512_srai_epi32(both, 8));
#else
  for (int i = 0; i < LANES; i++) even[i] = w[2 * i].value, odd[i] = w[2 * i + 1].value;
#endif
}

template <int R, int LINES = 0, class T>
[[gnu::always_inline]] inline void multiply(const T* x, long ldx, const int8* w, long ldw, long K, vec (&acc)[R][COLUMNS], Ahead<LINES> ahead = {}) {
  for (long k = 0; k < K; k += 2, w += 2 * ldw) {
    ahead.step(2 * ldw);
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) {  // an 8-bit integer is exact in bfloat16
      __m512bh b[COLUMNS];
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; v++) {
        const __m128i* from = (const __m128i*)(w + 2 * v * LANES);
        __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
        __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
        b[v] = _mm512_cvtne2ps_pbh(high, low);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + r * ldx + k, 4);
        __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
        for (int v = 0; v < COLUMNS; v++) acc[r][v] = (vec)_mm512_dpbf16_ps((__m512)acc[r][v], a, b[v]);
      }
      continue;
    }
#endif
    vec even[COLUMNS], odd[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; v++) widen(w + 2 * v * LANES, even[v], odd[v]);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vec first = splat(widen(x[r * ldx + k])), second = splat(widen(x[r * ldx + k + 1]));
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; v++) acc[r][v] += first * even[v], acc[r][v] += second * odd[v];
    }
  }
}

// Calls tile<R> for M rows: as many whole tiles as there are, then the rest.
template <class F> inline void by_rows(long M, F tile) {
  long m = 0;
  for (; m + ROWS <= M; m += ROWS) tile(std::integral_constant<int, ROWS>(), m);
  switch (M - m) {
    case 5: tile(std::integral_constant<int, 5>(), m); break;
    case 4: tile(std::integral_constant<int, 4>(), m); break;
    case 3: tile(std::integral_constant<int, 3>(), m); break;
    case 2: tile(std::integral_constant<int, 2>(), m); break;
    case 1: tile(std::integral_constant<int, 1>(), m); break;
  }
}

// Inputs that lie side by side in a panel.
template <class W> constexpr int PAIR = sizeof(W) == 4 ? 1 : 2;

// Of a panel, in elements: its scales, and all of it.
template <class W> constexpr long SCALES = sizeof(W) == 1 ? PANEL * sizeof(float) : 0;
template <class W> inline long panel_size(long K) { return SCALES<W> + K * PANEL; }

constexpr long ROW_BLOCK = 192;  // rows of a task
constexpr long MAX_TILE = 32;

// Rows of a tile of products; it divides ROW_BLOCK.
template <class W> inline long tile_rows(long K) {
#if defined(__AMX_BF16__)
  if (sizeof(W) == 2 && K % AMX_INPUTS == 0 && amx_allowed()) return AMX_ROWS;
#endif
  return 4 * ROWS;
}

// sums[r][n] = x[r] . w[n] for at most tile_rows(K) rows and the 64 outputs of a panel. If no tile before has read the
// panel, `next` is the one that this thread probably reads after it: the first pass over the rows asks for the lines of
// this panel, the others for halves of the next, since they leave memory idle.
template <class T, class W>
inline void panel_sums(const T* x, long ldx, long rows, const W* panel, long K, float* sums, const W* next) {
#if defined(__AMX_BF16__)
  if constexpr (sizeof(W) == 2)
    if (tile_rows<W>(K) == AMX_ROWS) return amx_sums(x, ldx, rows, panel, K, sums, next != nullptr);
#endif
  constexpr int LINES = std::max<int>(1, COLUMNS * PAIR<W> * sizeof(W) / sizeof(float));  // read by a step over the inputs
  const float* scale = (const float*)panel;
  for (int c = 0; c < PANEL / LANES; c += COLUMNS)
    by_rows(rows, [&](auto R, long r) {
      vec acc[R][COLUMNS] = {};
      const T* row = x + r * ldx;
      const W* w = panel + SCALES<W> + c * LANES * PAIR<W>;
      if (next && r == 0) {
        multiply<R, LINES>(row, ldx, w, PANEL, K, acc, {(const char*)w + 2048 * R});
      } else if (next && LINES == 4) {
        multiply<R, 2>(row, ldx, w, PANEL, K, acc, {(const char*)next + 128 * ((r / ROWS + 1) % 2), 64});
      } else {
        multiply<R>(row, ldx, w, PANEL, K, acc);
      }
      for (int i = 0; i < R; i++)
        for (int v = 0; v < COLUMNS; v++) {
          if (SCALES<W>) acc[i][v] *= load(scale + (c + v) * LANES);
          store(sums + (r + i) * PANEL + (c + v) * LANES, acc[i][v]);
        }
    });
}

// Calls tile(m, rows) for M rows, in tiles.
template <class W, class F> inline void by_tiles(long M, long K, F tile) {
  for (long m = 0, step = tile_rows<W>(K); m < M; m += step) tile(m, std::min(step, M - m));
}

// Calls out(r, v, some) for the outputs of a panel that exist: `some` of them from sums[r][v] on.
template <class F> inline void for_outputs(long rows, long outputs, F out) {
  for (long r = 0; r < rows; r++)
    for (long v = 0; v < std::min<long>(PANEL, outputs); v += LANES)
      out(r, v, (int)std::min<long>(LANES, outputs - v));
}

// The panel, or task, that a thread probably takes after this one.
inline long following(long p, long count) { return std::min(p + Pool::get().threads(), count - 1); }

// Calls tile(m, rows, p, next) for the tiles of M rows and the panels of N outputs, on several threads, where `next` is
// as for panel_sums, -1 for none; an output reads `inputs` weights. With AMX the rows of a tile stay in the fastest cache while panels pass by;
// without it a panel stays.
template <class W, class F> inline void for_panels(long M, long N, long K, long inputs, F tile) {
  constexpr long GROUP_BYTES = 1 << 19, TASKS = 8;
  long panels = (N + PANEL - 1) / PANEL, blocks = (M + ROW_BLOCK - 1) / ROW_BLOCK, group = 1;
  if (tile_rows<W>(K) == MAX_TILE)
    group = std::max(1L, std::min(GROUP_BYTES / (inputs * PANEL * (long)sizeof(W)), panels * blocks / TASKS));
  long groups = (panels + group - 1) / group;
  parallel(groups * blocks, (double)M * N * inputs, [&](long task) {
    long first = task / blocks * group, last = std::min(panels, first + group), m0 = task % blocks * ROW_BLOCK;
    by_tiles<W>(std::min(ROW_BLOCK, M - m0), K, [&](long m, long rows) {
      for (long p = first; p < last; p++) tile(m0 + m, rows, p, m ? -1 : following(p, panels));
    });
  });
}

template <class T> constexpr const T* NO_BIAS = nullptr;

template <class T, class O, class W>
void linear(long M, long N, long K, const T* x, long ldx, const W* w, const T* bias, O* out, long ldo) {
  for_panels<W>(M, N, K, K, [&](long m, long rows, long p, long next) {
    float sums[MAX_TILE * PANEL];
    long n = p * PANEL, size = panel_size<W>(K);
    panel_sums(x + m * ldx, ldx, rows, w + p * size, K, sums, next < 0 ? nullptr : w + next * size);
    for_outputs(rows, N - n, [&](long r, long v, int some) {
      vec y = load(sums + r * PANEL + v);
      if (bias) y += load_some(bias + n + v, some);
      store_some(out + (m + r) * ldo + n + v, y, some);
    });
  });
}

// out[m, h] = w[h] x[m, h] for a stack of H weights, each packed
template <class T>
void linear_stack(long H, long M, long N, long K, const T* x, long ldx, long x_head, const T* w, T* out, long ldo, long out_head) {
  long panels = (N + PANEL - 1) / PANEL;
  parallel(H * panels, (double)H * M * N * K, [&](long task) {
    long h = task / panels, n = task % panels * PANEL;
    const T *panel = w + task * panel_size<T>(K), *next = w + following(task, H * panels) * panel_size<T>(K);
    by_tiles<T>(M, K, [&](long m, long rows) {
      float sums[MAX_TILE * PANEL];
      panel_sums(x + m * ldx + h * x_head, ldx, rows, panel, K, sums, m ? nullptr : next);
      for_outputs(rows, N - n, [&](long r, long v, int some) {
        store_some(out + (m + r) * ldo + h * out_head + n + v, load(sums + r * PANEL + v), some);
      });
    });
  });
}

// silu(gate x) * up x for the rows of a tile and one panel of each; `outputs` exist from out on
template <class T, class W>
inline void gate_up_panel(const T* x, long ldx, long rows, const W* both, long K, T* out, long ldo, long outputs, const W* next) {
  float gate[MAX_TILE * PANEL], up[MAX_TILE * PANEL];
  const W* other = both + panel_size<W>(K);
  panel_sums(x, ldx, rows, both, K, gate, next ? other : nullptr);
  panel_sums(x, ldx, rows, other, K, up, next);
  for_outputs(rows, outputs, [&](long r, long v, int some) {
    store_some(out + r * ldo + v, silu(load(gate + r * PANEL + v)) * load(up + r * PANEL + v), some);
  });
}

// silu(gate x) * up x: panels of `gate` and `up` alternate.
template <class T, class W>
void gate_up(long M, long F, long K, const T* x, long ldx, const W* w, T* out, long ldo) {
  for_panels<W>(M, F, K, 2 * K, [&](long m, long rows, long p, long next) {
    long n = p * PANEL, size = 2 * panel_size<W>(K);
    gate_up_panel(x + m * ldx, ldx, rows, w + p * size, K, out + m * ldo + n, ldo, F - n, next < 0 ? nullptr : w + next * size);
  });
}

inline long padded(long dims) { return (dims + LANES - 1) / LANES * LANES; }

// scores[r][j] = q[r] . key[j] for R rows, padded with zeros, and 4 keys
template <int R, class T> inline void dots(const float* q, long D, const T* const* key, float* scores, long lds) {
  vec acc[R][4] = {};
  long ldq = padded(D);
  auto add = [&](long d, auto read) {
    vec k[4];
    for (int j = 0; j < 4; j++) k[j] = read(key[j] + d);
    for (int r = 0; r < R; r++) {
      vec a = load(q + r * ldq + d);
      for (int j = 0; j < 4; j++) acc[r][j] += a * k[j];
    }
  };
  long d = 0;
  for (; d + LANES <= D; d += LANES) add(d, [](const T* p) { return load(p); });
  if (d < D) add(d, [&](const T* p) { return load_some(p, (int)(D - d)); });
  for (int r = 0; r < R; r++) {
    four dot = sum_four(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
    memcpy(scores + r * lds, dot.at, sizeof dot);
  }
}

// A product with a small float32 weight as it is, such as a router's: x is widened first.
template <class T> void linear_fp32(long M, long N, long K, const T* x, long ldx, const float* w, float* out) {
  parallel((M + ROWS - 1) / ROWS, (double)M * N * K, [&](long task) {
    thread_local std::vector<float> wide;
    wide.resize(ROWS * padded(K));
    float found[ROWS * 4];
    long m0 = task * ROWS, rows = std::min<long>(ROWS, M - m0);
    for (long r = 0; r < rows; r++)
      for (long k = 0; k < K; k += LANES)
        store(wide.data() + r * padded(K) + k, load_some(x + (m0 + r) * ldx + k, (int)std::min<long>(LANES, K - k)));
    for (long n = 0; n < N; n += 4) {
      const float* four[4];
      for (int j = 0; j < 4; j++) four[j] = w + std::min(n + j, N - 1) * K;
      by_rows(rows, [&](auto R, long r) { dots<R>(wide.data() + r * padded(K), K, four, found + r * 4, 4); });
      for (long r = 0; r < rows; r++)
        memcpy(out + (m0 + r) * N + n, found + r * 4, std::min<long>(4, N - n) * sizeof(float));
    }
  });
}
