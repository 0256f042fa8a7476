"""The exact law of whole outputs, enumerated: of decoding under a grammar, and of its known biases.

The law that counts is the *locally projected* one (comparison.md, "Losslessness, exactly"): at
every position the target's logits are restricted to the legal tokens (V1.3f), then temperature,
top-k and top-p make a law of them. Everything here is plain Python over float64 and shares nothing
with the loop, the masks, the verifiers or the samplers but the matcher that says what is legal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from harness.grammar.matcher import CompiledGrammar, Matcher, TokenTable
from harness.grammar.service import grammar_engine
from harness.grammar.spec import GrammarSpec
from harness.models.sampling import Sampling
from tests.toys import Law

Outcome = tuple[int, ...]
"""All tokens of one output."""
OutcomeLaw = dict[Outcome, float]


def token_law(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """``[vocab]`` probabilities: temperature, then top-k with ties, then top-p; -inf = illegal."""
    best = max(logits)
    if sampling.greedy:
        winner = list(logits).index(best)
        return [float(token == winner) for token in range(len(logits))]
    weights = [math.exp((logit - best) / sampling.temperature) for logit in logits]
    if sampling.top_k:
        last = sorted(weights, reverse=True)[min(sampling.top_k, len(weights)) - 1]
        weights = [weight if weight >= last else 0.0 for weight in weights]
    law = normalised(weights)
    if sampling.top_p < 1:
        law = normalised(nucleus(law, sampling.top_p))
    return law


def nucleus(law: Sequence[float], top_p: float) -> list[float]:
    """The fewest most likely tokens whose mass reaches ``top_p``; of equal ones the lower id."""
    kept, mass = [0.0] * len(law), 0.0
    for token in sorted(range(len(law)), key=lambda token: -law[token]):
        if mass < top_p:
            kept[token] = law[token]
        mass += law[token]
    return kept


def normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def total_variation(one: OutcomeLaw, other: OutcomeLaw) -> float:
    """Half the summed differences: the most that the probability of any event differs by."""
    return math.fsum(abs(one.get(o, 0) - other.get(o, 0)) for o in {*one, *other}) / 2


@dataclass(frozen=True)
class Problem:
    """What is decoded: two models that are tables, a grammar, and how tokens are chosen.

    Attributes:
        table: the vocabulary; the prompt is its token 0.
        target, draft: logits from all tokens so far.
        grammar: None = free text.
        engine: of the grammar.
        sampling: of the target, and of drafts that are sampled.
        limit: most tokens of an output.
        draft_tokens: K.
    """

    table: TokenTable
    target: Law
    draft: Law
    grammar: GrammarSpec | None
    engine: str
    sampling: Sampling
    limit: int
    draft_tokens: int

    @cached_property
    def compiled(self) -> CompiledGrammar | None:
        if self.grammar is None:
            return None
        return grammar_engine(self.engine, self.table).compile(self.grammar)

    def matcher(self, output: Outcome) -> Matcher | None:
        """A fresh matcher behind ``output``."""
        if self.compiled is None:
            return None
        matcher = self.compiled.matcher()
        assert matcher.accept(output)
        return matcher

    def legal(self, output: Outcome) -> list[bool]:
        """``[vocab]``: which tokens may follow."""
        matcher = self.matcher(output)
        every = range(len(self.table))
        return [matcher is None or matcher.validate([token]) == 1 for token in every]

    def logits(self, output: Outcome) -> Sequence[float]:
        """The target's, before any mask."""
        return self.target((0, *output))

    def p(self, output: Outcome) -> list[float]:
        """The law that decoding without drafts draws the next token from."""
        pairs = zip(self.logits(output), self.legal(output), strict=True)
        return token_law([x if legal else -math.inf for x, legal in pairs], self.sampling)

    def q(self, output: Outcome) -> list[float]:
        """The law of a free draft."""
        return token_law(self.draft((0, *output)), self.sampling)

    def ended(self, output: Outcome) -> bool:
        return output[-1:] == (self.table.eos_id,) or len(output) == self.limit

    def window(self, output: Outcome) -> int:
        """Drafts in a step that begins behind ``output`` (L11)."""
        return min(self.draft_tokens, self.limit - len(output) - 1)


Branch = tuple[int, float, bool]
"""A token that may come next, its probability, and whether it was an accepted draft."""
Rule = Callable[[Problem, Outcome, int], Iterable[Branch]]
"""How the next token comes about behind an output, with this many drafts left in the window."""


def projected(problem: Problem, output: Outcome, _: int) -> Iterator[Branch]:
    """What every lossless strategy must do: draw from p, whatever the drafts."""
    return ((token, mass, False) for token, mass in enumerate(problem.p(output)))


def trimmed(problem: Problem, output: Outcome, window: int) -> Iterator[Branch]:
    """Drafts drawn from q and cut at the first illegal one; the bonus row draws from p (V1.7).

    Biased: an illegal draft hands its mass to p instead of to the residual max(p - q, 0).
    """
    if not window:
        yield from projected(problem, output, window)
        return
    p, q, legal = problem.p(output), problem.q(output), problem.legal(output)
    accepted = [min(a, b) for a, b in zip(p, q, strict=True)]
    dropped = math.fsum(mass for mass, allowed in zip(q, legal, strict=True) if not allowed)
    rejected = 1 - dropped - sum(accepted)
    residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    recovered = normalised(residual) if any(residual) else p
    for token, mass in enumerate(accepted):
        yield token, mass, True
        yield token, dropped * p[token] + rejected * recovered[token], False


def checked(problem: Problem, output: Outcome, _: int) -> Iterator[Branch]:
    """llama.cpp's check-then-resample: p(t) + P(illegal) p_masked(t) for legal t (L4).

    Biased where top-k or top-p cut the law of the first draw before the grammar is asked.
    """
    first, second = token_law(problem.logits(output), problem.sampling), problem.p(output)
    legal = problem.legal(output)
    illegal = math.fsum(m for m, allowed in zip(first, legal, strict=True) if not allowed)
    for token, allowed in enumerate(legal):
        if allowed:
            yield token, first[token] + illegal * second[token], False


def generous(threshold_acc: float) -> Rule:
    """SGLang's target-only sampling of an argmax draft under a threshold below 1 (S2h)."""

    def rule(problem: Problem, output: Outcome, window: int) -> Iterator[Branch]:
        p = problem.p(output)
        if not window:
            yield from projected(problem, output, window)
            return
        logits = list(problem.draft((0, *output)))
        draft = logits.index(max(logits))
        lucky = min(1.0, p[draft] / threshold_acc)
        yield draft, lucky, True
        if lucky < 1:
            rest = normalised([0.0 if token == draft else m for token, m in enumerate(p)])
            yield from ((token, (1 - lucky) * mass, False) for token, mass in enumerate(rest))

    return rule


def argmax_drafts(problem: Problem, output: Outcome, window: int) -> Iterator[Branch]:
    """Lossless verification of argmax drafts: p, and the step goes on where the draft was right.

    The tokens follow p as ever; where steps end matters only to what happens between them.
    """
    logits = list(problem.draft((0, *output)))
    draft = logits.index(max(logits))
    for token, mass in enumerate(problem.p(output)):
        yield token, mass, bool(window) and token == draft


def jumped(problem: Problem, output: Outcome) -> Outcome:
    """What SGLang's jump over forced text makes of an output (S1a, S1h, S1o).

    Biased where text has several tokenisations: the model is not asked which one it wants.
    """
    matcher = problem.matcher(output)
    forced = matcher.forced_text() if matcher else ""
    if not forced:
        return output
    table = problem.table
    text = b"".join(table.tokens[token] for token in (0, *output)) + forced.encode()
    encoded = table.encode_greedily(text)
    assert encoded[0] == 0, "the prompt fuses with the output; choose another grammar"
    new = tuple(encoded[1:])
    return new if len(new) < problem.limit else output


def outcome_law(problem: Problem, rule: Rule = projected, jumps: bool = False) -> OutcomeLaw:
    """Probability of each whole output.

    Args:
        problem: what is decoded.
        rule: how each token comes about.
        jumps: whether forced text is inserted between steps.
    """

    @cache
    def branches(output: Outcome, window: int) -> tuple[Branch, ...]:
        return tuple(branch for branch in rule(problem, output, window) if branch[1] > 0)

    law: defaultdict[Outcome, float] = defaultdict(float)

    def walk(output: Outcome, window: int, mass: float) -> None:
        for token, probability, goes_on in branches(output, window):
            longer = (*output, token)
            if problem.ended(longer):
                law[longer] += mass * probability
            elif goes_on:
                walk(longer, window - 1, mass * probability)
            else:
                longer = jumped(problem, longer) if jumps else longer
                walk(longer, problem.window(longer), mass * probability)

    walk((), 0, 1.0)  # the prefill has no drafts
    return dict(law)
