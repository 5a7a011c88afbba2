"""The end of an engine's log is shown to clients, and an engine writes its keys there: not half of one is shown."""

from __future__ import annotations

import sys

import pytest
from sie_adapters_sglang._process import _LOG_BYTES, EngineProcess
from sie_adapters_sglang._state import Home

KEY = "0123456789abcdef" * 3
# What stands before and after the key, as expressions.
WHERE = {
    "across the end of a line that is cut": ("'x' * 480", "'\\n'"),
    "across the first byte that is read": ("''", "'\\n' + 'y' * 80 + ('\\n' + 'z' * 79) * 818 + '\\n'"),
    "across the turn of the log": (f"'x' * {_LOG_BYTES - 20}", "'\\nlast\\n'"),
}
SAY = """
import sys, time
def say(text):
    sys.stdout.write(text)
    sys.stdout.flush()
    time.sleep(0.3)  # the log turns where one read ends
say({before} + {first!r})
say({rest!r} + {after})
"""


@pytest.mark.parametrize("where", WHERE)
def test_no_part_of_a_key_is_shown(where: str) -> None:
    before, after = WHERE[where]
    code = SAY.format(before=before, first=KEY[:20], rest=KEY[20:], after=after)
    home = Home("m")
    process = EngineProcess([sys.executable, "-c", code], {}, home, secrets=(KEY,))
    assert process.ended.wait(20)
    assert process.exit_code == 0
    shown = process.log_tail(2000)
    assert shown
    assert not [at for at in range(len(KEY) - 8) if KEY[at : at + 8] in shown]
    home.forget()
