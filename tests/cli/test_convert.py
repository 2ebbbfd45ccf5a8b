import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

from paddock.checkpoint import load_pretrained, save_pretrained
from paddock.cli.__main__ import app
from paddock.model import ModelConfig, Transformer, preset
from paddock.model.config import GQASettings, RopeSettings
from paddock.text import SpecialToken, Tokenizer, get_renderer
from paddock.text.chat_template import glm_chat_template_source
from paddock.text.glm_renderer import GlmRenderer
from tests.text.tiny_gguf import TEMPLATE, byte_level, sentencepiece, write_gguf

TOKENIZER = {
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "generation_config.json": b"{}",
}


def convert(source, target, *options):
    return CliRunner().invoke(app, ["model", "convert", str(source), str(target), *options])


def grouped(family, vocab):
    config = ModelConfig(
        family=family,
        vocab=vocab,
        hidden=32,
        context=64,
        attention=("gqa", "gqa"),
        mlp=("dense", "dense"),
        dense_inner=48,
        rope=RopeSettings(theta=10_000.0, layout="halves"),
        gqa=GQASettings(heads=4, kv_heads=2, dim=8, bias="qkv" if family == "qwen2" else "none"),
        eos=(2,),
        bos=1,
        pad=0 if family == "qwen2" else None,
    )
    return Transformer.from_config(config, 0).eval()


@pytest.fixture
def folder(tmp_path):
    save_pretrained(
        Transformer.from_config(preset("nano"), 0), tmp_path / "nano", extra_files=TOKENIZER
    )
    return tmp_path / "nano"


def test_a_folder_is_converted_with_its_tokenizer(folder, tmp_path):
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    (folder / ".cache").write_bytes(b"private")
    done = convert(folder, tmp_path / "half", "--dtype", "bfloat16", "--max-shard-size", "200KB")
    assert done.exit_code == 0, done.output
    shards = list((tmp_path / "half").glob("model-*-of-*.safetensors"))
    assert len(shards) > 1
    assert max(shard.stat().st_size for shard in shards) < 250_000
    for name, data in TOKENIZER.items():
        assert (tmp_path / "half" / name).read_bytes() == data
        assert name in done.stdout
    assert not (tmp_path / "half" / "pytorch_model.bin").exists()
    assert not (tmp_path / "half" / ".cache").exists()
    before, after = load_pretrained(folder), load_pretrained(tmp_path / "half")
    for name, tensor in before.state_dict().items():
        rounded = (
            tensor
            if name.endswith(("router.bias", "indexer.weights.weight"))
            else tensor.bfloat16().float()
        )
        assert torch.equal(after.state_dict()[name], rounded), name


def test_the_dtype_is_kept_unless_set(folder, tmp_path):
    for name, options in {"half": ("--dtype", "bfloat16"), "again": ()}.items():
        source = folder if name == "half" else tmp_path / "half"
        assert convert(source, tmp_path / name, *options).exit_code == 0
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("half", "again"))
    assert once.keys() == twice.keys()
    for name, tensor in once.items():
        assert twice[name].dtype == tensor.dtype
        assert torch.equal(twice[name], tensor)


@pytest.mark.parametrize(
    ("family", "kind", "pre"), [("llama", "llama", None), ("qwen2", "gpt2", "qwen2")]
)
def test_a_gguf_file_becomes_a_folder_that_transformers_reads(tmp_path, family, kind, pre):
    pieces = (sentencepiece() if kind == "llama" else byte_level())[0]
    network = grouped(family, len(pieces))
    source = write_gguf(tmp_path / "m.gguf", kind, pre=pre, network=network)
    done = convert(source, tmp_path / "m")
    assert done.exit_code == 0, done.output
    loaded = load_pretrained(tmp_path / "m")
    assert loaded.config.model_dump(exclude={"init"}) == network.config.model_dump(exclude={"init"})
    torch.testing.assert_close(loaded.logits([1, 5, 9]), network.logits([1, 5, 9]))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    assert tokenizer.decode(tokenizer("The pony", add_special_tokens=False).input_ids) == "The pony"
    assert tokenizer.chat_template == TEMPLATE
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == family


def test_a_model_of_another_family_gets_the_glm5_chat_template_and_keeps_its_outputs(tmp_path):
    pieces = byte_level()[0]
    network = grouped("qwen2", len(pieces))
    source = write_gguf(tmp_path / "m.gguf", pre="qwen2", network=network)
    assert convert(source, tmp_path / "old").exit_code == 0
    done = convert(source, tmp_path / "new", "--chat-template", "5.1")
    assert done.exit_code == 0, done.output
    old, new = (Tokenizer.load(tmp_path / name) for name in ("old", "new"))
    assert old.encode("The pony", specials=False) == new.encode("The pony", specials=False)
    assert set(SpecialToken) == set(new.special_token_ids)
    assert isinstance(get_renderer(new), GlmRenderer)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "new")
    text = "<|user|>The pony<|assistant|><think></think><tool_call>"
    assert theirs.encode(text, add_special_tokens=False) == new.encode(text, specials=True)
    assert theirs.chat_template == glm_chat_template_source("5.1")
    larger = load_pretrained(tmp_path / "new")
    assert larger.config.eos == new.special_token_ids.stop_token_ids
    assert new.vocab_size <= larger.config.vocab < new.vocab_size + 64
    before = network.logits([1, 5, 9])
    torch.testing.assert_close(larger.logits([1, 5, 9])[:, : len(pieces)], before)
    # A new special token is initialised from the tokens of its text.
    spelled = old.encode(SpecialToken.USER, specials=False)
    rows = larger.embed.weight.detach()
    torch.testing.assert_close(
        rows[new.special_token_ids[SpecialToken.USER]], rows[spelled].mean(0)
    )


def test_chat_needs_a_tokenizer(tmp_path):
    save_pretrained(Transformer.from_config(preset("nano"), 0), tmp_path / "bare")
    done = convert(tmp_path / "bare", tmp_path / "new", "--chat-template", "5")
    assert done.exit_code == 1
    assert "no tokenizer.json to add GLM-5's tokens to" in done.stderr
    assert not (tmp_path / "new").exists()


def test_the_dtype_of_a_gguf_file_can_be_set(tmp_path):
    network = grouped("qwen2", len(byte_level()[0]))
    source = write_gguf(tmp_path / "m.gguf", pre="qwen2", network=network)
    assert convert(source, tmp_path / "m", "--dtype", "bfloat16").exit_code == 0
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def unknown_tokenizer(network):
    return network, {"pre": "tekken"}


def not_a_number(network):
    network.norm.weight.data[3] = torch.nan
    return network, {"pre": "qwen2"}


def a_layer_too_few(network):
    del network.layers[1].mlp.up
    return network, {"pre": "qwen2"}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (unknown_tokenizer, "pre-tokenizer must be one of"),
        (not_a_number, "'norm.weight' holds nan"),
        (a_layer_too_few, "'layers.1.mlp.up.weight' is missing"),
    ],
)
def test_a_failed_conversion_leaves_nothing_behind(tmp_path, damage, named):
    network, fields = damage(grouped("qwen2", len(byte_level()[0])))
    source = write_gguf(tmp_path / "m.gguf", network=network, **fields)
    done = convert(source, tmp_path / "m")
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and named in line
    assert list(tmp_path.iterdir()) == [source]


def test_the_source_is_never_overwritten(folder, tmp_path):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    done = convert(folder, tmp_path / "other" / ".." / "nano")
    assert done.exit_code == 1
    assert "source and target are the same" in done.stderr
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("source", "target", "options", "named"),
    [
        ("nowhere", "new", (), "nowhere: neither a checkpoint folder nor a .gguf file"),
        ("nowhere.gguf", "new", (), "nowhere.gguf: file not found"),
        ("nano", "full", (), "full: already exists; convert writes a new folder"),
        ("nano", "new", ("--max-shard-size", "5 apples"), "'5 apples' is not a size such as 5GB"),
    ],
)
def test_invalid_arguments_are_rejected(folder, tmp_path, source, target, options, named):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "diary.txt").write_text("mine")
    done = convert(tmp_path / source, tmp_path / target, *options)
    assert done.exit_code == 1
    assert named in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "nano"]
