// Exits with 0 if a product by AMX tiles is right; dies or exits with 1 where AMX is refused.
#include "amx.h"

int main() {
  constexpr long ROWS = 20, K = 64;
  static bf16 x[ROWS * K], w[K * 64];
  static float sums[AMX_ROWS * 64];
  for (long i = 0; i < ROWS * K; i++) x[i].bits = 0x3f80;                // 1
  for (long i = 0; i < K * 64; i++) w[i].bits = i / 2 % 64 < 32 ? 0x4000 : 0x3f80;  // 2 and 1
  if (!amx_allowed()) return 1;
  amx_sums(x, K, ROWS, w, K, sums);
  for (long r = 0; r < ROWS; r++)
    for (long n = 0; n < 64; n++)
      if (sums[r * 64 + n] != (n < 32 ? 2 * K : K)) return 1;
  return 0;
}
