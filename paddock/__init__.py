"""The open, complete GLM-5 recipe: the network, its training, its agentic RL and its serving.

The house. A room may import itself and the rooms after its arrow, all of which stand above it
here; nothing else, not even inside a function. tests/test_rooms.py reads this table.

records    nouns that travel between rooms      <-
config     frozen settings, recipes as diffs    <-
journal    what a run writes down               <- records
text       tokenizer, chat template, parsing    <- records
http       who may ask a server, and how long   <-
api        public JSON shapes <-> records       <- records text
kernels    tensor functions and their twins     <-
parallel   meshes, sharding, collectives        <-
optim      Muon Split, AdamW, schedules         <- records kernels parallel
model      the network, one definition          <- records config kernels parallel
envs       worlds that end in a verdict         <- records config
data       documents and dialogues as rows      <- records config text envs
checkpoint weights on disk and on the wire      <- config parallel model
quant      W4A8, QuaRot, INT4 QAT               <- config kernels model checkpoint
train      one loop, many stages                <- GROUND kernels parallel optim model data checkpoint quant
engine     requests in, tokens out              <- GROUND text kernels parallel model checkpoint quant
serve      the engine's HTTP doors              <- GROUND text http api engine
rollout    tasks into token-exact episodes      <- GROUND text api envs
rl         episodes into weights                <- GROUND checkpoint train rollout
evals      benchmarks and judges                <- GROUND text envs rollout
dashboard  the journal, for human eyes          <- GROUND http
cli        the front door                       <- EVERY

GROUND = records config journal
EVERY  = all the rooms above
"""

__version__ = "0.1.0"
