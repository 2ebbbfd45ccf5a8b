"""Working folder of a quantization run, renamed to the target when it is complete.

plan.json records the weights, settings and calibration text; resuming with another plan is an
error. progress.json records the finished layers and their results. Every file is written
atomically, so a killed process leaves no partial files.
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
    """Shards, progress and activations of one run; safe to resume after a kill."""

    def __init__(self, target: Path, shards: int) -> None:
        target = target.resolve()  # follow a link to the actual folder
        self.target, self.folder = target, target.parent / f".{target.name}.quantizing"
        self.shards = [safetensors_folder.SHARD.format(i, shards) for i in range(1, shards + 1)]
        self.streams = ActivationStore(self.folder / STREAMS)

    def finished_report(self, plan: Mapping[str, Any]) -> dict[str, Any] | None:
        """The report of a finished target with this plan; None if there is no target yet. Raises
        QuantError if the target holds anything else."""
        if not self.target.exists() or (self.target.is_dir() and not any(self.target.iterdir())):
            return None
        file = self.target / REPORT
        report = safetensors_folder.read_json(file) if file.is_file() else {}
        for key, value in plan.items():
            if report.get(key) != value:
                why = f", made with other {key}" if key in report else ""
                raise QuantError(f"{self.target}: already exists{why}; choose a new folder")
        return report

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder for this process; the lock is released when the process exits."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise QuantError(f"{self.folder}: in use by another process") from None
        finally:
            os.close(handle)

    def resume(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Start, or resume a run that was started with the same plan. Returns the progress."""
        file = self.folder / PLAN
        if not file.is_file():
            write_json(file, plan)
        started = safetensors_folder.read_json(file)
        for key, value in plan.items():
            if started.get(key) != value:
                raise QuantError(
                    f"{self.folder}: was started with a different '{key}'; use the same to resume, "
                    "or remove that folder to start over"
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
        temporary = file.with_suffix(".partial")
        write_tensors(dict(tensors), temporary)
        os.replace(temporary, file)

    def open_shards(self) -> safetensors_folder.SafetensorsFolder:
        """The shards, once all are written."""
        return safetensors_folder.SafetensorsFolder(self.folder, self.shards)

    def size_bytes(self) -> int:
        return sum((self.folder / file).stat().st_size for file in self.shards)

    def finish(
        self,
        config: Mapping[str, Any],
        report: Mapping[str, Any],
        extra_files: Iterable[Path],
        recipe: str,
    ) -> None:
        """Write index, configuration, extra files, recipe and report; then rename to the target."""
        tensors = self.open_shards()
        weight_map = {name: tensors.file(name) for name in sorted(tensors.names)}
        index = {"metadata": {"total_size": self.size_bytes()}, "weight_map": weight_map}
        write_json(self.folder / safetensors_folder.INDEX, index)
        write_json(self.folder / safetensors_folder.CONFIG, config)
        for file in extra_files:
            if file.name not in (REPORT, RECIPE):
                shutil.copy2(file, self.folder / file.name)
        (self.folder / RECIPE).write_text(recipe)
        write_json(
            self.folder / REPORT, report
        )  # last: its presence means that all else is complete
        self.finalize()

    def complete_report(self, plan: Mapping[str, Any]) -> dict[str, Any] | None:
        """The report if this plan is complete except for the final rename."""
        file = self.folder / REPORT
        report = safetensors_folder.read_json(file) if file.is_file() else {}
        return report if all(report.get(key) == value for key, value in plan.items()) else None

    def finalize(self) -> None:
        """Remove working files and rename the folder to the target."""
        shutil.rmtree(self.folder / STREAMS, ignore_errors=True)
        for name in (PROGRESS, PLAN):
            (self.folder / name).unlink(missing_ok=True)
        os.replace(self.folder, self.target)


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    temporary = file.with_suffix(".partial")
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    os.replace(temporary, file)


def weights_size_bytes(folder: Path) -> int:
    """Total size of the safetensors files in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def fingerprint(source: Path, tensors: safetensors_folder.SafetensorsFolder) -> str:
    """Digest of config.json and of the names, sizes and mtimes of the weight files."""
    digest = hashlib.blake2b((source / safetensors_folder.CONFIG).read_bytes(), digest_size=16)
    for file in sorted({tensors.file(name) for name in tensors.names}):
        stat = (source / file).stat()
        digest.update(f"{file} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def text_digest(batches: Sequence[CalibrationBatch]) -> str:
    """Digest of the calibration text."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for text in batch.passages:
            digest.update(json.dumps(asdict(text)).encode())
    return digest.hexdigest()
