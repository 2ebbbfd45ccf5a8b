"""`paddock serve` and `paddock chat` as commands."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.cli.chat import HELP
from paddock.launch.engines import default_sampling, open_model_folder
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]


def test_serve_prints_its_settings_answers_and_stops_cleanly(folder, tmp_path):
    command = [sys.executable, "-m", "paddock.cli", "serve", str(folder), "--port", "0"]
    command += ["--dp-size", "2", "--context-length", "256"]
    command += ["--kv-cache-memory", "4MB", "--served-model-name", "pony"]
    command += ["--max-prefill-tokens", "300"]
    environment = os.environ | {"PADDOCK_API_KEY": "secret"}
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            output_lines = []
            for line in process.stdout:
                output_lines.append(line)
                if line.startswith("ready"):
                    break
            output = "".join(output_lines)
            url = re.search(r"chat page +(http\S+)", output)[1]
            assert "pony: glm_moe_dsa" in output and "2 replicas" in output
            assert re.search(r"chunked prefill +300 tokens per step", output)
            assert "256 tokens" in output and "curl http://127.0.0.1:" in output
            assert re.search(r"cache +[\d,]+ tokens in [\d,]+ pages", output)
            body = {"messages": [{"role": "user", "content": "Say hello."}], "temperature": 0}
            assert httpx.post(url + "/v1/chat/completions", json=body).status_code == 401
            key = {"Authorization": "Bearer secret"}
            done = httpx.post(url + "/v1/chat/completions", json=body, headers=key, timeout=60)
            assert done.json()["choices"][0]["message"]["content"] == "Hello there, friend!"
        finally:
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=PATIENCE_S)
        log.seek(0)
        lines = log.read()
    assert process.returncode == 0 and rest == "stopped\n", lines
    assert re.search(r"prompt=8 cached=0 output=10 ttft=\S+s accept=1\.00 .* finish=stop", lines)
    assert "Traceback" not in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-pages", "3"], r"one request of 512 tokens needs 32 pages .* the KV cache has 3"),
        (["--context-length", "4096"], r"'context_length' 4096 exceeds the model's 512"),
        (["--kv-cache-memory", "lots"], r"'lots' is not a size"),
        (["--kv-cache-memory", "1MB", "--num-pages", "9"], r"--kv-cache-memory and --num-pages"),
        (["--port", "99999"], r"cannot listen on 127\.0\.0\.1:99999"),
        (["--api-key", ""], r"the api key must not be empty"),
    ],
)
def test_impossible_settings_are_rejected_with_the_numbers(folder, arguments, message):
    done = CliRunner().invoke(app, ["serve", str(folder), "--port", "0", *arguments])
    assert done.exit_code == 1
    assert re.search(f"error: .*{message}", done.output), done.output


def without(folder, target, *names):
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*names))
    return str(target)


@pytest.mark.parametrize("subcommand", ["serve", "chat"])
def test_a_folder_without_tokenizer_or_chat_template_is_rejected(folder, tmp_path, subcommand):
    def error_of(path):
        done = CliRunner().invoke(app, [subcommand, path])
        assert done.exit_code == 1
        return done.output

    assert "folder not found" in error_of(str(tmp_path / "nowhere"))
    assert "tokenizer not found" in error_of(without(folder, tmp_path / "a", "tokenizer*"))
    bare = Path(without(folder, tmp_path / "b", "chat_template*"))
    rules = (bare / "tokenizer.json").read_text()
    (bare / "tokenizer.json").write_text(rules.replace("<|assistant|>", "<|nobody|>"))
    assert "has no chat template" in error_of(str(bare))


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_a_missing_device_is_a_one_line_error(folder, device):
    done = CliRunner().invoke(app, ["serve", str(folder), "--port", "0", "--device", device])
    assert done.exit_code == 1
    assert f"error: device '{device}': " in done.output


def test_chat_reads_lines_and_keeps_the_history(folder):
    lines = "Say hello.\n/reasoning\n/new\n/think off\nCount.\n\n/wat\n/quit\nnever read\n"
    done = CliRunner().invoke(app, ["chat", str(folder), "--temperature", "0"], input=lines)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        "(reasoning, 11 characters)",
        "Hello there, friend!",
        "A greeting.",
        "(new chat)",
        "(thinking is off)",
        "one two three four five six seven eight nine ten",
        HELP,
    ]


def test_chat_reads_invalid_utf8(folder):
    done = CliRunner().invoke(app, ["chat", str(folder), "--max-tokens", "2"], input=b"\xff\xfe\n")
    assert done.exit_code == 0, done.exception


def test_a_run_folder_serves_its_newest_checkpoint(folder, tmp_path):
    for step, source in (("step-00000001", None), ("step-00000002", folder)):
        model = tmp_path / "run" / "checkpoints" / step / "model"
        model.parent.mkdir(parents=True)
        shutil.copytree(source, model) if source else model.mkdir()
    found = open_model_folder(tmp_path / "run", None)
    assert found.folder == tmp_path / "run" / "checkpoints" / "step-00000002" / "model"


def test_chat_reports_a_conversation_beyond_the_context(folder):
    lines = "ten " * 600 + "\nSay hello.\n"
    done = CliRunner().invoke(app, ["chat", str(folder), "--temperature", "0"], input=lines)
    assert "context of 512 tokens; /new starts a new chat" in done.stdout
    assert done.stdout.endswith("Hello there, friend!\n")


def test_sampling_defaults_come_from_generation_config(tmp_path):
    file = tmp_path / "generation_config.json"
    assert default_sampling(tmp_path) == {}
    file.write_text('{"temperature": 1, "top_p": 0.95, "top_k": 0, "eos_token_id": [1]}')
    assert default_sampling(tmp_path) == {"temperature": 1.0, "top_p": 0.95}
    file.write_text('{"do_sample": false}')
    assert default_sampling(tmp_path) == {"temperature": 0.0}
