"""Break one rule at a time in a copy of the project, and see that a test goes red.

    python -m tests.mutants                # all; minutes
    python -m tests.mutants trtllm T8      # those whose rule or file has one of the words

Exit status 1 if a mutant survives. The list is that of ``spec/regressions.md``, and the rules that
a reader would not miss in a diff.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
COPIED = ("harness", "strategies", "configs", "tests", "pyproject.toml")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutant:
    """One change that must not go unnoticed.

    Attributes:
        rule: what is broken.
        path: the file.
        old: text that occurs in it once.
        new: what stands there instead.
        tests: where the test is that must fail.
    """

    rule: str
    path: str
    old: str
    new: str
    tests: str

    def applied(self, text: str) -> str:
        """The file's text with the change.

        Raises:
            ValueError: the list is stale.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.path}: {self.old!r} occurs {text.count(self.old)} times")
        return text.replace(self.old, self.new)


MUTANTS = (
    Mutant(
        "T9: no reset of the draft's termination",
        "strategies/trtllm.py",
        "self.advanced_drafts, self.draft_terminated = 0, False",
        "self.advanced_drafts = 0",
        "tests/strategies/test_trtllm.py",
    ),
    Mutant(
        "T8: r = ADV - a, without the golden token",
        "strategies/trtllm.py",
        "self.advanced - (1 + self.accepted)",
        "self.advanced - self.accepted",
        "tests/strategies/test_trtllm.py",
    ),
    Mutant(
        "1.4a: drafts rolled back before the last fill",
        "strategies/trtllm.py",
        "        fill = partial(fill_row, masks, index, matcher)\n",
        "        fill = partial(fill_row, masks, index, matcher)\n"
        "        ledgers(sequence).roll_back_drafts(matcher)\n",
        "tests/strategies/test_trtllm.py",
    ),
    Mutant(
        "1.2: ADV counted 0 on context",
        "strategies/trtllm.py",
        "        self.advanced = 1\n        if not matcher.terminated:",
        "        self.advanced = int(new_token is not None)\n        if not matcher.terminated:",
        "tests/strategies/test_trtllm.py",
    ),
    Mutant(
        "T13: no clamp at EOS",
        "strategies/trtllm.py",
        "min(len(step.verdicts[index].emitted), books.advanced)",
        "len(step.verdicts[index].emitted)",
        "tests/strategies/test_trtllm.py",
    ),
    Mutant(
        "T7: padding bits counted",
        "harness/bitmask.py",
        "int(row[whole]) & ((1 << spare) - 1)",
        "int(row[whole])",
        "tests/grammar/test_masks.py",
    ),
    Mutant(
        "L14: a token is emitted before the grammar is asked",
        "harness/models/resample.py",
        "not constraint.accept(token)):",
        "not (constraint.accept(token) or True)):",
        "tests/strategies/test_llamacpp.py",
    ),
    Mutant(
        "L5: resampled from logits that are not masked",
        "harness/models/resample.py",
        "    mask_rows(logits, upload(mask, logits.device))\n",
        "",
        "tests/strategies/test_llamacpp.py",
    ),
    Mutant(
        "D16: a step beyond a request's rows masks its neighbour's",
        "harness/bitmask.py",
        "rows[rows < ends], requests[rows < ends]",
        "rows, requests",
        "tests/grammar/test_masks.py",
    ),
    Mutant(
        "D16: the bitmask is indexed by row",
        "harness/bitmask.py",
        "bits = bitmask[requests, :, None]",
        "bits = bitmask[rows % len(bitmask), :, None]",
        "tests/grammar/test_masks.py",
    ),
    Mutant(
        "D9: the trigger's history is not rolled back",
        "harness/grammar/token_trigger.py",
        "            del self.progress_history[-rest:]\n",
        "",
        "tests/grammar/test_gate.py",
    ),
    Mutant(
        "D9: a rollback takes the stop token before those behind it",
        "harness/grammar/token_trigger.py",
        "after_eos = min(n, max(self.tokens_after_eos, 0))",
        "after_eos = 0",
        "tests/grammar/test_gate.py",
    ),
    Mutant(
        "V1.2g: a preview is not rolled back when the engine breaks",
        "strategies/vllm.py",
        '        finally:\n            matcher.rollback(advanced, "preview")',
        "        except ZeroDivisionError:\n            pass\n"
        '        matcher.rollback(advanced, "preview")',
        "tests/strategies/test_vllm.py",
    ),
    Mutant(
        "V1.1e: the first illegal draft is kept",
        "strategies/vllm.py",
        "        legal = keep\n        if self.options.keep_first_invalid:",
        "        legal = keep\n        if True:",
        "tests/strategies/test_vllm.py",
    ),
    Mutant(
        "V1.7b: accept at u <= p / q",
        "harness/models/verifiers.py",
        "q_draft > 0 and draws[row - 1, COIN] * q_draft < p_draft",
        "q_draft > 0 and draws[row - 1, COIN] * q_draft <= p_draft",
        "tests/models/test_verifiers.py",
    ),
    Mutant(
        "V1.7c: no residual",
        "harness/models/verifiers.py",
        "residual = (p - children).clamp_min_(0)",
        "residual = p.clone()",
        "tests/models/test_verifiers.py",
    ),
    Mutant(
        "V1.7e: padding can be accepted",
        "harness/models/verifiers.py",
        "if draft == PAD or not passed:",
        "if not passed:",
        "tests/models/test_verifiers.py",
    ),
    Mutant(
        "T11: a rollback over EOS takes a token of the text along",
        "harness/grammar/adapter.py",
        "text = n - self._terminated",
        "text = n",
        "tests/grammar/test_matcher_contract.py",
    ),
    Mutant(
        "R11: what stands behind the stop token is emitted",
        "harness/loop.py",
        "                return tokens[:count], Finish.STOP",
        "                return tokens[:remaining], Finish.STOP",
        "tests/test_loop.py",
    ),
    Mutant(
        "a whole window's last draft is taken for read by the draft model",
        "harness/drafters/model.py",
        "longest_common_prefix(sequence.draft_ahead, emitted[:-1])",
        "len(emitted) - 1",
        "tests/test_loop.py",
    ),
    Mutant(
        "1.4a: a pruned draft is masked by other tokens' bits",
        "harness/draft_vocabulary.py",
        "self._bits = bits.to(device)",
        "self._bits = bits.flip(0).to(device)",
        "tests/test_draft_vocabulary.py",
    ),
    Mutant(
        "T18: the law of a pruned draft is brought back to other tokens",
        "harness/draft_vocabulary.py",
        "index_copy_(1, self._ids, law)",
        "index_copy_(1, self._ids.flip(0), law)",
        "tests/strategies/test_pruned_draft.py",
    ),
    Mutant(
        "L12: the model drafts where others have drafted already",
        "harness/drafters/cascade.py",
        "if not each.tokens]",
        "if True]",
        "tests/drafters/test_cascade.py",
    ),
    Mutant(
        "D12: forced text of a matcher that lags behind the output",
        "harness/drafters/forced.py",
        "if matcher.held >= len(output):",
        "if True:",
        "tests/drafters/test_forced.py",
    ),
    Mutant(
        "V1.7b: drafts that were drawn are reported as certain",
        "harness/drafters/uniform.py",
        "q=law if reports else None",
        "q=None if reports else law",
        "tests/drafters/test_uniform.py",
    ),
    Mutant(
        "an adaptive length takes what stands behind a wrong draft for tested",
        "harness/drafters/length.py",
        "min(accepted + 1, drafted)",
        "drafted",
        "tests/drafters/test_length.py",
    ),
    Mutant(
        "padding counts as a draft",
        "harness/core.py",
        "return len(self.raw) - self.raw.count(PAD)",
        "return len(self.raw)",
        "tests/drafters/test_ngram.py",
    ),
    Mutant(
        "padding is visible to a row's tokens",
        "harness/models/causal_lm.py",
        "torch.arange(span, device=positions.device) <= positions[:, :, None]",
        "torch.arange(span, device=positions.device) <= positions[:, :, None] + 1",
        "tests/models/test_causal_lm.py",
    ),
    Mutant(
        "repeats of a sweep take turns",
        "harness/sweep/sweeper.py",
        'overrides.sort(key=lambda each: each.key_or_group != "repeat")',
        "pass",
        "tests/sweep/test_sweep.py",
    ),
    Mutant(
        "an interval of repeats reaches from the lowest end to the highest",
        "harness/results/repeats.py",
        "return [min(lows), max(highs)]",
        "return [max(lows), min(highs)]",
        "tests/results/test_repeats.py",
    ),
    Mutant(
        "runs of two commits are no repeats",
        "harness/results/pivot.py",
        "for commit, _ in repeats}) > 1 for",
        "for commit, _ in repeats}) > 9 for",
        "tests/results/test_report_pivot.py",
    ),
    Mutant(
        "a title tells of cells with fewer repeats",
        "harness/results/pivot.py",
        "min(map(len, cells), default=0), max(",
        "max(map(len, cells), default=0), max(",
        "tests/results/test_report_pivot.py",
    ),
    Mutant(
        "a repeat is no setting",
        "harness/results/pivot.py",
        'independent(differing.drop(columns=REPEAT, errors="ignore"))',
        "independent(differing)",
        "tests/results/test_report_pivot.py",
    ),
    Mutant(
        "no garbage collection while time counts",
        "harness/garbage.py",
        "        gc.disable()\n",
        "",
        "tests/test_garbage.py",
    ),
    Mutant(
        "nor where one fails and the others' next step is under way",
        "harness/loop.py",
        "if finished and not self.clock.left:",
        "if finished:",
        "tests/test_garbage.py",
    ),
    Mutant(
        "a collection walks what is new, not what was there before",
        "harness/garbage.py",
        "gc.collect(NEW)",
        "gc.collect()",
        "tests/test_garbage.py",
    ),
    Mutant(
        "what has survived a collection of the loop is collected later",
        "harness/garbage.py",
        "gc.collect(NEW)",
        "gc.collect(), gc.freeze()",
        "tests/test_garbage.py",
    ),
    Mutant(
        "garbage is collected as requests end",
        "harness/loop.py",
        "            self._garbage.collect()\n",
        "            pass\n",
        "tests/test_garbage.py",
    ),
    Mutant(
        "a mask lingers in the next forward's row",
        "harness/static_logits.py",
        "            self._host[row] = EVERY_TOKEN\n",
        "            pass\n",
        "tests/test_static_logits.py",
    ),
)


def main(words: Sequence[str]) -> int:
    chosen = [
        mutant
        for mutant in MUTANTS
        if not words or any(word in f"{mutant.rule} {mutant.path}" for word in words)
    ]
    with TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        copy.mkdir()
        for name in COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors")
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=ignored)
            else:
                shutil.copy(source, copy / name)
        survivors = [mutant for mutant in chosen if not killed(mutant, copy)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


def killed(mutant: Mutant, copy: Path) -> bool:
    """Whether a test of the mutated copy fails; the copy is whole again afterwards."""
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.applied(text), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.tests]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        status = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        status = 1
    finally:
        path.write_text(text, encoding="utf-8")
    verdict = {0: "SURVIVED", 1: "killed"}.get(status, f"pytest ended with {status}")
    print(f"{verdict:>10}  {mutant.rule} ({mutant.path})", flush=True)
    return status == 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
