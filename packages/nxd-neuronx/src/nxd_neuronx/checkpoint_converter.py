"""`CheckpointConverterBase`: the command line of scripts that convert between whole weights and rank files.

nxd_ckpt reads and writes the files; this module only maps the converter's options to their layouts. `nxd ckpt convert`
and `load_checkpoint`, which reads whole and sharded weights at any layout, need no such script.
"""

import argparse
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nxd_ckpt import Checkpoint, CheckpointError, open_checkpoint
from nxd_ckpt.interop import from_checkpoint, open_hugging_face, open_neuronx, read_whole, write_neuronx
from nxd_ckpt.interop.neuronx import Sharding, Split
from nxd_ckpt.interop.neuronx.rank_files import BEGUN_MARKER, DONE_MARKER, load_rank_file, v1_files, v2_files, v2_name
from nxd_ckpt.reader import TensorInfo
from nxd_ckpt.sharded_tensor import Shard
from nxd_engine.checkpoints.find import find_checkpoint
from nxd_engine.checkpoints.legacy_heads import HeadOrder, stacked
from nxd_engine.checkpoints.merged_weights import ModelTensors
from nxd_engine.checkpoints.shard_files import write_file, write_xser
from torch import Tensor

from nxd_neuronx.pipeline_parts import create_partitions, stage_to_pipeline_parallel_rank

_COMMANDS = ("convert_from_full_state", "convert_to_full_state", "convert_from_xser", "convert_to_xser")
_FULL_FILE = "checkpoint.pt"

HOW_TO_RUN = """\
neuronx_distributed.scripts.checkpoint_converter has a base class only. Write these lines to a file, such as
converter.py, and run `python converter.py` with the same options; for names other than Llama's, set attributes of the
class:

from neuronx_distributed.scripts.checkpoint_converter import CheckpointConverterBase

class Converter(CheckpointConverterBase):
    pass

converter = Converter()
converter.run(converter.get_arg_parser().parse_args())"""

# The whole tensors in each fused tensor of a rank, by the endings of their names.
_FUSED = {
    "gate_up_proj.weight": ("gate_proj.weight", "up_proj.weight"),
    "qkv_proj.weight_q": ("q_proj.weight",),
    "qkv_proj.weight_k": ("k_proj.weight",),
    "qkv_proj.weight_v": ("v_proj.weight",),
    "qkv_proj.weight_qkv": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
    "qkv_proj.weight": ("q_proj.weight", "k_proj.weight", "v_proj.weight"),
}
_FUSED_HEADS = ("qkv_proj.weight_qkv", "qkv_proj.weight")


class CheckpointConverterBase:
    """Converts weights of decoders with Llama's names; subclasses declare their differences.

    Attributes:
        attribute_map: alternative names of keys in the model's config, with dots between sections.
        embedding_partition_dim: dim along which embedding and head are split.
        qkv_partition_dim: dim of queries, keys and values.
        gate_up_proj_partition_dim: dim of gate and up.
        down_proj_partition_dim: dim of the second projection of the feed-forward.
        o_proj_partition_dim: dim of the attention's output.
        layer_name: a part of the names of layers.
        layer_name_pattern: regular expression whose first group is a layer's name.
    """

    attribute_map: Mapping[str, str] = {}
    embedding_partition_dim = 0
    qkv_partition_dim = 0
    gate_up_proj_partition_dim = 0
    down_proj_partition_dim = 1
    o_proj_partition_dim = 1
    layer_name = "layers"
    layer_name_pattern = r"^(model\.layers\.\d+)"

    def get_arg_parser(self) -> argparse.ArgumentParser:
        """The options; subclasses may add their own."""
        parser = argparse.ArgumentParser()
        text = parser.add_argument
        text("--input_dir", help="weights to read: a .pt or .safetensors file, or a folder of Hugging Face or of ranks")
        text("--hf_model_name", help="Hugging Face folder, instead of --input_dir")
        text("--output_dir", required=True, help="folder to write to")
        text("--hw_backend", required=True, help="trn1 or trn2: the order of repeated key and value heads")
        text("--config", help="the model's config.json")
        text("--model_key", default="model", help="the model's key in each rank's file")
        for name in ("tp_size", "pp_size", "ep_size", "virtual_pp_size", "kv_size_multiplier"):
            text(f"--{name}", type=int, default=1)
        for name in ("n_layers", "i_tp_round_factor"):
            text(f"--{name}", type=int, default=0)
        for name in ("coalesce_qkv", "qkv_linear", "fuse_qkv", "pad_attn_heads", "load_xser", "save_xser"):
            text(f"--{name}", type=_boolean, default=False)
        for name in _COMMANDS:
            text(f"--{name}", action="store_true")
        text("--model_style", choices=["hf", "megatron"], default="hf", help="naming style of the model")
        text("--nxdt_yaml_config", help="YAML of neuronx-distributed-training, instead of --config")
        return parser

    def run(self, args: argparse.Namespace) -> None:
        """Run the conversion that the options select.

        Raises:
            ValueError: options contradict each other, are not supported, or do not fit the weights.
            CheckpointError: weights cannot be read.
        """
        chosen = [name for name in _COMMANDS if getattr(args, name)]
        if len(chosen) != 1:
            raise ValueError(f"pass exactly one of {', '.join(f'--{name}' for name in _COMMANDS)}; got {chosen}")
        _refuse_unsupported(args)
        if args.nxdt_yaml_config:
            from nxd_neuronx.nxdt_config import convert_yaml_to_json  # noqa: PLC0415

            args.config = convert_yaml_to_json(args.nxdt_yaml_config)
        getattr(self, chosen[0])(args)

    def convert_from_full_state(self, args: argparse.Namespace) -> None:
        """Convert a whole model's weights to rank files in `<output_dir>/model`, which `load_checkpoint` reads."""
        full_state = self.pre_process_full_state_before_tp_conversion(self.load_full_state(args), args)
        shapes = {name: tuple(tensor.shape) for name, tensor in full_state.items()}
        rank_names = dict.fromkeys(self._rank_name(name, args) for name in full_state)
        whole, tag = os.path.split(os.path.abspath(args.output_dir))
        stage_of = self._stages(full_state, args)
        write_neuronx(
            _InMemory(full_state),
            whole,
            tag,
            sharding=self._sharding(rank_names, shapes, args),
            tensor_parallel_size=args.tp_size,
            pipeline_stage_of=stage_of,
            xser=args.save_xser,
        )

    def convert_to_full_state(self, args: argparse.Namespace) -> None:
        """Convert rank files to a whole model's weights in `<output_dir>/checkpoint.pt`."""
        full_state = self.post_process_full_state_after_tp_conversion(self.merge_tp_checkpoints(args), args)
        os.makedirs(args.output_dir, exist_ok=True)
        write_file(full_state, os.path.join(args.output_dir, _FULL_FILE))

    def convert_from_xser(self, args: argparse.Namespace) -> None:
        """Convert one file per tensor to one file per rank."""
        self._rewrite(args, xser=False)

    def convert_to_xser(self, args: argparse.Namespace) -> None:
        """Convert one file per rank to one file per tensor."""
        self._rewrite(args, xser=True)

    def merge_tp_checkpoints(self, args: argparse.Namespace) -> dict[str, Tensor]:
        """Return the whole model's weights by name, from rank files or a `save_checkpoint` checkpoint at any degrees.

        Raises:
            ValueError: the files have other degrees than the options.
            CheckpointError: they cannot be read.
        """
        own = _own_checkpoint(args.input_dir)
        if own is not None:
            weights = ModelTensors(from_checkpoint(own))
            whole = (self._unfused(name, read_whole(weights, name), args) for name in weights.tensors)
            return {name: tensor.clone() for tensors in whole for name, tensor in tensors.items()}
        with _readable(args.input_dir) as folder:
            local = open_neuronx(folder, sharding={})
            rank_names = [name for name, info in local.tensors.items() if info.global_shape]
            shapes = self._whole_shapes({name: local.tensors[name].global_shape for name in rank_names}, args)
            source = open_neuronx(folder, sharding=self._sharding(rank_names, shapes, args))
            return {name: read_whole(source, name).clone() for name in source.tensors}

    def load_full_state(self, args: argparse.Namespace) -> dict[str, Tensor]:
        """Return the whole model's weights by name; nothing in the files is executed.

        Raises:
            ValueError: no option gives their location.
            CheckpointError: they cannot be read.
        """
        path = args.input_dir or args.hf_model_name
        if not path:
            raise ValueError("pass --input_dir, the file or folder of the whole model's weights")
        if not os.path.exists(path):
            raise ValueError(f"{path!r} is not a file or folder; download the model first and pass its folder")
        if os.path.isdir(path) or path.endswith(".safetensors"):
            source = open_hugging_face(path)
            return {name: read_whole(source, name) for name in source.tensors}
        content = load_rank_file(path)
        state = content.get(args.model_key, content) if isinstance(content, dict) else content
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{path} holds no dict of tensors; pass the whole model's state, or --model_key")
        return state

    def pre_process_full_state_before_tp_conversion(self, full_state: Any, args: argparse.Namespace) -> Any:
        """Hook for subclasses that change the whole weights before they are split."""
        return full_state

    def post_process_full_state_after_tp_conversion(self, full_state: Any, args: argparse.Namespace) -> Any:
        """Hook for subclasses that change the whole weights after they are combined."""
        return full_state

    def is_qkv_weight(self, name: str) -> bool:
        """Return whether the weight belongs to queries, keys or values."""
        return any(part in name for part in ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"))

    def get_partition_dim(self, name: str) -> int:
        """Return the dim along which a weight is split; a ValueError if it is not split."""
        dim = self._dim_of(name)
        if dim is None:
            raise ValueError(f"Unknown partition_dim for {name}; it is not split")
        return dim

    def _dim_of(self, name: str) -> int | None:
        if not name.endswith(".weight") and ".weight_" not in name:
            return None
        dims = {
            ("embed_tokens", "lm_head", "wte"): self.embedding_partition_dim,
            ("gate_proj", "up_proj"): self.gate_up_proj_partition_dim,
            ("down_proj",): self.down_proj_partition_dim,
            ("o_proj",): self.o_proj_partition_dim,
        }
        if self.is_qkv_weight(name):
            return self.qkv_partition_dim
        return next((dim for parts, dim in dims.items() if any(part in name for part in parts)), None)

    def _get_config_value(self, config: Mapping[str, Any], key: str) -> Any:
        """A value of the model's config, under its own name or the one in `attribute_map`."""
        for path in (key, self.attribute_map.get(key, key)):
            value: Any = config
            for part in [path] if path in config else path.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is not None:
                return value
        raise ValueError(f"the config has no {key}; it has {', '.join(config)}")

    def _heads(self, args: argparse.Namespace) -> tuple[HeadOrder, int]:
        """The order of heads over the ranks, and a head's size."""
        if not args.config:
            raise ValueError("pass --config, the model's config.json, for the number of heads")
        config = json.loads(Path(args.config).read_text(encoding="utf-8"))
        heads = int(self._get_config_value(config, "num_attention_heads"))
        elsewhere = self._get_config_value(config, "num_key_value_heads") if self.attribute_map else None
        kv_heads = int(config.get("num_key_value_heads") or elsewhere or heads)
        size = int(config.get("head_dim") or self._get_config_value(config, "hidden_size") // heads)
        multiplier = args.kv_size_multiplier if args.qkv_linear else 1
        return HeadOrder(heads, kv_heads, multiplier, args.tp_size, args.hw_backend == "trn2"), size

    def _rank_name(self, name: str, args: argparse.Namespace) -> str:
        """Return the name of the rank's tensor that contains a whole one."""
        prefix, ending = _split_name(name)
        if ending in _FUSED["gate_up_proj.weight"]:
            return f"{prefix}gate_up_proj.weight"
        if ending not in _FUSED["qkv_proj.weight"]:
            return name
        if args.qkv_linear:
            return f"{prefix}qkv_proj.weight_{'qkv' if args.fuse_qkv else ending[0]}"
        return f"{prefix}qkv_proj.weight" if args.coalesce_qkv else name

    def _unfused(self, name: str, tensor: Tensor, args: argparse.Namespace) -> dict[str, Tensor]:
        """Return the consecutive parts of a fused tensor; for any other, the tensor itself."""
        prefix, ending = _split_name(name)
        parts = _FUSED.get(ending, ())
        if len(parts) < 2:
            return {name: tensor}
        dim = self._dim_of(name) or 0
        lengths = [tensor.shape[dim] // len(parts)] * len(parts)
        if ending in _FUSED_HEADS:
            order, size = self._heads(args)
            lengths = [order.num_heads * size, order.num_kv_heads * size, order.num_kv_heads * size]
        if sum(lengths) != tensor.shape[dim]:
            raise ValueError(
                f"{name} {list(tensor.shape)} needs {lengths} rows according to --config; pass the model's own config"
            )
        return {prefix + part: value for part, value in zip(parts, tensor.split(lengths, dim), strict=True)}

    def _sharding(
        self, rank_names: Any, shapes: Mapping[str, tuple[int, ...]], args: argparse.Namespace
    ) -> dict[str, Sharding]:
        """The sharding of each rank tensor, given the shapes of the whole tensors."""
        sharding: dict[str, Sharding] = {}
        for name in rank_names:
            prefix, ending = _split_name(name)
            dim = self._dim_of(name)
            if ending in _FUSED:
                wholes = [prefix + part for part in _FUSED[ending]]
                sharding[name] = stacked({it: shapes[it] for it in wholes}, dim or 0, self._runs(wholes, shapes, args))
            elif args.qkv_linear and ending == "o_proj.weight":
                sharding[name] = stacked({name: shapes[name]}, dim or 0, self._runs([name], shapes, args))
            else:
                sharding[name] = Split(dim)
        return sharding

    def _runs(
        self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]], args: argparse.Namespace
    ) -> list[list[tuple[str, int, int]]]:
        """For each rank, the consecutive runs `(whole tensor, begin, length)` of its tensor."""
        runs: list[list[tuple[str, int, int]]] = [[] for _ in range(args.tp_size)]
        for name in names:
            ending = _split_name(name)[1]
            if ending in _FUSED["gate_up_proj.weight"]:
                total = shapes[name][self.gate_up_proj_partition_dim]
                if total % args.tp_size:
                    raise ValueError(f"--tp_size {args.tp_size} does not divide {name} {list(shapes[name])}; lower it")
                length = total // args.tp_size
                for rank, own in enumerate(runs):
                    own.append((name, rank * length, length))
                continue
            order, size = self._heads(args)
            for rank, own in enumerate(runs):
                is_kv = ending in ("k_proj.weight", "v_proj.weight")
                heads = order.kv_heads_of(rank) if is_kv else order.heads_of(rank)
                own += [(name, head * size, size) for head in heads]
        return runs

    def _whole_shapes(
        self, local: Mapping[str, tuple[int, ...]], args: argparse.Namespace
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of the whole tensors, from those of a rank."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in local.items():
            prefix, ending = _split_name(name)
            dim = self._dim_of(name)
            for part in _FUSED.get(ending, ("",)):
                whole = list(shape)
                if ending == "gate_up_proj.weight":
                    whole[dim or 0] = shape[dim or 0] // 2 * args.tp_size
                elif ending in _FUSED:
                    order, size = self._heads(args)
                    heads = order.num_heads if part == "q_proj.weight" else order.num_kv_heads
                    whole[dim or 0] = heads * size
                elif dim is not None:
                    whole[dim] = shape[dim] * args.tp_size
                shapes[prefix + part if part else name] = tuple(whole)
        return shapes

    def _stages(self, full_state: Mapping[str, Any], args: argparse.Namespace) -> Any:
        """The pipeline rank of each tensor: layers in even runs, the embedding first, norm and head last."""
        found = (re.match(self.layer_name_pattern, name) for name in full_state)
        layers = sorted({match[1] for match in found if match}, key=lambda name: int(re.findall(r"\d+", name)[0]))
        cuts = create_partitions(args.pp_size * args.virtual_pp_size, layers) if args.pp_size > 1 else []
        ends = [layers.index(cut) for cut in cuts]

        def stage_of(name: str) -> int:
            match = re.match(self.layer_name_pattern, name)
            if match:
                stage = sum(layers.index(match[1]) > end for end in ends)
                return stage_to_pipeline_parallel_rank(stage, pp_size=args.pp_size)
            return 0 if "embed_tokens" in name or "wte" in name else args.pp_size - 1

        return stage_of

    def _rewrite(self, args: argparse.Namespace, *, xser: bool) -> None:
        files = v2_files(args.input_dir) or v1_files(args.input_dir)
        if not files:
            raise ValueError(f"{args.input_dir} holds no rank files; pass the folder with dp_rank_00_tp_rank_... .pt")
        folder = os.path.join(args.output_dir, "model")
        os.makedirs(folder, exist_ok=True)
        for rank, file in files.items():
            (write_xser if xser else write_file)(load_rank_file(file), os.path.join(folder, v2_name(rank)))


class _InMemory:
    """Tensors in memory as a source for the writers of nxd_ckpt."""

    objects: Any = None
    is_mapped = False

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.tensors = {name: TensorInfo(it.dtype, tuple(it.shape)) for name, it in state.items()}

    def shards(self, name: str, box: Any) -> Sequence[Shard]:
        tensor = self._state[name]
        return [Shard(tensor, (0,) * tensor.dim())]


def _refuse_unsupported(args: argparse.Namespace) -> None:
    refused = {
        "--ep_size above 1": args.ep_size > 1,
        "--i_tp_round_factor": args.i_tp_round_factor > 0,
        "--pad_attn_heads": args.pad_attn_heads,
        "--model_style megatron": args.model_style != "hf",
    }
    asked = [name for name, is_asked in refused.items() if is_asked]
    if asked:
        raise ValueError(
            f"{', '.join(asked)}: not supported by this converter; load_checkpoint pads heads with pad_model=True and "
            "reads transformers weights at any layout"
        )


def _split_name(name: str) -> tuple[str, str]:
    """Split a name before its last module: `("model.layers.0.mlp.", "up_proj.weight")`."""
    parts = name.split(".")
    return "".join(f"{part}." for part in parts[:-2]), ".".join(parts[-2:])


def _own_checkpoint(path: str | None) -> Checkpoint | None:
    """The `save_checkpoint` checkpoint at a path, which may end in `model` as in the old library."""
    if not path or v2_files(path) or v1_files(path):
        return None
    folder, last = os.path.split(os.path.normpath(path))
    try:
        found = find_checkpoint(path if os.path.isdir(path) or last != "model" else folder, None)
    except CheckpointError:
        return None
    return open_checkpoint(found.root, found.tag) if found.layout == "nxd" else None


@contextmanager
def _readable(path: str | None) -> Iterator[str]:
    """The folder of a checkpoint; a folder with rank files only is wrapped in a temporary one."""
    if not path or not os.path.isdir(path):
        raise ValueError(f"--input_dir {path} is not a folder; pass the folder with the rank files")
    if not v2_files(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(os.path.abspath(path), os.path.join(folder, "model"))
        for marker in (BEGUN_MARKER, DONE_MARKER):
            Path(folder, marker).write_text("1", encoding="ascii")
        yield folder


def _boolean(text: str) -> bool:
    """Parse a boolean as scripts write it: `--qkv_linear True`, or 1."""
    if text.lower() in ("true", "1"):
        return True
    if text.lower() in ("false", "0", ""):
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither True nor False")
