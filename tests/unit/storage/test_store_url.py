from pathlib import Path

import pytest

from kvkeep_storage.errors import Invalid
from kvkeep_storage.objects import Objects
from kvkeep_storage.store_url import LocalUrl, OtherUrl, S3Url, parse_store_url


@pytest.mark.parametrize(
    ("url", "meaning"),
    [
        ("file:///a/b%20c", LocalUrl(Path("/a/b c"))),
        ("s3://bucket", S3Url("bucket", "")),
        ("s3://bucket/", S3Url("bucket", "")),
        ("s3a://bucket/a/b/", S3Url("bucket", "a/b")),
        ("s3://bucket/a%20b", S3Url("bucket", "a b")),
        (
            "s3://bucket/a?endpoint=http://10.0.0.1:9000/&region=eu-north-1&path_style=false"
            "&checksum=crc64nvme&anonymous=true",
            S3Url("bucket", "a", "http://10.0.0.1:9000", "eu-north-1", False, "crc64nvme", True),
        ),
        (
            "s3://bucket?endpoint=https%3A%2F%2Fminio.example",
            S3Url("bucket", "", endpoint="https://minio.example"),
        ),
        ("gs://bucket/a", OtherUrl("gs://bucket/a")),
    ],
)
def test_a_url_means_one_store(url: str, meaning: LocalUrl | S3Url | OtherUrl) -> None:
    assert parse_store_url(url) == meaning


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "file:///directory or s3://bucket/prefix"),
        ("relative", "file:///directory or s3://bucket/prefix"),
        ("file://host/path", "file:///absolute/path"),
        ("file:///a?b=c", "file:///absolute/path"),
        ("s3:///a", "s3://bucket/prefix"),
        ("s3://bucket:9000/a", "s3://bucket/prefix"),
        ("s3://bucket/a#b", "s3://bucket/prefix"),
        ("s3://a bucket/a", "s3://bucket/prefix"),
        ("s3://bucket?region=eu%0A", "the value of 'region' cannot stand in a request"),
        ("s3://bucket/a//b", "no empty part"),
        ("s3://bucket/a/../b", "no empty part"),
        (
            "s3://bucket?endpiont=http://h",
            "there is no option 'endpiont'; there are"
            " endpoint, region, path_style, checksum, anonymous",
        ),
        ("s3://bucket?region=", "'region' needs exactly one value"),
        ("s3://bucket?region=a&region=b", "'region' needs exactly one value"),
        ("s3://bucket?endpoint=host:9000", "http://host:port or https://host"),
        ("s3://bucket?endpoint=ftp://host", "http://host:port or https://host"),
        ("s3://bucket?endpoint=http://host:99999", "http://host:port or https://host"),
        ("s3://bucket?endpoint=http://", "http://host:port or https://host"),
        ("s3://bucket?path_style=yes", "path_style is true or false"),
        ("s3://bucket?anonymous=1", "anonymous is true or false"),
        ("s3://bucket?checksum=md5", "checksum is one of sha256, crc64nvme"),
        ("http://[host/x", "is not a URL"),
    ],
)
def test_a_wrong_url_is_refused_with_what_is_right(url: str, said: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_store_url(url)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret-word@bucket/a",
        "s3://bucket?endpoint=http://key:secret-word@host:9000",
        "s3://bucket?secret_access_key=secret-word",
    ],
)
def test_a_credential_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_store_url(url)
    assert "secret-word" not in str(refused.value)


@pytest.mark.parametrize("url", ["nonsense://x/secret-word", "az://account/secret-word"])
def test_what_obstore_does_not_open_is_refused_and_not_repeated(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(Invalid, match="names no store that can be opened") as refused:
        Objects.open(url)
    assert "secret-word" not in str(refused.value)


def test_other_schemes_of_obstore_pass_through() -> None:
    assert Objects.open("gs://bucket/prefix").is_remote
