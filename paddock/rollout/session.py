"""Session: one agent's conversation as token ids, token-in-token-out without re-tokenization.

The session owns the token ids. A client sends its whole conversation every turn; the recorded
prefix is matched (prefix_matcher.py), and only new messages are tokenized and appended to the
recorded ids, spliced at the boundary token that the model sampled. If the client changed the
history, the new turn forks off the last turn that still matches; so it does if the chat template
rewrites its history (reasoning cleared by a new user message).
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from paddock.records import Completion, Message, Outcome, ToolSpec, Trajectory
from paddock.rollout.client import as_int32_array
from paddock.rollout.prefix_matcher import (
    LOOSE,
    Digest,
    MergedMessage,
    PrefixMatcher,
    chain_digest,
    merge_assistant_messages,
    preamble_digest,
    reasoning_digest,
    split_reasoning,
)
from paddock.rollout.session_tree import SessionTree, TurnNode
from paddock.text import (
    DEFAULT_THINKING,
    NotPrefixPreservingError,
    Renderer,
    SpecialToken,
    ThinkingKwargs,
    is_in_reasoning,
)

PRESERVED = ThinkingKwargs(clear_thinking=False)  # keep reasoning, and so the prefix
_PROBE = (Message(role="user", content="x"),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionHistory:
    """Digest of a conversation that was matched before."""

    length: int = 0  # messages
    entries: int = 0
    head: Digest  # of everything before the first message
    digest: Digest  # of the conversation
    parent: TurnNode | None = None  # last turn whose recorded reply is in it
    ends_with_reply: bool = False  # the next message may be part of that reply


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedPrefix:
    """A conversation with its recorded prefix, not tokenized yet. `history` describes all of it,
    for matching a later conversation that starts with it."""

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...]
    thinking: ThinkingKwargs
    history: SessionHistory
    start: int  # index of the first message that is not recorded
    last_reply: Message | None  # the last recorded reply, as it came back

    @property
    def num_chars(self) -> int:
        """Characters that may have to be tokenized: the new messages if all are tool results, else
        the whole conversation, since the template may rewrite its history."""
        new = self.messages[self.start :]
        results = all(message.role == "tool" for message in new)
        return sum(len(message.content) for message in (new if results else self.messages))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnPrompt:
    """Prompt of a turn that is not sampled or recorded yet."""

    prompt: "array[int]"  # all token ids
    new_token_ids: "array[int]"  # those after the parent turn
    parent: TurnNode | None
    new_messages: tuple[Message, ...]  # the messages in `new_token_ids`
    key: Digest  # of the conversation before the reply
    entries: int
    fork_reason: str  # why it does not continue the newest turn; "" if it does
    tools: tuple[ToolSpec, ...] = ()
    thinking: ThinkingKwargs = DEFAULT_THINKING


@dataclass(slots=True, eq=False)
class Session:
    """All turns of one agent. Turns may run concurrently; each is recorded when it ends."""

    id: str
    renderer: Renderer
    matcher: PrefixMatcher = LOOSE
    tree: SessionTree = field(default_factory=SessionTree)
    tools: tuple[ToolSpec, ...] = ()  # as the newest turn had them
    _by_key: dict[Digest, TurnNode] = field(default_factory=dict)
    _heads: dict[ThinkingKwargs, tuple[tuple[ToolSpec, ...], Digest]] = field(default_factory=dict)

    # --- a turn -----------------------------------------------------------------------------------

    def begin_turn(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        forced: Sequence[int] = (),
    ) -> TurnPrompt:
        """The prompt of the next turn, followed by the `forced` tokens of the reply. Raises
        ChatTemplateError if the template cannot render it."""
        return self.build_prompt(
            self.match_prefix(messages, tools=tools, thinking=thinking), forced
        )

    def match_prefix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        past: SessionHistory | None = None,
    ) -> MatchedPrefix:
        """First half of `begin_turn`: microseconds per message. A `past` that the messages start
        with is not matched again if its next reply was recorded."""
        head = self._head(tuple(tools), thinking)
        nothing = SessionHistory(head=head, digest=head)
        continues = past is not None and past.head == head and not past.ends_with_reply
        match = self._match(messages, past if past is not None and continues else nothing)
        if continues and match[0].parent is None:
            match = self._match(messages, nothing)
        history, start, last_reply = match
        return MatchedPrefix(
            messages=messages,
            tools=tuple(tools),
            thinking=thinking,
            history=history,
            start=start,
            last_reply=last_reply,
        )

    def build_prompt(self, found: MatchedPrefix, forced: Sequence[int] = ()) -> TurnPrompt:
        """Second half of `begin_turn`: tokenizes the new messages."""
        parent = found.history.parent
        past = array("i") if parent is None else parent.token_ids()
        added, follows, why = self._added(found, past)
        added.extend(forced)
        return TurnPrompt(
            prompt=(past if follows else array("i")) + added,
            new_token_ids=added,
            parent=parent if follows else None,
            new_messages=tuple(found.messages[found.start if follows else 0 :]),
            key=found.history.digest,
            entries=found.history.entries,
            fork_reason=why,
            tools=found.tools,
            thinking=found.thinking,
        )

    def record(
        self, prompt: TurnPrompt, completion: Completion, reply: Message, *, stop: str = ""
    ) -> TurnNode | None:
        """Record a turn that its client has received. A completion without tokens is ignored.

        `stop` is the stop string that ended it: sampled, but no part of `reply`. A client may put
        it there again."""
        if not completion.token_ids:
            return None
        matched = split_reasoning(reply)  # as it will be matched
        node = TurnNode(
            parent=prompt.parent,
            number=len(self.tree.nodes),
            added=prompt.new_token_ids,
            ids=as_int32_array(completion.token_ids),
            logprobs=array("f", completion.logprobs),
            versions=completion.versions,
            finish=completion.finish,
            forced=completion.forced,
            key=chain_digest(self.matcher.key(matched), prompt.key),
            reasoning_digest=reasoning_digest(matched),
            entries=prompt.entries + 1,
            fork_reason=prompt.fork_reason,
        )
        node.store_messages(prompt.new_messages, reply)
        self.tree.add(node)
        # Of equal replies a client continues the newest.
        self._by_key[node.key] = node
        if stop:
            restored = replace(matched, content=matched.content + stop)
            self._by_key[chain_digest(self.matcher.key(restored), prompt.key)] = node
        self.tools = prompt.tools
        return node

    # --- export -----------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of the newest branch."""
        return self.tree.nodes[-1].tokens if self.tree.nodes else 0

    def trajectories(
        self, *, task_id: str, group_id: str, outcome: Outcome
    ) -> tuple[Trajectory, ...]:
        """Every branch as a trajectory; one without turns for a session without turns.

        A turn shared by branches is trained in the first of them only, so every sampled token is
        trained exactly once.
        """
        trained: set[int] = set()
        found = []
        for branch, last in enumerate(self.tree.leaves()):
            turns = [node.turn(trained=node.number not in trained) for node in last.path()]
            trained.update(node.number for node in last.path())
            found.append((branch, tuple(turns)))
        return tuple(
            Trajectory(
                task_id=task_id,
                group_id=group_id,
                session_id=self.id,
                branch=branch,
                turns=turns,
                outcome=outcome,
            )
            for branch, turns in found or [(0, ())]
        )

    # --- prefix matching --------------------------------------------------------------------------

    def _match(
        self, messages: Sequence[Message], before: SessionHistory
    ) -> tuple[SessionHistory, int, Message | None]:
        """The history of the conversation, of which `before` is known; the index of the first
        message that is not recorded; and the recorded reply before it."""
        merged = merge_assistant_messages(messages[before.length :])
        keys = [before.digest]
        for message, _ in merged:
            keys.append(chain_digest(self.matcher.key(message), keys[-1]))
        node, at = self._recorded(merged, keys, before)
        whole = SessionHistory(
            length=len(messages),
            entries=before.entries + len(merged),
            head=before.head,
            digest=keys[-1],
            parent=node,
            ends_with_reply=bool(merged) and merged[-1].message.role == "assistant",
        )
        if node is None:
            return whole, 0, None
        return whole, before.length + merged[at].end, merged[at].message

    def _head(self, tools: tuple[ToolSpec, ...], thinking: ThinkingKwargs) -> Digest:
        """Digest of everything before the first message; usually the same in every turn."""
        known = self._heads.get(thinking)
        if known is None or known[0] != tools:
            probe = self.renderer.render_dialogue(_PROBE, thinking=thinking).token_ids
            known = self._heads[thinking] = (tools, preamble_digest(tools, thinking, probe))
        return known[1]

    def _recorded(
        self, merged: Sequence[MergedMessage], keys: Sequence[Digest], before: SessionHistory
    ) -> tuple[TurnNode | None, int]:
        """The last turn whose recorded reply is among these messages, and its index."""
        for at in range(len(merged) - 1, -1, -1):
            if merged[at].message.role != "assistant":
                continue
            node = self._by_key.get(keys[at + 1])
            if node is not None and self._same_reasoning(node, merged, before):
                return node, at
        return None, 0

    def _same_reasoning(
        self, node: TurnNode, merged: Sequence[MergedMessage], before: SessionHistory
    ) -> bool:
        rule = self.matcher.reasoning
        if rule == "ignored":
            return True
        turn: TurnNode | None = node
        while turn is not None and turn.entries > before.entries:
            now = reasoning_digest(merged[turn.entries - before.entries - 1].message)
            if now != turn.reasoning_digest and (rule == "must" or now is not None):
                return False
            turn = turn.parent
        return turn is before.parent  # earlier turns were compared when `before` was matched

    # --- new tokens -------------------------------------------------------------------------------

    def _added(self, found: MatchedPrefix, past: "array[int]") -> tuple["array[int]", bool, str]:
        """New token ids, whether they follow `past` (the parent's tokens), and the fork reason."""
        newest, parent = self.tree.nodes[-1] if self.tree.nodes else None, found.history.parent
        if parent is None:
            why = "" if newest is None else "the conversation starts with no recorded turn"
            return self._whole(found), False, why
        why = "" if parent is newest else f"continues turn {parent.number}, not the newest"
        rest = found.messages[found.start :]
        try:
            if all(message.role != "assistant" for message in rest):
                new = self.renderer.render_next_turn(
                    past, rest, thinking=found.thinking, answering=found.last_reply
                )
                return array("i", new.token_ids), True, why
            spliced = self._spliced(found, past)
        except NotPrefixPreservingError as error:
            return self._whole(found), False, str(error)
        if spliced is None:
            return self._whole(found), False, "contains replies that this session did not sample"
        return spliced, True, why or "contains replies that this session did not sample"

    def _whole(self, found: MatchedPrefix) -> "array[int]":
        return array(
            "i",
            self.renderer.render_prompt(
                found.messages, tools=found.tools, thinking=found.thinking
            ).token_ids,
        )

    def _spliced(self, found: MatchedPrefix, past: "array[int]") -> "array[int] | None":
        """New token ids if replies that this session did not sample are among the new messages;
        None if the template does not preserve the prefix there."""
        before = self.renderer.render_dialogue(
            found.messages[: found.start], tools=found.tools, thinking=found.thinking, closed=False
        ).token_ids
        whole = tuple(self._whole(found))
        if whole[: len(before)] != before:
            return None
        new = array("i", whole[len(before) :])
        if past and new and past[-1] == new[0]:
            return new[1:]
        tokenizer = self.renderer.tokenizer
        if is_in_reasoning(tokenizer, past):
            new.insert(0, tokenizer.special_token_ids[SpecialToken.THINK_CLOSE])
        return new
