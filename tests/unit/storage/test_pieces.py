import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep_storage import pieces


@given(sizes=st.lists(st.integers(0, 40), max_size=12), views_max=st.integers(1, 5))
def test_pieces_are_all_bytes_in_order_within_both_limits(sizes: list[int], views_max: int) -> None:
    content = bytes(range(256)) * 2
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    into = [
        memoryview(content)[start : start + size] for start, size in zip(starts, sizes, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", 16)
        patch.setattr(pieces, "_VIEWS_MAX", views_max)
        found = list(pieces.pieces(into))
    assert b"".join(view for piece in found for view in piece) == content[: sum(sizes)]
    for piece in found:
        assert 0 < len(piece) <= views_max
        assert all(piece)
        assert sum(map(len, piece)) <= 16


def test_scattering_copies_every_byte_and_tells_of_it_afterwards() -> None:
    into = [bytearray(3), bytearray(0), bytearray(2)]
    heard: list[tuple[int, bytes]] = []
    pieces.scatter(
        memoryview(b"abcdefg"),
        [memoryview(part) for part in into],
        10,
        lambda offset, views: heard.append((offset, b"".join(views))),
    )
    assert into == [b"abc", b"", b"de"]
    assert heard == [(10, b"abcde")]
