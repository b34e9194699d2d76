"""What a server may answer with status 200 that is not what was asked for: one table for the hub's
and a bucket's.
"""

from __future__ import annotations

# Of no use to whoever asked for an object of any kind; a body of the right kind with a wrong field
# is each test's own.
FOREIGN_BODIES = (
    "",
    "{}",
    "[]",
    "7",
    "null",
    '"text"',
    '[{"a": 1}]',
    '{"files": [{}], "objects": [{}]}',
    "<html>log in to the network first</html>",
    "[" * 100_000,
    '{"a": ' + "9" * 5_000 + "}",
    "\ufffd\x00",
)
