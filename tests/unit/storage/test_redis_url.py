import pytest

from kvkeep_storage.errors import Invalid
from kvkeep_storage.redis_link import RedisLink
from kvkeep_storage.redis_url import Host, parse_cluster, parse_sentinel

SECRET = "s3cr3t"


def test_a_sentinel_url_names_hosts_service_database_and_login() -> None:
    address = parse_sentinel("redis+sentinel://me:p%40ss%2F@one:1,two,[::1]:3/my%20service/4")
    assert address.sentinels == (Host("one", 1), Host("two", 26379), Host("::1", 3))
    assert (address.service, address.database) == ("my service", 4)
    assert (address.username, address.password) == ("me", "p@ss/")


def test_login_and_database_may_be_left_out() -> None:
    address = parse_sentinel("redis+sentinel://one/main")
    assert (address.username, address.password, address.database) == (None, None, 0)
    assert parse_sentinel("redis+sentinel://:only@one/main").password == "only"


def test_a_cluster_url_names_hosts_and_login() -> None:
    address = parse_cluster("redis+cluster://me:pw@one:7000,two,[::1]/")
    assert address.nodes == (Host("one", 7000), Host("two", 6379), Host("::1", 6379))
    assert (address.username, address.password) == ("me", "pw")


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://me:{}@one:1",
        "redis+sentinel://me:{}@one:1/",
        "redis+sentinel://me:{}@/main",
        "redis+sentinel://me:{}@one:1,,two:2/main",
        "redis+sentinel://me:{}@one:1/main/x",
        "redis+sentinel://me:{}@one:0/main",
        "redis+sentinel://me:{}@one:99999/main",
        "redis+sentinel://me:/{}@one:1/main",
        "redis+sentinel://me:1?{}@one:1/main",
        "redis+sentinel://one:1/main?password={}",
        "redis+sentinel://me:{}@[::1/main",
        "redis+sentinel://me:{}@[::1]x/main",
        "redis+cluster://me:{}@one:1/0",
        "redis+cluster://me:{}@",
        "redis+cluster://me:{}@one:x",
        "redis+cluster://me:/{}@one:1",
        "redis+cluster://me:#{}@one:1",
        "redis://me:/{}@one:1",
        "redis://me:{}@one:port",
        "redis://me@[{}@one",
        "unix:///socket?db={}",
        "redis://one:1?{}=1",
        "redis://one:1?client_name=x&health_check_interval={}",
        "rediss://one:1?ssl_cert_reqs={}",
        "redis://one:1?encoding_errors={}",
        "redis://me:{}@one:1?protocol=3",
        "redis://me:{}@one:1?socket_timeout=900",
        "other://me:{}@one",
        "{}",
    ],
)
def test_a_malformed_url_is_refused_and_nothing_of_it_repeated(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        RedisLink.open(url.format(SECRET), 1.0)
    seen: BaseException | None = caught.value
    while seen is not None:
        assert SECRET not in str(seen)
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)


def test_an_address_does_not_show_its_password() -> None:
    assert SECRET not in repr(parse_sentinel(f"redis+sentinel://me:{SECRET}@one/main"))
    assert SECRET not in repr(parse_cluster(f"redis+cluster://me:{SECRET}@one"))
