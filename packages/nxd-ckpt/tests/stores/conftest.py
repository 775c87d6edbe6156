"""Each kind of storage as an empty root: a folder, memory of this process, and S3 of a local server."""

import uuid
from importlib.util import find_spec

import pytest


@pytest.fixture(scope="session", autouse=True)
def s3_server():
    """The address of a server that speaks S3, None without moto and s3fs.

    For all tests, so that it runs before the first one: what that leaves behind does not contain the server.
    """
    if find_spec("s3fs") is None or find_spec("moto") is None:
        yield None
        return
    import fsspec.asyn
    from moto import server

    fsspec.asyn.get_loop()  # which stays open
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def s3_bucket(s3_server, monkeypatch, s3_connections):
    """The name of an empty bucket that `s3://` finds."""
    import fsspec

    if s3_server is None:
        pytest.skip("needs a local S3: pip install 'moto[server]'")
    for name, value in {
        "AWS_ENDPOINT_URL": s3_server,
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"b-{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    return bucket


@pytest.fixture(params=["folder", "memory", "s3"])
def root(request, tmp_path):
    """An empty place for checkpoints in each kind of storage."""
    if request.param == "folder":
        return str(tmp_path / "root")
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"s3://{request.getfixturevalue('s3_bucket')}/runs"


@pytest.fixture(params=["memory", "s3"])
def object_root(request):
    """An empty place for checkpoints in each kind of object store."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"s3://{request.getfixturevalue('s3_bucket')}/runs"
