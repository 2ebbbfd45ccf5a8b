"""The open, complete GLM-5 recipe: the network, its training, its agentic RL and its serving.

The import rule: a package may import itself and the packages after its arrow, all of which stand
above it here, and nothing else, not even inside a function; of another package it uses what that
package's `__init__` exports. tests/test_architecture.py reads this table.

records    dataclasses that travel between packages    <-
config     frozen settings, recipes as diffs           <-
journal    metrics, events and the ledger of a run     <- records
text       tokenizer, chat template, parsing           <- records
http       routing, SSE, disconnects, connection pool  <- records
api        public JSON shapes <-> records              <- records text
kernels    tensor ops: reference and fast versions     <-
parallel   meshes, sharding, collectives               <-
optim      Muon Split, AdamW, schedules                <- records kernels parallel
model      the transformer, one definition             <- records config kernels parallel
sandbox    where untrusted code runs                   <- records config
envs       environments that end in a verdict          <- records config sandbox
data       documents and dialogues as token rows       <- records config text envs
checkpoint weights on disk and on the wire             <- config parallel model
quant      W4A8, QuaRot, INT4 QAT                      <- config kernels model checkpoint
train      one loop, many stages                       <- GROUND kernels parallel optim model data checkpoint quant
engine     requests in, tokens out                     <- GROUND text kernels parallel model checkpoint quant
serve      the engine's HTTP API                       <- GROUND text http api engine
rollout    tasks into token-exact trajectories         <- GROUND text http api envs
rl         trajectories into weights                   <- GROUND checkpoint train rollout
evals      suites, scoring, judges                     <- GROUND text sandbox envs rollout
launch     a run put together, here or on a cluster    <- EVERY
bench      what `paddock bench` measures               <- EVERY
dashboard  the journal as pages                        <- GROUND http
cli        typer functions and tables                  <- EVERY

GROUND = records config journal
EVERY  = all the packages above
"""

__version__ = "0.2.0"
