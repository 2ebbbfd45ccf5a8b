"""Runs put together from trainer, engines, gateway, environments and teachers.

Everything that a command does, as a function: it takes paths or resolved settings and callbacks,
raises UserError for what the user must change, and prints nothing. Importing this package does not
import torch.

agent_process.py       an agent as a process per rollout
calibration_texts.py   text that quantization is calibrated and evaluated with
convert.py             checkpoints checked and converted
describe.py            parameters, memory and FLOPs of a network
dialogue_file.py       append-only JSONL of accepted dialogues
distill.py             on-policy distillation of earlier stages
dry_run.py             checks of a dry run
engine_stats.py        statistics of an RL run's engines as rows of engine.jsonl
engines.py             a model folder as engines
errors.py              UserError
estimate.py            cost of a stage, time of a pipeline
evaluate.py            a model in environments
event_loop.py          an event loop and a process that end in time
gateway.py             sessions of agents over a model
inspect_network.py     index selections and expert loads on one text
model_client.py        a model that rollouts are sampled from
pass_rates.py          tasks by how often a model solves them
pipeline.py            settings and state of a pipeline
pipeline_run.py        a pipeline, stage after stage
quantize.py            a checkpoint with integer weights
rejection_sampling.py  completions sampled, scored and kept for fine-tuning
rl.py                  an RL run
rollout_engines.py     engines and teachers of an RL run
rollouts.py            batches of an RL run, live or replayed
run_gateway.py         the gateway of an RL run
run_tasks.py           tasks registered while an RL run goes on
serve.py               a model over HTTP
settings.py            settings of a stage, its default run folder
suites.py              evaluation suites
task_states.py         state of a run's tasks, for dashboards
token_text.py          token ids as pieces of text
trackers.py            TensorBoard, trackio, Weights & Biases
train.py               a training stage
units.py               counts and sizes as text
"""

from paddock.launch import (
    convert,
    describe,
    dry_run,
    engines,
    estimate,
    event_loop,
    gateway,
    model_client,
    settings,
    token_text,
    units,
)
from paddock.launch.distill import distill
from paddock.launch.errors import UserError
from paddock.launch.evaluate import evaluate
from paddock.launch.inspect_network import inspect_run
from paddock.launch.pipeline import PipelineStage
from paddock.launch.pipeline_run import (
    PipelineCallbacks,
    PipelineRun,
    open_pipeline,
    run_pipeline,
)
from paddock.launch.quantize import quantize
from paddock.launch.rejection_sampling import sample
from paddock.launch.rl import RLCallbacks, rl
from paddock.launch.serve import ServeOptions, ServerInfo, open_server, serve
from paddock.launch.trackers import Tracker
from paddock.launch.train import train

__all__ = [
    "PipelineCallbacks",
    "PipelineRun",
    "PipelineStage",
    "RLCallbacks",
    "ServeOptions",
    "ServerInfo",
    "Tracker",
    "UserError",
    "convert",
    "describe",
    "distill",
    "dry_run",
    "engines",
    "estimate",
    "evaluate",
    "event_loop",
    "gateway",
    "inspect_run",
    "model_client",
    "open_pipeline",
    "open_server",
    "quantize",
    "rl",
    "run_pipeline",
    "sample",
    "serve",
    "settings",
    "token_text",
    "train",
    "units",
]
