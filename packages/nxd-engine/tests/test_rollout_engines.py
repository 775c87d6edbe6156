"""Weights for vLLM and SGLang, against a receiver of ours that follows the documented requests, over gloo.

Neither engine is installed here. The receiver refuses what the documents do not allow at that moment.
"""

import gc
import json
import socket
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

import nxd_engine
import pytest
import torch
import torch.distributed as dist
from nxd_lora import LoraConfig
from nxd_state import get_world_group

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

TIMEOUT = timedelta(seconds=60)


def llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes, architectures=["LlamaForCausalLM"])
    return transformers.LlamaForCausalLM(config)


def on_two_ranks(**more):
    config = nxd_engine.neuronx_distributed_config(tensor_parallel_size=2, **more)
    return nxd_engine.initialize_parallel_model(config, llama)


def joined(host, port, rank, size):
    """A process group beside torch's own; returns its broadcast from rank 0, of any dtype."""
    store = dist.TCPStore(host, port, size, rank == 0, TIMEOUT)
    group = dist.ProcessGroupGloo(store, rank, size, TIMEOUT)
    return lambda tensor: group.broadcast([tensor.view(-1).view(torch.uint8)]).wait()


class RolloutEngine(ThreadingHTTPServer):
    """The routes of both engines for weights; what arrived is in `loaded`."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.broadcast, self.is_updating, self.loaded, self.requests = None, False, {}, []

    def act(self, route, body):
        self.requests.append((route, {key: value for key, value in body.items() if key not in ("shapes", "dtypes")}))
        if route == "/init_weight_transfer_engine":
            self.join(**body["init_info"])
        elif route == "/init_weights_update_group":
            assert body.pop("backend") == "gloo"
            assert body.pop("group_name") == "weight_update_group"
            self.join(**body)
        elif route == "/start_weight_update":
            assert not self.is_updating, "an update is already under way"
            self.is_updating = True
        elif route == "/update_weights":
            assert self.is_updating, "start_weight_update comes first"
            info = body["update_info"]
            self.receive(info.pop("names"), info.pop("dtype_names"), info.pop("shapes"))
            assert not info
        elif route == "/finish_weight_update":
            assert self.is_updating, "start_weight_update comes first"
            self.is_updating = False
        elif route == "/update_weights_from_distributed":
            assert body["group_name"] == "weight_update_group"
            assert body.get("weight_version") != "refused", "this version is refused"
            self.receive(body["names"], body["dtypes"], body["shapes"])
        elif route == "/update_weights_from_disk":
            self.loaded = safetensors.load_file(f"{body['model_path']}/model.safetensors")
        else:
            raise AssertionError(f"no such route: {route}")

    def join(self, master_address, master_port, rank_offset, world_size):
        self.broadcast = joined(master_address, master_port, rank_offset, world_size)

    def receive(self, names, dtypes, shapes):
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.broadcast(tensor)
            self.loaded[name] = tensor


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        try:
            self.server.act(self.path, body)
            status, answer = 200, {"success": True, "message": "Succeeded."}
        except Exception as error:
            status, answer = 400, {"success": False, "message": str(error)}
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def engine():
    with RolloutEngine() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
        server.broadcast = None
        gc.collect()  # closes the connections of its group


def post(url, route, body=None):
    with urlopen(Request(f"{url}/{route}", json.dumps(body or {}).encode(), {"Content-Type": "application/json"})):
        pass


def join_with(url, route, **more):
    """Join a group of this process and the engine's, which has to join at the same time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"master_address": "127.0.0.1", "master_port": probe.getsockname()[1], "world_size": 2}
    body = {**place, "rank_offset": 1, **more}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, url, route, body if more else {"init_info": body})
        broadcast = joined(place["master_address"], place["master_port"], 0, 2)
        answer.result()
    return broadcast


class VllmTrainer:
    """The trainer's side, as the documents of vLLM 0.32 describe its NCCL engine without packing; on all ranks."""

    def __init__(self, url, source):
        self.url, self.source = url, source
        self.is_sender = get_world_group().rank == 0
        self.broadcast = join_with(url, "init_weight_transfer_engine") if self.is_sender else None

    def send_weights(self):
        metadata = self.source.metadata()  # on all ranks
        if not self.is_sender:
            return [name for name, _ in self.source]
        info = {
            "names": [it.name for it in metadata],
            "dtype_names": [str(it.dtype).split(".")[-1] for it in metadata],
            "shapes": [list(it.shape) for it in metadata],
        }
        post(self.url, "start_weight_update")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(post, self.url, "update_weights", {"update_info": info})
            for declared, (name, tensor) in zip(metadata, self.source, strict=True):
                assert (declared.name, declared.dtype, declared.shape) == (name, tensor.dtype, tuple(tensor.shape))
                self.broadcast(tensor)
            answer.result()
        post(self.url, "finish_weight_update")
        return metadata


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_vllms_phases_bring_the_weights_of_each_step(run_ranks, engine):
    def train(url):
        model = on_two_ranks()
        trainer = VllmTrainer(url, nxd_engine.WeightSource(model, dtype=torch.bfloat16, bucket_size=2000))
        trainer.send_weights()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        return trainer.send_weights()

    metadata, of_rank_1 = run_ranks(train, 2, engine.url)

    assert_same(engine.loaded, {name: 2 * tensor.bfloat16() for name, tensor in llama().state_dict().items()})
    assert of_rank_1 == []
    assert len(metadata) == len(engine.loaded)
    one = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    assert [route for route, _ in engine.requests] == ["/init_weight_transfer_engine", *one, *one]


@pytest.mark.parametrize("options", [{"quantize": "fp8_blocks"}, {"adapters": "alone"}, {"names": "*norm*"}])
def test_metadata_say_on_every_rank_what_the_iteration_yields(run_ranks, options):
    def compare():
        lora = LoraConfig(lora_rank=2, target_modules=["q_proj"])
        source = nxd_engine.WeightSource(on_two_ranks(lora_config=lora), to="every_rank", **options)
        metadata = source.metadata()
        assert metadata == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source]
        return len(metadata)

    assert run_ranks(compare, 2) == [{"quantize": 35, "adapters": 4, "names": 5}[next(iter(options))]] * 2


def test_source_can_be_one_of_vllms_class_as_well():
    class WeightSourceOfVllm(ABC):
        @abstractmethod
        def metadata(self): ...

        @abstractmethod
        def __iter__(self): ...

        def held_names(self):
            return {it.name for it in self.metadata()}

    class Source(nxd_engine.WeightSource, WeightSourceOfVllm):
        pass

    assert Source(llama()).held_names() == llama().state_dict().keys()


def test_sglang_loads_the_folder_that_it_is_told(run_ranks, engine, tmp_path):
    def train(url):
        version = {"weight_version": "7"}
        nxd_engine.update_sglang_from_disk(on_two_ranks(), url, tmp_path / "step7", server=version)

    run_ranks(train, 2, engine.url)

    assert_same(engine.loaded, llama().state_dict())
    body = {"model_path": str(tmp_path / "step7"), "flush_cache": True, "weight_version": "7"}
    assert engine.requests == [("/update_weights_from_disk", body)]


def test_sglang_gets_buckets_and_flushes_its_cache_with_the_last(run_ranks, engine):
    def train(url):
        model, broadcast = on_two_ranks(), None
        if get_world_group().rank == 0:
            more = {"group_name": "weight_update_group", "backend": "gloo"}
            broadcast = join_with(url, "init_weights_update_group", **more)
        nxd_engine.update_sglang_from_distributed(
            model, url, broadcast, server={"weight_version": "7"}, bucket_size=5000, dtype=torch.bfloat16
        )

    run_ranks(train, 2, engine.url)

    assert_same(engine.loaded, {name: tensor.bfloat16() for name, tensor in llama().state_dict().items()})
    *earlier, (_, last) = engine.requests[1:]
    assert len(earlier) > 1
    assert all(body["flush_cache"] is False and "weight_version" not in body for _, body in earlier)
    assert (last["flush_cache"], last["weight_version"]) == (True, "7")


@pytest.mark.parametrize("way", ["disk", "distributed"])
def test_refusal_of_sglang_is_an_error_on_every_rank(run_ranks, engine, tmp_path, way):
    def train(url):
        update, server = {
            "disk": (nxd_engine.update_sglang_from_disk, {"model_path": "/nowhere"}),
            "distributed": (nxd_engine.update_sglang_from_distributed, {"weight_version": "refused"}),
        }[way]
        with pytest.raises(RuntimeError) as error:
            update(on_two_ranks(), url, tmp_path if way == "disk" else wait_and_pass, server=server)
        return f"{error.type.__name__}: {error.value}"

    first, second = run_ranks(train, 2, engine.url)

    assert f"/update_weights_from_{way} answered 400: " in first
    assert second == f"PeerError: updating the rollout engine failed on rank 0: {first}"


def test_refusal_of_an_earlier_bucket_ends_the_stream_on_every_rank(run_ranks, engine):
    def train(url):
        with pytest.raises(RuntimeError) as error:
            nxd_engine.update_sglang_from_distributed(on_two_ranks(), url, wait_and_pass, bucket_size=1000)
        return f"{error.type.__name__}: {error.value}"

    first, second = run_ranks(train, 2, engine.url)  # the engine has joined no group

    assert "/update_weights_from_distributed answered 400: " in first
    assert second == "PeerError: streaming the weights failed on rank 0: the loop over the tensors ended early"


def wait_and_pass(_):
    """As a broadcast whose other side takes no part."""
    threading.Event().wait(0.1)


def test_url_of_another_scheme_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'file:///etc' is not the URL of a server; use one such as"):
        nxd_engine.update_sglang_from_disk(llama(), "file:///etc", tmp_path / "saved")
