"""For every test: nothing asks the network for a model or reports usage (set before torch, Ray or vLLM is imported, so
that the processes they start have it too), and hypothesis minds no slowness: machines that run tests are shared.
In CI and for `make test` hypothesis plays the same examples every time: new ones are found by whoever calls pytest
directly, and can look at them.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

os.environ |= {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # As policy.py has it, which comes too late where a test has imported Ray before.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

settings.register_profile(
    "tapforge",
    deadline=None,
    print_blob=True,
    derandomize=bool(os.environ.get("CI") or os.environ.get("TAPFORGE_SAME_EXAMPLES")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tapforge")
