"""Three environments for models of under a million parameters, with demonstrations.

language.py       vocabulary, sums and keys, and the rule that holds an eighth of them out
demonstrations.py  interface and helpers for demonstrations
chain.py          nano-chain: a chain of sums
tools.py          nano-tools: look-ups in a store with tools
rules.py          nano-rules: answer with a colour under formatting rules
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
