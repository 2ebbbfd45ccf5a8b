// Matrix products with packed weights.
//
// A weight [N, K] is stored as panels of 64 outputs: [ceil(N / 64)][K][64], padded with zeros. Of
// bfloat16 two neighbouring inputs lie together, [K / 2][64][2], as vdpbf16ps takes them. A tile
// holds a few rows and one panel in registers and adds over the inputs in ascending order. So a
// row's result does not depend on how many rows there are.
#pragma once
#include <type_traits>
#include "pool.h"
#include "vec.h"

constexpr int PANEL = 64;
#if defined(__AVX512F__)
constexpr int COLUMNS = 4, ROWS = 6;  // vectors and rows of a tile: 24 of 32 registers are sums
#else
constexpr int COLUMNS = 1, ROWS = 5;
#endif

// acc[r][v] += sum_k x[r, k] * w[k, v]
template <int R> inline void multiply(const float* x, long ldx, const float* w, long ldw, long K, vec (&acc)[R][COLUMNS]) {
  for (long k = 0; k < K; k++, w += ldw) {
    vec b[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; v++) b[v] = load(w + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vec a = splat(x[r * ldx + k]);
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; v++) acc[r][v] += a * b[v];
    }
  }
}

template <int R> inline void multiply(const bf16* x, long ldx, const bf16* w, long ldw, long K, vec (&acc)[R][COLUMNS]) {
  for (long k = 0; k < K; k += 2, w += 2 * ldw) {
#if defined(__AVX512BF16__)
    __m512bh b[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; v++) b[v] = (__m512bh)_mm512_loadu_si512(w + 2 * v * LANES);
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

constexpr long ROW_BLOCK = 192;      // rows of a task, a multiple of every ROWS but 5

template <class T, class O>
void linear(long M, long N, long K, const T* x, long ldx, const T* w, const T* bias, O* out, long ldo) {
  long panels = (N + PANEL - 1) / PANEL, blocks = (M + ROW_BLOCK - 1) / ROW_BLOCK;
  parallel(panels * blocks, (double)M * N * K, [&](long task) {
    long p = task / blocks, m0 = task % blocks * ROW_BLOCK, rows = std::min(ROW_BLOCK, M - m0);
    for (int c = 0; c < PANEL / LANES; c += COLUMNS) {
      long n = p * PANEL + c * LANES;
      if (n >= N) break;
      const T* panel = w + p * K * PANEL + c * LANES * (sizeof(T) == 2 ? 2 : 1);
      by_rows(rows, [&](auto R, long m) {
        vec acc[R][COLUMNS] = {};
        multiply<R>(x + (m0 + m) * ldx, ldx, panel, PANEL, K, acc);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < COLUMNS; v++) {
            long col = n + v * LANES, at = (m0 + m + r) * ldo + col;
            int some = (int)std::min<long>(LANES, N - col);
            if (some <= 0) break;
            vec y = acc[r][v];
            if (bias) y += load_some(bias + col, some);
            store_some(out + at, y, some);
          }
      });
    }
  });
}

// out[m, h] = w[h] x[m, h] for a stack of H weights, each packed
template <class T>
void linear_stack(long H, long M, long N, long K, const T* x, long ldx, long x_head, const T* w, T* out, long ldo, long out_head) {
  long panels = (N + PANEL - 1) / PANEL;
  parallel(H * panels, (double)H * M * N * K, [&](long task) {
    long h = task / panels, p = task % panels;
    for (int c = 0; c < PANEL / LANES && p * PANEL + c * LANES < N; c += COLUMNS) {
      const T* panel = w + task * K * PANEL + c * LANES * (sizeof(T) == 2 ? 2 : 1);
      by_rows(M, [&](auto R, long m) {
        vec acc[R][COLUMNS] = {};
        multiply<R>(x + m * ldx + h * x_head, ldx, panel, PANEL, K, acc);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < COLUMNS; v++) {
            long col = p * PANEL + (c + v) * LANES;
            int some = (int)std::min<long>(LANES, N - col);
            if (some <= 0) break;
            store_some(out + (m + r) * ldo + h * out_head + col, acc[r][v], some);
          }
      });
    }
  });
}

// silu(gate x) * up x: panels of `gate` and `up` alternate.
template <class T> void gate_up(long M, long F, long K, const T* x, long ldx, const T* w, T* out, long ldo) {
  long panels = (F + PANEL - 1) / PANEL, blocks = (M + ROW_BLOCK - 1) / ROW_BLOCK;
  parallel(panels * blocks, 2.0 * M * F * K, [&](long task) {
    long p = task / blocks, m0 = task % blocks * ROW_BLOCK, rows = std::min(ROW_BLOCK, M - m0);
    for (int c = 0; c < PANEL / LANES; c += COLUMNS) {
      long n = p * PANEL + c * LANES;
      if (n >= F) break;
      const T* gate = w + 2 * p * K * PANEL + c * LANES * (sizeof(T) == 2 ? 2 : 1);
      by_rows(rows, [&](auto R, long m) {
        vec g[R][COLUMNS] = {}, u[R][COLUMNS] = {};
        multiply<R>(x + (m0 + m) * ldx, ldx, gate, PANEL, K, g);
        multiply<R>(x + (m0 + m) * ldx, ldx, gate + K * PANEL, PANEL, K, u);
        for (int r = 0; r < R; r++)
          for (int v = 0; v < COLUMNS; v++) {
            long col = n + v * LANES;
            int some = (int)std::min<long>(LANES, F - col);
            if (some <= 0) break;
            store_some(out + (m0 + m + r) * ldo + col, silu(g[r][v]) * u[r][v], some);
          }
      });
    }
  });
}
