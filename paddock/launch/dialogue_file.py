"""A file of dialogues that only grows, and what became of every answer that was asked for."""

import fcntl
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paddock.cli.errors import UserError
from paddock.journal import JsonlWriter, follow
from paddock.records import Failure, Verdict


@dataclass(slots=True)
class DialogueFile:
    """The file of dialogues that were kept, and beside it what became of every answer.

    A dialogue is written before its answer is noted, each with one write. Whoever is killed
    between the two finds the dialogue and does not ask again.
    """

    kept_lines: JsonlWriter
    noted_lines: JsonlWriter
    done: set[str] = field(default_factory=set)
    said: set[str] = field(default_factory=set)  # digests of the conversations kept
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    @contextmanager
    def open(cls, out: Path, begun: dict[str, Any]) -> Iterator["DialogueFile"]:
        out.parent.mkdir(parents=True, exist_ok=True)
        notes = out.with_name(f"{out.name}.notes")
        with out.with_name(f"{out.name}.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{out}: another process is writing it") from None
            if out.exists() and out.stat().st_size and not notes.exists():
                raise UserError(f"{out} is there already and was not written by this command")
            harvest = cls(JsonlWriter(out), JsonlWriter(notes))
            try:
                harvest._take_up(out, [note for note, _ in follow(notes)], begun)
                yield harvest
            finally:
                harvest.kept_lines.close()
                harvest.noted_lines.close()

    def _take_up(self, out: Path, notes: list[dict[str, Any]], begun: dict[str, Any]) -> None:
        """Go on from what the files say."""
        if not notes:
            self.noted_lines.append({"begun": begun})
        elif notes[0].get("begun") != begun:
            before = notes[0].get("begun") or {}
            name = next(key for key in {**begun, **before} if begun.get(key) != before.get(key))
            raise UserError(
                f"{out} was begun with {name} {before.get(name)!r}, not {begun.get(name)!r}: "
                "choose another file with --out"
            )
        for note in notes[1:]:
            self.done.add(note["id"])
            self.counts[note["fate"]] += 1
        for line, _ in follow(out):
            self.said.add(_digest(line["task"], line["messages"]))
            if line["id"] not in self.done:  # killed before it was noted
                self._note(line["id"], "kept", line["reward"])

    def add(self, name: str, line: dict[str, Any], verdict: Verdict, at_least: float) -> None:
        """An answer that was judged."""
        if verdict.reward < at_least:
            self._note(name, "rejected", verdict.reward)
            return
        digest = _digest(line["task"], line["messages"])
        if digest in self.said:
            self._note(name, "said before", verdict.reward)
            return
        self.said.add(digest)
        self.kept_lines.append(line)
        self._note(name, "kept", verdict.reward)

    def add_failure(self, name: str, failure: Failure) -> None:
        """An answer without a verdict. Unless the model is to blame it is not noted, so that it is
        asked for again when the command is called again."""
        if failure.is_policy_failure:
            self._note(name, "unusable", None)
        else:
            self.counts["failed"] += 1

    def _note(self, name: str, fate: str, reward: float | None) -> None:
        self.noted_lines.append({"id": name, "fate": fate, "reward": reward})
        self.done.add(name)
        self.counts[fate] += 1


def _digest(task: str, messages: Sequence[dict[str, Any]]) -> str:
    """Stands for a conversation about a task; ids of calls do not matter."""
    bare = [{k: v for k, v in m.items() if k != "tool_call_id"} for m in messages]
    for message in bare:
        if "tool_calls" in message:
            message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return blake2b(json.dumps([task, bare]).encode(), digest_size=16).hexdigest()
