"""The nouns that travel between rooms: plain, frozen, checked at birth.

dialogue.py    a conversation to learn from
message.py     what people, models and tools say to each other
parameter.py   what a model says about a parameter, for optimizers that know no model
sample.py      one trainable token sequence
sampling.py    how a reply is to be sampled
task.py        what a world is asked to do, and what came of it
trajectory.py  one attempt at a task, token by token
wire.py        records as JSON values and back
"""

from paddock.records.dialogue import Dialogue, ThinkingMode, Untrained
from paddock.records.message import Message, Role, ToolCall, ToolSpec
from paddock.records.parameter import NamedParameter, ParameterKind, ParameterRole, Split
from paddock.records.sample import Sample
from paddock.records.sampling import Bias, Grammar, GrammarKind, Sampling
from paddock.records.task import Budget, Failure, FailureKind, Outcome, Task, Verdict
from paddock.records.trajectory import Completion, Finish, Segment, Trajectory, Turn
from paddock.records.wire import JsonObject, WireError, decode, encode, mended

__all__ = [
    "Bias",
    "Budget",
    "Completion",
    "Dialogue",
    "Failure",
    "FailureKind",
    "Finish",
    "Grammar",
    "GrammarKind",
    "JsonObject",
    "Message",
    "NamedParameter",
    "Outcome",
    "ParameterKind",
    "ParameterRole",
    "Role",
    "Sample",
    "Sampling",
    "Segment",
    "Split",
    "Task",
    "ThinkingMode",
    "ToolCall",
    "ToolSpec",
    "Trajectory",
    "Turn",
    "Untrained",
    "Verdict",
    "WireError",
    "decode",
    "encode",
    "mended",
]
