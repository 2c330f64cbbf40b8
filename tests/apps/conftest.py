"""A server for clients of OpenAI's protocol."""

from __future__ import annotations

import pytest

from hf_specdec import demo


TEMPLATE = "{% for tool in tools or [] %}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def url():
    """Address of a server whose key is "secret" and whose template takes tools."""
    from tests.helpers.servers import serving

    arguments = {"eos_token_id": demo.load_tokenizer().eos_token_id}
    with serving(template=TEMPLATE, arguments=arguments, api_key="secret") as running:
        yield f"{running.address}/v1"
