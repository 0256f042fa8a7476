"""The settings of a drafter (config group ``drafter``)."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import ConfigError

DRAFTERS = ("model", "ngram", "grammar", "chain", "oracle", "random")
LENGTHS = ("fixed", "p_min", "adaptive")


@dataclass
class DrafterConfig:
    """Where drafts come from, and how many.

    Attributes:
        name: ``model`` (the pair's draft model), ``ngram`` (prompt look-up), ``grammar`` (forced
            text), ``chain`` (grammar and n-gram, else the model), ``oracle`` (known outputs), or
            ``random`` (any token).
        min_n, max_n: tokens that an n-gram look-up compares.
        reference: run folder whose ``plain`` the oracle replays.
        rate: probability that a draft of the oracle is right.
        length: ``fixed`` (K), ``p_min`` (stop where the draft model is unsure), or ``adaptive``
            (what past acceptance and the costs below make fastest).
        p_min: least probability of the draft model's best token.
        draft_ms: one draft forward, ms; null = measured at the start, and written into the
            manifest, as are the other two: a run with these numbers has the same counts.
        verify_ms: one target forward with a row of logits per sequence, ms.
        row_ms: each further row per sequence, ms.

    Raises:
        ConfigError: a value is out of its range, or two do not fit together.
    """

    name: str = "model"
    min_n: int = 2
    max_n: int = 4
    reference: str | None = None
    rate: float = 0.8
    length: str = "fixed"
    p_min: float = 0.5
    draft_ms: float | None = None
    verify_ms: float | None = None
    row_ms: float | None = None

    def __post_init__(self) -> None:
        for field, known in (("name", DRAFTERS), ("length", LENGTHS)):
            if (value := getattr(self, field)) not in known:
                raise ConfigError(f"drafter.{field}: {value!r} is none of {', '.join(known)}")
        if not 1 <= self.min_n <= self.max_n:
            raise ConfigError(
                f"drafter.min_n: {self.min_n} is not between 1 and drafter.max_n={self.max_n}"
            )
        for field in ("rate", "p_min"):
            if not 0 <= getattr(self, field) <= 1:
                raise ConfigError(f"drafter.{field}: give a probability between 0 and 1")
        self._check_costs()
        if self.name == "oracle" and self.reference is None:
            raise ConfigError(
                "drafter.reference: oracle needs outputs to replay; name a run folder with plain"
            )
        if self.length == "p_min" and not self.has_logits:
            raise ConfigError(
                f"drafter.length: p_min looks at logits, and drafter {self.name} has none; use "
                "drafter=model, or drafter.length=fixed or adaptive"
            )

    def _check_costs(self) -> None:
        for field, least in (("draft_ms", 0.0), ("verify_ms", 1e-9), ("row_ms", 0.0)):
            value = getattr(self, field)
            if value is not None and not least <= value < float("inf"):
                raise ConfigError(f"drafter.{field}: {value} is no time; give ms, or null")

    def check_serves(self, needs_logits: str) -> None:
        """Refuse a strategy with a setting that looks at the drafter's logits.

        Args:
            needs_logits: that setting (``Strategy.needs_logits``); empty = there is none.

        Raises:
            ConfigError: the drafter has none.
        """
        if needs_logits and not self.has_logits:
            raise ConfigError(
                f"drafter.name: {self.name} has no logits for {needs_logits}; use drafter=model, "
                "or change that"
            )

    @property
    def has_logits(self) -> bool:
        """Its drafts come from logits that others may see, step by step (``SteppedDrafter``)."""
        return self.name == "model"

    @property
    def uses_model(self) -> bool:
        """It needs the pair's draft model."""
        return self.name in ("model", "chain")

    @property
    def label(self) -> str:
        """For tables: its name, and how long its drafts are unless that is fixed."""
        return self.name if self.length == "fixed" else f"{self.name}, {self.length}"
