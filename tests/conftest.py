"""Settings that must be there before torch is loaded, and one for all random tests."""

import os

from hypothesis import HealthCheck, settings

# Some virtual machines announce AMX and then refuse its instructions; bfloat16 products would end
# the process. Capping oneDNN below AMX costs tests nothing.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# How long an example takes says how busy the machine is, not whether it holds.
settings.register_profile("paddock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paddock")
