"""The slow proofs and benchmarks of one area, or of all, ending in one table.

    make prove AREA=model

Exit code 1 if a claim misses its target.
"""

import argparse
import sys
from collections.abc import Callable

from benchmarks import forward_vs_transformers, kernels, raise_base, serve, train_step
from benchmarks.table import Claim, print_claims

AREAS: dict[str, tuple[Callable[[], list[Claim]], ...]] = {
    "model": (forward_vs_transformers.claims,),
    "train": (raise_base.claims, train_step.claims_here),
    "engine": (serve.claims,),
    "kernels": (kernels.claims,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("area", nargs="?", choices=[*AREAS], help="default: every area")
    area = parser.parse_args().area
    proofs = [proof for name in ([area] if area else AREAS) for proof in AREAS[name]]
    claims = [claim for proof in proofs for claim in proof()]
    print_claims(claims)
    sys.exit(any(claim.holds is False for claim in claims))


if __name__ == "__main__":
    main()
