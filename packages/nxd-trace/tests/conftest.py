import contextlib
import os
import sys
from pathlib import Path

import nxd_trace
import pytest

# Worker processes import the models by name, along the path of the process that starts them.
sys.path.insert(0, str(Path(__file__).parent / "programs"))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Compiled programs of the tests are not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def trace():
    """`parallel_model_trace` by the quick compiler; closes the models at the end."""
    models = []

    def trace_model(func, inputs, **settings):
        settings = {"compiler": "export", "progress": False, **settings}
        models.append(nxd_trace.parallel_model_trace(func, inputs, **settings))
        return models[-1]

    yield trace_model
    while models:  # pytest keeps the fixture, and so what it refers to, until the test is reported
        models.pop().close()


@pytest.fixture(scope="module")
def tiny_generator():
    """The tiny decoder, compiled for two prompts at a time."""
    import tiny_decoder  # along the path that is set above
    from nxd_trace.generation import compile_generator

    sizes = {"batch_size": 2, "max_length": 40, "prefill_lengths": (4,), "compiler": "export", "progress": False}
    with compile_generator(tiny_decoder.TinyDecoder, **sizes) as generator:
        yield generator


@pytest.fixture
def running_workers():
    """`running_workers()`: process ids of the workers of this process that have not ended."""

    def children_of(parent):
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                state, of = path.read_text().rpartition(")")[2].split()[:2]
                if int(of) == parent and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def of_all_servers():
        servers = [pid for pid in children_of(os.getpid()) if "fork_server" in Path(f"/proc/{pid}/cmdline").read_text()]
        return [worker for server in servers for worker in children_of(server)]

    return of_all_servers
