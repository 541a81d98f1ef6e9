import pytest

import kvkeep_storage.errors as errors
from kvkeep_storage.errors import StorageError, StoreMismatch


def every_class(root: type[StorageError] = StorageError) -> list[type[StorageError]]:
    return [root, *(found for child in root.__subclasses__() for found in every_class(child))]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [error.code for error in every_class() if error.__module__ == errors.__name__]
    assert len(codes) == len(set(codes)) == 18


def test_the_drawn_tree_names_every_error_in_order() -> None:
    drawn = [
        line.split("─")[-1].split()[0]
        for line in (errors.__doc__ or "").splitlines()[2:]
        if line.startswith("    ")
    ]
    assert drawn == [
        error.__name__ for error in every_class() if error.__module__ == errors.__name__
    ]


def test_only_what_may_pass_by_itself_is_retryable() -> None:
    retryable = {error.__name__ for error in every_class() if error.retryable}
    assert retryable >= {"Unavailable", "MetadataUnavailable", "ObjectsUnavailable", "Full"}
    assert not retryable & {"Invalid", "NotFound", "Conflict", "LeaseLost", "Corrupt"}


@pytest.mark.parametrize(
    ("stored", "recorded", "advice"),
    [
        ("store-a", "store-b", "one of the two URLs names another store"),
        # An empty bucket is no place to restore records from, whatever Redis was filled from.
        (None, "store-b", "one of the two URLs names another store"),
        ("store-a", None, "where its records are lost, `kvkeep-server admin reindex` brings them"),
        (None, None, "nothing was ever stored here"),
    ],
)
def test_stores_that_do_not_match_come_with_what_to_do_about_it(
    stored: str | None, recorded: str | None, advice: str
) -> None:
    said = str(StoreMismatch(stored, recorded))
    assert said.startswith(f"the object store is {stored!r}, Redis was filled from {recorded!r}: ")
    assert advice in said
    assert ("reindex" in said) == (recorded is None and stored is not None)
