"""From the settings of a drafter to the drafter."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from harness.drafters.base import Drafter
from harness.drafters.cascade import Cascade
from harness.drafters.config import DrafterConfig
from harness.drafters.forced import ForcedDrafter
from harness.drafters.length import AdaptiveLength, Costs, FixedLength, Length, Unsure
from harness.drafters.model import ModelDrafter
from harness.drafters.ngram import NgramDrafter
from harness.drafters.oracle import OracleDrafter, References
from harness.drafters.uniform import UniformDrafter
from harness.errors import ConfigError
from harness.models.language_model import LanguageModel
from harness.models.pair import PairConfig
from harness.static_logits import Places
from harness.text import Codec


@dataclass(frozen=True, slots=True)
class Parts:
    """What drafters are made of.

    Attributes:
        draft_tokens: K, the most drafts per step.
        vocab_size: width of the target's logits.
        codec: the tokenizer.
        model: the draft model, for drafters that use it.
        places: logits that stay where they are.
        references: known outputs, for the oracle.
        costs: of a step, for adaptive lengths.
    """

    draft_tokens: int
    vocab_size: int
    codec: Codec
    model: LanguageModel | None = None
    places: Places | None = None
    references: References = field(default_factory=dict)
    costs: Costs | None = None


def needed_pair(pair: PairConfig, config: DrafterConfig | None) -> PairConfig:
    """What to load: the draft model only for a drafter that uses it.

    Args:
        pair: what there is.
        config: the drafter; None = nobody drafts.

    Raises:
        ConfigError: the drafter needs a draft model and there is none.
    """
    if config is None or not config.uses_model:
        return replace(pair, draft=None)
    if pair.draft is None:
        raise ConfigError(
            f"pair.draft: drafter {config.name} drafts with a model; name one, or use "
            "drafter=ngram or grammar"
        )
    return pair


def make_drafter(config: DrafterConfig, parts: Parts) -> Drafter:
    """A drafter that has seen nothing yet: each strategy of a run gets its own."""
    k, length = parts.draft_tokens, _length(config, parts)
    match config.name:
        case "ngram":
            return NgramDrafter(k, config.min_n, config.max_n, length)
        case "grammar":
            return ForcedDrafter(k, parts.codec, length)
        case "oracle":
            return OracleDrafter(k, parts.references, config.rate, parts.vocab_size, length)
        case "random":
            return UniformDrafter(k, parts.vocab_size, length)
        case "chain":
            forced = ForcedDrafter(k, parts.codec)
            ngram = NgramDrafter(k, config.min_n, config.max_n)
            return Cascade(forced, ngram, _model(parts), length)
        case _:
            model = _model(parts)
            stop = Unsure(config.p_min) if config.length == "p_min" else None
            return ModelDrafter(model.model, k, parts.places, length, stop)


def _length(config: DrafterConfig, parts: Parts) -> Length:
    if config.length != "adaptive":
        return FixedLength(parts.draft_tokens)
    assert parts.costs is not None, "an adaptive length needs costs"
    return AdaptiveLength(parts.draft_tokens, parts.costs)


def _model(parts: Parts) -> ModelDrafter:
    assert parts.model is not None, "this drafter needs a draft model"
    return ModelDrafter(parts.model, parts.draft_tokens, parts.places)
