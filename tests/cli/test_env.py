import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paddock.cli.__main__ import app
from paddock.envs import REGISTRY
from paddock.sandbox import rootfs
from tests.envs.harbor.tasks import simple
from tests.sandbox.sandboxes import BWRAP

ROOT = Path(__file__).parents[2]
SMALL = ["--set", "levels=[1]", "--set", 'families=["files"]', "--set", "warm_sandboxes=0"]
bwrap = pytest.mark.parametrize("backend", BWRAP)


@pytest.fixture(autouse=True)
def _temporary_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(rootfs, "cache_dir", lambda: tmp_path / "cache_dir" / "sandbox")


def paddock(*words, typed=None):
    return CliRunner().invoke(app, ["env", *words], input=typed)


def test_every_environment_is_listed():
    done = paddock("list")
    assert done.exit_code == 0
    assert all(name in done.stdout for name in REGISTRY)


def test_an_environment_is_shown_with_settings_tools_and_a_task():
    done = paddock("show", "terminal", *SMALL)
    assert done.exit_code == 0
    for word in ("unlimited", "shell(command, timeout_s)", "levels = [1]", "memory_bytes = "):
        assert word in done.stdout
    assert "user: In " in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "termial"], "error: environment 'termial' not found; it must be one of "),
        (["show", "terminal", "--set", "levls=[1]"], "error: environment 'terminal': "),
        (["show", "harbor", "--set", 'path="/nowhere"'], "error: /nowhere: folder not found"),
        (
            ["try", "terminal", "--base-url", "http://127.0.0.1:1"],
            "error: --base-url needs --model",
        ),
    ],
)
def test_a_user_error_is_one_line(words, message):
    done = paddock(*words)
    assert done.exit_code == 1
    assert done.stderr.startswith(message)


@bwrap
def test_a_person_can_try_a_task(backend):
    typed = '/shell ls\n/look x\n/shell {"command": "pwd"}\nDone.\n'
    done = paddock("try", "terminal", *SMALL, typed=typed)
    assert done.exit_code == 0, done.stderr
    assert "tool: /workspace" in done.stdout
    assert "tools: /shell(command, timeout_s)" in done.stderr
    assert "reward 0 (not so: " in done.stdout
    assert "after 3 turns" in done.stdout


@bwrap
def test_end_of_input_ends_without_a_verdict(backend):
    done = paddock("try", "terminal", *SMALL, typed="")
    assert done.exit_code == 1
    assert "error: rollout failed (policy at person): end of input" in done.stderr


@bwrap
def test_the_solution_can_be_run(backend):
    done = paddock("try", "terminal", *SMALL, "--solve")
    assert done.exit_code == 0, done.stderr
    assert "assistant calls shell" in done.stdout
    assert "reward 1 after 2 turns" in done.stdout


class Model(BaseHTTPRequestHandler):
    """An OpenAI-compatible server whose model makes one tool call and stops."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._say({"data": [{"id": "m"}]})

    def do_POST(self):
        request_body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request_body["tools"][0]["function"]["name"] == "shell"
        call = {"name": "shell", "arguments": '{"command": "echo from-$((40 + 2))"}'}
        message = {"role": "assistant", "content": "I give up."}
        if not any(each["role"] == "tool" for each in request_body["messages"]):
            calls = [{"id": "c1", "type": "function", "function": call}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        self._say({"choices": [{"index": 0, "message": message, "finish_reason": finish}]})

    def _say(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@bwrap
def test_a_model_behind_a_url_can_try_a_task(backend):
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        done = paddock("try", "terminal", *SMALL, "--base-url", url, "--model", "m")
        server.shutdown()
    assert done.exit_code == 0, done.stderr
    assert "tool: from-42" in done.stdout
    assert "assistant: I give up." in done.stdout
    assert "reward 0" in done.stdout


@pytest.mark.slow
def test_a_model_from_a_folder_can_try_a_task(tmp_path):
    """An untrained network: its reply may or may not end, but it is sampled."""
    from paddock.checkpoint import save_pretrained
    from paddock.data.dialogue_sources import DemonstrationSource
    from paddock.model import Transformer
    from paddock.text import train_tokenizer, with_chat_template
    from tests.model.networks import latent_config

    source = DemonstrationSource(name="c", env="nano-chain", count=20)
    texts = (document.text for document in source.documents(None))
    tokenizer = with_chat_template(train_tokenizer(texts, vocab=330, splitting="words"), "5")
    config = latent_config(
        vocab=tokenizer.vocab_size, context=256, eos=tokenizer.special_token_ids.stop_token_ids
    )
    save_pretrained(Transformer.from_config(config, seed=1), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    folder = str(tmp_path / "model")
    done = paddock("try", "nano-chain", "--model", folder, "--max-tokens", "20")
    assert "reward " in done.stdout or "rollout failed (policy at engine)" in done.stderr


@bwrap
def test_sound_tasks_pass_the_check(backend, tmp_path):
    simple(tmp_path / "good")
    done = paddock("check", str(tmp_path), "--set", "allow_internet_in_build=false")
    assert done.exit_code == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.strip().startswith("good")]
    assert row == ["good", "1", "0", "yes", "yes"]


@bwrap
def test_an_unsound_task_is_exit_code_one_with_the_reason(backend, tmp_path):
    simple(tmp_path / "bad", solution__solve_DOT_sh="true\n")
    done = paddock("check", str(tmp_path / "bad"), "--set", "allow_internet_in_build=false")
    assert done.exit_code == 1
    assert "bad: the solution has reward 0" in done.stdout
    assert "error: 1 of 1 tasks are not valid" in done.stderr


def test_a_malformed_task_is_named_with_file_and_field(tmp_path):
    folder = simple(tmp_path / "a", task_DOT_toml='[environment]\ncpus = "two"\n')
    done = paddock("check", str(folder))
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {folder / 'task.toml'}: environment.cpus: ")


def test_listing_imports_neither_torch_nor_an_environment():
    code = (
        "import sys; from paddock.cli.__main__ import main; sys.argv[1:] = ['env', 'list']\n"
        "try: main()\nfinally:\n"
        "    assert not {'torch', 'paddock.envs.terminal.taskset'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "AssertionError" not in done.stderr
