import pytest

from paddock.envs.harbor import TaskError
from paddock.envs.harbor.dockerfile import (
    CopyInstruction,
    EnvInstruction,
    RunInstruction,
    UserInstruction,
    WorkdirInstruction,
    read_dockerfile,
)


def steps(tmp_path, text):
    (tmp_path / "Dockerfile").write_text("FROM base:1 AS main\n" + text)
    return list(read_dockerfile(tmp_path / "Dockerfile").steps)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("RUN a && \\\n  # why\n\n  b", RunInstruction("a &&   b")),
        ('RUN ["a", "b c"]', RunInstruction(("a", "b c"))),
        ("RUN --mount=type=cache,target=/x a", RunInstruction("a")),
        ('SHELL ["/bin/bash", "-lc"]\nRUN a', RunInstruction("a", ("/bin/bash", "-lc"))),
        ("RUN <<END\na\nb\nEND", RunInstruction("a\nb\n")),
        ("RUN cat <<'END' > f\na $b\nEND", RunInstruction("cat <<'END' > f\na $b\nEND")),
        ("run a", RunInstruction("a")),
        ("ARG V=1\nRUN echo $V", RunInstruction("V=1; echo $V")),
        ("ENV A=1 B='two words'", EnvInstruction((("A", "1"), ("B", "two words")))),
        ("ENV A one two", EnvInstruction((("A", "one two"),))),
        ("ENV A=1\nENV P=$A:${B:-b}", EnvInstruction((("P", "1:b"),))),
        ("WORKDIR app", WorkdirInstruction("app")),
        ("USER me:us", UserInstruction("me")),
        ("COPY a b/ c/", CopyInstruction(("a", "b/"), "c/")),
        ("COPY --chown=a:b --chmod=755 a b", CopyInstruction(("a",), "b", "755", "a:b")),
        ('COPY ["a b", "c"]', CopyInstruction(("a b",), "c")),
        ("ADD x.tar /x", CopyInstruction(("x.tar",), "/x", unpack=True)),
        ("COPY <<EOF /f\nhi\nEOF", CopyInstruction((), "/f", texts=(("EOF", "hi\n"),))),
    ],
)
def test_an_instruction(tmp_path, text, step):
    assert steps(tmp_path, text)[-1] == step


def test_run_options_of_a_container_are_ignored(tmp_path):
    assert steps(tmp_path, "LABEL a=b\nEXPOSE 80\nCMD x\nENTRYPOINT y\nHEALTHCHECK CMD z\n") == []


def test_terminal_bench_base_images_start_in_app(tmp_path):
    (tmp_path / "Dockerfile").write_text("ARG T=2\nFROM ghcr.io/laude-institute/t-bench/u:$T\n")
    found = read_dockerfile(tmp_path / "Dockerfile")
    assert found.base == "ghcr.io/laude-institute/t-bench/u:2"
    assert found.steps == (WorkdirInstruction("/app"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("COPY --from=other a b", "line 2: COPY --from=other needs"),
        ("FROM x", "line 2: multi-stage builds"),
        ("COPY a", "line 2: COPY and ADD must have"),
        ("ADD https://a/b c", "line 2: https://a/b cannot be downloaded"),
        ("RUM a", "line 2: unknown instruction RUM"),
        ("ENV A", "line 2: ENV must be"),
    ],
)
def test_an_unsupported_instruction_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(TaskError, match=message):
        steps(tmp_path, text)
