"""What a weight sync leaves behind."""

from __future__ import annotations

import pytest

from hybridrl.controller.startup import sync_session
from hybridrl.errors import EngineError
from hybridrl.reshard.transports import SHARED_MEMORY


def test_a_session_takes_its_own_shared_memory_with_it_and_no_other() -> None:
    with pytest.raises(EngineError), sync_session() as session, sync_session() as other:
        left = [SHARED_MEMORY / f"hybridrl-{session}-0-1", SHARED_MEMORY / f"hybridrl-{session}-0-2.new"]
        for path in left:
            path.touch()
        with sync_session():
            pass
        assert other != session and all(path.exists() for path in left)
        raise EngineError("a rank died while it connected")
    assert not any(path.exists() for path in left)
