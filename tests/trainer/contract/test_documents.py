"""Records that are read by several threads at once."""

from __future__ import annotations

import subprocess
import sys

# of each class the first reading is the one at which msgspec learns its fields
PROGRAM = """
import sys, threading, types
from trainer.contract.documents import record_of
from trainer.contract.record import Record

CLASSES = '''
from __future__ import annotations
class Inner(Record):
    name: str
    jobs: tuple[str, ...] = ()
class Outer(Record):
    inner: Inner
    others: tuple[Inner, ...] = ()
'''
sys.setswitchinterval(1e-6)
for number in range(60):
    module = types.ModuleType(f"classes_{number}")
    module.Record = Record
    sys.modules[module.__name__] = module
    exec(CLASSES, module.__dict__)
    together, read = threading.Barrier(8), []
    def reader():
        together.wait()
        read.append(record_of(module.Outer, {"inner": {"name": "x"}, "others": [{"name": "y"}]}))
    threads = [threading.Thread(target=reader) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.others[0].name for one in read] == ["y"] * 8
"""


def test_threads_that_meet_a_class_first_at_once_all_read_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr  # -11: a segmentation fault
