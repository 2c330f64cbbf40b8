"""The recipe of MTP layers, for a target that has none or to draft several tokens better than its own does.

The layer reads the embedding of token t + 1 and the target's last state of token t, and predicts token t + 2; the
tokens after it are drafted by the same layer from the states that it hands on. It is trained on these steps, as
FastMTP trains published layers (Cai et al. 2025, arXiv:2509.18362), with the cycles of `training/autoregressive.py`.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from ...errors import SpecConfigError
from ...target_facts import decoder_layers
from ...training.autoregressive import AutoregressiveRecipe
from ...training.initial_weights import begin_near
from . import MtpTraining
from .network import MtpNetwork, check_family, new_mtp


class MtpRecipe(MtpTraining, AutoregressiveRecipe):
    """One layer of the target's own class, saved in the `mtp.*` layout. It begins as the target's last one."""

    method = "mtp"

    def check(self, target: PreTrainedModel) -> None:
        check_family(target)
        super().check(target)
        if not self.intermediate_size:
            return
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
