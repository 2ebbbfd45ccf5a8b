"""A session: one agent's conversation, in the tokens that an engine really saw and sampled.

The session owns the ids. A client sends its whole conversation every time; what of it is already
recorded is found again (match.py), only what is new becomes tokens, and these follow the ids that
exist, spliced at the boundary token that the model itself sampled. The past is never rendered
again. Where a client changed the past, the new turn forks off the last turn that still holds; a
template that rewrites its own past (thoughts that a new user message clears) forks too.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

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

PRESERVED = ThinkingKwargs(clear_thinking=False)  # an agent keeps its thoughts, and so its prefix
_PROBE = (Message(role="user", content="x"),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionHistory:
    """A conversation that was looked for before, without its texts."""

    length: int = 0  # messages
    entries: int = 0
    head: Digest  # of what stands before the first message
    digest: Digest  # of all of it
    parent: TurnNode | None = None  # the last turn whose reply is in it, as it was
    ends_with_reply: bool = False  # a reply is its last message, so that another may be part of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedPrefix:
    """A conversation, and what of it is recorded. Nothing of it is in tokens yet. `past` is all of
    it, for a conversation that begins with this one."""

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...]
    thinking: ThinkingKwargs
    history: SessionHistory
    start: int  # index of the first message that is not recorded
    last_reply: Message | None  # the last recorded reply, as it came back

    @property
    def num_chars(self) -> int:
        """That may have to become tokens: of what is new, where that is results of tools alone; a
        template may rewrite its past for whatever else comes."""
        new = self.messages[self.start :]
        results = all(message.role == "tool" for message in new)
        return sum(len(message.content) for message in (new if results else self.messages))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnPrompt:
    """A turn about to be sampled. Nothing of it is recorded yet."""

    prompt: "array[int]"  # all that the engine is to read
    new_token_ids: "array[int]"  # of it, what follows the turn before
    parent: TurnNode | None
    new_messages: tuple[Message, ...]  # the messages in `added`
    key: Digest  # of the conversation before the reply
    entries: int
    fork_reason: str  # why it does not go on from the newest turn; "" if it does
    tools: tuple[ToolSpec, ...] = ()
    thinking: ThinkingKwargs = DEFAULT_THINKING


@dataclass(slots=True, eq=False)
class Session:
    """All turns of one agent. Turns may be under way at once; each is recorded when it is over."""

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
        """The tokens of the next turn's prompt. `forced` are put behind it, for the reply to go on
        from. Raises ChatTemplateError if the template cannot say it."""
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
        """The first half of `begin`, which takes microseconds a message. A `past` that the messages
        begin with need not be looked at again, if its next reply was recorded."""
        head = self._head(tuple(tools), thinking)
        nothing = SessionHistory(head=head, digest=head)
        goes_on = past is not None and past.head == head and not past.ends_with_reply
        place = self._place(messages, past if past is not None and goes_on else nothing)
        if goes_on and place[0].parent is None:
            place = self._place(messages, nothing)
        whole, start, answering = place
        return MatchedPrefix(
            messages=messages,
            tools=tuple(tools),
            thinking=thinking,
            history=whole,
            start=start,
            last_reply=answering,
        )

    def build_prompt(self, found: MatchedPrefix, forced: Sequence[int] = ()) -> TurnPrompt:
        """The second half, which takes as long as a tokenizer needs for what is new."""
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
        self, opening: TurnPrompt, completion: Completion, reply: Message
    ) -> TurnNode | None:
        """Keep a turn that its client has received. A turn without a token is none."""
        if not completion.token_ids:
            return None
        said = split_reasoning(reply)  # as it will be looked for
        node = TurnNode(
            parent=opening.parent,
            number=len(self.tree.nodes),
            added=opening.new_token_ids,
            ids=as_int32_array(completion.token_ids),
            logprobs=array("f", completion.logprobs),
            versions=completion.versions,
            finish=completion.finish,
            forced=completion.forced,
            key=chain_digest(self.matcher.key(said), opening.key),
            reasoning_digest=reasoning_digest(said),
            entries=opening.entries + 1,
            fork_reason=opening.fork_reason,
        )
        node.store_messages(opening.new_messages, reply)
        self.tree.add(node)
        # Of replies that read alike the newest is the one that a client goes on from.
        self._by_key[node.key] = node
        self.tools = opening.tools
        return node

    # --- what came of it --------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Of the newest branch."""
        return self.tree.nodes[-1].tokens if self.tree.nodes else 0

    def trajectories(
        self, *, task_id: str, group_id: str, outcome: Outcome
    ) -> tuple[Trajectory, ...]:
        """Every branch. A turn that several share is trained in the first of them alone, so that
        every sampled token is trained exactly once. A session without a turn is one branch."""
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

    # --- finding the past again -------------------------------------------------------------------

    def _place(
        self, messages: Sequence[Message], before: SessionHistory
    ) -> tuple[SessionHistory, int, Message | None]:
        """The conversation, of which `before` is known; where what is not recorded starts, and the
        reply in front of that. Only replies after `before` are looked for."""
        said = merge_assistant_messages(messages[before.length :])
        keys = [before.digest]
        for message, _ in said:
            keys.append(chain_digest(self.matcher.key(message), keys[-1]))
        node, at = self._recorded(said, keys, before)
        whole = SessionHistory(
            length=len(messages),
            entries=before.entries + len(said),
            head=before.head,
            digest=keys[-1],
            parent=node,
            ends_with_reply=bool(said) and said[-1].message.role == "assistant",
        )
        if node is None:
            return whole, 0, None
        return whole, before.length + said[at].end, said[at].message

    def _head(self, tools: tuple[ToolSpec, ...], thinking: ThinkingKwargs) -> Digest:
        """Of what stands before the first message; the same, as a rule, in every turn."""
        known = self._heads.get(thinking)
        if known is None or known[0] != tools:
            probe = self.renderer.render_dialogue(_PROBE, thinking=thinking).token_ids
            known = self._heads[thinking] = (tools, preamble_digest(tools, thinking, probe))
        return known[1]

    def _recorded(
        self, said: Sequence[MergedMessage], keys: Sequence[Digest], before: SessionHistory
    ) -> tuple[TurnNode | None, int]:
        """The last turn whose reply is among these entries, as it was, and at which."""
        for at in range(len(said) - 1, -1, -1):
            if said[at].message.role != "assistant":
                continue
            node = self._by_key.get(keys[at + 1])
            if node is not None and self._same_thoughts(node, said, before):
                return node, at
        return None, 0

    def _same_thoughts(
        self, node: TurnNode, said: Sequence[MergedMessage], before: SessionHistory
    ) -> bool:
        rule = self.matcher.reasoning
        if rule == "ignored":
            return True
        turn: TurnNode | None = node
        while turn is not None and turn.entries > before.entries:
            now = reasoning_digest(said[turn.entries - before.entries - 1].message)
            if now != turn.reasoning_digest and (rule == "must" or now is not None):
                return False
            turn = turn.parent
        return turn is before.parent  # up to there they were compared when that was found

    # --- new tokens -------------------------------------------------------------------------------

    def _added(self, found: MatchedPrefix, past: "array[int]") -> tuple["array[int]", bool, str]:
        """What is new in tokens, whether it follows `past`, the tokens of the parent, and why that
        is not the newest turn."""
        newest, parent = self.tree.nodes[-1] if self.tree.nodes else None, found.history.parent
        if parent is None:
            why = "" if newest is None else "nothing of the recorded past is in the conversation"
            return self._whole(found), False, why
        why = "" if parent is newest else f"goes on after turn {parent.number}, not the newest"
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
            return self._whole(found), False, "replies of others came in"
        return spliced, True, why or "replies of others came in"

    def _whole(self, found: MatchedPrefix) -> "array[int]":
        return array(
            "i",
            self.renderer.render_prompt(
                found.messages, tools=found.tools, thinking=found.thinking
            ).token_ids,
        )

    def _spliced(self, found: MatchedPrefix, past: "array[int]") -> "array[int] | None":
        """What the template puts after the recorded messages, where replies that this session did
        not sample are among the rest; None if the template does not simply go on there."""
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
