"""Runs the slow proofs and benchmarks of one area, or of all, and prints one table.

    make prove AREA=model

Exit code 1 if a claim misses its target.
"""

import argparse
import sys
from collections.abc import Callable

from benchmarks import (
    agents,
    async_scheduling,
    attack_graders,
    attack_grammars,
    attack_requests,
    attack_sandbox,
    chat,
    dash,
    environments,
    foreign_environments,
    forward_vs_transformers,
    gateway_sessions,
    kernels,
    nano_pipeline,
    quant,
    real_agents,
    rl_distill,
    rl_gateway,
    rl_learn,
    rl_logprobs,
    rl_mtp,
    rl_prompt_weights,
    rl_routing,
    rl_schedule,
    rl_trl,
    sandbox,
    serve,
    serve_gpu,
    terminal_bench,
    tool_choice,
    train_ablations,
    train_step,
)
from benchmarks.table import Claim, print_claims

AREAS: dict[str, tuple[Callable[[], list[Claim]], ...]] = {
    "model": (forward_vs_transformers.claims,),
    "train": (train_ablations.claims, train_step.claims_here),
    "engine": (
        serve.claims,
        async_scheduling.claims,
        async_scheduling.claims_on_gpu,
        serve_gpu.claims,
        tool_choice.claims,
    ),
    "chat": (chat.claims,),
    "agents": (
        agents.claims,
        real_agents.claims,
        foreign_environments.claims,
        gateway_sessions.claims,
    ),
    "envs": (environments.claims, sandbox.claims, terminal_bench.claims),
    "rl": (
        rl_logprobs.claims,
        rl_learn.claims,
        rl_distill.claims,
        rl_schedule.claims,
        rl_mtp.claims,
        rl_prompt_weights.claims,
        rl_routing.claims,
        rl_gateway.claims,
        rl_trl.claims,
    ),
    "kernels": (kernels.claims,),
    "pipeline": (nano_pipeline.claims,),
    "quant": (quant.claims,),
    "dash": (dash.claims,),
    "attack": (
        attack_graders.claims,
        attack_sandbox.claims,
        attack_requests.claims,
        attack_grammars.claims,
    ),
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
