"""The distillation recipe on a tiny pair and a few records of our own: all stages in seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from experiments.distill import batches, cli, data, prompts, train
from experiments.distill.batches import CHUNK, Batch, Batches, collate
from experiments.distill.checkpoint import Checkpoint
from experiments.distill.masks import Governed, Grammars, Masks
from experiments.distill.measure import agreement
from experiments.distill.objective import divergences, legal_logits
from experiments.distill.references import reference_sequences
from experiments.distill.schedule import Budget, rate
from experiments.distill.sequences import TokenSequence, read
from experiments.distill.settings import Settings, claim, defaults, parse
from experiments.distill.student import (
    first_and_last,
    head_of,
    hidden_states,
    make_student,
    parse_layers,
    student_config,
    trainable,
)
from experiments.study import Study
from harness.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, ConfigError
from harness.grammar.spec import GrammarSpec
from harness.grammar.vocabulary import token_table
from harness.models.pair import PairConfig, load_pair
from tests.tiny_pair import byte_tokenizer, random_llama, save_pair

TINY = (
    "device=cpu",
    "layers=1",
    "rounds=5",
    "references=2",
    "slots=4",
    "max_new_tokens=12",
    "max_length=448",
    "batch_tokens=1024",
    "steps=4",
    "evaluate_every=2",
    "lr=0.01",
)


def call_record(number: int, split: str) -> dict[str, Any]:
    name = f"tool{number}"
    arguments = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    return {
        "id": f"bfcl/{split}/{number}",
        "kind": "simple",
        "messages": [{"role": "user", "content": f"Use {number}."}],
        "functions": [{"name": name, "description": "d", "parameters": arguments}],
        "schema": {"type": "object", "properties": {name: arguments}, "required": [name]},
        "instance": {name: {"n": number}},
        "split": split,
    }


def schema_record(number: int) -> dict[str, Any]:
    return {
        "id": f"jsb/{number}",
        "kind": "own",
        "schema": {"enum": [number, "a"]},
        "valid": [number, "a"],
        "invalid": [],
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of workloads: a few calls of both splits, and a few schemas."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "workloads").mkdir()
    calls = [call_record(n, "eval" if n % 4 == 0 else "train") for n in range(24)]
    for name, records in (("bfcl", calls), ("jsonschemabench", map(schema_record, range(12)))):
        text = "\n".join(json.dumps(record) for record in records)
        (folder / "workloads" / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads only wait for each other in models as small as these."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _workloads(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_SHARED", str(shared))


def distil(target: Path, out: Path, *words: str) -> int:
    return cli.main([f"pair={target}", f"out={out}", *TINY, *words])


@pytest.fixture(scope="module")
def finished(
    _one_thread: None, shared: Path, target: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """All stages: the folder, and that of the draft."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HARNESS_SHARED", str(shared))
        assert distil(target, out) == 0
    return out, out / "target-draft-1l"


def weights(out: Path) -> dict[str, torch.Tensor]:
    checkpoint = Checkpoint.read(out / "train")
    assert checkpoint is not None
    return next(iter(checkpoint.weights.values()))


def losses(out: Path) -> list[float]:
    checkpoint = Checkpoint.read(out / "train")
    assert checkpoint is not None
    return [point.loss for point in checkpoint.curve]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def items(out: Path) -> set[str]:
    return {each.item for path in (out / "data").glob("*.parquet") for each in read(path)[0]}


# The recipe as a whole


def test_the_exported_draft_loads_behind_its_target(
    target: Path, finished: tuple[Path, Path]
) -> None:
    pair = load_pair(PairConfig(str(target), str(finished[1]), device="cpu"))
    assert pair.draft is not None
    assert pair.draft.get_input_embeddings() is pair.target.get_input_embeddings()
    for name, parameter in trainable(pair.draft).items():
        trained = weights(finished[0])[name]
        assert torch.equal(parameter, trained.bfloat16().float()), name


def test_the_card_names_the_recipe_and_the_figures(finished: tuple[Path, Path]) -> None:
    card = (finished[1] / "README.md").read_text()
    assert "its layers 0 and" in card
    assert "bfcl, reference, compact" in card
    assert "steps=4" in card
    assert "lr=0.01" in card


def test_the_curve_has_a_point_for_every_look(finished: tuple[Path, Path]) -> None:
    curve = pd.read_csv(finished[0] / "curve.csv")
    assert curve.step.tolist() == [2, 4]
    assert curve["held_out.bfcl, reference, compact"].between(0, 1).all()
    assert (finished[0] / "curve.svg").exists()


def test_two_runs_give_the_same_weights(
    target: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    assert distil(target, tmp_path, "stages=data,train") == 0
    assert same(weights(tmp_path), weights(finished[0]))


def test_another_seed_gives_other_weights(
    target: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    assert distil(target, tmp_path, "stages=data,train", "seed=1") == 0
    assert not same(weights(tmp_path), weights(finished[0]))


def test_an_interrupted_training_goes_on_to_the_same_weights(
    target: Path, finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    learn = train.Training._learn

    def learn_and_press(self: train.Training, *given: Any) -> None:
        learn(self, *given)
        if self.at.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "_learn", learn_and_press)
        assert distil(target, tmp_path, "stages=train") == EXIT_INTERRUPTED
    kept = Checkpoint.read(tmp_path / "train")
    assert kept is not None
    assert kept.step == 3
    assert distil(target, tmp_path, "stages=train") == 0
    assert same(weights(tmp_path), weights(finished[0]))
    assert losses(tmp_path) == losses(finished[0])


def test_data_made_in_two_calls_is_the_data_of_one(
    target: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    assert distil(target, tmp_path, "stages=data", "rounds=1") == 0
    assert distil(target, tmp_path, "stages=data") == 0
    for path in (finished[0] / "data").glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "data" / path.name).read_bytes()


def test_sequences_without_their_masks_are_refused_with_the_remedy(
    target: Path, finished: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    (tmp_path / "data" / "reference.npz").unlink()
    assert distil(target, tmp_path, "stages=train") == EXIT_BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert "reference.parquet has no masks beside it" in line
    assert "run the stage data" in line


def test_processes_that_share_the_rounds_make_the_data_of_one(
    target: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    for part in ("1/2", "0/2"):
        assert distil(target, tmp_path, "stages=data", f"part={part}") == 0
    for path in (finished[0] / "data").glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "data" / path.name).read_bytes()


def test_a_time_budget_keeps_what_exists_and_begins_no_round(target: Path, tmp_path: Path) -> None:
    assert distil(target, tmp_path, "stages=data", "data_seconds=1e-9") == 0
    made = {path.stem for path in (tmp_path / "data").glob("*.parquet")}
    assert made == {"reference", "held_out"}


def test_several_students_share_the_target(
    target: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    assert distil(target, tmp_path, "layers=1,2,[1]", "stages=train,export", "steps=1") == 0
    for name, layers in {"1l": 1, "2l": 2, "1": 1}.items():
        config = json.loads((tmp_path / f"target-draft-{name}" / "config.json").read_text())
        assert config["num_hidden_layers"] == layers
        assert config["embeddings"] == "shared"
        assert str(target) not in json.dumps(config)


def test_a_folder_of_other_settings_is_refused(
    target: Path, finished: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert distil(target, finished[0], "stages=train", "lr=0.5") == EXIT_BAD_INPUT
    assert "lr:" in capsys.readouterr().err
    assert distil(target, finished[0], "stages=data", "references=3") == EXIT_BAD_INPUT


def test_a_folder_that_holds_no_result_yet_is_anybodys(tmp_path: Path) -> None:
    claim(tmp_path, {"target": "mistyped"})  # and then the target cannot be loaded
    claim(tmp_path, {"target": "smollm2"})
    (tmp_path / "round-0000.parquet").write_bytes(b"")
    claim(tmp_path, {"target": "smollm2"})
    with pytest.raises(ConfigError, match=r"target: .* was begun with 'smollm2', not 'other'"):
        claim(tmp_path, {"target": "other"})


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this PyTorch has no Muon")
def test_muon_trains_too(target: Path, finished: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    assert distil(target, tmp_path, "stages=train", "optimizer=muon") == 0
    assert not same(weights(tmp_path), weights(finished[0]))


def test_training_brings_the_student_nearer_to_its_target(
    target: Path, finished: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(finished[0] / "data", tmp_path / "data")
    assert distil(target, tmp_path, "stages=train", "steps=60", "evaluate_every=20") == 0
    first, *_, last = losses(tmp_path)
    assert last < 0.9 * first


def test_a_bench_prints_its_parts(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distil(target, tmp_path, "stages=bench", "bench_seconds=0.1") == 0
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("whole step", "target forward", "head and loss"))


# What is trained on


def test_the_eval_split_is_never_read_into_the_data(finished: tuple[Path, Path]) -> None:
    train_ids = {record["id"] for record in prompts.read(prompts.CALLS, "train")}
    schemas = {record["id"] for record in prompts.read(prompts.SCHEMAS, "train")}
    assert items(finished[0]) <= train_ids | schemas
    assert not any("/eval/" in item for item in items(finished[0]))


def test_held_out_records_are_in_no_training_sequence(finished: tuple[Path, Path]) -> None:
    found = data.load(finished[0] / "data")
    held_out = {each.item for each in found.held_out}
    assert held_out
    assert not held_out & {each.item for each in found.train}


def test_outputs_of_constrained_rounds_follow_their_grammar(finished: tuple[Path, Path]) -> None:
    tokenizer = byte_tokenizer()
    rounds = [each for each in data.load(finished[0] / "data").train if each.rows.any()]
    texts = [tokenizer.decode(each.tokens[each.start :]) for each in rounds]
    assert texts
    assert all(text.startswith(("{", '"a"', *"0123456789", " ", "\n", "\t")) for text in texts)


def test_a_reference_stands_behind_its_prompt_and_ends_with_the_end_token() -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(token_table(tokenizer, frozenset({tokenizer.eos_token_id})))
    styled = [(call_record(1, "train"), ["compact"])]
    (made,) = reference_sequences(styled, tokenizer, 400, grammars, grammars.new_table())
    prompt, output = made.tokens[: made.start], made.tokens[made.start :]
    assert tokenizer.decode(prompt).endswith("user: Use 1.\nassistant:")
    assert tokenizer.decode(output[:-1]) == '{"tool1": {"n": 1}}'
    assert output[-1] == tokenizer.eos_token_id


# Masks


def allows(masks: Masks, row: int, token: int) -> bool:
    return bool(masks[row, token // 32] >> (token % 32) & 1)


def test_every_output_under_a_grammar_has_masks_that_allow_it(finished: tuple[Path, Path]) -> None:
    found = data.load(finished[0] / "data")
    governed = [each for each in found.train + found.held_out if "no grammar" not in each.source]
    for each in governed:
        assert len(each.rows) == len(each.output)
        assert all(map(partial(allows, found.masks), each.rows, each.output)), each.source
        assert each.rows.all(), "JSON never allows everything"


def test_free_outputs_have_no_masks(finished: tuple[Path, Path]) -> None:
    found = data.load(finished[0] / "data")
    free = [each for each in found.train if "no grammar" in each.source]
    assert free
    assert not any(each.rows.any() for each in free)
    assert (found.masks[0] == -1).all()


def test_behind_a_token_that_the_grammar_refuses_everything_is_allowed() -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(token_table(tokenizer, frozenset({tokenizer.eos_token_id})))
    table, spec = grammars.new_table(), GrammarSpec("regex", "ab*")
    governed = Governed(tokenizer.encode("abcb", add_special_tokens=False), spec, "compact")
    (rows,) = grammars.follow([governed], table)
    assert rows.tolist() == [1, 2, 2, 0]
    ids = tokenizer.encode("abc", add_special_tokens=False)
    assert [allows(table.masks, 2, each) for each in ids] == [False, True, False]


def test_a_grammar_that_does_not_compile_allows_everything() -> None:
    tokenizer = byte_tokenizer()
    grammars = Grammars(token_table(tokenizer, frozenset({tokenizer.eos_token_id})))
    governed = Governed([97, 98], GrammarSpec("regex", "("), "compact")
    (rows,) = grammars.follow([governed], grammars.new_table())
    assert rows.tolist() == [0, 0]


def test_what_a_mask_forbids_has_no_probability() -> None:
    logits = legal_logits(torch.ones(1, 20), torch.tensor([[0b101]]))
    assert logits.softmax(-1)[0].nonzero().flatten().tolist() == [0, 2]


@pytest.mark.parametrize(("law", "masked"), [("masked", True), ("own", False)])
def test_the_law_that_is_taught_is_a_choice(
    law: str, masked: bool, finished: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    taught: list[data.Data] = []
    monkeypatch.setattr(cli, "train", lambda settings, data, folder: taught.append(data))
    settings = parse({**defaults(), "law": law})
    cli.STAGES["train"](settings, cast(Study, SimpleNamespace(out=finished[0])))
    rows = [each.rows for each in taught[0].train + taught[0].held_out]
    assert any(each.any() for each in rows) == masked


# Batches


def some_sequences(lengths: Iterable[int], start: int = 4) -> list[TokenSequence]:
    return [
        TokenSequence(
            str(number),
            "own",
            np.full(length, 1 + number, np.int32),
            start,
            np.arange(1, 1 + length - start, dtype=np.int32),
        )
        for number, length in enumerate(lengths)
    ]


def test_all_outputs_and_no_prompts_are_weighed_when_measuring() -> None:
    (sequence,) = some_sequences([7])
    batch = collate([sequence], (1, 10))
    # Positions 3, 4 and 5 predict the output tokens 4, 5 and 6.
    assert batch.positions[: batch.total].tolist() == [3, 4, 5]
    assert batch.rows[: batch.total].tolist() == [1, 2, 3]
    assert batch.weights.sum() == batch.total == 3
    assert len(batch.positions) == len(batch.rows) == CHUNK


def test_a_share_of_the_prompt_is_learnt_from() -> None:
    sequences = some_sequences([900] * 8, start=801)
    batch = collate(sequences, (8, 900), 0.25, np.random.default_rng(0))
    in_prompt = batch.positions[: batch.total] % 900 < 800
    assert (batch.rows[: batch.total][in_prompt] == 0).all()
    assert batch.rows[: batch.total][~in_prompt].tolist() == [*range(1, 100)] * 8
    prompt = in_prompt.sum()
    assert prompt == pytest.approx(0.25 * 8 * 800, rel=0.1)
    assert batch.total - prompt == 8 * 99


def test_an_epoch_holds_every_sequence_in_batches_of_one_size() -> None:
    made = Batches(some_sequences(range(5, 205)), 2048, 512, 0.0, seed=3)
    epoch = [made[index] for index in range(len(made))]
    assert {batch.tokens.shape for batch in epoch} == {(8, 256)}
    seen = {int(row[0]) for batch in epoch for row in batch.tokens}
    assert seen == set(range(1, 201))


def test_a_batch_is_a_function_of_its_index() -> None:
    sequences = some_sequences(range(5, 205))
    there, again = (Batches(sequences, 2048, 512, 0.5, seed=3) for _ in range(2))
    later = there[len(there) + 2]
    assert torch.equal(later.tokens, again[len(there) + 2].tokens)
    assert torch.equal(later.positions, again[len(there) + 2].positions)
    assert not torch.equal(later.tokens, there[2].tokens)


def test_batches_that_are_made_ahead_come_in_order() -> None:
    made = batches.ahead(lambda index: collate(some_sequences([index]), (1, index)), 6)
    assert [next(made).real for _ in range(5)] == [6, 7, 8, 9, 10]
    made.close()


# Students and their objective


def test_the_gradient_is_that_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    target, states = torch.randn(2, 2 * CHUNK, 8, generator=generator).unbind()
    head = torch.randn(30, 8, generator=generator)
    weights = (torch.rand(2 * CHUNK, generator=generator) < 0.5).float()
    masks = torch.tensor([[-1], [0b110]], dtype=torch.int32)
    rows = torch.randint(2, (2 * CHUNK,), generator=generator)
    nowhere = torch.zeros(0, dtype=torch.int64)
    batch = Batch(nowhere, nowhere, rows, weights, int(weights.sum()), 0)
    (found,) = divergences(target, [states], batch, masks, head)
    leaf = states.clone().requires_grad_()
    forbidden = (rows == 1)[:, None] & ~torch.isin(torch.arange(30), torch.tensor([1, 2]))
    log_q = F.log_softmax(leaf @ head.T, dim=-1)
    log_p = F.log_softmax((target @ head.T).masked_fill(forbidden, -1e30), dim=-1)
    by_autograd = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1) @ weights
    by_autograd.backward()
    torch.testing.assert_close(found.sums[0], by_autograd.detach(), rtol=1e-4, atol=1e-3)
    assert leaf.grad is not None
    torch.testing.assert_close(found.gradient, leaf.grad, rtol=1e-4, atol=1e-5)
    equal = (log_p.argmax(-1) == log_q.argmax(-1)).float() @ weights
    assert found.sums[1] == equal


def test_a_student_of_all_layers_agrees_with_its_target_everywhere() -> None:
    target = random_llama(0).requires_grad_(False)
    sequences = some_sequences([30, 40])
    head = head_of(target, 257)
    masks = np.array([[-1] * 9, *[[1 << n % 31] + [0] * 8 for n in range(36)]], np.int32)
    whole = agreement(make_student(target, (0, 1)), target, head, sequences, masks, 256)
    assert whole.share("own") == whole.share("guided") == 1
    assert whole.positions.tolist() == [26, 36]
    part = agreement(make_student(target, (1,)), target, head, sequences, masks, 256)
    assert part.share("own") < 1
    assert part.share("guided") == 1, "one token is legal"


def test_a_draft_without_the_grammar_is_held_against_what_the_target_may_say() -> None:
    target = random_llama(0).requires_grad_(False)
    (sequence,) = some_sequences([30])
    tokens = np.random.default_rng(0).integers(257, size=30, dtype=np.int32)
    sequence = sequence._replace(tokens=tokens, rows=np.ones(26, np.int32))
    head = head_of(target, 257)
    states = hidden_states(target, torch.from_numpy(sequence.tokens).long()[None])[0, 3:-1]
    best = F.linear(states, head).argmax(-1)
    one, masks = int(best.mode().values), np.zeros((2, 9), np.int32)
    masks[0], masks[1, one // 32] = -1, np.array(1 << (one % 32), np.uint32).view(np.int32)
    found = agreement(make_student(target, (0, 1)), target, head, [sequence], masks, 256)
    assert found.share("own") == 1
    assert found.share("free") == int((best == one).sum()) / 26 < 1


def test_a_student_begins_as_the_chosen_layers_and_trains_nothing_of_the_target() -> None:
    target = random_llama(0, layers=4).requires_grad_(False)
    student = make_student(target, (0, 3))
    theirs, own = dict(target.named_parameters()), trainable(student)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(own[name], theirs["model.layers.3.mlp.up_proj.weight"])
    assert own[name] is not theirs["model.layers.3.mlp.up_proj.weight"]
    assert "model.norm.weight" in own
    assert student.get_output_embeddings() is target.get_output_embeddings()
    assert not any("embed" in name or "lm_head" in name for name in own)


def test_lists_that_name_every_layer_are_cut_to_the_chosen_ones() -> None:
    config = random_llama(0, layers=3).config
    config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    cut = student_config(config, (0, 1))
    assert cut.layer_types == ["full_attention", "sliding_attention"]
    assert config.num_hidden_layers == 3


def test_a_target_that_does_more_to_its_logits_is_refused() -> None:
    target = random_llama(0)
    target.lm_head.register_forward_hook(lambda module, given, logits: logits / 3)
    with pytest.raises(ConfigError, match="scales"):
        head_of(target, 257)


@pytest.mark.parametrize(
    ("depth", "layers"), [(1, (0,)), (2, (0, 29)), (3, (0, 1, 29)), (4, (0, 1, 2, 29))]
)
def test_a_depth_takes_the_first_layers_and_the_last(depth: int, layers: tuple[int, ...]) -> None:
    assert first_and_last(depth, 30) == layers


def test_students_are_named_by_depth_or_by_layers() -> None:
    assert parse_layers("1,[0,15,29],3", 30) == {
        "1l": (0,),
        "0-15-29": (0, 15, 29),
        "3l": (0, 1, 29),
    }


@pytest.mark.parametrize("text", ["", "0", "31", "[30]", "x", "[]"])
def test_layers_that_the_target_has_not_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="layers"):
        parse_layers(text, 30)


# Schedule and settings


def test_the_rate_rises_then_falls_to_zero() -> None:
    rates = [rate(done / 100, warm_up=0.1) for done in range(101)]
    assert rates[0] == 0
    assert rates[10] == 1
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0)
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_a_budget_is_in_steps_or_in_seconds() -> None:
    assert Budget(10, 0).done(5, 1e9) == 0.5
    assert Budget(10, 100).done(9, 25) == 0.25


def test_settings_are_read_by_their_type() -> None:
    settings = parse({**defaults(), "lr": "1e-2", "steps": "7"})
    assert (settings.lr, settings.steps) == (0.01, 7)
    assert settings.target == "smollm2"
    with pytest.raises(ConfigError, match="steps: 'x'"):
        parse({**defaults(), "steps": "x"})
    with pytest.raises(ConfigError, match="part"):
        Settings(part="2/2")
    with pytest.raises(ConfigError, match="optimizer"):
        Settings(optimizer="sgd")
