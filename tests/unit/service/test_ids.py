import pytest

from kvkeep_service.ids import is_context_id, new_answer_id, new_context_id


def test_ids_of_one_process_ascend_strictly() -> None:
    ids = [new_context_id() for _ in range(2000)]
    assert ids == sorted(set(ids))


def test_a_new_id_has_the_shape_of_the_contract() -> None:
    assert is_context_id(new_context_id())
    prefix, _, ulid = new_answer_id().partition("_")
    assert (prefix, len(ulid)) == ("ans", 26)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ctx_",
        "ctx_../../etc/passwd",
        "ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5P",
        "ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PXX",
        "ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PX\n",
        "ctx_01K9Z3V5J8Q6W2E4R7T1Y0N5PI",
        "ctx_81K9Z3V5J8Q6W2E4R7T1Y0N5PX",
        "ctx_01k9z3v5j8q6w2e4r7t1y0n5px",
        "ans_01K9Z3V5J8Q6W2E4R7T1Y0N5PX",
        "ctx_\uff101K9Z3V5J8Q6W2E4R7T1Y0N5PX",
    ],
)
def test_nothing_else_passes_for_the_id_of_a_context(text: str) -> None:
    assert not is_context_id(text)
