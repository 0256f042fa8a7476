"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import ConfigError, check_timeout


@dataclass
class EngineConfig:
    """Config group ``engine``.

    Attributes:
        slots: sequences decoded at once.
        draft_tokens: K, the most drafts per step.
        max_length: tokens a slot holds: prompt, output and drafts. 0 = what the workload needs,
            at most what the models can.
        turn: requests that a strategy decodes before the next one's turn in a comparison; 0 = as
            many as there are slots, or, of a strategy alone, all.
        threads: CPU threads of torch; 0 = its own choice.
        mode: ``eager``, ``graphs`` (static shapes, as CUDA graphs on CUDA), or ``auto``: graphs
            on CUDA, eager elsewhere. On a CPU, graphs are for tests: what is launched ahead
            is finished at once, in the step before.
        compile: torch.compile below the graphs.
        grammar_threads: threads that do the grammar work of a batch.
        profile: write a timeline of the first steps beside the results.
        detail: record probabilities and legal tokens, for the trace viewer. Counts and outputs
            stay what they are; the times of such a run are not for quoting.
        paranoid: after each step, replay every output into a fresh grammar matcher and compare
            what both allow. Counts and outputs stay what they are, and none of it is timed.
        dp: processes that share the requests of a run (data parallelism), each with the whole pair
            and ``slots`` of its own; on CUDA each has a device to itself. With ``threads`` 0 they
            share the cores.
        tp: devices that share the target (tensor parallelism), one process each, which
            ``torchrun --nproc-per-node`` starts.
        tp_timeout_s: how long one of them waits for another in a step.
    """

    slots: int = 8
    draft_tokens: int = 4
    max_length: int = 0
    turn: int = 0
    threads: int = 0
    mode: str = "auto"
    compile: bool = False
    grammar_threads: int = 1
    profile: bool = False
    detail: bool = False
    paranoid: bool = False
    dp: int = 1
    tp: int = 1
    tp_timeout_s: float = 20.0

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "eager", "graphs"):
            raise ConfigError(f"engine.mode: {self.mode!r} is none of auto, eager, graphs")
        least = {
            "slots": 1,
            "draft_tokens": 1,
            "max_length": 0,
            "turn": 0,
            "threads": 0,
            "grammar_threads": 1,
            "dp": 1,
            "tp": 1,
        }
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(
                    f"engine.{name}: {getattr(self, name)} is below {bound}; raise it"
                )
        if self.dp > 1 and self.profile:
            raise ConfigError(
                f"engine.profile: watches one process, and engine.dp={self.dp} has several; "
                "set one of the two"
            )
        if self.dp > 1 and self.tp > 1:
            raise ConfigError(
                f"engine.dp: {self.dp} processes cannot share a run whose target engine.tp="
                f"{self.tp} shares out; set one of the two to 1"
            )
        check_timeout("engine.tp_timeout_s", self.tp_timeout_s)
        for name, chosen in {"compile": self.compile, "profile": self.profile}.items():
            if chosen and self.tp > 1:
                raise ConfigError(f"engine.{name}: not with engine.tp={self.tp}; leave it out")
