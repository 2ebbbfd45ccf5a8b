// Products of bfloat16 rows with a packed panel by AMX tiles, where the processor has them.
//
// A panel's layout, pairs of inputs side by side, is what the instructions take. A tile adds over
// the inputs in ascending order, even and odd ones apart; a row does not depend on the others.
#pragma once
#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#include "vec.h"

constexpr long AMX_ROWS = 32, AMX_INPUTS = 32;  // of a product, and of one step of it

// Linux lends a process the tile registers when it asks.
inline bool amx_allowed() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return allowed;
}

// The shape of the eight tiles: sums 0 to 3, rows of x, weights. Freed for others' use at its end.
class Tiles {
 public:
  explicit Tiles(long rows) {
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {};
    shape.palette = 1;
    uint8_t few = (uint8_t)std::min(rows, 16L), more = (uint8_t)(rows - few);
    // Up to 16 rows: 4 holds x, 5 to 7 weights. More: 2, 3 and 5 belong to the rows beyond 16.
    uint8_t all[8] = {few, few, few, few, few, 16, 16, 16};
    if (more) all[2] = all[3] = all[5] = more;
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = all[i];
    __asm__ volatile("" : : "r"(&shape) : "memory");  // GCC 12 believes that 8 bytes of it are read
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
};

// sums[r][n] = x[r] . w[n] for the 64 outputs of a panel; K is a multiple of AMX_INPUTS.
inline void amx_sums(const bf16* x, long ldx, long rows, const bf16* panel, long K, float* sums, bool cold = false) {
  constexpr long PANEL_BYTES = 64 * 4, GROUP = 2 * 16, STEP = AMX_INPUTS * 64;
  Tiles tiles(rows);
  if (rows <= 16) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (const bf16* w = panel; w < panel + K * 64; w += STEP, x += AMX_INPUTS) {
      if (cold) for (long line = 0; line < STEP; line += 32) __builtin_prefetch(w + STEP + line);
      _tile_loadd(4, x, ldx * 2);
      _tile_loadd(5, w, PANEL_BYTES); _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(6, w + GROUP, PANEL_BYTES); _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, w + 2 * GROUP, PANEL_BYTES); _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, w + 3 * GROUP, PANEL_BYTES); _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, PANEL_BYTES); _tile_stored(1, sums + 16, PANEL_BYTES);
    _tile_stored(2, sums + 32, PANEL_BYTES); _tile_stored(3, sums + 48, PANEL_BYTES);
    return;
  }
  for (int half = 0; half < 2; half++) {
    const bf16 *w = panel + half * 2 * GROUP, *low = x, *high = x + 16 * ldx;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (long k = 0; k < K; k += AMX_INPUTS, w += STEP) {
      if (cold && !half) for (long line = 0; line < STEP; line += 32) __builtin_prefetch(w + STEP + line);
      _tile_loadd(6, w, PANEL_BYTES); _tile_loadd(7, w + GROUP, PANEL_BYTES);
      _tile_loadd(4, low + k, ldx * 2); _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, high + k, ldx * 2); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    float* to = sums + half * 32;
    _tile_stored(0, to, PANEL_BYTES); _tile_stored(1, to + 16, PANEL_BYTES);
    _tile_stored(2, to + 16 * 64, PANEL_BYTES); _tile_stored(3, to + 16 * 64 + 16, PANEL_BYTES);
  }
}
#endif
