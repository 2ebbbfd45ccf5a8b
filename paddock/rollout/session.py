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
from paddock.rollout.client import int32
from paddock.rollout.match import (
    LOOSE,
    Digest,
    Entry,
    Matcher,
    digest,
    entries,
    opening_of,
    parted,
    thoughts_of,
)
from paddock.rollout.tree import Node, Tree
from paddock.text import (
    DEFAULT_THINKING,
    NotPrefixPreservingError,
    Renderer,
    SpecialToken,
    ThinkingKwargs,
)
from paddock.text.completion_parser import is_in_reasoning

PRESERVED = ThinkingKwargs(clear_thinking=False)  # an agent keeps its thoughts, and so its prefix
_PROBE = (Message(role="user", content="x"),)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Past:
    """A conversation that was looked for before, without its texts."""

    length: int = 0  # messages
    entries: int = 0
    head: Digest  # of what stands before the first message
    key: Digest  # of all of it
    parent: Node | None = None  # the last turn whose reply is in it, as it was
    replied: bool = False  # a reply is its last message, so that another may be part of it


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Found:
    """A conversation, and what of it is recorded. Nothing of it is in tokens yet. `past` is all of
    it, for a conversation that begins with this one."""

    messages: Sequence[Message]
    tools: tuple[ToolSpec, ...]
    thinking: ThinkingKwargs
    past: Past
    start: int  # index of the first message that is not recorded
    answering: Message | None  # the last recorded reply, as it came back

    @property
    def letters(self) -> int:
        """That may have to become tokens: of what is new, where that is results of tools alone; a
        template may rewrite its past for whatever else comes."""
        new = self.messages[self.start :]
        results = all(message.role == "tool" for message in new)
        return sum(len(message.content) for message in (new if results else self.messages))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opening:
    """A turn about to be sampled. Nothing of it is recorded yet."""

    prompt: "array[int]"  # all that the engine is to read
    added: "array[int]"  # of it, what follows the turn before
    parent: Node | None
    came: tuple[Message, ...]  # the messages in `added`
    key: Digest  # of the conversation before the reply
    entries: int
    forked: str  # why it does not go on from the newest turn; "" if it does
    tools: tuple[ToolSpec, ...] = ()
    thinking: ThinkingKwargs = DEFAULT_THINKING


@dataclass(slots=True, eq=False)
class Session:
    """All turns of one agent. Turns may be under way at once; each is recorded when it is over."""

    id: str
    renderer: Renderer
    matcher: Matcher = LOOSE
    tree: Tree = field(default_factory=Tree)
    tools: tuple[ToolSpec, ...] = ()  # as the newest turn had them
    _by_key: dict[Digest, Node] = field(default_factory=dict)
    _heads: dict[ThinkingKwargs, tuple[tuple[ToolSpec, ...], Digest]] = field(default_factory=dict)

    # --- a turn -----------------------------------------------------------------------------------

    def begin(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        forced: Sequence[int] = (),
    ) -> Opening:
        """The tokens of the next turn's prompt. `forced` are put behind it, for the reply to go on
        from. Raises ChatTemplateError if the template cannot say it."""
        return self.opened(self.found(messages, tools=tools, thinking=thinking), forced)

    def found(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: ThinkingKwargs = DEFAULT_THINKING,
        past: Past | None = None,
    ) -> Found:
        """The first half of `begin`, which takes microseconds a message. A `past` that the messages
        begin with need not be looked at again, if its next reply was recorded."""
        head = self._head(tuple(tools), thinking)
        nothing = Past(head=head, key=head)
        goes_on = past is not None and past.head == head and not past.replied
        place = self._place(messages, past if past is not None and goes_on else nothing)
        if goes_on and place[0].parent is None:
            place = self._place(messages, nothing)
        whole, start, answering = place
        return Found(
            messages=messages,
            tools=tuple(tools),
            thinking=thinking,
            past=whole,
            start=start,
            answering=answering,
        )

    def opened(self, found: Found, forced: Sequence[int] = ()) -> Opening:
        """The second half, which takes as long as a tokenizer needs for what is new."""
        parent = found.past.parent
        past = array("i") if parent is None else parent.token_ids()
        added, follows, why = self._added(found, past)
        added.extend(forced)
        return Opening(
            prompt=(past if follows else array("i")) + added,
            added=added,
            parent=parent if follows else None,
            came=tuple(found.messages[found.start if follows else 0 :]),
            key=found.past.key,
            entries=found.past.entries,
            forked=why,
            tools=found.tools,
            thinking=found.thinking,
        )

    def record(self, opening: Opening, completion: Completion, reply: Message) -> Node | None:
        """Keep a turn that its client has received. A turn without a token is none."""
        if not completion.token_ids:
            return None
        said = parted(reply)  # as it will be looked for
        node = Node(
            parent=opening.parent,
            number=len(self.tree.nodes),
            added=opening.added,
            ids=int32(completion.token_ids),
            logprobs=array("f", completion.logprobs),
            versions=completion.versions,
            finish=completion.finish,
            forced=completion.forced,
            key=digest(self.matcher.key(said), opening.key),
            thoughts=thoughts_of(said),
            entries=opening.entries + 1,
            forked=opening.forked,
        )
        node.keep(opening.came, reply)
        self.tree.add(node)
        # Of replies that read alike the newest is the one that a client goes on from.
        self._by_key[node.key] = node
        self.tools = opening.tools
        return node

    # --- what came of it --------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Of the newest branch."""
        return self.tree.nodes[-1].tokens if self.tree.nodes else 0

    def trajectories(
        self, *, task_id: str, group_id: str, outcome: Outcome
    ) -> tuple[Trajectory, ...]:
        """Every branch. A turn that several share is trained in the first of them alone, so that
        every sampled token is trained exactly once. A session without a turn is one branch."""
        trained: set[int] = set()
        found = []
        for branch, last in enumerate(self.tree.branches()):
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

    def _place(self, messages: Sequence[Message], before: Past) -> tuple[Past, int, Message | None]:
        """The conversation, of which `before` is known; where what is not recorded starts, and the
        reply in front of that. Only replies after `before` are looked for."""
        said = entries(messages[before.length :])
        keys = [before.key]
        for message, _ in said:
            keys.append(digest(self.matcher.key(message), keys[-1]))
        node, at = self._recorded(said, keys, before)
        whole = Past(
            length=len(messages),
            entries=before.entries + len(said),
            head=before.head,
            key=keys[-1],
            parent=node,
            replied=bool(said) and said[-1].message.role == "assistant",
        )
        if node is None:
            return whole, 0, None
        return whole, before.length + said[at].end, said[at].message

    def _head(self, tools: tuple[ToolSpec, ...], thinking: ThinkingKwargs) -> Digest:
        """Of what stands before the first message; the same, as a rule, in every turn."""
        known = self._heads.get(thinking)
        if known is None or known[0] != tools:
            probe = self.renderer.render_dialogue(_PROBE, thinking=thinking).token_ids
            known = self._heads[thinking] = (tools, opening_of(tools, thinking, probe))
        return known[1]

    def _recorded(
        self, said: Sequence[Entry], keys: Sequence[Digest], before: Past
    ) -> tuple[Node | None, int]:
        """The last turn whose reply is among these entries, as it was, and at which."""
        for at in range(len(said) - 1, -1, -1):
            if said[at].message.role != "assistant":
                continue
            node = self._by_key.get(keys[at + 1])
            if node is not None and self._same_thoughts(node, said, before):
                return node, at
        return None, 0

    def _same_thoughts(self, node: Node, said: Sequence[Entry], before: Past) -> bool:
        rule = self.matcher.thoughts
        if rule == "ignored":
            return True
        turn: Node | None = node
        while turn is not None and turn.entries > before.entries:
            now = thoughts_of(said[turn.entries - before.entries - 1].message)
            if now != turn.thoughts and (rule == "must" or now is not None):
                return False
            turn = turn.parent
        return turn is before.parent  # up to there they were compared when that was found

    # --- new tokens -------------------------------------------------------------------------------

    def _added(self, found: Found, past: "array[int]") -> tuple["array[int]", bool, str]:
        """What is new in tokens, whether it follows `past`, the tokens of the parent, and why that
        is not the newest turn."""
        newest, parent = self.tree.nodes[-1] if self.tree.nodes else None, found.past.parent
        if parent is None:
            why = "" if newest is None else "nothing of the recorded past is in the conversation"
            return self._whole(found), False, why
        why = "" if parent is newest else f"goes on after turn {parent.number}, not the newest"
        rest = found.messages[found.start :]
        try:
            if all(message.role != "assistant" for message in rest):
                new = self.renderer.render_next_turn(
                    past, rest, thinking=found.thinking, answering=found.answering
                )
                return array("i", new.token_ids), True, why
            spliced = self._spliced(found, past)
        except NotPrefixPreservingError as error:
            return self._whole(found), False, str(error)
        if spliced is None:
            return self._whole(found), False, "replies of others came in"
        return spliced, True, why or "replies of others came in"

    def _whole(self, found: Found) -> "array[int]":
        return array(
            "i",
            self.renderer.render_prompt(
                found.messages, tools=found.tools, thinking=found.thinking
            ).token_ids,
        )

    def _spliced(self, found: Found, past: "array[int]") -> "array[int] | None":
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
