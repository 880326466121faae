"""How many files a reader opens to follow one chat from its route to the kernels."""

import pytest
from support.chat_path import chat_path


@pytest.mark.usefixtures("default_model_path")
def test_a_chat_takes_a_short_way() -> None:
    """At most 25 files; `docs/decisions/0023-a-backend-is-a-protocol.md` says what counts."""
    found = chat_path("smollm2-135m")
    ends = {
        "server/api/completions.py",
        "engine/engine.py",
        "core/scheduler.py",
        "kernels/native.py",
        "server/http/replies.py",
    }
    assert ends <= set(found["way"]) <= set(found["all"])
    assert len(found["way"]) <= 25
