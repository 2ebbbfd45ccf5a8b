// Gradients: of weights, of RMSNorm, of the gated activation, and of cross-entropy.
//
// Sums over rows run in ascending order within blocks of fixed size: a gradient does not depend on
// the number of threads.
#pragma once
#include "elementwise.h"
#include "linear.h"

constexpr long DEPTH = 512;       // rows of a block that a sum runs over
constexpr long OUTPUTS = 16 * ROWS;  // of a task

// acc[r][v] += sum_t a[t][r] * b[t][v], of bfloat16 two t at a time: a and b hold them as pairs
template <int R> inline void outer(const float* a, long lda, const float* b, long ldb, long depth, vec (&acc)[R][COLUMNS]) {
  for (long t = 0; t < depth; t++, a += lda, b += ldb) {
    vec row[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; v++) row[v] = load(b + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      vec x = splat(a[r]);
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; v++) acc[r][v] += x * row[v];
    }
  }
}
template <int R> inline void outer(const bf16* a, long lda, const bf16* b, long ldb, long depth, vec (&acc)[R][COLUMNS]) {
  for (long t = 0; t < depth; t += 2, a += 2 * lda, b += 2 * ldb) {
#if defined(__AVX512BF16__)
    __m512bh row[COLUMNS];
#pragma GCC unroll 4
    for (int v = 0; v < COLUMNS; v++) row[v] = (__m512bh)_mm512_loadu_si512(b + 2 * v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      memcpy(&pair, a + 2 * r, 4);
      __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int v = 0; v < COLUMNS; v++) acc[r][v] = (vec)_mm512_dpbf16_ps((__m512)acc[r][v], x, row[v]);
    }
#else
    for (int v = 0; v < COLUMNS; v++) {
      uvec both = *(const uvec*)(b + 2 * v * LANES);
      vec even = (vec)(both << 16), odd = (vec)(both & 0xffff0000u);
      for (int r = 0; r < R; r++) acc[r][v] += widen(a[2 * r]) * even, acc[r][v] += widen(a[2 * r + 1]) * odd;
    }
#endif
  }
}

// A copy of `depth` rows and `some` of `width` columns, the others zero. Of bfloat16 rows come in
// pairs, whose elements lie side by side.
inline void gather(const float* from, long ld, long depth, long some, long width, float* to) {
  for (long t = 0; t < depth; t++, from += ld, to += width) {
    memcpy(to, from, some * sizeof(float));
    std::fill(to + some, to + width, 0.0f);
  }
}
inline void gather(const bf16* from, long ld, long depth, long some, long width, bf16* to) {
  static const bf16 NOTHING[LANES] = {};
  for (long t = 0; t < depth; t += 2, from += 2 * ld, to += 2 * width) {
    memset(to + 2 * some, 0, 2 * (width - some) * sizeof(bf16));
    for (long i = 0; i < some; i += LANES) {
      long n = std::min<long>(LANES, some - i);
      const bf16* next = t + 1 < depth ? from + ld + i : NOTHING;
      if (n == LANES) {
        *(uvec*)(to + 2 * i) = __builtin_convertvector(*(const hvec*)(from + i), uvec) |
                               __builtin_convertvector(*(const hvec*)next, uvec) << 16;
      } else {
        for (long j = 0; j < n; j++) to[2 * (i + j)] = from[i + j], to[2 * (i + j) + 1] = next[j];
      }
    }
  }
}

// out [N, K] (+)= dy[T, N]^T x[T, K], in float32
template <class T>
void weight_grad(long rows, long N, long K, const T* dy, long ldy, const T* x, long ldx, float* out, bool add) {
  parallel((N + OUTPUTS - 1) / OUTPUTS, (double)rows * N * K, [&](long task) {
    thread_local std::vector<T> a, b;
    a.resize(DEPTH * OUTPUTS), b.resize(DEPTH * PANEL);
    long n0 = task * OUTPUTS, outputs = std::min(OUTPUTS, N - n0);
    for (long t = 0; t < rows; t += DEPTH) {
      long depth = std::min(DEPTH, rows - t);
      bool first = t == 0 && !add;
      gather(dy + t * ldy + n0, ldy, depth, outputs, OUTPUTS, a.data());
      for (long k = 0; k < K; k += PANEL) {
        long inputs = std::min<long>(PANEL, K - k);
        gather(x + t * ldx + k, ldx, depth, inputs, PANEL, b.data());
        for (int c = 0; c * LANES < inputs; c += COLUMNS)
          by_rows(outputs, [&](auto R, long r) {
            auto at = [&](int i, int v) { return out + (n0 + r + i) * K + k + (c + v) * LANES; };
            auto some = [&](int v) { return (int)std::min<long>(LANES, inputs - (c + v) * LANES); };
            vec acc[R][COLUMNS] = {};
            if (!first)
              for (int i = 0; i < R; i++)
                for (int v = 0; v < COLUMNS && some(v) > 0; v++) acc[i][v] = load_some(at(i, v), some(v));
            outer<R>(a.data() + r * PAIR<T>, OUTPUTS, b.data() + c * LANES * PAIR<T>, PANEL, depth, acc);
            for (int i = 0; i < R; i++)
              for (int v = 0; v < COLUMNS && some(v) > 0; v++) store_some(at(i, v), acc[i][v], some(v));
          });
      }
    }
  });
}

// Calls take(i, some) for n elements, `some` of them from i on.
template <class F> inline void for_vectors(long n, F take) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) take(i, LANES);
  if (i < n) take(i, (int)(n - i));
}

// silu(gate) * up
template <class T> void swiglu(long M, long F, const T* gate, long ldg, const T* up, long ldu, T* out) {
  for_rows(M, F, [&](long m) {
    for_vectors(F, [&](long f, int some) {
      store_some(out + m * F + f, silu(load_some(gate + m * ldg + f, some)) * load_some(up + m * ldu + f, some), some);
    });
  });
}
// Gradients of gate and up
template <class T>
void swiglu_grad(long M, long F, const T* dy, const T* gate, long ldg, const T* up, long ldu, T* dgate, T* dup, long ldd) {
  for_rows(M, F, [&](long m) {
    for_vectors(F, [&](long f, int some) {
      vec g = load_some(gate + m * ldg + f, some), u = load_some(up + m * ldu + f, some), y = load_some(dy + m * F + f, some);
      vec share = sigmoid(g);
      store_some(dgate + m * ldd + f, y * u * share * (1.0f + g * (1.0f - share)), some);
      store_some(dup + m * ldd + f, y * g * share, some);
    });
  });
}

constexpr long NORM_ROWS = 64;  // whose gradients of the weight are added up before those of others

// Gradients of RMSNorm; `parts` [ceil(M / NORM_ROWS), D] are those of the weight.
template <class T>
void rms_norm_grad(long M, long D, const T* dy, long ldy, const T* x, long ldx, const T* weight, float eps, T* dx, float* parts) {
  parallel((M + NORM_ROWS - 1) / NORM_ROWS, COST * M * D, [&](long task) {
    float* dweight = parts + task * D;
    std::fill(dweight, dweight + D, 0.0f);
    for (long m = task * NORM_ROWS; m < std::min(M, (task + 1) * NORM_ROWS); m++) {
      const T *row = x + m * ldx, *above = dy + m * ldy;
      vec squares = {}, products = {};
      for_vectors(D, [&](long d, int some) {
        vec v = load_some(row + d, some);
        squares += v * v;
        products += v * load_some(above + d, some) * load_some(weight + d, some);
      });
      float scale = 1.0f / std::sqrt(sum(squares) / D + eps), mean = sum(products) * scale * scale / D;
      for_vectors(D, [&](long d, int some) {
        vec v = load_some(row + d, some), y = load_some(above + d, some);
        store_some(dx + m * D + d, (y * load_some(weight + d, some) - v * mean) * scale, some);
        store_some(dweight + d, load_some(dweight + d, some) + y * v * scale, some);
      });
    }
  });
}

// Of logits [R, V]: log-sum-exp and negative log-likelihood of the target in each row; softmax minus
// one at the target, to `grad` unless it is null. It may be the logits themselves.
template <class T>
void cross_entropy(long R, long V, const float* logits, const int64_t* target, float inverse_temperature, float* nll, T* grad) {
  parallel(R, COST * R * V, [&](long r) {
    const float* row = logits + r * V;
    vec most = splat(-INFINITY), total = {};
    float top = -INFINITY;
    long whole = V / LANES * LANES;
    for (long v = 0; v < whole; v += LANES) most = max(most, load(row + v));
    for (long v = whole; v < V; v++) top = std::max(top, row[v]);
    top = std::max(top, largest(most)) * inverse_temperature;
    for (long v = 0; v < whole; v += LANES) total += exp(load(row + v) * inverse_temperature - top);
    float rest = 0;
    for (long v = whole; v < V; v++) rest += std::exp(row[v] * inverse_temperature - top);
    float lse = top + std::log(sum(total) + rest);
    nll[r] = lse - row[target[r]] * inverse_temperature;
    if (!grad) return;
    T* to = grad + r * V;
    for_vectors(V, [&](long v, int some) {
      vec p = exp(load_some(row + v, some) * inverse_temperature - lse);
      ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      p = lane == (int)std::min<long>(LANES, std::max<long>(-1, target[r] - v)) ? p - 1.0f : p;
      store_some(to + v, p * inverse_temperature, some);
    });
  });
}
