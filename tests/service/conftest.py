"""A served endpoint for the tests of this folder; see served.py, which is importable here."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from served import TINY_SETTINGS, ServedEndpoint


@pytest.fixture(scope="session")
def endpoint(tiny_model, tmp_path_factory):
    """One for all files that need nothing special of it: starting it takes most of a minute.

    A file must not count on what others did to it, and leave it serving and learning.
    """
    served = ServedEndpoint(tiny_model, tmp_path_factory.mktemp("run") / "e", *TINY_SETTINGS)
    try:
        yield served.start()
    finally:
        if served.process is not None:
            served.stop()
