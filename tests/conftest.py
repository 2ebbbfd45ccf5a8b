"""Settings that must be there before torch is loaded."""

import os

# Some virtual machines announce AMX and then refuse its instructions; bfloat16 products would end
# the process. Capping oneDNN below AMX costs tests nothing.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
