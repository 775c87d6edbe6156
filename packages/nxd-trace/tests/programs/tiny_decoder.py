"""A decoder with one attention layer, whose heads are split over the ranks, and a reference without a cache."""

import torch
from nxd_state import active_group, all_reduce, set_shard_spec, shard_along
from nxd_trace.generation import CacheLayer, CacheView, PromptInputs, PromptInputShapes
from nxd_trace.generation.prompt_inputs import TokenInputs
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, HIDDEN, HEADS, POSITIONS = 32, 16, 2, 48
SIZE = HIDDEN // HEADS


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "tokens": (VOCAB, HIDDEN),
        "places": (POSITIONS, HIDDEN),
        "mix": (HIDDEN, HIDDEN),
        "head": (VOCAB, HIDDEN),
    }
    shapes |= dict.fromkeys(("to_query", "to_key", "to_value"), (HEADS, SIZE, HIDDEN))
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


class TinyDecoder(nn.Module):
    """Attention with this rank's heads, and their columns of the output projection."""

    max_positions = POSITIONS

    def __init__(self) -> None:
        super().__init__()
        group = active_group("tp")
        whole = weights()
        self.model = nn.ParameterDict()
        for name, tensor in whole.items():
            dim = {"to_query": 0, "to_key": 0, "to_value": 0, "mix": 1}.get(name)
            part = tensor if dim is None else tensor.chunk(group.size, dim)[group.rank].contiguous()
            self.model[name] = nn.Parameter(part)
            if dim is not None:
                set_shard_spec(self.model[name], shard_along(tensor.shape, dim, rank=group.rank, size=group.size))

    def cache_layers(self) -> list[CacheLayer]:
        return [CacheLayer(HEADS // active_group("tp").size, SIZE, SIZE, torch.float64)]

    def forward(self, input_ids: Tensor, positions: Tensor, cache: CacheView) -> Tensor:
        part = self.model
        hidden = part["tokens"][input_ids] + part["places"][positions]  # [batch, seq, hidden]
        query, key, value = (
            torch.einsum("bsh,ndh->bnsd", hidden, part[name]) for name in ("to_query", "to_key", "to_value")
        )
        key, value = cache.update(key, value, 0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=cache.mask)
        mixed = mixed[:, :, -1].flatten(1) @ part["mix"].T
        return (hidden[:, -1] + all_reduce(mixed, active_group("tp"))) @ part["head"].T


class TinyDraft(TinyDecoder):
    """Almost the same model, so that many of its draft tokens are accepted, but not all."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        head = self.model["head"]
        head.data += 0.5 * torch.randn(head.shape, generator=generator, dtype=head.dtype)


FEATURES = PromptInputShapes(HIDDEN, torch.float64, layers=(0,), num_axes=2, longest_span=5)


class DecoderWithFeatures(TinyDecoder):
    """Two layers of equal weights, so that what tokens before the last attend to matters.

    Reads features in place of tokens, and tells places by the mean of two rotary positions.
    """

    def cache_layers(self) -> list[CacheLayer]:
        return super().cache_layers() * 2

    def forward(self, input_ids: Tensor, positions: Tensor, cache: CacheView, inputs: TokenInputs) -> Tensor:
        del positions
        part = self.model
        hidden = part["tokens"][input_ids]
        if inputs.features is not None:
            hidden = torch.where(inputs.is_given.unsqueeze(-1), inputs.features[:, :, 0], hidden)
            hidden = hidden + inputs.features[:, :, 1]
        hidden = hidden + part["places"][inputs.rotary.sum(-1) // 2]
        for layer in range(2):
            query, key, value = (
                torch.einsum("bsh,ndh->bnsd", hidden, part[name]) for name in ("to_query", "to_key", "to_value")
            )
            key, value = cache.update(key, value, layer)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=cache.mask)
            hidden = hidden + all_reduce(mixed.transpose(1, 2).flatten(2) @ part["mix"].T, active_group("tp"))
        return hidden[:, -1] @ part["head"].T


class ReadsAtMostTwoColumns(TinyDecoder):
    """Rejects more than two columns."""

    def forward(self, input_ids: Tensor, positions: Tensor, cache: CacheView) -> Tensor:
        if input_ids.shape[1] > 2:
            raise ValueError(f"{input_ids.shape[1]} columns")
        return super().forward(input_ids, positions, cache)


class LargerVocabulary(TinyDecoder):
    """Has a larger vocabulary by one token."""

    def __init__(self) -> None:
        super().__init__()
        self.model["head"] = nn.Parameter(torch.zeros(VOCAB + 1, HIDDEN, dtype=torch.float64))


def plain_logits(tokens: list[int], inputs: PromptInputs | None = None, num_layers: int = 1) -> Tensor:
    """Return the logits after the last token, `[vocab]`, computed without a cache."""
    whole = weights()
    hidden, places = whole["tokens"][tokens], torch.arange(len(tokens))
    mask = torch.ones(len(tokens), len(tokens)).tril().bool()
    if inputs is not None:
        hidden[inputs.at] = inputs.features.sum(1)
        of_prompt = inputs.rotary.sum(1) // 2
        places = torch.cat([of_prompt, places[len(of_prompt) :] + inputs.rotary.max() + 1 - len(of_prompt)])
        for start, stop in inputs.spans:
            mask[start:stop, start:stop] = True
    hidden = hidden + whole["places"][places]
    for _ in range(num_layers):
        query, key, value = (
            torch.einsum("sh,ndh->nsd", hidden, whole[name]) for name in ("to_query", "to_key", "to_value")
        )
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + mixed.permute(1, 0, 2).flatten(1) @ whole["mix"].T
    return hidden[-1] @ whole["head"].T


def plain_greedy(
    prompt: list[int], new_tokens: int, inputs: PromptInputs | None = None, num_layers: int = 1
) -> list[int]:
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(plain_logits(tokens, inputs, num_layers).argmax()))
    return tokens[len(prompt) :]
