"""The nouns that travel between rooms: plain, frozen, checked at birth.

dialogue.py    a conversation to learn from
message.py     what people, models and tools say to each other
parameter.py   what a model says about a parameter, for optimizers that know no model
train_sample.py  one trainable token sequence
sampling_params.py  how a reply is to be sampled
task.py        what a world is asked to do, and what came of it
trajectory.py  one attempt at a task, token by token
errors.py      errors that an HTTP API reports to its client
json_codec.py  records as JSON values and back
"""

from paddock.records import json_codec
from paddock.records.dialogue import Dialogue, LossMaskSpan, ThinkingMode
from paddock.records.errors import ApiError
from paddock.records.message import Message, Role, ToolCall, ToolSpec
from paddock.records.parameter import (
    ModelPart,
    MuonSplit,
    NamedParameter,
    ParameterKind,
    ParameterRole,
)
from paddock.records.sampling_params import MAX_SEED, Grammar, LogitBias, SamplingParams
from paddock.records.task import (
    MAX_ABS_REWARD,
    Budget,
    Failure,
    FailureKind,
    Outcome,
    Task,
    Verdict,
)
from paddock.records.train_sample import TrainSample
from paddock.records.trajectory import Completion, FinishReason, Segment, Trajectory, Turn

__all__ = [
    "MAX_ABS_REWARD",
    "MAX_SEED",
    "ApiError",
    "Budget",
    "Completion",
    "Dialogue",
    "Failure",
    "FailureKind",
    "FinishReason",
    "Grammar",
    "LogitBias",
    "LossMaskSpan",
    "Message",
    "ModelPart",
    "MuonSplit",
    "NamedParameter",
    "Outcome",
    "ParameterKind",
    "ParameterRole",
    "Role",
    "SamplingParams",
    "Segment",
    "Task",
    "ThinkingMode",
    "ToolCall",
    "ToolSpec",
    "TrainSample",
    "Trajectory",
    "Turn",
    "Verdict",
    "json_codec",
]
