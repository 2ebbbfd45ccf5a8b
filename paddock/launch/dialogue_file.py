"""Append-only JSONL of accepted dialogues, with a log of the outcome of every completion."""

import fcntl
import json
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from paddock.journal import JsonlWriter, follow
from paddock.launch.errors import UserError
from paddock.records import Failure, Verdict

# Outcomes as files of earlier versions spell them.
OLD_FATES = {"kept": "accepted", "said before": "duplicate", "unusable": "policy failure"}


@dataclass(slots=True)
class OutcomeLog:
    """OUT.notes: the options of a command, then the outcome of every completion."""

    notes: JsonlWriter
    fates: dict[str, str] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def open(cls, out: Path, options: dict[str, Any]) -> Iterator["OutcomeLog"]:
        """Create the log beside `out`, or continue one begun with the same `options`; locks it."""
        out.parent.mkdir(parents=True, exist_ok=True)
        notes = out.with_name(f"{out.name}.notes")
        with out.with_name(f"{out.name}.lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{out} is in use by another process") from None
            if out.exists() and out.stat().st_size and not notes.exists():
                raise UserError(f"{out} already exists and was not written by this command")
            opened = cls(JsonlWriter(notes))
            try:
                opened._resume(out, [note for note, _ in follow(notes)], options)
                yield opened
            finally:
                opened.notes.close()

    def _resume(self, out: Path, notes: list[dict[str, Any]], options: dict[str, Any]) -> None:
        if not notes:
            self.notes.append({"begun": options})
        elif notes[0].get("begun") != options:
            before = notes[0].get("begun") or {}
            name = next(key for key in {**options, **before} if options.get(key) != before.get(key))
            raise UserError(
                f"{out} was started with {name} {before.get(name)!r}, not {options.get(name)!r}: "
                "choose another file with --out"
            )
        self.fates |= {n["id"]: OLD_FATES.get(n["fate"], n["fate"]) for n in notes[1:]}

    def note(self, name: str, fate: str, reward: float | None) -> None:
        self.notes.append({"id": name, "fate": fate, "reward": reward})
        self.fates[name] = fate


@dataclass(slots=True)
class DialogueFile:
    """Accepted dialogues in OUT, and the outcome of every completion in OUT.notes.

    A dialogue is written before its outcome is noted, each with one write: a process killed between
    the two finds the dialogue when it resumes and does not sample it again.
    """

    dialogues: JsonlWriter
    log: OutcomeLog
    digests: set[str] = field(default_factory=set)  # of the accepted dialogues
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    @contextmanager
    def open(cls, out: Path, options: dict[str, Any]) -> Iterator["DialogueFile"]:
        """Create the file, or continue one that was begun with the same `options`; locks it."""
        with OutcomeLog.open(out, options) as log:
            opened = cls(JsonlWriter(out), log, counts=Counter(log.fates.values()))
            try:
                for line, _ in follow(out):
                    opened.digests.add(_digest(line["task"], line["messages"]))
                    if line["id"] not in opened.done:  # killed before it was noted
                        opened._note(line["id"], "accepted", line["reward"])
                yield opened
            finally:
                opened.dialogues.close()

    @property
    def done(self) -> Set[str]:
        """The completions whose outcome is known."""
        return self.log.fates.keys()

    def add(self, name: str, line: dict[str, Any], verdict: Verdict, min_reward: float) -> None:
        """A completion that was scored."""
        if verdict.reward < min_reward:
            self._note(name, "rejected", verdict.reward)
            return
        digest = _digest(line["task"], line["messages"])
        if digest in self.digests:
            self._note(name, "duplicate", verdict.reward)
            return
        self.digests.add(digest)
        self.dialogues.append(line)
        self._note(name, "accepted", verdict.reward)

    def add_failure(self, name: str, failure: Failure) -> None:
        """A rollout without a verdict. A failure that is not the policy's is not noted, so that the
        completion is sampled again when the command is run again."""
        if failure.is_policy_failure:
            self._note(name, "policy failure", None)
        else:
            self.counts["failed"] += 1

    def _note(self, name: str, fate: str, reward: float | None) -> None:
        self.log.note(name, fate, reward)
        self.counts[fate] += 1


def _digest(task: str, messages: Sequence[dict[str, Any]]) -> str:
    """Identifies a conversation about a task; ids of tool calls do not count."""
    bare = [{k: v for k, v in m.items() if k != "tool_call_id"} for m in messages]
    for message in bare:
        if "tool_calls" in message:
            message["tool_calls"] = [call["function"] for call in message["tool_calls"]]
    return blake2b(json.dumps([task, bare]).encode(), digest_size=16).hexdigest()
