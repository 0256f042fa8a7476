"""llama.cpp's verification: sample, ask the grammar, resample (L4, 2.4)."""

from __future__ import annotations

import torch

from harness.core import Proposal, Verdict
from harness.models.sampling import Sampling
from harness.models.verifiers import CheckThenResample, VerifyBatch
from tests.models.languages import Language

GREEDY = Sampling()
A, B, C, D, E, Z, Q, EOS = range(8)


def peaked(*tokens: int) -> torch.Tensor:
    """Rows of logits whose argmax is the given token, 3 ahead of the next."""
    return 3.0 * torch.nn.functional.one_hot(torch.tensor(tokens), 8).float()


def verify(
    logits: torch.Tensor, drafts: list[int], language: Language, sampling: Sampling = GREEDY
) -> Verdict:
    batch = VerifyBatch(logits, [Proposal(drafts)], [7], [0], sampling, [language])
    return CheckThenResample().verify(batch)[0]


def test_worked_example_of_llama_cpp() -> None:
    """L 2.9: {abcd, abce}, the target itself prefers the illegal z in row 1."""
    logits = peaked(B, Z, D, EOS)
    logits[1, C] = 2.0
    language = Language([[A, B, C, D], [A, B, C, E]], held=[A])
    verdict = verify(logits, [B, Z, Q], language)
    assert verdict.emitted == [B, C]
    assert verdict.path == [0]
    assert language.held == [A, B, C]
    assert language.filled == 1
    assert verdict.gaps == [3.0, float("inf")]


def test_run_goes_on_if_the_second_choice_is_the_draft() -> None:
    logits = peaked(Z, Z, D)
    language = Language([[B, C, D]])
    verdict = verify(logits, [B, C], language)
    assert verdict.emitted == [B, C, D]
    assert verdict.path == [0, 1]
    assert language.filled == 2


def test_matcher_sees_only_what_is_emitted_and_only_once() -> None:
    """L14b; mutant "llama accept before check": the refused z never enters the matcher."""
    language = Language([[A, B]])
    verify(peaked(Z, Z), [Z], language)
    assert language.held == [A]
    assert language.asked == [Z, A]


def test_second_try_starts_from_the_logits_of_the_model() -> None:
    """Mutant "resample without reloading logits": after top-1 of the first try nothing is left."""
    logits = peaked(Z)
    logits[0, B] = 1.0
    sampling = Sampling(temperature=1.0, top_k=1)
    language = Language([[A], [B]])
    verdict = verify(logits, [], language, sampling)
    assert verdict.emitted == [B]


def test_run_ends_with_the_token_that_terminates_the_matcher() -> None:
    """A drafted stop token is accepted (L14e); what is behind it is not looked at."""
    logits = peaked(A, EOS, B)
    language = Language([[A, EOS]])
    verdict = verify(logits, [A, EOS], language)
    assert (verdict.emitted, verdict.path) == ([A, EOS], [0, 1])
    assert language.terminated
    assert language.asked == [A, EOS]


def test_dead_end_keeps_what_was_emitted_before_and_spares_the_others() -> None:
    """L6: nothing legal is that sequence's failure alone; the others resample in their rows."""
    logits = torch.cat([peaked(A, B, C), peaked(A, Z, C)])
    logits[1, E], logits[4, D] = 2.0, 2.0  # what each row would choose next
    stuck, fine = Language([[A]]), Language([[A, D, C], [A, E]])
    batch = VerifyBatch(
        logits, [Proposal([A, B]), Proposal([A, D])], [1, 2], [0, 0], GREEDY, [stuck, fine]
    )
    verdicts = CheckThenResample().verify(batch)
    assert (verdicts[0].emitted, verdicts[0].path) == ([A], [0])
    assert (verdicts[1].emitted, verdicts[1].path) == ([A, D, C], [0, 1])


def test_grammar_that_refuses_its_own_mask_ends_the_run() -> None:
    class Liar(Language):
        def accept(self, token: int) -> bool:
            return False

    verdict = verify(peaked(Z), [], Liar([[A]]))
    assert verdict == Verdict([], [])
