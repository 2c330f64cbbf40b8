"""lm-evaluation-harness: its model of transformers, with speculation.

`python -m hf_specdec.integrations.lm_eval run --model hf-specdec --model_args pretrained=...,spec_method=...` is its
command line with one more model.
"""

from __future__ import annotations

from typing import Any

import torch


try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    from ..errors import MissingDependencyError

    raise MissingDependencyError(
        f"Evaluations need lm-evaluation-harness ({error}). Install it: pip install lm-eval"
    ) from error

from ..arguments import is_off
from ..loader import load_speculator
from ..metrics import SpecDecodingStats, record


# What the results file has of the statistics.
_REPORTED = (
    "method",
    "is_lossless",
    "mean_acceptance_length",
    "acceptance_rate",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_committed_tokens",
    "num_target_forwards",
)


@register_model("hf-specdec")
class SpecHFLM(HFLM):
    """The harness's model "hf" with speculation. Answers and scores stay the same.

    Tasks that only compare likelihoods generate nothing, so nothing is drafted for them.

    Args:
        pretrained (`str` or `PreTrainedModel`): The target.
        spec_method, spec_model, num_speculative_tokens, speculative (*optional*): The drafter, as for `generate()`;
            without any the best that is found. `spec_method="off"` is the model "hf".
        kwargs: As for the model "hf".

    Raises:
        SpecConfigError: The drafter's settings are wrong.
        CheckpointFormatError: It does not fit the target.
    """

    def __init__(
        self,
        pretrained: Any,
        spec_method: str | None = None,
        spec_model: str | None = None,
        num_speculative_tokens: int | str | None = None,
        speculative: Any = None,
        **kwargs: Any,
    ):
        super().__init__(pretrained, **kwargs)
        self._stats: list[SpecDecodingStats] = []
        self._drafter: dict[str, Any] = {"spec_method": "off"}
        if not is_off(spec_method) and not is_off(speculative):
            method = "auto" if spec_method is None and spec_model is None and speculative is None else spec_method
            settings = {"method": method, "model": spec_model, "num_speculative_tokens": num_speculative_tokens}
            self._drafter = {"assistant": load_speculator(self.model, speculative, **settings)}

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **kwargs: Any) -> torch.Tensor:
        # The harness's own criterion looks at the whole batch, so each row would wait for the slowest. Texts are cut
        # at these strings afterwards in any case.
        ends = {"stop_strings": stop, "tokenizer": self.tokenizer} if stop else {}
        with record() as made:
            output = super()._model_generate(context, max_length, [], **{**self._drafter, **kwargs, **ends})
        self._stats = [SpecDecodingStats.total([*self._stats, *(call.stats for call in made.calls)])]
        return output

    def get_model_info(self) -> dict[str, Any]:
        """Facts about the model for the results file, what was drafted and accepted among them."""
        stats = SpecDecodingStats.total(self._stats).to_dict()
        return {**super().get_model_info(), "speculative": {name: stats[name] for name in _REPORTED}}


def main() -> None:
    """The harness's own command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
