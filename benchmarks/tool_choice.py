"""Required tool calls of a random model are parsed by real clients, however small `max_tokens` is.

    python -m benchmarks.tool_choice [PYTHON]    PYTHON: an interpreter with the clients installed

200 random schemas, random weights (temperature 50), thinking on and off, `max_tokens` is the size
of the smallest call plus 8.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.schemas import random_schema, smallest
from benchmarks.table import Claim, print_claims

COUNT = 200


def claims(python: str = sys.executable, count: int = COUNT) -> list[Claim]:
    from tests.serve.live import serving
    from tests.serve.random_model import save_random_model

    with (
        tempfile.TemporaryDirectory() as folder,
        serving(save_random_model(Path(folder) / "model")) as server,
    ):
        cases = []
        for seed in range(count):
            schema = random_schema(random.Random(seed))
            max_tokens = smallest(server.tokenizer, "look", schema) + 8
            case = {
                "seed": seed,
                "schema": schema,
                "max_tokens": max_tokens,
                "thinks": seed % 2 == 0,
            }
            cases.append(case)
        file = Path(folder) / "cases.json"
        file.write_text(json.dumps(cases))
        script = str(Path(__file__).with_name("tool_choice_clients.py"))
        done = subprocess.run(
            [python, script, server.url, str(file)], stdout=subprocess.PIPE, check=True
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return [_claim(name, each, count) for name, each in found.items()]


def _claim(name: str, found: dict[str, object], count: int) -> Claim:
    what = f"required call parsed by {name} {found['version'] or ''}".strip()
    if found["version"] is None:
        return Claim(name=what, measured="not installed, not run")
    return Claim(
        name=what,
        target=f"{count} of {count}",
        measured=f"{found['parsed']} of {found['requests']} {found['error']}".strip(),
        holds=found["parsed"] == count,
    )


if __name__ == "__main__":
    print_claims(claims(*sys.argv[1:2]))
