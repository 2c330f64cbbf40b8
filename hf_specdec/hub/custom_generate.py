"""Repositories for transformers' `generate(custom_generate="user/repo", trust_remote_code=True)`.

Such a repository has `custom_generate/generate.py`, whose function transformers calls in place of its own with all
arguments of the call. What is exported is a few lines that call this package, with settings for calls that name none.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from ..errors import SpecConfigError
from ..settings import AUTO, CONFIG_NAME, SpeculativeConfig
from ..version import INSTALLATION, __version__
from .card import CARD_NAME, as_list, card_of, is_public, load_card, repository_name
from .published import PRIVATE


TAG = "custom_generate"

_GENERATE = '''"""Speculative decoding by hf_specdec {version}: `model.generate(..., custom_generate="{name}")`."""

# For an import that is not tried, as for requirements.txt, transformers advises what an index has under this name.
try:
    import hf_specdec
except ImportError as error:
    raise ImportError("This needs hf_specdec {version} or newer: {installation}.") from error


# For calls that name no method, model, settings or assistant.
SETTINGS = {settings}


def generate(*args, model, **kwargs):
    """`model.generate()` that also takes `spec_method`, `spec_model`, `num_speculative_tokens`, `speculative` and
    `assistant`.
    """
    if all(kwargs.get(name) is None for name in ("spec_method", "spec_model", "speculative", "assistant")):
        kwargs["speculative"] = SETTINGS
    return hf_specdec.generate(model, *args, **kwargs)


# If hf_specdec is imported before, it hands these arguments over to functions that say so.
generate.takes_speculative_arguments = True
'''

_SECTION = """
## With `custom_generate`

```python
model.generate(**inputs, custom_generate="{name}", trust_remote_code=True)
```

decodes speculatively, with {settings}. It needs hf_specdec: {installation}. The
call may name others: `spec_method`, `spec_model`, `num_speculative_tokens`, `speculative`, `assistant`.
"""


def export_custom_generate(
    folder: str | os.PathLike[str], config: SpeculativeConfig | None = None, *, name: str | None = None
) -> list[Path]:
    """Writes the files of a `custom_generate` repository into a folder, beside what is there.

    Args:
        folder (`str` or `os.PathLike`): Made if needed. It may hold a drafter.
        config (`SpeculativeConfig`, *optional*): Settings for calls that name none. `None`: those of the drafter in
            the folder; without one, what is found for the target.
        name (`str`, *optional*): Repo id that the folder will have. `None`: the name of the folder.

    Returns:
        `list[Path]`: The files.

    Raises:
        SpecConfigError: The drafter would not be found by others: it has no name, or that of a folder here.
        CheckpointFormatError: What lies in the folder is no drafter.
    """
    folder = Path(folder)
    settings = _settings(folder, config, name)
    name = repository_name(name, folder)
    # Read before anything is written.
    card = _card(folder, name, settings)
    known = {"version": __version__, "installation": INSTALLATION, "name": name, "settings": repr(settings)}
    contents = {
        "custom_generate/generate.py": _GENERATE.format(**known),
        CARD_NAME: str(card),
    }
    (folder / "custom_generate").mkdir(parents=True, exist_ok=True)
    for file, content in contents.items():
        (folder / file).write_text(content, encoding="utf-8")
    return [folder / file for file in contents]


def _settings(folder: Path, config: SpeculativeConfig | None, name: str | None) -> dict[str, Any]:
    has_drafter = any((folder / file).is_file() for file in ("config.json", CONFIG_NAME))
    if config is None and not has_drafter:
        return {"method": AUTO}
    if config is None:
        config = SpeculativeConfig.resolve(folder)
        is_here = config.model == str(folder)
        if is_here and name is None:
            raise SpecConfigError(
                f"Calls will load the drafter in '{folder}' from its repository. Name the repo id that it will have."
            )
        config = config.replace(model=name) if is_here else config
    if config.model is not None and not is_public(config.model):
        raise SpecConfigError(
            f"Others cannot load the drafter from the folder '{config.model}'. Push it, and name its repository."
        )
    return {key: value for key, value in config.to_dict().items() if key not in PRIVATE}


def _card(folder: Path, name: str, settings: dict[str, Any]) -> ModelCard:
    """The card that is there with the tag and a section on the use, or a new one."""
    existing = load_card(folder)
    data = {} if existing is None else existing.data.to_dict()
    data["tags"] = [*dict.fromkeys([*as_list(data.get("tags")), TAG, "speculative-decoding"])]
    data.setdefault("library_name", "transformers")
    data.setdefault("pipeline_tag", "text-generation")
    text = existing.text if existing is not None else f"\n# {name.rpartition('/')[2]}\n"
    if TAG not in text:
        described = ", ".join(f"`{key}={value!r}`" for key, value in settings.items())
        described = "the drafter that is found for the model" if settings == {"method": AUTO} else described
        text = text.rstrip("\n") + "\n" + _SECTION.format(name=name, settings=described, installation=INSTALLATION)
    return card_of(data, text)
