"""Recipe of an MTP layer for a target that has none, or one that drafts several tokens better than its own.

The layer reads the embedding of token t + 1 and the target's last state of token t, and predicts token t + 2; the
tokens behind it are drafted by the same layer from the states that it hands on. It is trained on these steps, as
FastMTP trains published layers (Cai et al. 2025, arXiv:2509.18362), with the cycles of [`~training.eagle`].
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_specdec.candidate_generators.mtp.network import MtpNetwork, check_family, new_mtp
from hf_specdec.errors import SpecConfigError
from hf_specdec.target_facts import decoder_layers

from ..eagle.recipe import EagleRecipe, begin_near


@dataclass(frozen=True)
class MtpRecipe(EagleRecipe):
    """
    One layer of the target's own class, saved in the `mtp.*` layout. It begins as the target's last one.

    Args:
        ttt_steps (`int`): Steps of a cycle; 1 is how MTP layers are trained with their models.
        intermediate_size (`int`): Of a dense MLP, at most the target's; 0 for the target's.
        head_decay (`float`): Weight of a step's loss relative to the one before it.
        kl_weight (`float`): Share of KL(target || draft); the rest is the cross-entropy.
    """

    ttt_steps: int = 4
    intermediate_size: int = 0
    head_decay: float = 0.8
    kl_weight: float = 1.0

    method = "mtp"

    def __post_init__(self):
        self._check_common()

    def check(self, target: PreTrainedModel) -> None:
        check_family(target)
        if self.intermediate_size:
            self._check_width(target)
        super().check(target)

    def _check_width(self, target: PreTrainedModel) -> None:
        if not hasattr(getattr(decoder_layers(target)[-1], "mlp", None), "gate_proj"):
            raise SpecConfigError(
                f"The layers of {type(target).__name__} have experts, whose sizes an MTP layer shares. Leave out "
                "`intermediate_size`."
            )
        widest = target.config.get_text_config(decoder=True).intermediate_size
        if self.intermediate_size > widest:
            raise SpecConfigError(
                f"`intermediate_size` must be at most {widest}, that of {type(target).__name__}, got "
                f"{self.intermediate_size}."
            )

    def build(self, target: PreTrainedModel) -> MtpNetwork:
        network = new_mtp(target, intermediate_size=self.intermediate_size or None).float()
        # It reads about what the target's last layer reads: the embedding, and a share of the state.
        begin_near(network.eh_proj[0], (1.0, 0.3))
        return network
