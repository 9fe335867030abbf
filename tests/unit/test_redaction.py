from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

import pytest

from search_r1.compose import build_config, compose_dict, to_yaml
from search_r1.config import Config
from search_r1.doctor import check_retriever
from search_r1.environments.async_retriever import GatheringRetrieverClient
from search_r1.environments.retriever_client import RetrieverClient
from search_r1.errors import ConfigError, RetrieverError
from search_r1.main import main
from search_r1.redaction import redact, shown
from tests.scripted_server import fake_server, reply, unused_url

SECRETS = ("s3cret", "KKK")


def with_secrets(url: str) -> str:
    return url.replace("http://", "http://me:p@s3cret@") + "?api_key=KKK"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://127.0.0.1:8000/retrieve", "http://127.0.0.1:8000/retrieve"),
        ("http://me:s3cret@h/retrieve?api_key=KKK", "http://<redacted>@h/retrieve?api_key=<redacted>"),
        ("http://me:p@s3cret@h/retrieve", "http://<redacted>@h/retrieve"),
        ("me:s3cret@h:8000", "<redacted>@h:8000"),
        ("http://h/r?k=3&Access-Token=KKK&lang=en", "http://h/r?k=3&Access-Token=<redacted>&lang=en"),
        ("http://h/r?lang=en;password=KKK#top", "http://h/r?lang=en;password=<redacted>#top"),
        ("retriever.url=http://me:s3cret@h became other", "retriever.url=http://<redacted>@h became other"),
        ("who wrote me@example.org?", "who wrote me@example.org?"),
    ],
)
def test_a_url_is_shown_without_its_secrets(text: str, expected: str) -> None:
    assert shown(text) == expected


def test_secrets_are_hidden_at_any_depth_and_other_values_stay() -> None:
    settings = {"api_key": "KKK", "urls": ("http://me:p@s3cret@h/?token=KKK",), "max_tokens": 5, "empty_key": ""}
    hidden = {"api_key": "<redacted>", "urls": ["http://<redacted>@h/?token=<redacted>"]}
    assert redact(settings) == hidden | {"max_tokens": 5, "empty_key": ""}


def test_no_error_of_the_retriever_client_holds_a_secret(caplog: pytest.LogCaptureFixture) -> None:
    not_found = b"Cannot POST /retrieve?api_key=KKK"
    messages = []
    with fake_server(reply(404, not_found)) as refusing, fake_server(reply(200, b"what?")) as strange:
        for url in (unused_url(), refusing.url, strange.url):
            client = RetrieverClient([with_secrets(url)], max_retries=1, sleep=lambda seconds: None)
            for call in (client.check, lambda client=client: client.search(["a"], 1)):
                with pytest.raises(RetrieverError) as caught:
                    call()
                messages.append(str(caught.value))
            client.close()
    messages += [record.getMessage() for record in caplog.records]
    assert len(messages) > 6
    assert all("<redacted>@127.0.0.1" in message for message in messages)
    assert not [message for message in messages if any(secret in message for secret in SECRETS)]


def test_no_error_of_the_gathering_client_holds_a_secret() -> None:
    async def ask() -> None:
        client = GatheringRetrieverClient([with_secrets(unused_url())], gather_s=0.0, max_retries=0)
        try:
            await client.asearch("a", 1)
        finally:
            await client.aclose()
            client.close()

    with pytest.raises(RetrieverError) as caught:
        asyncio.run(ask())
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_an_address_that_is_none_is_refused_without_its_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        RetrieverClient(["http://me:s3cret@h:port/retrieve?api_key=KKK"])
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_the_saved_and_the_shown_configuration_hold_no_secret(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    override = f"retriever.url='{with_secrets('http://h/retrieve')}'"
    with caplog.at_level(logging.WARNING):
        config = build_config(Config, compose_dict("grpo", [override]))
    assert config.environment.retriever_urls == (with_secrets("http://h/retrieve"),)
    assert main(["--show-config", override]) == 0
    for text in (to_yaml(redact(asdict(config))), capsys.readouterr().out, caplog.text):
        assert "<redacted>@h/retrieve" in text
        assert not any(secret in text for secret in SECRETS)


def test_a_refused_value_is_told_without_its_secrets() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(Config, compose_dict("grpo", ["environment.retriever_urls='http://me:s3cret@h/retrieve'"]))
    assert "s3cret" not in str(caught.value)


def test_the_doctor_shows_no_secret_of_the_retriever() -> None:
    finding = str(check_retriever(with_secrets(unused_url())))
    assert "<redacted>@127.0.0.1" in finding
    assert not any(secret in finding for secret in SECRETS)
