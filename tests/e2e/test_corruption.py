"""Whatever happens to stored bytes: never an answer from them, and answers as before after it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ..support.documents import contract
from ..support.server import EAGER_SWEEPS, Server, eventually

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

QUESTION = "Who pays, and when?"
WAIT_SECONDS = 120


@pytest.fixture(scope="module")
def loading(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """A server that keeps nothing in memory: every answer comes from the store."""
    data = tmp_path_factory.mktemp("corruption") / "data"
    settings = {"threads": 1, "resident_bytes": 0, **EAGER_SWEEPS}
    with Server(data, model=tiny_model, **settings) as running:
        yield running


class Stored:
    """A context with its only generation in the store, and its answer while that was whole."""

    def __init__(self, server: Server, title: str) -> None:
        before = set(server.generations())
        self._server = server
        self.id: str = server.create(contract(title, 30))["id"]
        (self.generation,) = set(server.generations()) - before
        self.files = {path.name: path.read_bytes() for path in self.generation.iterdir()}
        answer = server.ask(self.id, QUESTION)
        assert answer["timings"]["source"] == "store"
        self.answer: list[int] = answer["token_ids"]

    @property
    def document(self) -> Path:
        (path,) = self._server.objects.glob(f"documents/*/{self.id}/document.json")
        return path

    def assert_is_refused(self, *, end: str = "ready") -> None:
        response = self._server.query(self.id, QUESTION)
        assert response.status_code == 409, response.text
        assert response.json()["code"] == "context_not_ready"
        assert response.json()["status_of_context"] == "rebuilding"
        assert int(response.headers["Retry-After"]) > 0
        assert self._server.context(self.id)["status"] in ("rebuilding", end)

    def assert_answers_as_before(self) -> None:
        answer = self._server.ask(self.id, QUESTION, wait=WAIT_SECONDS)
        assert answer["token_ids"] == self.answer
        assert answer["timings"]["source"] == "store"

    def assert_was_rebuilt(self) -> None:
        (rebuilt,) = self.generation.parent.iterdir()
        assert rebuilt.name != self.generation.name
        slabs = {path.name: path.read_bytes() for path in rebuilt.glob("*.safetensors")}
        assert slabs == {name: self.files[name] for name in slabs}
        assert len(slabs) == len(self.files) - 1


def flip_bit(path: Path, at: float) -> None:
    """Flip one bit at this fraction of a file."""
    content = bytearray(path.read_bytes())
    content[int(at * (len(content) - 1))] ^= 0b0000_1000
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _extend(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _swap_with_next(path: Path) -> None:
    other = path.with_name("kv-02.safetensors")
    mine, others = path.read_bytes(), other.read_bytes()
    path.write_bytes(others)
    other.write_bytes(mine)


def _flip(at: float) -> Callable[[Path], None]:
    return lambda path: flip_bit(path, at)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param("kv-00.safetensors", _flip(0.0), id="first-byte-of-a-slab"),
        pytest.param("kv-00.safetensors", _flip(0.5), id="a-row-of-a-slab"),
        pytest.param("kv-04.safetensors", _flip(1.0), id="last-byte-of-the-last-slab"),
        pytest.param("manifest.json", _flip(0.5), id="a-bit-of-the-manifest"),
        pytest.param("manifest.json", Path.unlink, id="no-manifest"),
        pytest.param("kv-01.safetensors", _truncate, id="a-truncated-slab"),
        pytest.param("kv-01.safetensors", _extend, id="an-extended-slab"),
        pytest.param("kv-01.safetensors", _empty, id="an-empty-slab"),
        pytest.param("kv-01.safetensors", _swap_with_next, id="swapped-slabs"),
        pytest.param("kv-03.safetensors", Path.unlink, id="a-missing-slab"),
    ],
)
def test_field_07_a_damaged_cache_is_never_answered_from_and_is_built_again(
    loading: Server, request: pytest.FixtureRequest, name: str, damage: Callable[[Path], None]
) -> None:
    stored = Stored(loading, request.node.callspec.id)
    damage(stored.generation / name)
    stored.assert_is_refused()
    stored.assert_answers_as_before()
    stored.assert_was_rebuilt()


def test_field_03_of_many_who_ask_a_damaged_cache_nobody_is_answered_from_it(
    loading: Server,
) -> None:
    stored = Stored(loading, "Asked by many")
    flip_bit(stored.generation / "kv-02.safetensors", 0.5)
    with ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(lambda _: loading.query(stored.id, QUESTION), range(24)))
    refused = [response for response in responses if response.status_code != 200]
    assert {response.json()["code"] for response in refused} == {"context_not_ready"}
    answered = [response for response in responses if response.status_code == 200]
    assert [answer.json()["token_ids"] for answer in answered] == [stored.answer] * len(answered)
    stored.assert_answers_as_before()
    stored.assert_was_rebuilt()


def test_another_caches_files_are_never_answered_from(loading: Server) -> None:
    # Whole in themselves, of the same model and sizes, only not what was asked for.
    stored, other = Stored(loading, "One contract"), Stored(loading, "Two contract")
    for name, content in other.files.items():
        (stored.generation / name).write_bytes(content)
    stored.assert_is_refused()
    stored.assert_answers_as_before()
    other.assert_answers_as_before()


def test_a_damaged_document_does_not_stop_an_intact_cache_from_answering(
    loading: Server,
) -> None:
    stored = Stored(loading, "Its document is damaged")
    flip_bit(stored.document, 0.5)
    stored.assert_answers_as_before()
    response = loading.http.get(f"/contexts/{stored.id}/document")
    assert (response.status_code, response.json()["code"]) == (409, "document_corrupt")
    stored.assert_answers_as_before()


@pytest.mark.parametrize("damage", [_flip(0.5), Path.unlink], ids=["flipped", "missing"])
def test_a_rebuild_from_a_damaged_document_fails_and_says_why(
    loading: Server, request: pytest.FixtureRequest, damage: Callable[[Path], None]
) -> None:
    stored = Stored(loading, f"Nothing whole is left: {request.node.callspec.id}")
    damage(stored.document)
    flip_bit(stored.generation / "kv-00.safetensors", 0.5)
    stored.assert_is_refused(end="failed")
    eventually(lambda: loading.context(stored.id)["status"] == "failed")
    assert loading.context(stored.id)["error"]["code"] == "document_corrupt"
    response = loading.query(stored.id, QUESTION, wait=WAIT_SECONDS)
    assert (response.status_code, response.json()["code"]) == (409, "context_failed")
    assert response.json()["error_code"] == "document_corrupt"
