"""What plain_train.py calls of torch, for tests in which only its lines, files and signals count: torch itself is
a second of a processor for each rank. In torch's place where `light` is the first folder of PYTHONPATH.
"""

import zipfile

from . import distributed as distributed


class Tensor:
    """One number."""

    def __init__(self, value):
        self.value = float(value)

    def fill_(self, value):
        self.value = float(value)

    def item(self):
        return self.value

    def clone(self):
        return Tensor(self.value)


def zeros(count):
    assert count == 1
    return Tensor(0.0)


def ones(count):
    assert count == 1
    return Tensor(1.0)


def save(value, path):
    """An archive, as torch writes one."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.txt", repr(value))
