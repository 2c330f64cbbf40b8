"""Settings and requests of every odd kind: an error of this package, or a text equal to that of plain generation."""

import json
import random
from collections import OrderedDict, UserDict
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from hf_specdec import SpecConfigError, SpecDecError, SpeculativeConfig, load_speculator
from hf_specdec.method import built_in_methods
from hf_specdec.settings import describe_settings
from tests.helpers.levels import in_full
from tests.helpers.models import prompts


METHODS = (*(method.name for method in built_in_methods()), "auto")
WITHOUT_MODEL = [method.name for method in built_in_methods() if not method.takes_model]
COMMON = [setting.key for setting in describe_settings()]
OWN = {method: [setting.key for setting in describe_settings(method)] for method in METHODS[:-1]}
MOST_CHARACTERS = 3000


class Hostile:
    """Fails at everything that code does with a value that it does not know."""

    def fail(self, *args):
        raise RuntimeError("no")

    __repr__ = __str__ = __eq__ = __bool__ = __len__ = __iter__ = __hash__ = __int__ = __index__ = __float__ = fail
    __getitem__ = __fspath__ = __lt__ = __gt__ = __contains__ = fail


class HostileText(str):
    __eq__ = __repr__ = __str__ = strip = startswith = split = Hostile.fail
    __hash__ = str.__hash__


class HostileNumber(int):
    __eq__ = __repr__ = __lt__ = __gt__ = __le__ = __ge__ = Hostile.fail
    __hash__ = int.__hash__


class HostileDict(dict):
    __repr__ = keys = items = __iter__ = __getitem__ = __eq__ = Hostile.fail


class HostileArray:
    shape = (3,)

    def tolist(self):
        raise ValueError("no")


class Word(str, Enum):
    NGRAM = "ngram"


def endless():
    value = []
    value.append(value)
    return value


# Each is made anew, so that nothing that keeps or changes one spoils another.
VALUES = [
    *(lambda value=value: value for value in (
        None, True, False, 0, 1, 2, 3, 7, -1, 64, 1023, 1024, 1025, 10**6, 10**9, 2**31, 2**63, 10**400, 10**5000,
        0.0, 0.5, 1.0, -0.0, -0.5, 1e308, float("nan"), float("inf"), -float("inf"), 2j,
        "", " ", "auto", "off", "none", "None", "ngram", "suffix", "toy", "greedy", "standard", "typical", "synthetic",
        "[[1, 2]]", "{}", "{", "[0, 0, 1]", "1", "5", "true", "nan", "x" * 10**5, "\ud800", "a\0b", "../..", "~", "/",
        "/dev/zero", "/etc/passwd", "/proc/self/mem", "no/such", "a/b/c", "[" * 10**4, "(" * 1000, "-" * 10**4 + "1",
        "9" * 5000, "hf_" + "aB3dE" * 7, b"ngram", b"\xff", bytearray(b"x"), (), (1,), (0,), [], [1], [0], [[]], [[0]],
        [[0], [1], [0, 0]], [[1, 8, 5], [9, 32, 2]], [[1, 10**9]], [[1, 2, 3], [3, 10**9, 0]], [0.9, 0.5], [0.5, 0.9],
        [None], ["a"], [[10**9]], [10**9], {}, {1: 10**9}, {1: 3}, {"1": 3}, {"num_steps": 3}, {None: None},
        {"num_steps": 10**9, "topk": 10**9, "num_draft_tokens": 10**9}, {"token": "s3cret"}, set(), {1},
        frozenset({2}), range(3), Decimal("2"), Fraction(1, 2), Word.NGRAM, Path("x"), Path("x" * 5000), print, int,
        object, Hostile,
    )),
    Hostile, lambda: HostileText("ngram"), lambda: HostileNumber(3), HostileDict, lambda: HostileDict(a=1),
    HostileArray, endless, lambda: [Hostile()], lambda: {"a": Hostile()}, lambda: {Hostile.__name__: [Hostile()] * 3},
    lambda: np.int64(3), lambda: np.float32(0.5), lambda: np.bool_(True), lambda: np.str_("auto"), lambda: np.array(3),
    lambda: np.array([1, 2]), lambda: np.array([[0], [1]]), lambda: np.zeros((2000, 2000)), lambda: np.array(["a"]),
    lambda: np.array([None]), lambda: torch.tensor(3), lambda: torch.tensor([0.9, 0.5]), lambda: torch.tensor(True),
    lambda: torch.empty(2, device="meta"), lambda: torch.zeros(0), lambda: torch.float16, lambda: torch.device("cpu"),
    lambda: iter([1]), lambda: (item for item in (1, 2)), lambda: UserDict(a=1), lambda: MappingProxyType({"a": 1}),
    lambda: OrderedDict({1: 2}), lambda: memoryview(b"x"),
    lambda: [0] * 10**5, lambda: [[0] * depth for depth in range(1, 99)],
]  # fmt: skip

KEYS = [
    "self", "cls", "value", "settings", "method", "model", "options", "config", "target_config", "draft_model", "",
    " ", "num_spec_tokens", "speculative_model", "k" * 10**5, "\ud800", "a\0b", "__class__", "token", 3, None, (), 1.5,
    Word.NGRAM,
]  # fmt: skip


def drawn_settings(rng):
    """Some settings of a method, most of them odd."""
    settings = {"method": rng.choice(METHODS)} if rng.random() < 0.9 else {}
    names = COMMON + OWN.get(settings.get("method"), OWN["ngram"])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        key = rng.choice(names) if rng.random() < 0.93 else rng.choice(KEYS)
        settings[key] = rng.choice(VALUES)()
    if rng.random() < 0.1:
        settings = {"method": settings.pop("method", "ngram"), "options": settings}
    return settings


def drawn_value(rng):
    """Anything that may stand where settings are expected."""
    kind = rng.random()
    if kind < 0.9:
        return drawn_settings(rng) if kind < 0.8 else rng.choice(VALUES)()
    try:
        text = json.dumps(drawn_settings(rng))
    except (TypeError, ValueError, RuntimeError, RecursionError):
        return "{" * 50
    place = rng.randrange(len(text) + 1)
    return text[:place] + rng.choice(("", "{", "}", '"', "\\", "NaN", "9" * 5000, text[:20])) + text[place:]


def check_message(error):
    message = str(error)
    assert len(message) < MOST_CHARACTERS, message
    message.encode("utf-8")
    assert "s3cret" not in message
    # One that a typing error has spoilt is no token.
    assert "hf_aB3dEaB3dE" not in message


def is_configuration(rng) -> bool:
    """Tells if what was drawn is taken, and serves then in every way, or refused with a message."""
    try:
        config = SpeculativeConfig.resolve(drawn_value(rng))
    except SpecDecError as error:
        check_message(error)
        return False
    assert len(config.compute_hash()) == 16
    assert SpeculativeConfig.from_dict(config.to_dict()) == config
    json.dumps(config.to_dict(), allow_nan=False)
    hash(config)
    repr(config).encode("utf-8", "backslashreplace")
    return True


PLAIN = {"do_sample": False, "max_new_tokens": 6}


def check_text(model, rng, plain):
    """A call with odd arguments writes the plain text, or is refused."""
    inputs = prompts(2)
    names = ("spec_method", "spec_model", "num_speculative_tokens", "speculative", "assistant")
    arguments = {name: rng.choice(VALUES)() for name in names if rng.random() < 0.3}
    if rng.random() < 0.6:
        arguments["spec_method"] = rng.choice(WITHOUT_MODEL)
    if rng.random() < 0.6:
        settings = drawn_settings(rng)
        if isinstance(settings.get("method"), str) and settings["method"] not in WITHOUT_MODEL:
            settings["method"] = rng.choice(WITHOUT_MODEL)
        arguments["speculative"] = settings
    try:
        text = model.generate(**inputs, **PLAIN, **arguments)
    except SpecDecError as error:
        check_message(error)
        return False
    settings = arguments.get("speculative")
    words = [value for value in dict.values(settings) if type(value) is str] if isinstance(settings, dict) else []
    assert "synthetic" in words or torch.equal(text, plain), arguments.keys()
    return True


# Arguments of generate() and values that are legal, by themselves at least.
ARGUMENTS = {
    "do_sample": [True, False], "num_beams": [1, 2], "num_return_sequences": [1, 2], "temperature": [0.7, 1.0, 0.0],
    "top_k": [1, 5, 0, 50], "top_p": [0.5, 1.0], "min_p": [0.1], "typical_p": [0.9], "epsilon_cutoff": [0.01],
    "repetition_penalty": [1.3], "no_repeat_ngram_size": [2], "bad_words_ids": [[[3]], [[3, 4]]],
    "suppress_tokens": [[1, 2]], "begin_suppress_tokens": [[5]], "forced_eos_token_id": [7],
    "forced_bos_token_id": [7], "eos_token_id": [3, [3, 9, 20], None], "pad_token_id": [0, 5],
    "max_length": [12, 40], "max_new_tokens": [1, 2, 9], "min_new_tokens": [3], "min_length": [10],
    "max_time": [100.0], "output_scores": [True], "output_logits": [True], "output_hidden_states": [True],
    "output_attentions": [True, False], "return_dict_in_generate": [True, False], "use_cache": [True, False],
    "cache_implementation": ["dynamic", "static", "offloaded", "no such"], "guidance_scale": [1.5],
    "renormalize_logits": [True], "remove_invalid_values": [True], "exponential_decay_length_penalty": [(2, 1.1)],
    "prompt_lookup_num_tokens": [3], "penalty_alpha": [0.6], "watermarking_config": [None], "token_type_ids": [None],
    "unknown_argument": [1], "generation_config": [None], "disable_compile": [True], "low_memory": [True],
    "diversity_penalty": [0.5], "num_beam_groups": [2], "stop_strings": ["a"],
}  # fmt: skip


def outcome(model, **arguments):
    torch.manual_seed(0)
    try:
        output = model.generate(**arguments)
    except Exception as error:  # noqa: BLE001 - what plain generation raises is compared with
        return None, error
    return output, None


def check_request(model, rng):
    """Expects of a request what plain generation makes of it, an error like its own, or one of this package."""
    inputs = prompts(rng.choice((1, 2)), padding=rng.random() < 0.5)
    names = rng.sample(list(ARGUMENTS), rng.randint(1, 4))
    arguments = {"max_new_tokens": 7, **inputs, **{name: rng.choice(ARGUMENTS[name]) for name in names}}
    plain, plain_error = outcome(model, **arguments)
    ours, error = outcome(model, **arguments, spec_method=rng.choice(WITHOUT_MODEL))
    if error is not None:
        assert isinstance(error, SpecDecError) or type(error) is type(plain_error), (names, error, plain_error)
        if isinstance(error, SpecDecError):
            check_message(error)
        return
    assert plain_error is None, (names, plain_error)
    if not arguments.get("do_sample"):
        assert torch.equal(getattr(ours, "sequences", ours), getattr(plain, "sequences", plain)), names


@pytest.mark.parametrize("seed", [0, *in_full(*range(1, 8))])
def test_configurations(seed):
    rng = random.Random(seed)
    found = [is_configuration(rng) for _ in range(160)]
    assert 0 < sum(found) < len(found)


@pytest.mark.parametrize("seed", [0, *in_full(*range(1, 6))])
def test_texts_and_requests(model, seed):
    rng, plain = random.Random(seed), model.generate(**prompts(2), **PLAIN)
    assert any([check_text(model, rng, plain) for _ in range(60)])
    before = model.generation_config.to_dict()
    for _ in range(40):
        check_request(model, rng)
    assert model.generation_config.to_dict() == before


def test_zero_is_not_off_and_numbers_of_other_libraries_are_numbers(model):
    for wrong in ({"spec_method": 0}, {"speculative": 0}):
        with pytest.raises(SpecConfigError, match="got (0|int)"):
            model.generate(**prompts(1), **wrong)
    plain = model.generate(**prompts(1), **PLAIN)
    for off in ("off", "none", False):
        assert torch.equal(model.generate(**prompts(1), **PLAIN, spec_method=off), plain)
    for key in ("self", "cls", "value", "target_config"):
        with pytest.raises(SpecConfigError, match=f"has no setting '{key}'"):
            SpeculativeConfig.resolve({"method": "ngram", key: 1})
    for number in (np.int64(4), np.array(4), torch.tensor(4), HostileNumber(4)):
        config = SpeculativeConfig("ngram", num_speculative_tokens=number)
        assert type(config.num_speculative_tokens) is int
        assert config == SpeculativeConfig("ngram", num_speculative_tokens=4)
        assert load_speculator(model, "ngram", num_speculative_tokens=number).config == config
    rates = {"rejection_sample_method": "synthetic", "rejection_sample_options": torch.tensor([0.5, 0.25])}
    assert SpeculativeConfig("ngram", **rates).rejection_sample_options == (0.5, 0.25)
