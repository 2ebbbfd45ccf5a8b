"""Three worlds small enough for a model of under a million parameters, and how each is shown.

language.py       words, sums and keys, and the rule that holds an eighth of them out
demonstrations.py  how a world shows what to do
chain.py          nano-chain: a chain of sums
tools.py          nano-tools: a store that only tools can see into
rules.py          nano-rules: a colour, said as the question wants it
"""

from paddock.envs.nano.demonstrations import DemonstrationStyle, DemonstrationTaskset, replay_policy
from paddock.envs.nano.language import (
    COLOUR_OF,
    KEYS,
    NOUNS,
    OPERATIONS,
    ORDINALS,
    VALUES,
    generate_chain,
    generate_entry,
    is_held_out,
)

__all__ = [
    "COLOUR_OF",
    "KEYS",
    "NOUNS",
    "OPERATIONS",
    "ORDINALS",
    "VALUES",
    "DemonstrationStyle",
    "DemonstrationTaskset",
    "generate_chain",
    "generate_entry",
    "is_held_out",
    "replay_policy",
]
