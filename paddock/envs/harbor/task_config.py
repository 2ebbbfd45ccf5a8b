"""Schema of task.toml (Harbor schema 1.4 and older).

Unknown keys are ignored as in Harbor, but reported, because they may be misspelt.
"""

import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from paddock.envs.harbor.network import Mode, validate_hosts, validate_network_mode
from paddock.sandbox import SyscallGroup

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
SERVICE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]*")
TOPOLOGY = re.compile(r"[1-9]\d*(x[1-9]\d*)+")
FORBIDDEN_CHARS = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
DEVICE_NAME = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[1-9\u00b9\u00b2\u00b3])")
VerifierView = Literal["files", "system", "processes"]  # of the agent's environment
MAIN = "main"  # the agent's service
SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


class TaskError(ValueError):
    """An invalid task; each line of the message names the file and the problem."""


class TaskTomlTable(BaseModel):
    """Base of all tables of task.toml."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class NetworkPolicyConfig(TaskTomlTable):
    """Network access of a phase; unset means as in the environment."""

    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: list[str] | None) -> list[str] | None:
        return None if hosts is None else validate_hosts(hosts)

    @model_validator(mode="after")
    def _check_mode(self) -> "NetworkPolicyConfig":
        validate_network_mode(self.network_mode, self.allowed_hosts)
        return self


class Author(TaskTomlTable):
    name: str
    email: str | None = None


class PackageInfo(TaskTomlTable):
    name: str
    version: str | None = Field(default=None, min_length=1)
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not NAME.fullmatch(name) or ".." in name:
            raise ValueError(f"must be of the form org/name, got {name!r}")
        return name


class HealthcheckConfig(TaskTomlTable):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class TpuConfig(TaskTomlTable):
    type: str = Field(min_length=1)
    topology: str

    @field_validator("topology")
    @classmethod
    def _topology(cls, text: str) -> str:
        if not TOPOLOGY.fullmatch(text.strip()):
            raise ValueError(f"must be of the form 2x4, got {text!r}")
        return text.strip()


class MCPServerConfig(TaskTomlTable):
    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []
    headers: dict[str, str] = {}

    @field_validator("transport", mode="before")
    @classmethod
    def _transport(cls, name: Any) -> Any:
        return "streamable-http" if name == "http" else name

    @model_validator(mode="after")
    def _check_transport(self) -> "MCPServerConfig":
        missing = "command" if self.transport == "stdio" else "url"
        if not getattr(self, missing):
            raise ValueError(f"transport {self.transport!r} needs {missing}")
        return self


class EnvironmentConfig(NetworkPolicyConfig):
    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: TpuConfig | None = None
    mcp_servers: list[MCPServerConfig] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: HealthcheckConfig | None = None
    workdir: str | None = None
    network_mode: Mode = "public"
    allow_internet: bool | None = None  # older form of network_mode

    @field_validator("os", mode="before")
    @classmethod
    def _system(cls, name: Any) -> Any:
        return name.lower() if isinstance(name, str) else name

    @model_validator(mode="before")
    @classmethod
    def _older_keys(cls, data: Any) -> Any:
        """Convert `memory = "2G"` and `storage = "10G"` of older tasks."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            text = data.pop(old, None)
            if isinstance(text, str):
                size = parse_megabytes(text)
                if data.setdefault(new, size) != size:
                    raise ValueError(f"{old} = {text!r} contradicts {new} = {data[new]!r}")
        return data

    @property
    def effective_network_mode(self) -> Mode:
        """The network mode, from the newer or the older key."""
        newer = "network_mode" in self.model_fields_set or self.allowed_hosts is not None
        if newer or self.allow_internet is None:
            return self.network_mode
        return "public" if self.allow_internet else "no-network"


def parse_megabytes(text: str) -> int:
    """A size such as "2G" in MiB.

    >>> parse_megabytes("2G"), parse_megabytes("512m")
    (2048, 512)
    """
    number, unit = text.strip()[:-1], text.strip()[-1:].upper()
    if unit not in SIZES:
        raise ValueError(f"must be a size such as '2G' or '512M', got {text!r}")
    return int(float(number) * SIZES[unit])


class AgentConfig(NetworkPolicyConfig):
    timeout_sec: float | None = None
    user: str | int | None = None


def _service(name: str | None) -> str | None:
    if name is not None and not SERVICE.fullmatch(name.strip()):
        raise ValueError(f"must be a service name, got {name!r}")
    return None if name is None else name.strip()


class CollectConfig(TaskTomlTable):
    command: str
    service: str = MAIN
    timeout_sec: float = 60.0
    user: str | int | None = None

    _check = field_validator("service")(_service)


class VerifierConfig(NetworkPolicyConfig):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentConfig | None = None
    collect: list[CollectConfig] = []

    @model_validator(mode="after")
    def _check_environment(self) -> "VerifierConfig":
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError(
                "environment_mode = 'shared' must not be combined with an environment table"
            )
        return self

    @property
    def effective_mode(self) -> Literal["shared", "separate"] | None:
        """The mode set here, explicitly or by an environment table; None if neither."""
        inferred: Literal["separate"] | None = "separate" if self.environment else None
        return self.environment_mode or inferred


class ArtifactConfig(TaskTomlTable):
    source: str
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None

    _check = field_validator("service")(_service)

    @field_validator("source")
    @classmethod
    def _source(cls, path: str) -> str:
        if ".." in PurePosixPath(path).parts:
            raise ValueError(f"must not contain '..', got {path!r}")
        return path

    @field_validator("destination")
    @classmethod
    def _destination(cls, path: str | None) -> str | None:
        if not path:
            return None
        parts = PurePosixPath(path).parts
        if "\\" in path or path.startswith("/") or ".." in parts or not parts:
            raise ValueError(
                f"must be a relative path with forward slashes and without '..', got {path!r}"
            )
        if path.rstrip("/") == "manifest.json":
            raise ValueError("'manifest.json' is reserved for the list of artifacts")
        return path

    @model_validator(mode="after")
    def _absolute(self) -> "ArtifactConfig":
        absolute = self.source.startswith("/") or re.match(r"[A-Za-z]:[/\\]", self.source)
        if self.service not in (None, MAIN) and not absolute:
            raise ValueError(
                f"source must be absolute for service {self.service!r}, got {self.source!r}"
            )
        return self


ArtifactOrPath = Annotated[
    ArtifactConfig,
    BeforeValidator(lambda value: {"source": value} if isinstance(value, str) else value),
]  # a table, or only its source


class StepConfig(TaskTomlTable):
    name: str
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckConfig | None = None
    artifacts: list[ArtifactOrPath] = []

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        device = DEVICE_NAME.fullmatch(name.partition(".")[0].rstrip(" ").lower())
        bad = not name.strip() or name.endswith((".", " ")) or FORBIDDEN_CHARS.search(name)
        if bad or device or len(name.encode()) > 255:
            raise ValueError(f"must be a portable directory name, got {name!r}")
        return name


class SolutionConfig(TaskTomlTable):
    env: dict[str, str] = {}


class PaddockMetadata(BaseModel):
    """The table `metadata.paddock`, which Harbor ignores: needs that are specific to Paddock."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    verifier_sees: VerifierView | None = None
    allow: tuple[SyscallGroup, ...] = ()  # allowed system calls


class TaskConfig(TaskTomlTable):
    schema_version: str = "1.4"
    task: PackageInfo | None = None
    metadata: dict[str, Any] = {}
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[StepConfig] | None = None
    artifacts: list[ArtifactOrPath] = []

    @property
    def paddock_metadata(self) -> PaddockMetadata:
        return PaddockMetadata.model_validate(self.metadata.get("paddock", {}))

    @model_validator(mode="after")
    def _check_metadata(self) -> "TaskConfig":
        try:
            PaddockMetadata.model_validate(self.metadata.get("paddock", {}))
            return self
        except ValidationError as error:
            raise ValueError("metadata.paddock." + "; ".join(_lines(error))) from None

    @model_validator(mode="before")
    @classmethod
    def _older_version(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = dict(data)
            data.setdefault("schema_version", data.pop("version"))
        return data

    @field_validator("steps")
    @classmethod
    def _unique_names(cls, steps: list[StepConfig] | None) -> list[StepConfig] | None:
        seen: set[str] = set()
        for step in steps or ():
            key = unicodedata.normalize("NFC", step.name).casefold()
            if key in seen:
                raise ValueError(
                    f"step names must be unique ignoring case, got {step.name!r} twice"
                )
            seen.add(key)
        return steps


def read_config(file: Path) -> tuple[TaskConfig, tuple[str, ...]]:
    """Read a task.toml; returns its unknown keys too. Raises TaskError if it is invalid."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise TaskError(f"{file}: not UTF-8: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{file}: not TOML: {error}") from None
    try:
        config = TaskConfig.model_validate(data)
    except ValidationError as error:
        raise TaskError("\n".join(f"{file}: {line}" for line in _lines(error))) from None
    return config, tuple(_unknown_keys(TaskConfig, data, ""))


def _lines(error: ValidationError) -> Iterator[str]:
    for each in error.errors():
        where = ".".join(str(part) for part in each["loc"])
        message = each["msg"].removeprefix("Value error, ")
        yield f"{where}: {message}" if where else message


OLDER_KEYS = {"memory", "storage", "version"}


def _unknown_keys(table: type[BaseModel], data: Mapping[str, Any], where: str) -> Iterator[str]:
    for key, value in data.items():
        name = f"{where}.{key}" if where else key
        field = table.model_fields.get(key)
        if field is None:
            if key not in OLDER_KEYS:
                yield name
            continue
        inner = _table_type(field.annotation)
        if inner is not None:
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    yield from _unknown_keys(inner, each, name)


def _table_type(annotation: Any) -> type[BaseModel] | None:
    """The table class of a field that holds one or several tables, or None."""
    if isinstance(annotation, type) and issubclass(annotation, TaskTomlTable):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _table_type(inner)
        if found is not None:
            return found
    return None
