"""A script's model becomes an `NxDModel`: split in place, with the names and the class that it had."""

from collections.abc import Iterable, Mapping
from functools import wraps
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

from nxd_engine import NxDModel, initialize_parallel_model
from nxd_layers import hf
from nxd_state import all_ranks, get_mesh, is_transformers_model, transformers_model_in, use_loss_over_labels
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from nxd_hf_trainer.backbone import BackboneStages, called_as_backbone
from nxd_hf_trainer.guards import check_first_batches, save_pretrained_of
from nxd_hf_trainer.pipelined import PipelinedForward, generates_without_cache
from nxd_hf_trainer.refusals import check_model


class SplitModels:
    """The models that have been split, and which of their parameters replace those of the script's model.

    A script's module keeps its parallel model alive, and nothing here does.

    Args:
        config: the complete config of the layout.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self._of_module: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of each module, the parallel model
        self._pipelined: WeakKeyDictionary[PipelinedForward, None] = WeakKeyDictionary()  # ordered, unlike a set
        self._places: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of each parameter, old and new, model and name

    def split(self, module: nn.Module) -> NxDModel:
        """Return the parallel model of a module; the same one for each call. Called by all ranks.

        The module itself is changed and stays usable; a transformers model keeps its class.

        Raises:
            ValueError: the model cannot be split, or trained so.
        """
        if isinstance(module, NxDModel):
            return module
        if (known := self._model_of(module)) is not None:
            return known
        check_model(module, self.config)
        before = dict(module.named_parameters(remove_duplicate=False))
        whole = transformers_model_in(module)
        size: Any = whole.num_parameters if is_transformers_model(whole) else None
        counts = {exclude: size(exclude_embeddings=exclude) for exclude in (False, True)} if size is not None else {}
        with all_ranks():
            model = self._parallel_model(module)
        check_first_batches(model)
        if is_transformers_model(whole) and not self._is_whole():
            for it in {whole, module}:  # PEFT's model writes its adapters
                _replace(it, "save_pretrained", save_pretrained_of(it, model))
        if counts:  # those of the whole model, from which Trainer estimates its operations
            _replace(whole, "num_parameters", _counted(counts))
        if is_transformers_model(whole):  # of whom `stream_weights` asks its class, as of a saved model
            whole.config.architectures = [type(whole).__name__]
        self._of_module[module] = ref(model)
        _replace(module, "parallel_model", lambda: model)  # a function, since deep copies share it
        after = (it.named_parameters(remove_duplicate=False) for it in (model, module))
        for name, parameter in chain(before.items(), *after):
            self._places[parameter] = (ref(model), name)
        return model

    def module_of(self, model: NxDModel) -> nn.Module:
        """Return the script's module of which a parallel model was made."""
        found: nn.Module = next(module for module, made in self._of_module.items() if made() is model)
        return found

    def finish_backward(self) -> None:
        """Run the second pass of models that are cut into stages, after a backward of the script."""
        for forward in list(self._pipelined):
            forward.finish_backward()

    def forget_backward(self, trained: Iterable[NxDModel]) -> None:
        """Drop what backwards have given to models that are cut into stages, and no step has used."""
        for forward in list(self._pipelined):
            if any(forward.model is model for model in trained):
                forward.forget_backward()

    def models_of(self, parameters: Iterable[Tensor]) -> list[NxDModel]:
        """Return the split models that have any of these parameters."""
        places = [place for it in parameters if (place := self.place_of(it)) is not None]
        return list({id(model): model for model, _ in places}.values())

    def place_of(self, parameter: Tensor) -> tuple[NxDModel, str] | None:
        """Return the model and the name of a parameter, as it was before or after the split; None if unknown."""
        made, name = self._places.get(parameter, (None, ""))
        model = None if made is None else made()
        return None if model is None else (model, name)

    def _model_of(self, module: nn.Module) -> NxDModel | None:
        made: ref[NxDModel] | None = self._of_module.get(module)
        return None if made is None else made()

    def _is_whole(self) -> bool:
        """Whether each rank has all of each model's parameters."""
        model_ranks = (self.config[f"{it}_parallel_size"] for it in ("tensor", "pipeline", "context"))
        is_sharded = get_mesh().splits_experts or self.config["optimizer_config"]["zero_stage"] == 3
        return not is_sharded and all(size == 1 for size in model_ranks)

    def _parallel_model(self, module: nn.Module) -> NxDModel:
        pipeline: Mapping[str, Any] = self.config["pipeline_config"]
        if self.config["pipeline_parallel_size"] == 1:
            return initialize_parallel_model(self.config, lambda: self._split_layers(module))

        self._split_layers(module)
        whole = transformers_model_in(module)
        use_loss_over_labels(whole)
        stages = BackboneStages(whole)
        with stages.cut(whole):
            model = initialize_parallel_model(
                {**self.config, "pipeline_config": {**pipeline, "input_names": stages.input_names}}, lambda: module
            )
        forward = PipelinedForward(model, whole, stages, pipeline["num_microbatches"])

        @wraps(forward)
        def call_module(*args: Any, **kwargs: Any) -> Any:
            return module(*args, **kwargs)  # with its hooks

        _replace(model, "forward", call_module)
        _replace(whole, "forward", forward)  # Trainer also calls the module that it was given
        for backbone in called_as_backbone(whole):
            _replace(backbone, "forward", forward.run_backbone)
        if hasattr(whole, "generate"):
            _replace(whole, "generate", generates_without_cache(whole))
        _share_training_mode(model, module)
        stages.free_other_stages(module, model.parameters())
        _replace(module, "state_dict", _refuse_state_dict)
        self._pipelined[forward] = None
        return model

    def _split_layers(self, module: nn.Module) -> nn.Module:
        mesh = get_mesh()
        tp, cp = self.config["tensor_parallel_size"], self.config["context_parallel_size"]
        if tp == cp == 1 and not mesh.splits_experts:
            return module
        whole = transformers_model_in(module)
        embeddings = whole.get_input_embeddings()
        hf.parallelize(
            whole,
            expert_parallel=mesh.splits_experts,
            sequence_parallel=self.config["sequence_parallel"],
            vocabulary_parallel_loss="whole_logits",  # which metrics and losses of scripts read
        )
        _share_hooks(embeddings, whole.get_input_embeddings())
        if tp > 1 or cp > 1:
            head: Any = whole.get_output_embeddings
            _replace(whole, "get_output_embeddings", lambda: hf.WholeHead(head()))
        return module


def parallel_model_in(model: Any) -> NxDModel | None:
    """Return the parallel model that Accelerate may have compiled; None for any other model."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, NxDModel) else None


def _refuse_state_dict(*args: Any, **kwargs: Any) -> Any:
    raise ValueError(
        "this model is cut into pipeline stages, and has no tensors of others; use the model that Accelerator.prepare "
        "returned (trainer.model_wrapped), as in accelerator.get_state_dict(model)"
    )


def _counted(counts: Mapping[bool, int]) -> Any:
    """Return a `num_parameters` for a split model; all parameters, as those that train are counted on no rank."""

    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return counts[exclude_embeddings]

    return num_parameters


def _share_hooks(before: nn.Module, after: nn.Module) -> None:
    """Give the layer that replaces the embeddings their hooks and what these read; handles of hooks stay valid.

    NEFTune has one there, which reads its strength from the layer.
    """
    if after is not before:
        for name, value in vars(before).items():
            if not name.startswith("_") and not hasattr(after, name):
                setattr(after, name, value)
        for name in ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
            setattr(after, name, getattr(before, name))


def _share_training_mode(model: NxDModel, module: nn.Module) -> None:
    """Let `train` and `eval` of a model that is cut into stages, and of the module that was cut, set both."""

    def train_as(returned: nn.Module) -> Any:
        def train(mode: bool = True) -> nn.Module:
            type(model).train(model, mode)
            type(module).train(module, mode)
            return returned

        return train

    for it in (model, module):
        _replace(it, "train", train_as(it))


def _replace(module: nn.Module, method: str, replacement: Any) -> None:
    setattr(module, method, replacement)
