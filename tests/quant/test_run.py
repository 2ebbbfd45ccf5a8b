"""Quantizing folders: results, loading, serving, interruption and resuming."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from paddock.checkpoint import load_pretrained
from paddock.config import load_recipe, resolve
from paddock.engine.weight_updater import EngineWeightUpdater
from paddock.model import AttentionMetadata
from paddock.quant import RECIPES, QuantSettings, layer_quantizer, quantize_folder
from paddock.quant import calibration_data as streaming
from paddock.quant import run as running
from paddock.quant.quantized_layers import QuantizedExperts, QuantizedLinear
from paddock.quant.rotate import RotatedMTP
from paddock.quant.w4a8 import QuantizationArgs, quantize
from tests.engine.networks import engine, greedy, prompts
from tests.model.networks import build_network, grouped_config, tokens
from tests.quant.tiny import QUICK, folder_of, network, simulated, text

SHARED = {"heads": 2, "dim": 8, "topk": 8, "layers": ("full", "shared", "full", "shared")}


def contents(folder):
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}


def test_every_module_is_stored_as_planned(target):
    found = load_pretrained(target)
    layer = found.layers[1]
    integers = {
        name
        for name, m in layer.named_modules()
        if isinstance(m, QuantizedLinear | QuantizedExperts)
    }
    attention = {f"attention.{name}" for name in ("q_a", "q_b", "kv_a", "o", "indexer.query")}
    shared = {f"mlp.shared.{name}" for name in ("gate", "up", "down")}
    assert integers == attention | shared | {"mlp.experts"}
    assert layer.mlp.experts.gate_up.dtype == torch.int8
    assert layer.mlp.experts.gate_up.shape == (6, 32, 16)  # two per byte
    assert isinstance(found.mtp, RotatedMTP)
    assert not any(isinstance(m, QuantizedLinear | QuantizedExperts) for m in found.mtp.modules())


def test_integers_match_a_fake_quantized_network(source, tmp_path):
    """Against a fake-quantized float64 network with the same weights."""
    quantize_folder(source, tmp_path / "q", RECIPES["rtn"])
    found, fake = load_pretrained(tmp_path / "q"), simulated(network(), RECIPES["rtn"])
    with torch.no_grad():
        logits, wanted = found.logits(tokens(60)), fake.logits(tokens(60))
        exact = load_pretrained(source).logits(tokens(60))
    assert matching_fraction(logits, wanted, within=2e-4) >= 0.9
    assert matching_fraction(logits, exact, within=1e-2) < 0.1  # and rounding has an effect


def matching_fraction(found, wanted, *, within):
    """Fraction of tokens whose logits agree. Not all must: another rounding of a sum may move an
    activation to the next integer, and with it everything after it."""
    return float(((found - wanted).abs().amax(-1) <= within).float().mean())


def test_rotated_and_smoothed_integers_match_a_fake_quantized_network(target):
    """The same for rotated and smoothed weights: the stored ones, dequantized."""
    found = load_pretrained(target)
    with torch.no_grad():
        for block in found.layers:
            for module in block.modules():
                if isinstance(module, QuantizedLinear):
                    x = torch.randn(9, module.integer.shape[1])
                    exact = rounded(x) @ (module.integer * module.scale).double().T
                    torch.testing.assert_close(module(x).double(), exact, atol=1e-4, rtol=1e-4)


def rounded(x):
    step = x.double().abs().amax(-1, keepdim=True) / 127
    return (x.double() / step).round() * step


@pytest.mark.parametrize("drafts", [0, 2])
def test_engine_replies_match_a_fake_quantized_network(source, tmp_path, drafts):
    """With and without drafts, replies and log-probabilities match the float64 network."""
    quantize_folder(source, tmp_path / "q", RECIPES["rtn"])
    found, fake = load_pretrained(tmp_path / "q"), simulated(network(), RECIPES["rtn"])
    prompt_list = prompts(4, longest=30)
    with engine(found, num_speculative_tokens=drafts) as serving:
        answers = serving.generate_outputs([greedy(prompt, 8) for prompt in prompt_list])
        assert serving.audit() == []
    agreed = []
    for prompt, answer in zip(prompt_list, answers, strict=True):
        reply_ids = answer.completion.token_ids
        with torch.no_grad():
            logits = fake.logits(prompt + reply_ids)[len(prompt) - 1 : -1]
        token = torch.tensor(reply_ids).unsqueeze(1)
        best = logits.gather(1, token).squeeze(1) > logits.amax(-1) - 1e-3
        wanted = logits.log_softmax(-1).gather(1, token).squeeze(1)
        agreed.append(best & ((torch.tensor(answer.completion.logprobs) - wanted).abs() < 1e-3))
    assert torch.cat(agreed).float().mean() >= 0.9  # see matching_fraction


@torch.no_grad()
def test_the_engine_drafts_with_a_rotated_trunk(source, target):
    """Drafts are accepted as often as those of the original network."""
    plain, found = load_pretrained(source), load_pretrained(target)
    token_T, layout = tokens(40), AttentionMetadata.packed([40])
    states = []
    for one in (plain, found):
        hidden_TD = one(token_T, layout).hidden_TD
        ((state_TD, _),) = one.mtp_forward(hidden_TD, token_T, one.make_context(layout), 1)
        states.append(one.head(state_TD))
    draft_error = float((states[1] - states[0]).norm() / states[0].norm())
    assert draft_error < 0.5, "a draft in the wrong basis would be all noise"
    with engine(found, num_speculative_tokens=2) as serving:
        (answer,) = serving.generate_outputs([greedy(tuple(token_T.tolist()), 8)])
        assert len(answer.completion.token_ids) == 8
        assert (
            "model.embed_tokens.weight" in EngineWeightUpdater(serving).checksums()
        )  # as a server requests it


def nll_of(network):
    """Mean NLL of the held-out text, computed directly."""
    nats, count = 0.0, 0
    for passage in text():
        if passage.purpose == "validation":
            with torch.no_grad():
                logits = network.logits(passage.ids)[:-1].log_softmax(-1)
            nats -= float(logits.gather(1, torch.tensor(passage.ids[1:]).unsqueeze(1)).sum())
            count += len(passage.ids) - 1
    return nats / count


def test_the_report_measures_both_networks(source, target):
    report = json.loads((target / "quantization.json").read_text())
    found = [nll_of(load_pretrained(folder)) for folder in (source, target)]
    assert report["nll"] == pytest.approx(found, abs=5e-3)
    assert abs(found[0] - found[1]) > 2e-2
    assert report["tokens"] == 2 * 39
    assert report["needle_tasks"] == 1
    assert [layer["layer"] for layer in report["layers"]] == [0, 1, 2, 3]
    assert all(0 < layer["layer_error"] < 0.5 for layer in report["layers"])
    assert report["bytes"][1] < 0.6 * report["bytes"][0]


def test_compressed_tensors_reads_the_folder(target):
    """compressed-tensors finds the scheme of every module and dequantizes our weights."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    written = json.loads((target / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(written)
    assert config.format == "mixed-precision"
    stored = {}
    for file in target.glob("*.safetensors"):
        stored |= load_file(file)
    found = load_pretrained(target)
    experts, linear = found.layers[1].mlp.experts, found.layers[1].attention.q_a
    for stem, group, ours in (
        ("model.layers.1.mlp.experts.4.up_proj", "group_0", up_of(experts, 4)),
        ("model.layers.1.self_attn.q_a_proj", "group_1", linear.integer * linear.scale),
    ):
        scheme = config.config_groups[group]
        mine = {
            k.removeprefix(f"{stem}."): t for k, t in stored.items() if k.startswith(f"{stem}.")
        }
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        assert set(mine) == set(compressor.compression_param_names(scheme))
        read = compressor.decompress(mine, scheme)["weight"]
        assert torch.equal(read, ours)
        again = compressor.compress({"weight": read, "weight_scale": mine["weight_scale"]}, scheme)
        assert all(torch.equal(again[name], mine[name]) for name in mine)


def up_of(experts, expert):
    from paddock.kernels.w4a8_gemm import unpack_halves

    inner = experts.gate_up.shape[1] // 2
    integer = unpack_halves(experts.gate_up[expert, inner:])
    return integer * experts.gate_up_scale[expert, inner:]


def test_transformers_serves_a_quantized_llama(tmp_path):
    """Loading through transformers end to end; without experts, which it does not support."""
    from transformers import AutoModelForCausalLM

    llama = build_network(
        grouped_config("gqa", "gqa", family="llama", gqa={"heads": 4, "kv_heads": 2, "dim": 8})
    )
    source = folder_of(llama, tmp_path / "llama")
    quantize_folder(source, tmp_path / "q", QUICK, passages=text())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32)
    token_T = tokens(20)
    with torch.no_grad():
        logits = theirs(token_T.unsqueeze(0)).logits[0]
        ours = load_pretrained(tmp_path / "q").logits(token_T)
        exact = llama.logits(token_T)
    assert float((logits - exact).norm() / exact.norm()) < 0.05
    assert float((ours - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("stopped_at", ["layer 0: smoothing", "layer 2: quantizing", "head"])
def test_a_killed_run_resumes_to_the_same_bytes(source, target, stopped_at, tmp_path):
    class Killed(Exception):
        pass

    def kill(progress):
        if progress.what == stopped_at:
            raise Killed

    with pytest.raises(Killed):
        quantize_folder(source, tmp_path / "q", QUICK, passages=text(), on_progress=kill)
    assert not (tmp_path / "q").exists()
    seen = []
    quantize_folder(
        source, tmp_path / "q", QUICK, passages=text(), on_progress=lambda m: seen.append(m.what)
    )
    assert contents(tmp_path / "q") == contents(target)
    if stopped_at == "layer 2: integers":
        assert seen[0] == "layer 2: reading weights"  # finished work is not repeated
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


@pytest.mark.parametrize("step", ["rmtree", "unlink"])
def test_a_run_killed_during_cleanup_loses_nothing(source, target, step, tmp_path, monkeypatch):
    owner = {"rmtree": layer_quantizer.shutil, "unlink": layer_quantizer.Path}[step]
    done, tidied = getattr(owner, step), ("streams", "progress.json")

    def kill(path, *others, **options):
        done(path, *others, **options)
        if path.name in tidied:
            raise KeyboardInterrupt

    monkeypatch.setattr(owner, step, kill)
    with pytest.raises(KeyboardInterrupt):
        quantize_folder(source, tmp_path / "q", QUICK, passages=text())
    monkeypatch.undo()
    seen = []
    report = quantize_folder(
        source, tmp_path / "q", QUICK, passages=text(), on_progress=seen.append
    )
    assert not seen
    assert report == json.loads((target / "quantization.json").read_text())
    assert contents(tmp_path / "q") == contents(target)
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_a_full_disk_stops_the_run_and_it_resumes_later(source, target, tmp_path, monkeypatch):
    """States are written while the next ones are computed."""
    calls, saved = [], streaming.save_file

    def full(tensors, file):
        calls.append(file)
        if len(calls) == 20:
            raise OSError("no space left")
        saved(tensors, file)

    monkeypatch.setattr(streaming, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        quantize_folder(source, tmp_path / "q", QUICK, passages=text())
    assert len(calls) == 20 and not (tmp_path / "q").exists()
    quantize_folder(source, tmp_path / "q", QUICK, passages=text())
    assert contents(tmp_path / "q") == contents(target)


def test_a_finished_run_is_not_repeated(source, target):
    """A second call with the same settings returns the same report and writes nothing."""
    before = {file.name: file.stat().st_mtime_ns for file in target.iterdir()}
    seen = []
    report = quantize_folder(source, target, QUICK, passages=text(), on_progress=seen.append)
    assert report == json.loads((target / "quantization.json").read_text())
    assert not seen
    assert {file.name: file.stat().st_mtime_ns for file in target.iterdir()} == before


def test_the_folder_keeps_its_settings(target):
    assert resolve(QuantSettings, load_recipe(target / "recipe.toml")) == QUICK


def test_only_one_layer_is_ever_in_memory(source, tmp_path, monkeypatch):
    alive = []

    class Counted(running.DecoderLayer):
        def __init__(self, *args):
            super().__init__(*args)
            alive.append(1)

        def __del__(self):
            alive.pop()

    alive_counts = []
    monkeypatch.setattr(running, "DecoderLayer", Counted)
    quantize_folder(
        source,
        tmp_path / "q",
        QUICK,
        passages=text(),
        on_progress=lambda _: alive_counts.append(len(alive)),
    )
    assert max(alive_counts) <= 1


def test_the_source_is_never_modified(source, tmp_path):
    before = contents(source)
    quantize_folder(source, tmp_path / "q", RECIPES["rtn"])
    assert contents(source) == before
    assert (tmp_path / "q" / "tokenizer.json").read_text() == "{}"


def test_layers_that_share_an_indexer_use_its_selection(tmp_path):
    shared = network(indexer=SHARED)
    source = folder_of(shared, tmp_path / "shared")
    report = quantize_folder(source, tmp_path / "q", QUICK, passages=text())
    found = [nll_of(shared), nll_of(load_pretrained(tmp_path / "q"))]
    assert report["nll"] == pytest.approx(found, abs=5e-3)


def test_group_scales_round_trip(source, tmp_path):
    settings = RECIPES["rtn"].model_copy(update={"expert_group_size": 8})
    quantize_folder(source, tmp_path / "q", settings)
    experts = load_pretrained(tmp_path / "q").layers[1].mlp.experts
    assert experts.gate_up_scale.shape == (6, 32, 4)
    down = network().layers[1].mlp.experts.down
    assert torch.equal(experts.down_scale, quantize(down, QuantizationArgs(group_size=8)).scale_XFG)


@pytest.mark.parametrize("recipe", [QUICK, RECIPES["rtn"]])
def test_a_tied_head_round_trips(recipe, tmp_path):
    tied = network(tied=True)
    source = folder_of(tied, tmp_path / "tied")
    report = quantize_folder(source, tmp_path / "q", recipe, passages=text())
    found = load_pretrained(tmp_path / "q")
    assert found.config.tied is not recipe.rotate
    assert report["nll"] == pytest.approx([nll_of(tied), nll_of(found)], abs=5e-3)


def test_bfloat16_stays_bfloat16(tmp_path):
    source = folder_of(network().cast(torch.bfloat16), tmp_path / "half")
    quantize_folder(source, tmp_path / "q", RECIPES["rtn"])
    found = load_pretrained(tmp_path / "q", dtype="bfloat16")
    assert found.embed.weight.dtype == torch.bfloat16
    assert found.layers[1].mlp.experts.down_scale.dtype == torch.float32
    with torch.no_grad():
        hidden = found(tokens(20), AttentionMetadata.packed([20])).hidden_TD
    assert hidden.dtype == torch.bfloat16 and hidden.isfinite().all()


def test_a_serving_process_loads_integers(tmp_path):
    source = folder_of(network(), tmp_path / "source")
    target = tmp_path / "target"
    quantize_folder(source, target, RECIPES["rtn"])
    code = (
        "import sys, paddock.engine; from paddock.checkpoint import load_pretrained; "
        "load_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=True)
