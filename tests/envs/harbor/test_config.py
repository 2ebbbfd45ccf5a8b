"""What Harbor's own model accepts and rejects. Each line was checked against harbor 0.24.0."""

import pytest

from paddock.envs.harbor import TaskError, read_config

ACCEPTED = [
    "",
    'version = "1.0"',
    'artifacts = ["/app/x", {source = "/a", destination = "b/c", exclude = ["*.o"]}]',
    'artifacts = [{source = "/a", destination = ""}]',
    'artifacts = [{source = "/a", service = "db"}]',
    '[task]\nname = "a/b"\nauthors = [{name = "x"}]\nkeywords = ["k"]',
    "[metadata]\nany = 1\n[metadata.deep]\nx = [1, 2]",
    '[agent]\ntimeout_sec = "10"\nuser = 1000',
    '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = [" A.com. ", "*.b.org", "10.0.0.0/8"]',
    '[agent]\nnetwork_mode = "public"\nallowed_hosts = []',
    "[agent]\nfoo = 1",
    '[verifier.environment]\nmemory = "2G"',
    '[verifier]\nenvironment_mode = "separate"\nenv = {A = "b"}',
    '[[verifier.collect]]\ncommand = "x"\nservice = " db "',
    '[environment]\nos = "LINUX"\ncpus = 2\nmemory_mb = 10\ngpus = 1\ngpu_types = ["T4"]',
    '[environment]\nmemory = "2G"\nmemory_mb = 2048\nstorage = "10G"',
    '[environment]\nallow_internet = false\nnetwork_mode = "public"',
    '[environment]\ntpu = {type = "v4", topology = "2x4"}',
    '[environment]\nmcp_servers = [{name = "a", transport = "http", url = "u"}]',
    '[environment]\nmcp_servers = [{name = "a", transport = "stdio", command = "c"}]',
    '[environment]\nhealthcheck = {command = "x", retries = 2}',
    '[[steps]]\nname = "a"\nmin_reward = {x = 1}\n[steps.agent]\ntimeout_sec = 3',
    "steps = []",
]
REFUSED = [
    ("schema_version = 1", "schema_version"),
    ('multi_step_reward_strategy = "max"', "multi_step_reward_strategy"),
    ('artifacts = ["../x"]', "artifacts.0.source"),
    ('artifacts = [{source = "/a", destination = "/abs"}]', "artifacts.0.destination"),
    ('artifacts = [{source = "/a", destination = "manifest.json"}]', "artifacts.0.destination"),
    ('artifacts = [{source = "rel", service = "db"}]', "artifacts.0"),
    ('artifacts = [{source = "/a", service = "-db"}]', "artifacts.0.service"),
    ('[task]\nname = "ab"', "task.name"),
    ('[task]\nname = "a/..b"', "task.name"),
    ('[task]\nversion = "1"', "task.name"),
    ('[agent]\ntimeout_sec = "ten"', "agent.timeout_sec"),
    ("[agent]\nallowed_hosts = []", "agent"),
    ('[agent]\nnetwork_mode = "none"', "agent.network_mode"),
    ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a:80"]', "agent.allowed_hosts"),
    ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["*.10.0.0.1"]', "agent.allowed_hosts"),
    ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["a.*.b"]', "agent.allowed_hosts"),
    ('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["fe80::1%e"]', "agent.allowed_hosts"),
    ('[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1', "verifier"),
    ("[[verifier.collect]]\nservice = 'db'", "verifier.collect.0.command"),
    ('[environment]\ncpus = "two"', "environment.cpus"),
    ('[environment]\nos = "mac"', "environment.os"),
    ('[environment]\nmemory = "2G"\nmemory_mb = 2000', "environment"),
    ('[environment]\nmemory = "2X"', "environment"),
    ("[environment]\nallow_internet = 3", "environment.allow_internet"),
    ('[environment]\ntpu = {type = "v4", topology = "2"}', "environment.tpu.topology"),
    ('[environment]\nmcp_servers = [{name = "a"}]', "environment.mcp_servers.0"),
    ("[environment]\nhealthcheck = {retries = 2}", "environment.healthcheck.command"),
    ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"', "steps"),
    ('[[steps]]\nname = "con.txt"', "steps.0.name"),
    ('[[steps]]\nname = "a/b"', "steps.0.name"),
    ('[[steps]]\nname = "a"\nmin_reward = "x"', "steps.0.min_reward"),
]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "task.toml"


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_harbor_accepts_is_accepted(file, text):
    file.write_text(text)
    read_config(file)


@pytest.mark.parametrize(("text", "field"), REFUSED)
def test_what_harbor_rejects_is_rejected_with_file_and_field(file, text, field):
    file.write_text(text)
    with pytest.raises(TaskError) as refused:
        read_config(file)
    assert all(line.startswith(f"{file}: {field}") for line in str(refused.value).splitlines())


def test_invalid_toml_is_named_with_its_line(file):
    file.write_text("a = \n")
    with pytest.raises(TaskError, match=r"task.toml: not TOML: .*line 1"):
        read_config(file)


def test_unknown_keys_are_reported(file):
    file.write_text(
        '[agent]\ntimeout = 3\n[environment]\nmemory = "1G"\n[[steps]]\nname="a"\nx=1\n'
    )
    assert read_config(file)[1] == ("agent.timeout", "steps.x")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("", "public"),
        ("allow_internet = false", "no-network"),
        ('allow_internet = false\nnetwork_mode = "public"', "public"),
        ("allow_internet = true", "public"),
    ],
)
def test_the_newer_network_key_overrides_the_older(file, text, mode):
    file.write_text(f"[environment]\n{text}")
    assert read_config(file)[0].environment.effective_network_mode == mode
