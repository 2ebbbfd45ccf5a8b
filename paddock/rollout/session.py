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
    thoughts_of,
)
from paddock.rollout.tree import Node, Tree
from paddock.text import UNSAID, Renderer, RewritesPast, Special, Thinking
from paddock.text.parse import is_thinking

PRESERVED = Thinking(clear_thinking=False)  # an agent keeps its thoughts, and so its prefix
_PROBE = (Message(role="user", content="x"),)


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
    thinking: Thinking = UNSAID


@dataclass(slots=True, eq=False)
class Session:
    """All turns of one agent. Turns may be under way at once; each is recorded when it is over."""

    id: str
    renderer: Renderer
    matcher: Matcher = LOOSE
    tree: Tree = field(default_factory=Tree)
    tools: tuple[ToolSpec, ...] = ()  # as the newest turn had them
    _by_key: dict[Digest, Node] = field(default_factory=dict)
    _heads: dict[Thinking, tuple[tuple[ToolSpec, ...], Digest]] = field(default_factory=dict)

    # --- a turn -----------------------------------------------------------------------------------

    def begin(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        thinking: Thinking = UNSAID,
        forced: Sequence[int] = (),
    ) -> Opening:
        """The tokens of the next turn's prompt. `forced` are put behind it, for the reply to go on
        from. Raises ChatTemplateError if the template cannot say it."""
        said = entries(messages)
        keys = self._keys(said, tools, thinking)
        parent = self._recorded(said, keys)
        added, parent, why = self._added(messages, said, parent, tools, thinking)
        added.extend(forced)
        start = said[parent.entries - 1].end if parent is not None else 0
        prompt = parent.token_ids() if parent is not None else array("i")
        prompt.extend(added)
        return Opening(
            prompt=prompt,
            added=added,
            parent=parent,
            came=tuple(messages[start:]),
            key=keys[-1],
            entries=len(said),
            forked=why,
            tools=tuple(tools),
            thinking=thinking,
        )

    def record(self, opening: Opening, completion: Completion, reply: Message) -> Node | None:
        """Keep a turn that its client has received. A turn without a token is none."""
        if not completion.token_ids:
            return None
        node = Node(
            parent=opening.parent,
            number=len(self.tree.nodes),
            added=opening.added,
            ids=int32(completion.token_ids),
            logprobs=array("f", completion.logprobs),
            versions=completion.versions,
            finish=completion.finish,
            forced=completion.forced,
            key=digest(self.matcher.key(reply), opening.key),
            thoughts=thoughts_of(reply),
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

    def _keys(
        self, said: Sequence[Entry], tools: Sequence[ToolSpec], thinking: Thinking
    ) -> list[Digest]:
        """Of the conversation before the first entry, after it, after the second ..."""
        found = [self._head(tuple(tools), thinking)]
        for entry in said:
            found.append(digest(self.matcher.key(entry.message), found[-1]))
        return found

    def _head(self, tools: tuple[ToolSpec, ...], thinking: Thinking) -> Digest:
        """Of what stands before the first message; the same, as a rule, in every turn."""
        known = self._heads.get(thinking)
        if known is None or known[0] != tools:
            probe = self.renderer.dialogue(_PROBE, thinking=thinking).token_ids
            known = self._heads[thinking] = (tools, opening_of(tools, thinking, probe))
        return known[1]

    def _recorded(self, said: Sequence[Entry], keys: Sequence[Digest]) -> Node | None:
        """The last turn whose reply is in the conversation, as it was."""
        for count in range(len(said), 0, -1):
            if said[count - 1].message.role != "assistant":
                continue
            node = self._by_key.get(keys[count])
            if node is not None and self._same_thoughts(node, said):
                return node
        return None

    def _same_thoughts(self, node: Node, said: Sequence[Entry]) -> bool:
        rule = self.matcher.thoughts
        if rule == "ignored":
            return True
        for turn in node.path():
            now = thoughts_of(said[turn.entries - 1].message)
            if now != turn.thoughts and (rule == "must" or now is not None):
                return False
        return True

    # --- new tokens -------------------------------------------------------------------------------

    def _added(
        self,
        messages: Sequence[Message],
        said: Sequence[Entry],
        parent: Node | None,
        tools: Sequence[ToolSpec],
        thinking: Thinking,
    ) -> tuple["array[int]", Node | None, str]:
        """What is new in tokens, the turn it follows, and why that is not the newest."""
        newest = self.tree.nodes[-1] if self.tree.nodes else None
        if parent is None:
            why = "" if newest is None else "nothing of the recorded past is in the conversation"
            return self._whole(messages, tools, thinking), None, why
        why = "" if parent is newest else f"goes on after turn {parent.number}, not the newest"
        last = said[parent.entries - 1]
        rest = messages[last.end :]
        past = parent.token_ids()
        try:
            if all(message.role != "assistant" for message in rest):
                new = self.renderer.extend(past, rest, thinking=thinking, answering=last.message)
                return array("i", new.token_ids), parent, why
            spliced = self._spliced(past, messages, last.end, tools, thinking)
        except RewritesPast as error:
            return self._whole(messages, tools, thinking), None, str(error)
        if spliced is None:
            return self._whole(messages, tools, thinking), None, "replies of others came in"
        return spliced, parent, why or "replies of others came in"

    def _whole(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], thinking: Thinking
    ) -> "array[int]":
        return array("i", self.renderer.prompt(messages, tools=tools, thinking=thinking).token_ids)

    def _spliced(
        self,
        past: "array[int]",
        messages: Sequence[Message],
        end: int,
        tools: Sequence[ToolSpec],
        thinking: Thinking,
    ) -> "array[int] | None":
        """What the template puts after `messages[:end]`, where replies that this session did not
        sample are among the rest; None if the template does not simply go on there."""
        whole = self.renderer.prompt(messages, tools=tools, thinking=thinking).token_ids
        before = self.renderer.dialogue(
            messages[:end], tools=tools, thinking=thinking, closed=False
        ).token_ids
        if whole[: len(before)] != before:
            return None
        new = array("i", whole[len(before) :])
        if past and new and past[-1] == new[0]:
            return new[1:]
        tokenizer = self.renderer.tokenizer
        if is_thinking(tokenizer, past):
            new.insert(0, tokenizer.specials[Special.THINK_CLOSE])
        return new
