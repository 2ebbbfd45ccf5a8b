"""The folder in which a quantized one is made: it becomes the target when it is whole.

plan.json says what is being done, to what, with which text; another plan is refused. progress.json
says how many layers are done and what was found in them. Files appear whole or not at all, so that
a process that is killed leaves nothing half written behind.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from paddock.checkpoint import safetensors_folder, write_tensors
from paddock.quant.calibration_data import ActivationStore, CalibrationBatch
from paddock.quant.w4a8 import QuantError

PLAN, PROGRESS, STREAMS = "plan.json", "progress.json", "streams"
REPORT, RECIPE = "quantization.json", "recipe.toml"


class QuantizationFolder:
    def __init__(self, target: Path, shards: int) -> None:
        target = target.resolve()  # through a link to the folder it means
        self.target, self.folder = target, target.parent / f".{target.name}.quantizing"
        self.shards = [safetensors_folder.SHARD.format(i, shards) for i in range(1, shards + 1)]
        self.streams = ActivationStore(self.folder / STREAMS)

    def finished_report(self, plan: Mapping[str, Any]) -> dict[str, Any] | None:
        """The report of a target that this very plan made; None where there is no target yet. What
        else may be there is not ours to replace."""
        if not self.target.exists() or (self.target.is_dir() and not any(self.target.iterdir())):
            return None
        file = self.target / REPORT
        report = safetensors_folder.read_json(file) if file.is_file() else {}
        for key, value in plan.items():
            if report.get(key) != value:
                why = f", made with other {key}" if key in report else ""
                raise QuantError(f"{self.target}: already there{why}; quantizing writes a new one")
        return report

    @contextmanager
    def lock(self) -> Iterator[None]:
        """The folder, for one process at a time; the claim dies with the process."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise QuantError(f"{self.folder}: another process is at work there") from None
        finally:
            os.close(handle)

    def resume(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Begin, or go on with what was begun with the very same plan. Returns the progress."""
        file = self.folder / PLAN
        if not file.is_file():
            write_json(file, plan)
        begun = safetensors_folder.read_json(file)
        for key, value in plan.items():
            if begun.get(key) != value:
                raise QuantError(
                    f"{self.folder}: was begun with another '{key}'; give the same again to go "
                    "on, or remove that folder to begin anew"
                )
        done = self.folder / PROGRESS
        return (
            safetensors_folder.read_json(done) if done.is_file() else {"layers": None, "found": []}
        )

    def save_progress(self, progress: Mapping[str, Any]) -> None:
        self.streams.flush()
        write_json(self.folder / PROGRESS, progress)

    def write_shard(self, number: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        file = self.folder / self.shards[number - 1]
        draft = file.with_suffix(".partial")
        write_tensors(dict(tensors), draft)
        os.replace(draft, file)

    def open_shards(self) -> safetensors_folder.SafetensorsFolder:
        """The shards, once they are all there."""
        return safetensors_folder.SafetensorsFolder(self.folder, self.shards)

    def size_bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in self.shards)

    def finish(
        self,
        config: Mapping[str, Any],
        report: Mapping[str, Any],
        beside: Iterable[Path],
        recipe: str,
    ) -> None:
        """Index, configuration, further files, recipe and report; then the folder takes its
        name."""
        tensors = self.open_shards()
        homes = {name: tensors.file(name) for name in sorted(tensors.names)}
        index = {"metadata": {"total_size": self.size_bytes()}, "weight_map": homes}
        write_json(self.folder / safetensors_folder.INDEX, index)
        write_json(self.folder / safetensors_folder.CONFIG, config)
        for file in beside:
            if file.name not in (REPORT, RECIPE):
                shutil.copy2(file, self.folder / file.name)
        (self.folder / RECIPE).write_text(recipe)
        write_json(self.folder / REPORT, report)  # last: where it is, everything else is too
        self.finalize()

    def complete_report(self, plan: Mapping[str, Any]) -> dict[str, Any] | None:
        """The report of a folder that this very plan made and that lacks nothing but its name."""
        file = self.folder / REPORT
        report = safetensors_folder.read_json(file) if file.is_file() else {}
        return report if all(report.get(key) == value for key, value in plan.items()) else None

    def finalize(self) -> None:
        """What is whole, without its tools, under its name."""
        shutil.rmtree(self.folder / STREAMS, ignore_errors=True)
        for name in (PROGRESS, PLAN):
            (self.folder / name).unlink(missing_ok=True)
        os.replace(self.folder, self.target)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    draft = file.with_suffix(".partial")
    draft.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(draft, file)


def weights_size_bytes(folder: Path) -> int:
    """Bytes of weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def fingerprint(source: Path, tensors: safetensors_folder.SafetensorsFolder) -> str:
    """Of the configuration, and of names, sizes and times of the weights' files."""
    found = hashlib.blake2b((source / safetensors_folder.CONFIG).read_bytes(), digest_size=16)
    for file in sorted({tensors.file(name) for name in tensors.names}):
        facts = (source / file).stat()
        found.update(f"{file} {facts.st_size} {facts.st_mtime_ns}".encode())
    return found.hexdigest()


def text_digest(batches: Sequence[CalibrationBatch]) -> str:
    """Of a text."""
    found = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for passage in batch.passages:
            found.update(json.dumps(asdict(passage)).encode())
    return found.hexdigest()
