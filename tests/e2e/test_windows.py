"""A model of which some layers see a window only: the same answers from memory and from disk."""

from pathlib import Path

import pytest

from ..support.documents import contract
from ..support.server import Server, server_environment, start_command
from ..support.tiny_models import GEMMA3_WINDOW, save_tiny_model

pytestmark = pytest.mark.e2e

QUESTION = "How many days does the carrier have in matters of payment?"
# K and V of 2 heads of 32 numbers, in one of the two layers.
ROW_BYTES = 2 * 2 * 32 * 2


def test_windows_are_kept_whole_beside_what_is_evicted(tmp_path: Path) -> None:
    model = save_tiny_model("gemma3", tmp_path / "tiny-gemma3")
    settings = {"model": model, "threads": 1, "dtype": "bfloat16"}
    with Server(tmp_path / "data", **settings) as server:
        context = server.create(contract("Carriage of goods by road", 20))
        compression, total = context["compression"], context["tokens"]["total"]
        window = GEMMA3_WINDOW - 1
        assert compression["full_bytes"] == (total + window) * ROW_BYTES
        protected = context["tokens"]["protected"]
        kept = 0.3 * (total - protected) + protected + window
        assert kept * ROW_BYTES - ROW_BYTES <= compression["stored_bytes"]
        assert compression["stored_bytes"] < kept * ROW_BYTES * 1.5
        # Longer than the window, so that answers slide out of it.
        asked = {"max_tokens": GEMMA3_WINDOW + 10}
        warm = {
            ratio: server.ask(context["id"], QUESTION, ratio=ratio, **asked) for ratio in (0.3, 0.2)
        }
        assert {answer["timings"]["source"] for answer in warm.values()} == {"resident"}
        assert warm[0.3]["token_ids"] != warm[0.2]["token_ids"]
        server.kill()
        server.start()
        for ratio, answer in warm.items():
            cold = server.ask(context["id"], QUESTION, ratio=ratio, **asked)
            assert cold["token_ids"] == answer["token_ids"]
        server.terminate()
        environment = server_environment(data=server.data)
        with start_command("admin", "verify", environment=environment) as verify:
            said, _ = verify.communicate(timeout=120)
        assert verify.returncode == 0, said
