"""What a gateway's rules are worth to its sessions, and to the clients of these."""

from dataclasses import replace

from paddock.records import Bias, Grammar, Sampling
from paddock.rollout.live import Rules
from tests.rollout.engines import Chancy
from tests.rollout.test_gateway import gateway, opened


def test_a_session_keeps_every_rule_that_it_was_not_opened_with():
    own = Rules(
        sampling=Sampling(
            max_new_tokens=20,
            min_new_tokens=5,
            frequency_penalty=0.5,
            presence_penalty=0.25,
            logit_bias=(Bias(3, -1.0),),
            stop_ids=(7,),
            stop_texts=("END",),
            ignore_eos=True,
            seed=4,
            thinking_budget=9,
            grammar=Grammar("regex", "a+"),
        )
    )
    with gateway(Chancy(), rules=own) as (url, sessions):
        opened(url, "as-ruled")
        opened(url, "other", max_tokens=3, stop=[], seed=5)
        assert sessions["as-ruled"].rules.sampling == own.sampling
        changed = replace(own.sampling, max_new_tokens=3, min_new_tokens=3, stop_texts=(), seed=5)
        assert sessions["other"].rules.sampling == changed
