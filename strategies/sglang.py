"""SGLang: jump over forced text between steps, mask a draft tree by depth-first search.

Invariant: between steps the matcher holds exactly the emitted tokens; inside the search each
accept is paired with a rollback of one. It pays on the CPU (one visit per tree node while the
target computes) and, when it jumps, in re-encoding and in feeding the forced tokens to both
models; a jump saves the steps that would have generated them, and may change tokens that were
already emitted.

Upstream never ran both at once (jump-forward ended with 0.4.3.post2, grammar with drafts came
with 0.4.6); here a jump happens between verify steps, before anything is drafted. The request
keeps its slot (upstream re-queues it, S1n), and no jump goes past the length limit (S1o).

Rules: S1a-d and S1g-l jump-forward, S1p as an option, S2a-d search, S2g-i verification and
accepting, S4 reasoning (``harness.grammar.gate``).
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.core import PAD, Sequence, longest_common_prefix
from harness.errors import ConfigError
from harness.grammar.tracked import TrackedMatcher
from harness.models.verifiers import TargetOnly
from harness.step import Step, isolate
from harness.text import output_text
from strategies.base import Setup, Strategy, feed


@dataclass(frozen=True)
class SglangOptions:
    """Switches of SGLang, and of rules that others added to jump-forward (S1b, S1c, S1p, S2h).

    Attributes:
        jump_forward: insert forced text between steps.
        min_chars: shortest forced text that is worth a jump; xgrammar's rule is 1.
        hold_back_last: leave that many tokens at the end of a jump to the model, which may
            merge them with what follows (recommended 1; SGLang itself has no such rule).
        tree_width: draft nodes per depth; 1 is a chain.
        threshold_single, threshold_acc: acceptance thresholds; lossless at 1.
    """

    jump_forward: bool = True
    min_chars: int = 1
    hold_back_last: int = 0
    tree_width: int = 1
    threshold_single: float = 1.0
    threshold_acc: float = 1.0


class Sglang(Strategy):
    """Jump-forward and tree verification."""

    name = "sglang"
    Options = SglangOptions

    def __init__(self, options: SglangOptions, setup: Setup) -> None:
        super().__init__(options, setup)
        for field in ("min_chars", "tree_width"):
            if getattr(options, field) < 1:
                raise ConfigError(f"options.sglang.{field}: give at least 1")
        if options.hold_back_last < 0:
            raise ConfigError("options.sglang.hold_back_last: give 0 or more")
        self.tree_width = options.tree_width
        self.verifier = TargetOnly(options.threshold_single, options.threshold_acc)

    @classmethod
    def needs_logits(cls, options: SglangOptions) -> str:
        """A tree's leaves are the runners-up of its chain."""
        return f"options.sglang.tree_width={options.tree_width}" if options.tree_width > 1 else ""

    @property
    def rewrites(self) -> bool:
        """A jump may change tokens that were emitted (S1h)."""
        return bool(self.options.jump_forward)

    def before_step(self, step: Step) -> None:
        """Jump over forced text (S1a)."""
        if not self.options.jump_forward:
            return
        for index, sequence, matcher in step.constrained():
            with isolate(sequence):
                step.jumped[index] = self.jump(sequence, matcher)

    def jump(self, sequence: Sequence, matcher: TrackedMatcher) -> tuple[int, int]:
        """Insert the text that the grammar forces, if any (S1c, S1g-S1k).

        Returns:
            Tokens inserted (a jump that merges tokens may insert fewer than none) and emitted
            ids changed; (0, 0) without a jump.
        """
        forced = matcher.forced_text()
        if len(forced) < self.options.min_chars:
            return 0, 0
        old = sequence.output_ids
        new = self.retokenize(sequence.request.prompt_ids, old, forced)
        if new is None or len(new) >= sequence.request.max_new_tokens:
            return 0, 0
        kept = longest_common_prefix(old, new)
        matcher.rollback(len(old) - kept, "retokenize")
        if not matcher.started or not matcher.accept(new[kept:]):
            # Upstream raises here (S1k); the old tokens are as good as before, and what stands
            # before a late start is never rewritten (S4f).
            feed(matcher, old[kept:])
            return 0, 0
        sequence.replace_output(new)
        sequence.jump_tokens += len(new) - len(old)
        sequence.retokenized += len(old) - kept
        return len(new) - len(old), len(old) - kept

    def retokenize(
        self, prompt: tuple[int, ...], output: list[int], forced: str
    ) -> list[int] | None:
        """Encode prompt, output and forced text as one (S1h).

        Returns:
            The new output ids; None where the jump must not happen: the output ends inside a
            character (S1g), the encoding fuses the prompt's last token (S1i) or shifts the
            output in a prompt that is not canonical itself, or nothing new is left once the
            last tokens are held back (S1p).
        """
        text = output_text(self.setup.table, output)
        if text.endswith("\ufffd"):
            return None
        encoded = self.setup.codec.encode(self.setup.codec.decode(prompt) + text + forced)
        if len(encoded) < len(prompt) or encoded[len(prompt) - 1] != prompt[-1]:
            return None
        new = encoded[len(prompt) : len(encoded) - self.options.hold_back_last]
        jumped = output_text(self.setup.table, new)
        goes_on = len(jumped) > len(text) and (text + forced).startswith(jumped)
        return new if goes_on else None

    def propose(self, step: Step) -> None:
        """A free chain, or a chain with leaves (S2a); the grammar never sees it."""
        step.proposals = step.drafts.free(step.sequences, width=self.tree_width)

    def fill_rows(
        self, step: Step, index: int, sequence: Sequence, matcher: TrackedMatcher
    ) -> None:
        """Depth-first search over the nodes (S2b, S2c): row i + 1 says what may follow node i.

        A node is legal if its parent's row says so. Rows of illegal nodes, of their
        descendants and behind a stop token stay unmasked; nothing reaches them. A root
        behind the stop token fills nothing (R9).
        """
        proposal = step.proposals[index]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(proposal.parent_nodes):
            children.setdefault(parent, []).append(node)
        legal = [False] * len(proposal.tokens)

        def visit(parent: int) -> None:
            for node in children.get(parent, ()):
                token = proposal.tokens[node]
                if token == PAD or not step.masks.allows(index, parent + 1, token):
                    continue
                if not matcher.accept([token]):  # an unmasked row lets even this pass (L22)
                    continue
                try:
                    legal[node] = True
                    if not matcher.terminated and step.masks.fill(index, node + 1, matcher):
                        visit(node)
                finally:
                    matcher.rollback(1, "preview")

        if not matcher.terminated:
            self.fill_first_row(step, index, matcher)
            visit(-1)
        proposal.legal = legal
