"""Records shared by the packages: frozen dataclasses, validated on construction.

dialogue.py         Dialogue: a conversation to train on
errors.py           ApiError: what an HTTP API reports to its client
json_codec.py       records to JSON values and back
message.py          chat messages, tool calls and tool specifications
parameter.py        the role of a model parameter, for optimizers
request_output.py   RequestOutput, OutputDelta and TokenLogprob of an engine
sampling_params.py  SamplingParams, LogitBias and Grammar of a request
task.py             Task, Budget, Verdict and Failure
train_sample.py     TrainSample: one token sequence for the RL trainer
trajectory.py       Trajectory: the recorded tokens of one rollout
"""

from paddock.records import json_codec, parameter
from paddock.records.dialogue import Dialogue, LossMaskSpan, ThinkingMode
from paddock.records.errors import ApiError
from paddock.records.message import Message, Role, ToolCall, ToolSpec
from paddock.records.parameter import (
    NamedParameter,
    ParameterRole,
)
from paddock.records.request_output import OutputDelta, RequestOutput, TokenLogprob
from paddock.records.sampling_params import Grammar, LogitBias, SamplingParams
from paddock.records.task import (
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
    "NamedParameter",
    "Outcome",
    "OutputDelta",
    "ParameterRole",
    "RequestOutput",
    "Role",
    "SamplingParams",
    "Segment",
    "Task",
    "ThinkingMode",
    "TokenLogprob",
    "ToolCall",
    "ToolSpec",
    "TrainSample",
    "Trajectory",
    "Turn",
    "Verdict",
    "json_codec",
    "parameter",
]
