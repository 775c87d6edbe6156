"""Speculative decoding: a small draft model guesses tokens, of which the model keeps those that it would have written.

The draft's cache has the blocks of the model's, and a sequence has the same ones in both: what is shared between texts
is shared in both. What the draft's cache lacks, such as the answers of sequences that draw, costs wrong guesses only:
every token that is kept was chosen from the model's own logits.
"""

from collections.abc import Mapping, Sequence

from nxd_trace.generation.programs import CachedModel, Row
from nxd_trace.generation.sequence import RunningSequence


class Drafter:
    """A draft model beside the model whose tokens it guesses.

    Args:
        draft: compiled with the sizes of the model.
        model: compiled with room for guesses.

    Attributes:
        draft: the same.
        num_proposed: guesses so far.
        num_accepted: number of tokens that the model kept.

    Raises:
        ValueError: they do not fit each other, or the model has no room for guesses.
    """

    def __init__(self, draft: CachedModel, model: CachedModel) -> None:
        for what in ("vocab_size", "max_length", "batch_size", "block_size", "prefill_lengths"):
            ours, theirs = getattr(draft, what), getattr(model, what)
            if ours != theirs:
                raise ValueError(
                    f"the draft model has {what}={ours}, but the model {what}={theirs}; use a draft with the same "
                    "vocabulary, and compile it with the same sizes"
                )
        self._most = model.num_rows // model.batch_size - 1
        if self._most < 1 or draft.num_rows < 2 * draft.batch_size:
            raise ValueError(
                "a model or its draft was compiled without speculative tokens; pass compile_generator "
                "num_speculative_tokens of 1 or more, also for the draft"
            )
        self.draft = draft
        self.num_proposed = 0
        self.num_accepted = 0

    def propose(self, sequences: Sequence[RunningSequence]) -> list[list[int]]:
        """Guess what follows each text: as many tokens as there is room and use for.

        Raises:
            WorkerError: a worker of the draft failed.
        """
        guesses: list[list[int]] = [[] for _ in sequences]
        wanted = [min(self._most, sequence.num_guessable) for sequence in sequences]
        unseen = {
            index: list(sequence.text[sequence.num_drafted :])
            for index, sequence in enumerate(sequences)
            if wanted[index]
        }
        while unseen:
            for index, token in self._next_tokens(sequences, unseen).items():
                guesses[index].append(token)
            unseen = {index: guesses[index][-1:] for index in unseen if len(guesses[index]) < wanted[index]}
        self.num_proposed += sum(map(len, guesses))
        return guesses

    def note_accepted(self, sequence: RunningSequence, guesses: Sequence[int], number: int) -> None:
        """The model kept this many of a sequence's guesses; what the draft saw of the others is written over."""
        self.num_accepted += number
        # The last guess has not been fed.
        sequence.num_drafted -= max(0, len(guesses) - 1 - number)

    def _next_tokens(self, sequences: Sequence[RunningSequence], unseen: Mapping[int, Sequence[int]]) -> dict[int, int]:
        """Feed what the draft has not seen; the likeliest token after each."""
        rows, ends = [], {}
        for index, tokens in unseen.items():
            sequence = sequences[index]
            rows += [Row(token, sequence.num_drafted + place, sequence.blocks) for place, token in enumerate(tokens)]
            sequence.num_drafted += len(tokens)
            ends[index] = len(rows) - 1
        likeliest = self.draft.feed_rows(rows).argmax(dim=1)
        return {index: int(likeliest[end]) for index, end in ends.items()}
