"""Reference of Newton-Schulz.

X any leading dims, B their product, M rows, N columns (M <= N after the transpose).
"""

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

# Steep at zero rather than convergent at one: five steps bring every singular value above 0.002
# into [0.68, 1.21], and training does not mind. (kellerjordan.github.io/posts/muon)
JORDAN: Coefficients = ((3.4445, -4.7750, 2.0315),)

# Steep first, gentle last: five steps bring every singular value above 0.003 into [0.97, 1.15].
# (XTuner's Muon Split for GLM.)
XTUNER: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def newton_schulz(
    update_XMN: Tensor,
    *,
    coefficients: Coefficients = JORDAN,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
) -> Tensor:
    tall = update_XMN.size(-2) > update_XMN.size(-1)
    wide_XMN = update_XMN.mT if tall else update_XMN
    x_BMN = wide_XMN.to(dtype or update_XMN.dtype).reshape(-1, *wide_XMN.shape[-2:])
    x_BMN = x_BMN / torch.linalg.vector_norm(x_BMN, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram_BMM = x_BMN @ x_BMN.mT
        poly_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, poly_BMM, x_BMN, beta=a)
    x_XMN = x_BMN.view(wide_XMN.shape).to(update_XMN.dtype)
    return x_XMN.mT if tall else x_XMN
