"""The vocabulary of the harness. Everything else speaks it.

Words, in the order of a step: a *sequence* (one request in a slot) has *pending* tokens that
the target has not seen. A *proposal* adds drafts to them. The target's forward gives one
row of logits per draft and one more (the *bonus* row). A *verdict* says how many drafts were
*accepted* and which tokens are *emitted*: the accepted drafts and a final one of the target's
own. A *ledger* counts how far grammar matchers advanced and were rolled back on the way, and a
*trace* is what is written down of it all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import torch

from harness.grammar.spec import GrammarSpec

if TYPE_CHECKING:
    from harness.grammar.gate import Trigger
    from harness.grammar.tracked import TrackedMatcher

PAD = -1
"""A draft that is not one: padding, or a token that was refused before the verification."""

RollbackKind = Literal["preview", "draft", "rejected", "retokenize"]
ROLLBACK_KINDS: tuple[RollbackKind, ...] = ("preview", "draft", "rejected", "retokenize")


class Fate(StrEnum):
    """What became of a draft that was put before the target, as a letter of ``fates``."""

    ACCEPTED = "a"
    REJECTED_GRAMMAR = "g"
    REJECTED_MODEL = "m"
    PAST_STOP = "s"
    PADDING = "-"


class Finish(StrEnum):
    """Why a sequence left its slot."""

    STOP = "stop"
    LENGTH = "length"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to do.

    Attributes:
        id: unique in its workload.
        prompt_ids: the tokens of the prompt, chat template applied.
        grammar: what the output must match, or None for free text.
        trigger: what starts the grammar inside the output; None = it holds from the first token.
        max_new_tokens: upper bound of the output, the stop token included.
        seed: of every random draw made for this request.
    """

    id: str
    prompt_ids: tuple[int, ...]
    grammar: GrammarSpec | None
    max_new_tokens: int
    seed: int = 0
    trigger: Trigger | None = None


@dataclass(slots=True)
class Ledger:
    """How far a matcher was moved, forth and back. ``held`` must be what the matcher says."""

    advanced: int = 0
    rollback_calls: dict[RollbackKind, int] = field(
        default_factory=lambda: dict.fromkeys(ROLLBACK_KINDS, 0)
    )
    rollback_tokens: dict[RollbackKind, int] = field(
        default_factory=lambda: dict.fromkeys(ROLLBACK_KINDS, 0)
    )

    @property
    def held(self) -> int:
        return self.advanced - sum(self.rollback_tokens.values())

    def copy(self) -> Ledger:
        return Ledger(self.advanced, dict(self.rollback_calls), dict(self.rollback_tokens))

    def roll_back(self, kind: RollbackKind, tokens: int) -> None:
        self.rollback_calls[kind] += 1
        self.rollback_tokens[kind] += tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in a slot, and how far each of its followers is.

    ``target_length`` and ``draft_length`` count the tokens of ``tokens`` whose keys and values
    are in each model's cache; what stands behind them is pending. Nothing else records it.
    """

    request: Request
    slot: int
    matcher: TrackedMatcher | None = None
    output_ids: list[int] = field(default_factory=list)
    target_length: int = 0
    draft_length: int = 0
    draft_ahead: list[int] = field(default_factory=list)
    """Drafts that the draft model's cache holds beyond ``draft_length``."""
    finish: Finish | None = None
    error: str | None = None
    steps: int = 0
    drawn: int = 0
    """Output positions below this have had their random draws."""
    jump_tokens: int = 0
    retokenized: int = 0
    engine: str = ""
    """The grammar engine that follows the output; empty = none does."""
    gaps: list[float] = field(default_factory=list)
    """By output token, the target's logit lead (greedy)."""
    state: Any = None
    """Whatever the strategy keeps for this sequence."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        return self.prompt_length + len(self.output_ids)

    @property
    def target_pending(self) -> list[int]:
        return self.tokens_from(self.target_length)

    @property
    def draft_pending(self) -> list[int]:
        return self.tokens_from(self.draft_length)

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return self.request.max_new_tokens - len(self.output_ids)

    @property
    def draw_position(self) -> int:
        """The position whose draws come next: the output's end, or behind all used ones where
        re-encoding has made the output shorter."""
        return max(len(self.output_ids), self.drawn)

    def tokens_from(self, start: int) -> list[int]:
        """Prompt and output tokens from index ``start`` on."""
        if start >= self.prompt_length:
            return self.output_ids[start - self.prompt_length :]
        return [*self.request.prompt_ids[start:], *self.output_ids]

    def replace_output(self, ids: list[int]) -> None:
        """Set the output anew; both caches keep the common prefix (O(1), S1l)."""
        kept = longest_common_prefix(self.output_ids, ids)
        self.target_length = min(self.target_length, self.prompt_length + kept)
        self.draft_length = min(self.draft_length, self.prompt_length + kept)
        self.gaps = [*self.gaps[:kept], *[math.nan] * (len(ids) - kept)]
        self.output_ids = ids

    def fail(self, reason: str) -> None:
        """End this sequence, and no other, with an error."""
        if self.error is None:
            self.finish, self.error = Finish.FAILED, reason


@dataclass(slots=True)
class Proposal:
    """What one sequence puts before the target in one step.

    Attributes:
        tokens: the drafts; ``PAD`` where a draft was refused but its row is kept.
        parents: for a tree, the index in ``tokens`` of each node's parent, -1 for children
            of the root (the last committed token); None for a chain.
        q: ``[len(tokens), vocab]``, the law that each draft was drawn from; None = one-hot.
        raw: these drafts themselves, where they are known: what ``tokens`` was at first.
        legal: by draft, whether the grammar allows it and all before it; a strategy sets it
            when it learns it. None = no grammar, or not looked.
        draft_forwards: forwards of the draft model that it took.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] | None = None
    q: torch.Tensor | None = None
    legal: list[bool] | None = None
    draft_forwards: int = 0
    raw: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.raw = list(self.tokens)

    @property
    def drafted_raw(self) -> int:
        """Drafts before anything was cut; padding was never one."""
        return len(self.raw) - self.raw.count(PAD)

    @property
    def drafted(self) -> int:
        """Drafts that the verification really tests: padding is not one."""
        return len(self.tokens) - self.tokens.count(PAD)

    @property
    def trimmed(self) -> int:
        return self.drafted_raw - self.drafted

    @property
    def trimmed_ids(self) -> list[int]:
        """The raw drafts that are not verified."""
        if self.tokens == self.raw:
            return []
        verified = [*self.tokens, *[PAD] * (len(self.raw) - len(self.tokens))]
        pairs = zip(self.raw, verified, strict=True)
        return [raw for raw, token in pairs if token == PAD != raw]

    @property
    def parent_nodes(self) -> SequenceOf[int]:
        """Each draft's parent, -1 for the root; in a chain the draft before it."""
        return range(-1, len(self.tokens) - 1) if self.parents is None else self.parents

    def legal_prefix(self, length: int) -> None:
        """Record that the grammar allows just the first ``length`` drafts of the chain."""
        self.legal = [index < length for index in range(len(self.tokens))]


@dataclass(slots=True)
class Verdict:
    """What the verification decided for one sequence.

    Attributes:
        emitted: the accepted drafts, then one token of the target's own.
        path: the accepted nodes of the proposal, in order; ``0..a-1`` for a chain.
        gaps: for greedy runs, by emitted token the target's logit lead over the runner-up
            (fp32); empty otherwise.
    """

    emitted: list[int]
    path: list[int]
    gaps: list[float] = field(default_factory=list)

    @property
    def accepted(self) -> int:
        return len(self.path)


def column(doc: str, **kwargs: Any) -> Any:
    """A dataclass field that is a column of a result table; ``doc`` is its documentation."""
    return field(metadata={"doc": doc}, **kwargs)


@dataclass(slots=True)
class StepTrace:
    """One row of ``steps.parquet``: one sequence in one step of the loop.

    Times are this sequence's share of its batch (batch time / sequences in the batch), so sums
    over rows are sums over time.
    """

    strategy: str = column("strategy that ran")
    request: str = column("request id")
    tick: int = column("iteration of the loop; rows with one tick shared a forward")
    step: int = column("step of this request; 0 is its prefill")
    prefill: bool = column("the prompt was fed: emits one token, is no verify step")
    batch: int = column("sequences in this forward")
    drafted_raw: int = column("drafts before trimming", default=0)
    drafted: int = column("drafts that were verified", default=0)
    accepted: int = column("verified drafts that were emitted", default=0)
    emitted: int = column("tokens emitted, the target's own included", default=0)
    trimmed: int = column("drafts cut before the verification", default=0)
    rejected_grammar: int = column("dead drafts at or behind the first illegal one", default=0)
    rejected_model: int = column("legal drafts at or behind the target's disagreement", default=0)
    past_stop: int = column("drafts behind the draft that ended the output", default=0)
    rows: int = column("target rows with logits: 1 + drafts, padding included", default=0)
    wasted_rows: int = column("of these, rows that decided no emitted token", default=0)
    mask_rows: int = column("mask rows filled, by drafting and verification", default=0)
    draft_forwards: int = column("draft forwards this sequence took part in", default=0)
    advanced: int = column("tokens fed to the matcher, previews included", default=0)
    rollback_preview_calls: int = column("rollbacks of a preview", default=0)
    rollback_preview_tokens: int = column("tokens rolled back after a preview", default=0)
    rollback_draft_calls: int = column("rollbacks of guided drafting", default=0)
    rollback_draft_tokens: int = column("tokens rolled back after guided drafting", default=0)
    rollback_rejected_calls: int = column("rollbacks of a rejected tail", default=0)
    rollback_rejected_tokens: int = column("tokens of rejected tails rolled back", default=0)
    rollback_retokenize_calls: int = column("rollbacks of a re-tokenisation", default=0)
    rollback_retokenize_tokens: int = column("tokens rolled back by re-tokenising", default=0)
    held: int = column("tokens the matcher holds after the step", default=0)
    jump_tokens: int = column("forced tokens inserted before this step", default=0)
    retokenized: int = column("emitted ids changed by re-encoding before this step", default=0)
    draft_us: float = column("draft forwards and draft sampling, µs", default=0.0)
    verify_us: float = column("target forward, mask application, verification, µs", default=0.0)
    grammar_us: float = column("grammar work on the CPU, µs", default=0.0)
    exposed_us: float = column("grammar time that the device waited for, µs", default=0.0)
    host_us: float = column("everything else in the step, µs", default=0.0)
    fill_us: list[float] = column("each mask fill of this sequence, µs", default_factory=list)
    draft_ids: list[int] = column("drafts as verified; -1 = refused before", default_factory=list)
    emitted_ids: list[int] = column("tokens emitted", default_factory=list)
    fates: str = column(
        "by id of draft_ids: a = accepted, g = rejected by the grammar, m = by the model, "
        "s = past the stop, - = padding",
        default="",
    )
    draft_parents: list[int] = column(
        "by id of draft_ids, in a tree: index of its parent, -1 = the last token; empty = a chain",
        default_factory=list,
    )
    trimmed_ids: list[int] = column("drafts cut before the verification", default_factory=list)
    jump_ids: list[int] = column(
        "ids that a jump put in place of the last `retokenized` ones, before this step",
        default_factory=list,
    )
    draft_p: list[float] = column(
        "by id of draft_ids: its probability in the law that verified it (greedy: the softmax); "
        "nan = padding; recorded with engine.detail",
        default_factory=list,
    )
    draft_q: list[float] = column(
        "by id of draft_ids: its probability in the law that it was drawn from; nan = it is the "
        "draft model's argmax, or padding; recorded with engine.detail",
        default_factory=list,
    )
    emitted_p: list[float] = column(
        "by id of emitted_ids: as draft_p; recorded with engine.detail", default_factory=list
    )
    legal: list[int] = column(
        "by row of logits (what follows the last token, then each draft): legal tokens in its "
        "mask; -1 = no mask; recorded with engine.detail",
        default_factory=list,
    )


@dataclass(slots=True)
class RequestTrace:
    """One row of ``requests.parquet``: one request under one strategy."""

    strategy: str = column("strategy that ran")
    request: str = column("request id")
    kind: str = column("workload category of the request")
    grammar: str = column("grammar kind; 'none' for free text")
    engine: str = column("grammar engine")
    seed: int = column("seed of the request's draws")
    prompt_tokens: int = column("tokens of the prompt")
    output_tokens: int = column("tokens of the output, the stop token included", default=0)
    finish: str = column("stop, length or failed", default="")
    error: str = column("why it failed; empty otherwise", default="")
    complete: bool = column("ended by itself", default=False)
    valid: bool | None = column(
        "complete and passes the independent validator; null = no grammar, or none knows it",
        default=None,
    )
    compile_ms: float = column("grammar compilation, ms (0 from the cache)", default=0.0)
    ttft_ms: float = column("admission to first token, ms", default=0.0)
    tpot_ms: float = column("mean time per output token after the first, ms", default=0.0)
    wall_ms: float = column("admission to last token, ms", default=0.0)
    jump_tokens: int = column("forced tokens inserted", default=0)
    retokenized: int = column("emitted ids changed by re-encoding", default=0)
    canonical_share: float = column("share of the output equal to its re-encoding", default=1.0)
    identical: bool | None = column("output ids equal plain's; null without plain", default=None)
    first_divergence: int = column("index of the first id that differs; -1 = none", default=-1)
    divergence_gap: float | None = column(
        "plain's logit lead at the first divergence (greedy)", default=None
    )
    text: str = column("the output, decoded", default="")
    output_ids: list[int] = column("the output", default_factory=list)
    gaps: list[float] = column(
        "logit lead of each output token (greedy); nan = inserted or re-encoded",
        default_factory=list,
    )


def columns(table: type) -> dict[str, str]:
    """Column name to documentation, in order, of a trace class."""
    return {item.name: item.metadata["doc"] for item in fields(table)}


def first_rows(proposals: SequenceOf[Proposal]) -> list[int]:
    """First logits row of each sequence: each has one row per draft and the bonus row (V1.3b)."""
    firsts, row = [], 0
    for proposal in proposals:
        firsts.append(row)
        row += 1 + len(proposal.tokens)
    return firsts


def longest_common_prefix(left: SequenceOf[int], right: SequenceOf[int]) -> int:
    """Number of leading items that two sequences share."""
    n = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        n += 1
    return n
