"""Tokenizes conversations with a tokenizer's chat template, and determines which tokens the loss counts.

A conversation is rendered once, as a whole, and its answers are found in the text: by `{% generation %}` if the
template marks them, otherwise by the output of each pass of its loop over messages. Without such a loop, the text
before an answer and the text up to its end are rendered separately, and both must be prefixes of the whole. Then the
text that the model's processor makes of each image takes the place of the image's token.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from reprlib import repr as short_repr
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nxd_data.content_parts import (
    count_images,
    forms_of_contents,
    text_of,
    texts_of,
    with_text,
)
from nxd_data.image_processor import ImageProcessor, Spans, has_processor, template_of_processor
from nxd_data.image_tokens import ConversationImages, check_num_images, check_text
from nxd_data.messages import (
    MARKS,
    REASONING_KEYS,
    Conversation,
    forms_of_calls,
    function_of,
    is_learned,
    plain_messages,
    read_conversation,
    spells_objects,
    thought_in_content,
    thought_of,
    with_reasoning,
)
from nxd_data.rendering import OWN_VARIABLES, MessageLostError, Rendered, RenderTask, TemplateRenderer
from nxd_data.stored_images import EncodedImage, ImageFiles
from nxd_data.tokenizer import digest_files, encoding_errors, load_tokenizer_of_transformers

VOCABULARY_FILES = ("vocab.txt", "merges.txt")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_LONGEST_NAME = 64
_DEVELOPER = re.compile(r"""["']developer["']""")

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class EncodedConversation(NamedTuple):
    """A conversation as tokens."""

    tokens: NDArray[np.int64]  # ids `[tokens]`
    learned: NDArray[np.bool_]  # `[tokens]` true for tokens that the loss counts
    num_lost_thoughts: int = 0  # number of learned answers whose thoughts the template omits
    images: Sequence[EncodedImage] = ()  # the images and their tokens, in order


class EncodedRow(NamedTuple):
    """The samples in a row, and the first special token that its text spells, and so becomes, if any."""

    samples: list[EncodedConversation]
    special_token: str | None = None


class RowEncoder(Protocol):
    """Turns a row into samples."""

    marks_answers: bool  # whether the answers are known without searching for them
    fingerprint: str  # changes whenever the same row would give different tokens

    def encode_row(self, place: str, row: Mapping[str, Any], files: ImageFiles | None = None) -> EncodedRow:
        """Return the samples in a row; `place` is its location, for messages, and `files` reads its images."""


class ChatTemplate:
    """A tokenizer with a chat template; a `RowEncoder` of conversations.

    Args:
        path: the folder of a tokenizer as Hugging Face models ship it, or its tokenizer.json.
        sequence_length: tokens of a sequence; a conversation with more images than these is refused before they are
            read. None for any number.

    Raises:
        NoChatTemplateError: the tokenizer has no chat template.
        ValueError: there is no such tokenizer, or transformers is not installed.
    """

    def __init__(self, path: str | Path, *, sequence_length: int | None = None) -> None:
        self._sequence_length = sequence_length
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self._folder = folder
        self._tokenizer = load_tokenizer_of_transformers(folder)
        if of_processor := template_of_processor(folder):
            self._tokenizer.chat_template = of_processor
        if not self._tokenizer.chat_template:
            raise NoChatTemplateError(
                f"data.chat=true needs a chat template, but {folder} has none; set data.tokenizer to the tokenizer of "
                "a chat model"
            )
        self._renderer = TemplateRenderer()
        self._processor: ImageProcessor | None = None  # loaded for the first image
        self._closing: dict[str, list[int]] = {}
        self._stand_in = f"nxd{secrets.token_hex(6)}"
        self._special_ids = {number for number, it in self._tokenizer.added_tokens_decoder.items() if it.special}
        self.marks_answers = _GENERATION.search(self._tokenizer.get_chat_template(None, None)) is not None
        added = (it.content for it in self._tokenizer.added_tokens_decoder.values() if it.special)
        special = dict.fromkeys([*self._tokenizer.all_special_tokens, *added])
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        files = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
        known = [it for it in files if it.suffix in (".json", ".model", ".jinja") or it.name in VOCABULARY_FILES]
        self.fingerprint = digest_files(sorted(known))

    def encode_row(self, place: str, row: Mapping[str, Any], files: ImageFiles | None = None) -> EncodedRow:
        """Encode the conversation in a row; raises ValueError as `read_conversation` and `encode` do."""
        conversation = read_conversation(place, row)
        texts = map(text_of, conversation.messages)
        spelled = (found.group() for text in texts if (found := self._special.search(text)))
        return EncodedRow([self.encode(place, conversation, files)], next(spelled, None))

    def encode(self, place: str, conversation: Conversation, files: ImageFiles | None = None) -> EncodedConversation:
        """Tokenize a conversation, and mark the assistant's tokens.

        Args:
            place: location of the conversation, for messages.
            conversation: the conversation.
            files: reads its images.

        Raises:
            ValueError: the template refuses the conversation, omits a message, or hides the answers; or an image
                cannot be read, or the model takes none.
        """
        messages, tools = conversation.messages, conversation.tools
        if count_images(messages) != len(conversation.images):
            raise ValueError(f"{place} has images, which are not supported here; leave them out")
        pictures, checker = None, None
        if conversation.images:
            check_num_images(place, len(conversation.images), self._sequence_length)
            pictures = ConversationImages(self._image_processor(place), conversation.images, files)
        elif has_processor(self._folder) and (found := self._special.search(str([*messages, *(tools or ())]))):
            checker = self._image_processor(place, f"spells {found.group()!r}")
        answers = [it for it in range(conversation.first_answer, len(messages)) if is_learned(messages[it])]
        before: dict[str, int] = {}  # for each role that precedes an answer, one such answer
        for answer in answers:
            before[messages[answer - 1]["role"] if answer else ""] = answer
        count = len(messages)
        jobs = [
            RenderTask(count=count, marked=True),
            *(RenderTask(count=it, asks=True, marked=True) for it in before.values()),
        ]
        try:
            text, (marked, *prompts), lost_thoughts = self._render(messages, tools, jobs)
            headers = {role: it.text[it.end :] for role, it in zip(before, prompts, strict=True) if it.end}
            spans = self._spans(text, marked, conversation, answers, headers)
            if spans is None:
                spans = self._spans_by_prefixes(text, conversation, answers)
            of_images: Spans = []
            if checker is not None:
                check_text(checker, text, 0)
            if pictures is not None:
                text, spans, of_images = pictures.take_places(text, spans)
            ids, learned, bounds = self._tokens(text, spans, of_images)
            if answers and answers[-1] == count - 1 and len(ids) and learned[-1]:
                closing = self._closing_tokens(messages, tools, ids)
                ids = np.append(ids, np.asarray(closing, dtype=np.int64))
                learned = np.append(learned, np.ones(len(closing), dtype=np.bool_))
            images = () if pictures is None else pictures.encoded(bounds)
            return EncodedConversation(ids, learned, len(lost_thoughts.intersection(answers)), images)
        except Exception as error:  # tokenizers raise various errors for a lone surrogate
            raise ValueError(f"{place}: {self._refusal(error)}") from error

    def encode_prompt(
        self, messages: Sequence[Message], tools: Tools = None, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Tokenize a conversation for the assistant to answer.

        Args:
            messages: messages in OpenAI's format.
            tools: JSON schemas of the tools for the template.
            variables: other variables for the template, such as `enable_thinking`: plain JSON.

        Raises:
            ValueError: the template refuses the conversation, or omits a message.
            LookupError: the template does not read a variable, or we already set it.
        """
        plain = plain_messages("messages", messages)
        if count_images(plain):
            raise ValueError("messages have images, which are not supported here; send text alone")
        text = self.render_prompt(plain, tools, variables)
        try:
            return [int(token) for token in self._tokenize(text)["input_ids"]]
        except Exception as error:  # as in `encode`
            raise ValueError(self._refusal(error)) from error

    def render_prompt(
        self, messages: Sequence[Message], tools: Tools = None, variables: Mapping[str, Any] | None = None
    ) -> str:
        """Return the text of a conversation for the assistant to answer; otherwise as `encode_prompt`.

        A content may be a list of parts, `{"type": "text", "text": ...}` and `{"type": "image"}`; the text has the
        template's token for each image.
        """
        plain = plain_messages("messages", messages)
        self._check_variables(variables or {}, tools or None)
        try:
            text, *_ = self._render(plain, tools or None, [], asks=True, variables=variables or {})
        except Exception as error:  # as in `encode`
            raise ValueError(self._refusal(error)) from error
        return text

    def _image_processor(self, place: str, why: str = "has images") -> ImageProcessor:
        """Return the processor in the tokenizer's folder, loaded once; raises ValueError if there is none."""
        if self._processor is None:
            try:
                self._processor = ImageProcessor(self._folder)
            except ValueError as error:
                raise ValueError(f"{place} {why}, but {error}") from error
        return self._processor

    def _check_variables(self, variables: Mapping[str, Any], tools: Tools) -> None:
        ours = {*OWN_VARIABLES, *self._tokenizer.special_tokens_map}
        written = set(_NAME.findall(self._tokenizer.get_chat_template(None, tools)))
        for name in variables:
            if name in ours:
                raise LookupError(f"{name!r} is already set for the chat template; leave it out")
            if name.startswith("_") or name not in written:
                near = get_close_matches(name[:_LONGEST_NAME], written - ours, 1, cutoff=0.8)
                advice = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise LookupError(f"the chat template of {self._folder} does not read {short_repr(name)}; {advice}")

    def _refusal(self, error: Exception) -> str:
        if isinstance(error, MessageLostError):
            return str(error)
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"the chat template of {self._folder} refuses it: {reason}"

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        jobs: Sequence[RenderTask],
        *,
        asks: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> tuple[str, list[Rendered], set[int]]:
        """Return the checked text of all messages, the results of `jobs`, and the messages whose thoughts are missing.

        Raises:
            ValueError: the template fails, or omits a message.
        """
        template = self._tokenizer.get_chat_template(None, tools)
        messages = [{key: value for key, value in message.items() if key not in MARKS} for message in messages]
        messages = [with_reasoning(message) for message in messages]
        if not _DEVELOPER.search(template):
            messages = [{**it, "role": "system"} if it["role"] == "developer" else it for it in messages]
        refusal: ValueError | None = None
        for form in forms_of_contents(messages):
            try:
                return self._render_form(template, form, tools, jobs, asks=asks, variables=variables)
            except ValueError as error:
                refusal = refusal or error
        assert refusal is not None
        raise refusal

    def _render_form(
        self,
        template: str,
        messages: Sequence[Message],
        tools: Tools,
        jobs: Sequence[RenderTask],
        *,
        asks: bool,
        variables: Mapping[str, Any],
    ) -> tuple[str, list[Rendered], set[int]]:
        """Render messages as `_render` does, with their contents as they are."""
        found: list[Rendered] = []
        for variant in forms_of_calls(messages):
            stand_ins = [self._with_stand_ins(number, it) for number, it in enumerate(variant)]
            whole = [RenderTask(count=len(variant), asks=asks), RenderTask(messages=stand_ins, asks=asks)]
            told = {**variables, **self._tokenizer.special_tokens_map}
            rendered = self._renderer.render(template, told, variant, tools, [*whole, *jobs])
            if not found or rendered[0].error is None:
                found = rendered
            if rendered[0].error is None and not spells_objects(variant, rendered[0].text):
                break
        text, probe, *others = found
        if text.error is not None:
            raise ValueError(text.error)
        self._check_rendered(messages, tools, text.text, probe)
        lost = {
            number
            for number, message in enumerate(messages)
            if (thought := thought_of(message))
            and (thought not in text.text if probe.error else f"{self._stand_in}y{number}y" not in probe.text)
        }
        return text.text, others, lost

    def _with_stand_ins(self, number: int, message: Message) -> Message:
        """Return a message with unique placeholder texts as its content and thought."""
        content, thought = f"{self._stand_in}x{number}x", f"{self._stand_in}y{number}y"
        changed = {key: thought for key in REASONING_KEYS if message.get(key)}
        if text_of(message):
            thinks = thought_in_content(message) is not None
            message = with_text(message, f"<think>\n{thought}\n</think>\n\n{content}" if thinks else content)
        return {**message, **changed}

    def _check_rendered(self, messages: Sequence[Message], tools: Tools, text: str, probe: Rendered) -> None:
        """Raise ValueError unless a text has all calls, tools and contents; `probe` has placeholders for contents.

        A template may omit the content beside a tool call, as gpt-oss omits earlier thoughts.
        """
        left_out = f"the chat template of {self._folder} leaves out"
        other = "or give the tokenizer a template that renders them"
        for number, message in enumerate(messages):
            calls = [function_of(call).get("name", "") for call in message.get("tool_calls", ())]
            content = text_of(message).strip()
            if probe.error is None:
                is_there = not content or f"{self._stand_in}x{number}x" in probe.text
            else:
                is_there = all(part.strip() in text for part in texts_of(message))
            if not all(_is_in(text, name) for name in calls):
                raise MessageLostError(f"{left_out} the tool_calls of message {number}; write them as text, {other}")
            if not is_there and not calls:
                role = f"message {number}, of the role {message['role']!r}"
                raise MessageLostError(f"{left_out} {role}; use a role that it renders")
        lost = [name for tool in tools or () if not _is_in(text, name := str(function_of(tool).get("name", "")))]
        if lost:
            raise MessageLostError(f"{left_out} tools, such as {lost[0]!r}; leave tools out, {other}")

    def _spans(
        self,
        text: str,
        marked: Rendered,
        conversation: Conversation,
        answers: Sequence[int],
        headers: Mapping[str, str],
    ) -> Spans | None:
        """Locate the answers in a text by its marks; None if these do not suffice.

        `headers`: the text that prompts for an answer, by the role before it.
        """
        if marked.error is not None or marked.text != text:
            return None
        messages = conversation.messages
        passes: dict[int, Spans] = {}
        for number, start, end in marked.passes:
            if text[start:end].strip():
                passes.setdefault(number, []).append((start, end))
        last = len(messages) - 1
        if last in passes and passes[last][-1][1] == marked.end:
            passes[last][-1] = (passes[last][-1][0], len(text))  # the end of the conversation belongs to its last turn
        if _GENERATION.search(self._tokenizer.get_chat_template(None, conversation.tools)):
            generated = [(start, end) for start, end in marked.generated]
            if len(answers) == sum(message["role"] == "assistant" for message in messages):
                return generated
            if not passes:
                return None
            of_answers = [span for answer in answers for span in passes.get(answer, ())]
            return [it for it in generated if any(start <= it[0] and it[1] <= end for start, end in of_answers)]
        spans: Spans = []
        for answer in answers:
            message, written = messages[answer], passes.get(answer, [])
            if not written and (message.get("content") or message.get("tool_calls")):
                return None
            for index, (start, end) in enumerate(written):
                header = headers.get(messages[answer - 1]["role"] if answer else "", next(iter(headers.values()), ""))
                spans.append((start + (0 if index else _length_of_header(text[start:end], header, message)), end))
        return spans

    def _spans_by_prefixes(self, text: str, conversation: Conversation, answers: Sequence[int]) -> Spans:
        """Locate the answers in a text between the separately rendered text before them and up to their ends."""
        messages, tools = conversation.messages, conversation.tools
        spans = []
        for answer in answers:
            bounds = []
            for count, asks in ((answer, True), (answer + 1, False)):
                prefix = self._render(messages[:count], tools, [], asks=asks)[0] if count else ""
                if not prefix or not text.startswith(prefix):
                    raise MessageLostError(
                        f"the chat template of {self._folder} renders the text "
                        f"{'before' if asks else 'up to'} message {answer} differently than in the whole "
                        "conversation, and has no loop over messages to find its tokens by; mark answers with "
                        "{% generation %} in the template, or end the conversation there"
                    )
                bounds.append(len(prefix))
            spans.append((bounds[0], bounds[1]))
        return spans

    def _tokens(
        self, text: str, spans: Spans, of_images: Spans
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[tuple[int, int]]]:
        """Tokenize a text, mark the tokens that overlap spans, and return the first and the end of those of images.

        If no special token ends a span, the special token after it is the one the assistant stops with, such as the
        next role in GLM's templates.
        """
        is_fast = self._tokenizer.is_fast
        encoded = self._tokenize(text, with_offsets=is_fast)
        ids = np.asarray(encoded["input_ids"], dtype=np.int64)
        if is_fast:
            offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        else:
            offsets = self._offsets(text, ids, [*spans, *of_images])
        learned = np.zeros(len(ids), dtype=np.bool_)
        for start, end in spans:
            inside = (offsets[:, 0] < end) & (offsets[:, 1] > start)
            learned |= inside
            said = [it for it in np.flatnonzero(inside) if text[offsets[it, 0] : offsets[it, 1]].strip()]
            following = int(np.flatnonzero(inside)[-1]) + 1 if said else len(ids)
            if following < len(ids) and ids[said[-1]] not in self._special_ids and ids[following] in self._special_ids:
                learned[following] = True
        bounds = []
        for start, end in of_images:  # there may be thousands
            first = int(np.searchsorted(offsets[:, 1], start, side="right"))
            last = int(np.searchsorted(offsets[:, 0], end))
            bounds.append((first, last))
            learned[first:last] = False
        return ids, learned, bounds

    def _closing_tokens(self, messages: Sequence[Message], tools: Tools, ids: NDArray[np.int64]) -> list[int]:
        """Return the assistant's stop token after the last answer, if the template leaves it to the next message."""
        special = [it in self._special_ids for it in ids.tolist()]
        last = len(ids) - 1
        while last > 0 and not special[last] and not self._tokenizer.decode([ids[last]]).strip():
            last -= 1
        if special[last]:
            return []
        role = "tool" if messages[-1].get("tool_calls") else "user"
        if role not in self._closing:
            following = [*messages, {"role": role, "content": self._stand_in}]
            count = len(following)
            self._closing[role] = []
            with suppress(ValueError):
                text, (marked,), _ = self._render(following, tools, [RenderTask(count=count, marked=True)])
                turns = [
                    text[start:]
                    for number, start, end in marked.passes
                    if number == count - 1 and text[start:end].strip()
                ]
                first = self._tokenize(turns[0])["input_ids"][:1] if turns and marked.text == text else []
                self._closing[role] = [it for it in first if it in self._special_ids]
        return self._closing[role]

    def _offsets(self, text: str, ids: NDArray[np.int64], spans: Spans) -> NDArray[np.int64]:
        """Return the span bounds around each token, for a tokenizer without offsets."""
        bounds = sorted({0, len(text), *(bound for span in spans for bound in span)})
        offsets = np.zeros((len(ids), 2), dtype=np.int64)
        first = 0
        for start, end in pairwise(bounds):
            prefix = self._tokenize(text[:end])["input_ids"]
            if ids[: len(prefix)].tolist() != list(prefix):
                raise ValueError("its tokenizer does not report offsets, and a token crosses the end of a turn")
            offsets[first : len(prefix)] = start, end
            first = len(prefix)
        return offsets

    def _tokenize(self, text: str, *, with_offsets: bool = False) -> Mapping[str, Any]:
        with encoding_errors():
            encoded: Mapping[str, Any] = self._tokenizer(
                text,
                add_special_tokens=False,
                padding=False,
                truncation=False,
                return_offsets_mapping=with_offsets,
                verbose=False,
            )
        return encoded


def _is_in(text: str, name: str) -> bool:
    return name in text or json.dumps(name)[1:-1] in text


def _length_of_header(turn: str, header: str, message: Message) -> int:
    """Return the length of the prompt header at the start of an answer's turn.

    A template may prompt for a thought but omit it from earlier answers: then it is the length of the common prefix.
    """
    if turn.startswith(header):
        return len(header)
    said = [text.strip() for text in (text_of(message), message.get("reasoning_content")) if text]
    shared = next((it for it, pair in enumerate(zip(turn, header, strict=False)) if pair[0] != pair[1]), len(turn))
    return min([shared, *(turn.find(text) for text in said if text and text in turn)])


class NoChatTemplateError(ValueError):
    """The tokenizer has no chat template."""
