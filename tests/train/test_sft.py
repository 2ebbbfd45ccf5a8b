"""Supervised fine-tuning on dialogues: loss masks, weights, resuming and fake quantization."""

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from paddock.checkpoint import load_pretrained
from paddock.checkpoint.training_state import latest_model
from paddock.data import (
    CorpusSettings,
    DataLoaderSettings,
    PackedBatch,
    TokenizerSettings,
)
from paddock.data.dialogue_sources import DemonstrationSource
from paddock.data.reasoning import ReasoningSource
from paddock.data.tokenize_dialogue import tokenize_dialogue
from paddock.kernels.linear_cross_entropy import linear_cross_entropy
from paddock.model import AttentionMetadata
from paddock.records import Dialogue, LossMaskSpan, Message
from paddock.text import Tokenizer, get_renderer, train_tokenizer
from paddock.text.glm_renderer import GlmRenderer
from paddock.train import train
from paddock.train.evaluate import validation_loss
from paddock.train.master_weights import MasterWeights
from paddock.train.micro_batch import MicroBatch, count_tokens, iter_micro_batches
from paddock.train.objective import LanguageModelObjective
from paddock.train.run import load_fake_quant, load_init_model, open_corpus, open_run_tokenizer
from paddock.train.settings import AuxLossSettings, OptimSettings
from paddock.train.stages import STAGES, stage_spec
from paddock.train.trainer import Trainer, TrainingError
from tests.model.networks import build_network, grouped_config, latent_config
from tests.train.test_micro_batch import batch_of
from tests.train.test_resume import assert_same_weights, quiet, weights
from tests.train.tiny import network_folder, run_in, settings

VOCAB = 700
STEPS = 8


def demonstrations(name="chain", env="nano-chain", **changes):
    defaults = {"count": 60, "mistake_rate": 0.3, "tasks_per_dialogue": (1, 2)}
    modes = {"interleaved": 0.4, "preserved": 0.3, "off": 0.3}
    return DemonstrationSource(name=name, env=env, **(defaults | {"thinking": modes} | changes))


def sft(start, **changes):
    defaults = {
        "stage": "sft",
        "steps": STEPS,
        "tokenizer": TokenizerSettings(vocab_size=VOCAB, pre_tokenizer="words"),
        "corpus": CorpusSettings(
            sources=(demonstrations(), demonstrations("rules", "nano-rules")), held_out_fraction=0.2
        ),
        "dataloader": DataLoaderSettings(
            packing="rows", seq_len=96, batch_tokens=96, drop_overlong=True
        ),
        "optim": OptimSettings(lr=1e-2, warmup_ratio=0.1),
        "loss": AuxLossSettings(mtp_depths=1),
    }
    return settings(start, **(defaults | changes))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return network_folder(tmp_path_factory.mktemp("sft") / "init", vocab=VOCAB)


@pytest.fixture(scope="module")
def tuned(home):
    run = run_in(home.parent / "straight", sft(home))
    train(run, log=quiet, on_update=quiet)
    return run


# --- runs -----------------------------------------------------------------------------------------


def test_a_run_trains_on_dialogues_and_validates_on_held_out_ones(tuned):
    lines = [json.loads(line) for line in (tuned.folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.2
    assert 0 < lines[-1]["val_loss"] < lines[0]["loss"] - 0.2
    assert "mtp_loss" in lines[-1] and "indexer_loss" in lines[-1]


def test_a_checkpoint_includes_its_chat_template(tuned):
    folder = latest_model(tuned.folder)
    assert (folder / "chat_template.jinja").is_file()
    assert get_renderer(Tokenizer.load(folder)).version == "5"


class Stop(Exception):
    pass


def stop_and_resume(run, at):
    def stop(update):
        if update.step == at:
            raise Stop

    with pytest.raises(Stop):
        train(run, log=quiet, on_update=stop)
    train(run, log=quiet, on_update=quiet)
    return weights(run.folder)


def test_a_resumed_run_ends_with_bitwise_identical_weights(home, tuned, tmp_path):
    run = run_in(tmp_path / "run", sft(home))
    assert_same_weights(stop_and_resume(run, at=4), weights(tuned.folder))


def test_a_frozen_indexer_does_not_change(home, tmp_path):
    run = run_in(tmp_path / "run", sft(home, freeze_indexer=True, steps=2))
    train(run, log=quiet, on_update=quiet)
    before = load_pretrained(home).state_dict()
    after = load_pretrained(latest_model(run.folder)).state_dict()
    matrices = [name for name in after if after[name].ndim > 1]
    still = {name for name in matrices if torch.equal(after[name], before[name])}
    assert still == {name for name in matrices if ".indexer." in name} != set()
    assert '"indexer"' not in (run.folder / "metrics.jsonl").read_text()


def test_fine_tuning_without_dialogues_is_rejected(home):
    texts = CorpusSettings(sources=(ReasoningSource(name="f", family="facts", count=9),))
    with pytest.raises(ValidationError, match="stage 'sft' needs a corpus source of dialogues"):
        sft(home, corpus=texts)
    with pytest.raises(ValidationError, match="stage 'warmup' trains only the indexer"):
        settings(home, stage="warmup", freeze_indexer=True)


# --- masks ----------------------------------------------------------------------------------------

WRONG, RIGHT = "it is blue", " no it is red"


def row_of(reasoning=WRONG + RIGHT, marked=True, weight=None):
    """A batch of one dialogue whose reasoning starts with an error."""
    words = ["what color ? it is blue no red green"] * 60
    tokenizer = train_tokenizer(words, vocab=400, splitting="words")
    question = Message(role="user", content="what color ?")
    reply = Message(role="assistant", content="red", reasoning=reasoning)
    marks = (LossMaskSpan(message=1, part="reasoning", end=len(WRONG)),) if marked else ()
    dialogue = Dialogue(messages=(question, reply), untrained=marks)
    (row,) = tokenize_dialogue(dialogue, GlmRenderer(tokenizer))
    trained_T = np.array(row.loss_mask)
    batch = PackedBatch(
        token_T=np.array(row.token_ids, np.int32),
        loss_mask_T=trained_T,
        lengths=(len(row.token_ids),),
        sources=("d",),
        num_targets=int(trained_T.sum()),
        loss_weight_T=None if weight is None else np.full(len(trained_T), weight, np.float32),
    )
    return batch, tokenizer


def errors_in(batch, tokenizer):
    """Positions of the tokens of the error."""
    ids = batch.token_T.tolist()
    wrong = tokenizer.encode(WRONG, specials=False)
    (start,) = [i for i in range(len(ids)) if ids[i : i + len(wrong)] == wrong]
    return range(start, start + len(wrong))


@pytest.fixture(scope="module")
def network():
    return build_network(latent_config(vocab=400))


def losses_of(network, batch):
    objective = LanguageModelObjective(STAGES["sft"], AuxLossSettings(mtp_depths=2))
    counted = count_tokens(batch, 2)
    (tokens,) = iter_micro_batches(batch, torch.device("cpu"))
    return objective(network, tokens, counted, 0.0), tokens


def test_a_masked_error_has_exactly_no_gradient(network, monkeypatch):
    """The logits that predict it, at every MTP depth, have no gradient; all others do."""
    batch, tokenizer = row_of()
    states = []

    def watched(hidden_TD, head_VD, target_T):
        states.append(hidden_TD.clone())
        states[-1].retain_grad()
        return linear_cross_entropy(states[-1], head_VD, target_T)

    monkeypatch.setattr("paddock.train.objective.linear_cross_entropy", watched)
    losses_of(network, batch)[0].total.backward()
    network.zero_grad()
    errors = errors_in(batch, tokenizer)
    assert len(states) == 3  # the next token and two depths
    for ahead, state_TD in enumerate(states, start=1):
        moved = state_TD.grad.abs().sum(-1) > 0
        for position in range(len(batch.token_T)):
            target = position + ahead
            trained = target < len(batch.token_T) and batch.loss_mask_T[target]
            assert bool(moved[position]) == bool(trained)
            if target in errors:
                assert torch.count_nonzero(state_TD.grad[position]) == 0


def test_a_masked_error_still_conditions_what_follows(network):
    batch, tokenizer = row_of()
    other, _ = row_of("it is green" + RIGHT)
    errors = errors_in(batch, tokenizer)
    assert batch.loss_mask_T.tolist() == other.loss_mask_T.tolist()
    assert (batch.token_T != other.token_T).nonzero()[0].tolist() == [errors[-1]]
    with torch.no_grad():
        one, two = losses_of(network, batch)[0], losses_of(network, other)[0]
    assert float(one.parts["loss"]) != float(two.parts["loss"])
    embedded = network.embed.weight
    losses, _ = losses_of(network, batch)
    losses.total.backward()
    wrong = int(batch.token_T[errors[-1]])
    assert (batch.token_T == wrong).sum() == 1
    assert torch.count_nonzero(embedded.grad[wrong]) > 0
    network.zero_grad()


def test_the_loss_is_averaged_over_trained_tokens(network):
    batch, _ = row_of()
    losses, tokens = losses_of(network, batch)
    with torch.no_grad():
        hidden_TD = network(tokens.token_T, tokens.attn_metadata).hidden_TD
        logp_TV = network.head(hidden_TD).log_softmax(-1)
    places = [i for i in range(1, len(batch.token_T)) if batch.loss_mask_T[i]]
    nats = [-float(logp_TV[i - 1, batch.token_T[i]]) for i in places]
    assert float(losses.parts["loss"]) == pytest.approx(sum(nats) / len(nats), rel=1e-5)


def test_a_constant_weight_changes_nothing_and_a_row_weight_scales_its_row(network):
    plain, _ = row_of()
    heavy, _ = row_of(weight=3.0)
    one, two = (losses_of(network, batch)[0].parts for batch in (plain, heavy))
    assert float(one["loss"]) == pytest.approx(float(two["loss"]), rel=1e-6)
    assert float(one["mtp_loss"]) == pytest.approx(float(two["mtp_loss"]), rel=1e-6)
    other, _ = row_of("it is green" + RIGHT)
    both = PackedBatch(
        token_T=np.concatenate([plain.token_T, other.token_T]),
        loss_mask_T=np.concatenate([plain.loss_mask_T, other.loss_mask_T]),
        lengths=(len(plain.token_T), len(other.token_T)),
        sources=("d", "d"),
        num_targets=plain.num_targets + other.num_targets,
        loss_weight_T=np.repeat(np.array([3.0, 1.0], np.float32), len(plain.token_T)),
    )
    alone = [float(losses_of(network, batch)[0].parts["loss"]) for batch in (plain, other)]
    found = float(losses_of(network, both)[0].parts["loss"])
    assert found == pytest.approx((3 * alone[0] + alone[1]) / 4, rel=1e-5)


def test_weights_stay_with_their_tokens_in_micro_batches(network):
    plain, _ = row_of()
    size = len(plain.token_T)
    both = PackedBatch(
        token_T=np.concatenate([plain.token_T] * 2),
        loss_mask_T=np.concatenate([plain.loss_mask_T] * 2),
        lengths=(size, size),
        sources=("d", "d"),
        num_targets=2 * plain.num_targets,
        loss_weight_T=np.repeat(np.array([0.5, 2.0], np.float32), size),
    )
    found = [
        set(t.loss_weight_S.tolist())
        for t in iter_micro_batches(both, torch.device("cpu"), tokens=size)
    ]
    assert found == [{0.5}, {2.0}]
    assert count_tokens(both, 0).targets[0] == pytest.approx(2.5 * plain.num_targets)


def test_validation_loss_is_over_replies_only(home, tmp_path):
    run = run_in(tmp_path / "run", sft(home))
    run.claim()
    tokenizer = open_run_tokenizer(run, quiet)
    corpus = open_corpus(run, tokenizer, quiet)
    network = load_init_model(run.settings, tokenizer)
    found = validation_loss(network, corpus, dense=False, context=96, tokens=10**6)
    total, count = 0.0, 0
    for documents in corpus.split("held_out").values():
        for number in range(len(documents)):
            length = documents.length(number)
            token_T = torch.from_numpy(documents.token_ids(number, 0, length).astype("int64"))
            trained_T = torch.from_numpy(documents.loss_mask(number, 0, length))
            batch = MicroBatch(token_T, trained_T, AttentionMetadata.packed([length]))
            with torch.no_grad():
                logp_TV = network.head(network(token_T, batch.attn_metadata).hidden_TD).log_softmax(
                    -1
                )
            for i in range(1, length):
                if trained_T[i]:
                    total, count = total - float(logp_TV[i - 1, token_T[i]]), count + 1
    assert found.loss == pytest.approx(total / count, rel=1e-4)


def test_networks_without_an_indexer_can_be_fine_tuned(tmp_path):
    batch, _ = row_of()
    network = build_network(grouped_config("gqa", "swa", vocab=400))
    stage = STAGES["sft"]
    stage.freeze(network)
    objective = LanguageModelObjective(stage, AuxLossSettings())
    trainer = Trainer(network, objective, settings(tmp_path), tmp_path / "b.npz")
    losses = [
        trainer.step(batch, lr=1e-2, bias_rate=0.0, progress=0.0).losses["loss"] for _ in range(8)
    ]
    assert losses[-1] < 0.8 * losses[0]


# --- fake quantization ----------------------------------------------------------------------------

GRID = 0.05


def rounding(name, weight):
    """Round every expert matrix to a coarse grid."""
    return (weight / GRID).round() * GRID if ".experts." in name else weight


def test_the_forward_pass_uses_rounded_weights_and_training_updates_exact_ones(tmp_path):
    network = build_network(latent_config())
    chosen = settings(tmp_path)
    stage = STAGES["pretrain"]
    stage.freeze(network)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    trainer = Trainer(
        network,
        LanguageModelObjective(stage, AuxLossSettings()),
        chosen,
        tmp_path / "b.npz",
        fake_quant=rounding,
    )
    rounded = [name for name in before if ".experts." in name]
    assert rounded

    def grid():
        for name, parameter in network.named_parameters():
            exact = trainer.weights.master[name]
            assert (exact is not parameter) == (name in rounded)
            wanted = rounding(name, exact.detach())
            assert torch.equal(parameter.detach(), wanted)

    grid()
    assert all(torch.equal(trainer.weights.master[name], before[name]) for name in before)
    for _ in range(3):
        trainer.step(batch_of(14, 5, 9), lr=1e-3, bias_rate=0.0, progress=0.0)
        grid()
    moved = trainer.weights.master[rounded[0]].detach() - before[rounded[0]]
    assert 0 < float(moved.abs().max()) < GRID  # steps smaller than the grid are not lost
    saved = trainer.weights.master_model()
    assert torch.equal(
        dict(saved.named_parameters())[rounded[0]], trainer.weights.master[rounded[0]]
    )


def test_gradients_are_straight_through(tmp_path):
    """The exact weight gets the gradient that the rounded one had."""
    network = build_network(latent_config())
    held = MasterWeights(network, fake_quant=rounding)
    name = next(name for name in held.master if ".experts." in name)
    parameter = dict(network.named_parameters())[name]
    parameter.sum().backward()
    held.accumulate_gradients()
    assert torch.equal(held.master[name].grad, torch.ones_like(parameter))
    assert parameter.grad is None


def test_without_a_quantizer_the_weights_are_unchanged():
    network = build_network(latent_config())
    held = MasterWeights(network)
    assert all(held.master[name] is parameter for name, parameter in network.named_parameters())


def test_a_run_with_a_named_quantizer_resumes_bitwise(home, tmp_path):
    chosen = sft(home, steps=2, fake_quant=f"{__name__}:rounding", checkpoint={"every": 1})
    straight = run_in(tmp_path / "straight", chosen)
    train(straight, log=quiet, on_update=quiet)
    run = run_in(tmp_path / "run", chosen)
    assert_same_weights(stop_and_resume(run, at=2), weights(straight.folder))


@pytest.mark.parametrize("name", ["nowhere:f", "json:nothing"])
def test_an_unknown_quantizer_is_named(name):
    with pytest.raises(TrainingError, match=f"'fake_quant' {name}"):
        load_fake_quant(name)


def test_freezing_the_indexer_freezes_only_its_parameters(home):
    stage = stage_spec(sft(home, freeze_indexer=True))
    network = build_network(latent_config())
    stage.freeze(network)
    frozen = [name for name, p in network.named_parameters() if not p.requires_grad]
    assert frozen and all(".indexer." in name for name in frozen)
    assert not stage.aux_request.indexer_loss and STAGES["sft"].aux_request.indexer_loss
