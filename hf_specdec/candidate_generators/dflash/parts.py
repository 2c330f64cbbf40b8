"""Parts that only some block drafters have: which of them a checkpoint has, and their sizes.

Shapes as in [`~candidate_generators.dflash.config`].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ...checkpoints.draft_reader import FIRST_LAYER, DraftReader
from ...checkpoints.format import architecture, is_marked
from ...checkpoints.settings import COUNT, FLAG, INDEX, NUMBER, POSITIVE, count_up_to
from ...errors import shown
from ...threads import cached_property
from .config import OF_DFLASH2, SCALES, DominoConfig, LiLiCorrConfig, XPressConfig


if TYPE_CHECKING:
    from ...checkpoints.settings import Kind


# Marks of their configs.
DFLASH2 = ("architectures=.*DFlash2.*", "speculators_model_type=dflash2")
LILICORR = ("architectures=.*LiLiCorr.*",)
DOMINO = ("architectures=.*Domino.*",)
XPRESS = ("architectures=.*XPress.*", "speculators_model_type=xpress")

# Beginnings of names of their tensors.
SELECTOR, LATTICE, REFINER = "candidate_selector.", "lilicorr.", "xpress_head."

_MARKOV = "markov_head.markov_w1"

# Tensors that tell the kinds of Markov heads apart.
_MARKOV_HEAD_TYPES = {"gated": "markov_head.gate_proj.weight", "rnn": "markov_head.joint_proj.weight"}

_CONFIDENCE = "confidence_head.proj"

_GRU = ("logit_head.prefix_gru.weight_ih_l0", "logit_head.prefix_gru.weight_hh_l0")
_DOMINO_WEIGHTS = (*_GRU, "logit_head.embed_proj.0.weight", "logit_head.embed_proj.2.weight")

# Tables of DFlash 2's selector; some files write `.weight` after them.
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
_CONVOLUTIONS = (f"{FIRST_LAYER}.attention_conv", f"{FIRST_LAYER}.mlp_conv")
_EVERY_SELECTOR = (*_CODEBOOKS, "candidate_selector.hidden_projection.weight")
_EVERY_CONVOLUTION = tuple(
    f"{name}.{part}" for name in _CONVOLUTIONS for part in ("base_kernel", "kernel_projection.weight")
)

_LILICORR_KEY = "lilicorr_{}".format

# What speculators calls the parts of XPress's head.
_REFINER_NAMES = {
    "token_embed.": "w1.",
    "readout.": "w2.",
    "mix_l": "mix.L",
    "mlp_gate.": "mlp.gate_proj.",
    "mlp_up.": "mlp.up_proj.",
    "mlp_down.": "mlp.down_proj.",
    "": "",
}

_BLOCK_SIZE = 16

# Candidates of a position where a config of speculators leaves them out.
_SPECULATORS_TOP_K = 16

# Passes where a config leaves them out.
_XPRESS_PASSES = 6

# Tokens of a block, and forwards for one: published drafts have 16. Each token of a block has logits over the whole
# vocabulary, so that a config must not be able to ask for any number.
BLOCK = count_up_to(256)


class PartsReader(DraftReader):
    """A checkpoint with a block drafter, as far as its parts beside the layers of all of them are concerned."""

    is_speculators: bool
    settings: ClassVar[dict[str, Kind]] = DraftReader.settings | {
        **dict.fromkeys(("block_size", "xpress_block_size", "xpress_num_passes", "num_jacobi_passes"), BLOCK),
        **dict.fromkeys(("sample_from_anchor", "shift_label"), FLAG),
        **dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), FLAG),
        **dict.fromkeys(("markov_rank", "pure_draft_prefix_len"), INDEX),
        **dict.fromkeys(("emb_dim", "gru_hidden_dim", "xpress_rank", "xpress_mlp_hidden"), COUNT),
        **dict.fromkeys(map(_LILICORR_KEY, ("hidden_size", "num_layers", "num_heads", "factor_dim")), COUNT),
        **dict.fromkeys(map(_LILICORR_KEY, ("vector_eps", "logit_scale")), POSITIVE),
        _LILICORR_KEY("candidate_topk"): count_up_to(256),
        _LILICORR_KEY("enabled"): FLAG,
        **dict.fromkeys(OF_DFLASH2, COUNT),
        "selector_top_k": count_up_to(256),
        **dict.fromkeys(("input_embedding_scale", "output_multiplier"), POSITIVE),
        "final_logit_softcapping": NUMBER,
    }
    renamed: ClassVar[Mapping[str, str]] = {
        # Early files of Domino have the head around them.
        **{f"{name}.": f"logit_head.{name}." for name in ("prefix_gru", "embed_proj")},
        **{f"{name}.weight": name for name in _CODEBOOKS},
        **{f"refiner_head.{theirs}": f"{REFINER}{ours}" for theirs, ours in _REFINER_NAMES.items()},
    }
    token_tables: ClassVar[tuple[str, ...]] = (
        *DraftReader.token_tables,
        f"{_MARKOV}.weight",
        "markov_head.markov_w2.weight",
        _DOMINO_WEIGHTS[-1],
        *_CODEBOOKS,
        f"{REFINER}w1.weight",
        f"{REFINER}w2.weight",
    )

    def check_parts(self) -> None:
        """Checks the parts that it has, and that they are not mixed as in no published draft.

        Raises:
            CheckpointFormatError: They are incomplete, contradict the config, or each other.
        """
        if self.is_lilicorr:
            self._check_lilicorr()
        if self.is_xpress:
            self._check_xpress()
        if self.is_domino:
            self._check_domino()
        elif self.setting("shift_label") and not self.predicts_next:
            raise self.wrong("has `shift_label` without `sample_from_anchor` in its config.json", self.instead)
        self._check_dflash2()

    def part_settings(self) -> dict[str, Any]:
        """The fields of a [`DFlashConfig`] that are about them."""
        return {
            **self._markov_settings(),
            **self._confidence_settings(),
            "domino": self._domino_settings() if self.is_domino else None,
            **(self._dflash2_settings() if self.is_dflash2 else {}),
            **(self._convolution_settings() if self.is_lilicorr and self.has_convolutions else {}),
            "lilicorr": self._lilicorr_settings() if self.is_lilicorr else None,
            "xpress": self._xpress_settings() if self.is_xpress else None,
        }

    # Which there are

    @cached_property
    def has_convolutions(self) -> bool:
        """True where config or tensors speak of convolutions."""
        names = map(re.compile(r".*(attention|mlp)_conv\..*").fullmatch, self.stored)
        return any(map(self.stated, OF_DFLASH2[:2])) or any(names)

    @cached_property
    def has_selector(self) -> bool:
        """True where config or tensors speak of a candidate selector."""
        names = (name.startswith(SELECTOR) for name in self.stored)
        return any(map(self.stated, OF_DFLASH2[2:])) or any(names)

    @cached_property
    def is_dflash2(self) -> bool:
        """True where config or tensors speak of a candidate selector, or of convolutions and no lattice."""
        has_parts = self.has_selector or (self.has_convolutions and not self.is_lilicorr)
        return has_parts or is_marked(self.header.config, DFLASH2)

    @cached_property
    def is_lilicorr(self) -> bool:
        """True where config or tensors speak of LiLiCorr's lattice, and the config does not switch it off."""
        if self.setting(_LILICORR_KEY("enabled")) is False:
            return False
        stated = any(key.startswith(_LILICORR_KEY("")) for place in self.places for key in place)
        names = (name.startswith(LATTICE) for name in self.stored)
        kind = self.stated("projector_type") == "lilicorr"
        return stated or kind or is_marked(self.header.config, LILICORR) or any(names)

    @cached_property
    def is_domino(self) -> bool:
        """True where config or tensors speak of Domino's corrections."""
        names = (name.startswith("logit_head.") for name in self.stored)
        return self.stated("projector_type") == "domino" or is_marked(self.header.config, DOMINO) or any(names)

    @cached_property
    def is_xpress(self) -> bool:
        """True where config or tensors speak of XPress's refinement."""
        names = (name.startswith(REFINER) for name in self.stored)
        return is_marked(self.header.config, XPRESS) or any(names)

    # The block

    @property
    def block_size(self) -> int:
        """B as it is stated, else the usual one."""
        if self.is_xpress and (size := self.setting("xpress_block_size")):
            return size
        return self.setting("block_size") or _BLOCK_SIZE

    @property
    def predicts_next(self) -> bool:
        """True where the anchor's position predicts the first token: as it is stated, else by the kind of draft."""
        if self.is_domino:
            return bool(self.setting("shift_label"))
        found = self.setting("sample_from_anchor")
        kinds = (self.header.config.get("speculators_model_type"), self.stated("projector_type"))
        return "DSpark" in architecture(self.header.config) or "dspark" in kinds if found is None else found

    # Checks

    def _check_dflash2(self) -> None:
        """Refuses scales without a selector, and with one what no published draft has."""
        if self.is_lilicorr and not self.has_selector:
            if self.header.shapes is not None and self.has_convolutions:
                self.require(_EVERY_CONVOLUTION, "a draft with convolutions")
                self._convolution_settings()
            return
        if not self.is_dflash2:
            stated = [key for key, (_, usual) in SCALES.items() if self.setting(key) not in (None, usual)]
            if stated:
                raise self.wrong(
                    f"has `{stated[0]}`={shown(self.setting(stated[0]))} in its config.json, which is supported for "
                    "DFlash 2 drafts alone",
                    self.instead,
                )
            return
        if self.header.shapes is not None:
            self.require((*_EVERY_SELECTOR, *_EVERY_CONVOLUTION), "a DFlash 2 draft")
        reasons = {
            "positions that predict the next token (`sample_from_anchor`)": self.predicts_next,
            "a vocabulary of its own (`d2t`)": {"d2t", "t2d"} & self.stored.keys(),
            "a Markov head": any(name.startswith("markov_head.") for name in self.stored),
            "Domino's corrections": self.is_domino,
            "LiLiCorr's lattice": self.is_lilicorr,
            "XPress's refinement": self.is_xpress,
        }
        if found := [what for what, is_there in reasons.items() if is_there]:
            raise self.wrong(
                f"is a DFlash 2 draft (convolutions, candidate selector) with {found[0]}, which is not supported",
                self.instead,
            )
        if self.header.shapes is not None:
            self._dflash2_settings()

    def _check_lilicorr(self) -> None:
        """Refuses a lattice that lacks something, or has what no published draft has beside it."""
        reasons = {
            "positions that predict the next token (`sample_from_anchor`)": self.predicts_next,
            "a vocabulary of its own (`d2t`)": {"d2t", "t2d"} & self.stored.keys(),
            "corrections": self.is_domino or any(name.startswith("markov_head.") for name in self.stored),
            "XPress's refinement": self.is_xpress,
        }
        if found := [what for what, is_there in reasons.items() if is_there]:
            raise self.wrong(f"is a LiLiCorr draft with {found[0]}, which is not supported", self.instead)
        if self.header.shapes is not None:
            self._lilicorr_settings()

    def _check_domino(self) -> None:
        """Refuses corrections that lack something, or have a Markov head beside them."""
        if self.header.shapes is None:
            return
        self.require(_DOMINO_WEIGHTS, "a Domino draft")
        if any(name.startswith("markov_head.") for name in self.stored):
            raise self.wrong("is a Domino draft with a Markov head, which is not supported", self.instead)
        self._domino_settings()

    def _check_xpress(self) -> None:
        """Refuses a refinement that lacks something, or has what no published draft has beside it."""
        reasons = {
            "positions that predict the next token (`sample_from_anchor`)": self.predicts_next,
            "corrections": self.is_domino or any(name.startswith("markov_head.") for name in self.stored),
        }
        if found := [what for what, is_there in reasons.items() if is_there]:
            raise self.wrong(f"is an XPress draft with {found[0]}, which is not supported", self.instead)
        if self.header.shapes is not None:
            self._xpress_settings()

    # Their sizes

    def _markov_settings(self) -> dict[str, Any]:
        if f"{_MARKOV}.weight" not in self.stored and not self.setting("markov_rank"):
            return {}
        self.require([f"{_MARKOV}.weight"], "its Markov head")
        found = next((kind for kind, name in _MARKOV_HEAD_TYPES.items() if name in self.stored), "vanilla")
        # Where there is none, some configs say so by `false` or 0.
        stated = self.stated("markov_head_type") or found
        if stated != found:
            raise self.wrong(
                f"has `markov_head_type`={shown(stated)} in its config.json, and the tensors of a Markov head of type "
                f"'{found}'",
                "Pass an intact checkpoint.",
            )
        return {"markov_rank": self.linear(_MARKOV)[1], "markov_head_type": found}

    def _confidence_settings(self) -> dict[str, bool]:
        """Finds what the confidence head reads by its width."""
        if f"{_CONFIDENCE}.weight" not in self.stored or self.setting("enable_confidence_head") is False:
            return {}
        width = self.linear(_CONFIDENCE)[1]
        with_markov = width != self.hidden_size
        if with_markov:
            self.require([f"{_MARKOV}.weight"], "its confidence head")
        stated = self.setting("confidence_head_with_markov")
        if stated not in (None, with_markov):
            raise self.wrong(
                f"has `confidence_head_with_markov`={shown(stated)} in its config.json, and a confidence head that "
                f"reads {width} values at a hidden size of {self.hidden_size}",
                "Pass an intact checkpoint.",
            )
        return {"has_confidence": True, "confidence_with_markov": with_markov}

    def _domino_settings(self) -> DominoConfig:
        """Sizes of Domino's corrections, by the tensors; where the config says others, it is wrong."""
        found = {"gru_hidden_dim": self.matrix(_GRU[1])[1], "emb_dim": self.matrix(_DOMINO_WEIGHTS[2])[0]}
        self._check_stated(found)
        return DominoConfig(**found, pure_draft_prefix_len=self.setting("pure_draft_prefix_len") or 0)

    def _lilicorr_settings(self) -> LiLiCorrConfig:
        """Sizes of LiLiCorr's lattice, by the tensors; where the config says others, it is wrong."""
        ranks, slots = (f"{LATTICE}{name}_embedding" for name in ("rank", "slot"))
        self.require([ranks, slots], "a LiLiCorr draft")
        of_ranks, of_slots = (list(self.shape(name) or ()) for name in (ranks, slots))
        if len(of_ranks) != 5 or len(of_slots) != 5 or of_slots[2] != self.block_size - 1:
            raise self.wrong(
                f"has a `slot_embedding` of the shape {of_slots} and a `rank_embedding` of {of_ranks}, which do not "
                f"fit blocks of {self.block_size} tokens",
                "Pass an intact checkpoint.",
            )
        layers = {name.split(".")[2] for name in self.stored if name.startswith(f"{LATTICE}layers.")}
        found = {
            "hidden_size": self.linear(f"{LATTICE}pass_hidden_proj")[0],
            "candidate_topk": of_ranks[3],
            "num_layers": len(layers),
            "num_heads": self.matrix(f"{LATTICE}relative_slot_bias")[0],
            "factor_dim": self.linear(f"{LATTICE}out_head")[0],
        }
        self._check_stated({_LILICORR_KEY(name): value for name, value in found.items()})
        if not found["num_heads"] or found["hidden_size"] % found["num_heads"]:
            raise self.wrong(
                f"has {found['num_heads']} heads in a lattice of {found['hidden_size']}, which they do not divide",
                "Pass an intact checkpoint.",
            )
        mlp_size = self.linear(f"{LATTICE}layers.0.mlp.up_proj")[0] if layers else found["hidden_size"]
        stated = {name: self.setting(_LILICORR_KEY(name)) for name in ("vector_eps", "logit_scale")}
        if stated["logit_scale"] is None:
            raise self.wrong("does not say `lilicorr_logit_scale` in its config.json", "Add it there.")
        return LiLiCorrConfig(
            **found, mlp_size=mlp_size, **{name: value for name, value in stated.items() if value is not None}
        )

    def _xpress_settings(self) -> XPressConfig:
        """Sizes of XPress's refinement, by the tensors; where the config says others, it is wrong."""
        mix = f"{REFINER}mix.L"
        self.require([mix], "an XPress draft")
        shape, rank = self.shape(mix) or (), self.matrix(f"{REFINER}w1.weight")[1]
        if shape != (rank, self.block_size, self.block_size):
            raise self.wrong(
                f"has `mix.L` of the shape {list(shape)}, which does not fit blocks of {self.block_size} tokens and a "
                f"rank of {rank}",
                "Pass an intact checkpoint.",
            )
        found = {"rank": rank, "mlp_hidden": self.linear(f"{REFINER}mlp.up_proj")[0]}
        self._check_stated({f"xpress_{name}": value for name, value in found.items()})
        passes = self.first_setting("xpress_num_passes", "num_jacobi_passes") or _XPRESS_PASSES
        return XPressConfig(**found, num_passes=passes)

    def _convolution_settings(self) -> dict[str, Any]:
        """Sizes of convolutions, by the tensors; where the config says others, it is wrong."""
        shape = self.shape(f"{_CONVOLUTIONS[0]}.base_kernel") or ()
        rows, _ = self.linear(f"{_CONVOLUTIONS[0]}.kernel_projection")
        taps = shape[1] if len(shape) == 3 else 0
        groups = rows // (2 * taps) if taps else 0
        if not groups or self.hidden_size % groups:
            raise self.wrong(
                f"has a `base_kernel` of the shape {list(shape)} and {rows} rows of `kernel_projection`, which make "
                f"no groups of {self.hidden_size} channels",
                "Pass an intact checkpoint.",
            )
        found = {"conv_kernel_size": taps, "conv_group_size": self.hidden_size // groups}
        self._check_stated(found)
        return found

    def _dflash2_settings(self) -> dict[str, Any]:
        """Sizes of convolutions and selector."""
        found = {**self._convolution_settings(), "selector_rank": self.matrix(_CODEBOOKS[0])[1]}
        self._check_stated(found)
        top_k = self.setting("selector_top_k") or (_SPECULATORS_TOP_K if self.is_speculators else None)
        if top_k is None:
            raise self.wrong("does not say `selector_top_k` in its config.json", "Add it there.")
        scales = {name: self.setting(key) or usual for key, (name, usual) in SCALES.items()}
        return {**found, "selector_top_k": top_k, **scales, "logit_softcap": max(scales["logit_softcap"], 0)}

    def _check_stated(self, found: Mapping[str, int]) -> None:
        """Refuses a config that states other sizes than the tensors have."""
        for key, value in found.items():
            if self.setting(key) not in (None, value):
                raise self.wrong(
                    f"has `{key}`={self.setting(key)} in its config.json, and its tensors have {value}", "Correct it."
                )

    def name_in_file(self, name: str) -> str:
        return name.removeprefix("logit_head.")
