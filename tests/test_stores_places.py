"""Addresses, hosts and waits: what is decided before anything is asked."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from fusecheck.errors import UsageError
from fusecheck.stores import is_remote, open_source
from fusecheck.stores.address import Address, parse
from fusecheck.stores.hosts import is_loopback, is_private, origin
from fusecheck.stores.patience import asked_to_wait


def test_what_is_remote() -> None:
    assert all(is_remote(url) for url in ("hf://a/b", "s3://b/c", "gs://b", "az://c/d", "http://x"))
    assert not any(is_remote(path) for path in ("a/b", "/a", "./s3:/x", "C:x", ""))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("hf://Qwen/Qwen3-0.6B", Address("hf", "Qwen/Qwen3-0.6B")),
        ("hf://a/b@refs/pr/1", Address("hf", "a/b", revision="refs/pr/1")),
        ("s3://bucket/models/a b/", Address("s3", "bucket", "models/a b")),
        ("gs://bucket", Address("gs", "bucket")),
        ("AZ://container/x", Address("az", "container", "x")),
        ("./out", Address("folder", "./out")),
    ],
)
def test_what_an_address_is(url: str, address: Address) -> None:
    assert parse(url) == address
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    "url",
    [
        "hf://",
        "hf://a",
        "hf://a/b/c",
        "hf://a/b@",
        "hf://a/b@..",
        "hf://a/b@x y",
        "s3://",
        "http://a/b",
        "s3://bucket/a/../b",
        "s3://bucket//a",
        "s3://bucket/a//",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError):
        parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/x",
        "az://container/x?sv=1&sig=secret",
        "hf://user:secret@owner/name",
        "hf://secret@owner/name",
        "gs://a/?x=secret",
    ],
)
def test_a_credential_in_an_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "\xb2"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 +99999999999999"}, None),
        ({"ratelimit": '"resolvers";r=0;t=42'}, 42),
    ],
)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_to_wait(headers) == seconds


def test_plain_http_is_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
    with pytest.raises(UsageError, match="plain http"):
        open_source("hf://a/b")


@pytest.mark.parametrize(
    ("place", "variable"),
    [
        ("s3", "AWS_endpoint"),
        ("gs", "GOOGLE_BASE_URL"),
        ("az", "AZURE_STORAGE_ENDPOINT"),
        ("az", "AZURITE_BLOB_STORAGE_URL"),
    ],
)
def test_plain_http_to_a_bucket_is_for_this_machine_alone(
    monkeypatch: pytest.MonkeyPatch, place: str, variable: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv(variable, "http://store.example:9000/?sig=S")
    with pytest.raises(UsageError, match=f"{variable}: is plain http to another machine") as caught:
        open_source(f"{place}://bucket/x")
    assert "store.example" not in str(caught.value)


def test_hosts_by_what_they_are() -> None:
    assert all(is_loopback(host) for host in ("localhost", "LOCALHOST.", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("localhost.example", "128.0.0.1", "", "[::1]"))
    inner = (
        "10.0.0.1",
        "192.168.1.1",
        "172.16.0.1",
        "169.254.169.254",
        "100.64.0.1",
        "fd00::1",
        "::ffff:10.0.0.1",
        "0.0.0.0",  # noqa: S104 - no server binds here
    )
    assert all(is_private(host) for host in inner)
    assert not any(is_private(host) for host in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"))
    assert origin("https://Hub.example/x") == origin("https://hub.example:443/y?z")
    assert origin("https://hub.example") != origin("http://hub.example")
