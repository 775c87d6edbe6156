"""`send_weights` beside `stream_weights`: the same tensors as safetensors bytes, and failures that reach every rank."""

import json
import re
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import nxd_engine
import pytest
import torch
from nxd_state import PeerError

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

TOKEN = "0123456789abcdef"


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    named = {"architectures": ["LlamaForCausalLM"]}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes, **named))


class Receiver(HTTPServer):
    """Records the requests, and refuses bucket number `refused`."""

    def __init__(self, refused=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused, self.seen, self.buckets = refused, [], []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        self.thread = Thread(target=self.serve_forever)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        server.seen.append((path, self.headers["Authorization"]))
        status = 200
        if path == "/update_weights":
            server.buckets.append(body)
            status = 507 if len(server.buckets) == server.refused else 200
        error = {"error": {"message": "the disk is full"}}
        answer = json.dumps(error if status > 200 else {"update_id": "1", "weights_version": "v"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def send(url, **options):
    config = nxd_engine.neuronx_distributed_config(tensor_parallel_size=2)
    model = nxd_engine.initialize_parallel_model(config, llama)
    try:
        return nxd_engine.send_weights(model, url, token=f"{TOKEN}\n", **options)
    except (RuntimeError, PeerError) as error:
        return f"{type(error).__name__}: {error}"


def test_buckets_are_safetensors_of_all_tensors_within_the_size(run_ranks):
    with Receiver() as receiver:
        versions = run_ranks(partial(send, receiver.url, bucket_size=2500, dtype=torch.bfloat16), 2)

    received = [safetensors.load(bucket) for bucket in receiver.buckets]
    tensors = {name: tensor for bucket in received for name, tensor in bucket.items()}
    expected = llama().state_dict()
    assert versions == ["v", "v"]
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in tensors.items())
    assert len(received) > 3
    assert max(sum(tensor.nbytes for tensor in bucket.values()) for bucket in received) <= 2500
    paths = [path for path, _ in receiver.seen]
    assert (paths[0], paths[-1]) == ("/start_weight_update", "/finish_weight_update")
    assert {authorization for _, authorization in receiver.seen} == {f"Bearer {TOKEN}"}


def test_bucket_that_is_refused_ends_the_call_on_all_ranks_and_aborts_the_update(run_ranks):
    with Receiver(refused=2) as receiver:
        of_first, of_second = run_ranks(partial(send, receiver.url, bucket_size=5000), 2)

    assert of_first == f"RuntimeError: {receiver.url} refused the weights: the disk is full"
    assert of_second == f"PeerError: streaming the weights failed on rank 0: {of_first}"
    assert [path for path, _ in receiver.seen[-2:]] == ["/update_weights", "/abort_weight_update"]
    assert len(receiver.buckets) == 2


def test_url_of_no_server_is_refused():
    with pytest.raises(ValueError, match=re.escape("url='localhost:8000' is not an address of a server")):
        nxd_engine.send_weights(llama(), "localhost:8000", token=TOKEN)
