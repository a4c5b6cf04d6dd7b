"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from sixfold_api.runtime_config import EffectiveConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import Chunk, Done, FinishReason, Generate
from sixfold_runtime.gateway.core import Gateway, exchange_of
from sixfold_runtime.gateway.deadline import until
from sixfold_runtime.gateway.dispatch import Call, Restarted
from sixfold_runtime.gateway.errors import ApiError, bad_request, json_response
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.merge import merge
from sixfold_runtime.gateway.openapi import generation_document
from sixfold_runtime.gateway.pool import Choice
from sixfold_runtime.gateway.replies import ChatForm, CompletionForm, Form, Usage
from sixfold_runtime.gateway.schema import ChatBody, CompletionBody, GenerationBody, Prompt
from sixfold_runtime.gateway.sse import DONE, EventStream, event, while_connected
from sixfold_runtime.gateway.stream_encoding import asked_of, encoding_for
from sixfold_runtime.gateway.tasks import asked_task
from sixfold_runtime.modes.arms import chat_beginning, prompt_beginning

TokenIds = Callable[[Choice], Awaitable[list[int]]]
"""The prompt's token ids for the engine that was chosen; raises ApiError."""


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_class=Response, openapi_extra=generation_document(ChatBody))
    async def chat(request: Request) -> Response:
        """Continue a conversation."""
        body = ChatBody.parse(await gateway.admit_task(request, Task.GENERATION))
        messages = [message.for_template(index) for index, message in enumerate(body.messages)]

        async def token_ids(choice: Choice) -> list[int]:
            return await choice.tokenizer.encode_chat(messages, choice.model.context_tokens)

        config = gateway.choose_arm(exchange_of(request), lambda: chat_beginning(messages))
        return await _Generation(gateway, request, body, ChatForm(), [token_ids], config, chat=True).respond()

    @routes.post("/v1/completions", response_class=Response, openapi_extra=generation_document(CompletionBody))
    async def completions(request: Request) -> Response:
        """Continue one text or several."""
        body = CompletionBody.parse(await gateway.admit_task(request, Task.GENERATION))
        prompts = body.prompts()
        config = gateway.choose_arm(exchange_of(request), lambda: [prompt_beginning(prompts[0])])
        token_ids = [_prompt_ids(prompt) for prompt in prompts]
        return await _Generation(gateway, request, body, CompletionForm(), token_ids, config, chat=False).respond()

    return routes


def _prompt_ids(prompt: Prompt) -> TokenIds:
    async def token_ids(choice: Choice) -> list[int]:
        if isinstance(prompt, str):
            return await choice.tokenizer.encode(prompt, choice.model.context_tokens)
        vocabulary = choice.tokenizer.vocabulary_tokens
        if not all(0 <= token_id < vocabulary for token_id in prompt):
            raise bad_request(f"token ids of this model are 0 to {vocabulary - 1}", "prompt")
        return prompt

    return token_ids


def allowed_tokens(prompt_tokens: int, context_tokens: int, asked: int | None, default: int | None) -> int:
    """How many tokens may be generated. Raises ApiError (400) if the prompt, or what was asked for, doesn't fit."""
    room = context_tokens - prompt_tokens
    if prompt_tokens == 0:
        raise bad_request("the prompt is empty", "prompt")
    if room < 1:
        message = (
            f"the context of this model holds {context_tokens} tokens and the prompt alone has {prompt_tokens} or more;"
            " shorten it"
        )
    elif asked is not None and asked > room:
        message = (
            f"the context of this model holds {context_tokens} tokens and the prompt has {prompt_tokens}:"
            f" max_tokens may be at most {room}, not {asked}"
        )
    else:
        return asked or min(room, default or room)
    raise ApiError(400, "context_length_exceeded", message, "max_tokens" if room >= 1 else "messages")


class _Generation:
    """One request: each prompt is one engine request and one choice."""

    def __init__(
        self,
        gateway: Gateway,
        request: Request,
        body: GenerationBody,
        form: Form,
        prompts: Sequence[TokenIds],
        config: EffectiveConfig,
        chat: bool,
    ) -> None:
        self._gateway = gateway
        self._request = request
        self._exchange: Exchange = exchange_of(request)
        self._body = body
        self._asked_tokens = body.asked_tokens
        self._slice = asked_task(request.headers, body.task)
        self._reuses = body.kv_cache_reuse is not False
        self._form = form
        self._prompts = prompts
        self._config = config
        self._chat = chat
        self._prompt_tokens = [0] * len(prompts)
        self._frame = {"id": form.prefix + secrets.token_hex(12), "object": "", "created": int(time.time())}

    async def respond(self) -> Response:
        terms = self._exchange.terms
        if terms.conversation and self._reuses and self._config.kv_reuse is not None:
            self._gateway.pool.prefetch(self._body.model, self._exchange.tenant, terms.conversation)
        if self._body.stream:
            return await self._respond_streaming()
        return json_response(await while_connected(self._request.receive, self._whole()))

    async def _respond_streaming(self) -> Response:
        """Wait for the engine's first word: refusals keep their HTTP status, and the level is known."""
        asked = asked_of(self._request.headers)
        parts = self._parts()
        try:
            first = await while_connected(self._request.receive, anext(parts))
        except BaseException:
            await parts.aclose()
            raise
        gateway = self._gateway
        # Of now: where the level fell meanwhile, no stream begins compressed.
        streaming = gateway.config.current.of(self._exchange.arm).streaming
        encoding = encoding_for(asked, self._exchange.level, streaming, gateway.stream_dictionary.current)
        return EventStream(_chain(first, parts), self._exchange, encoding)

    def _events(self, buffered: bool) -> AsyncGenerator[tuple[int, Chunk | Done | Restarted], None]:
        exchange = self._exchange
        calls = [
            Call(
                self._body.model,
                Task.GENERATION,
                self._builder(index, token_ids),
                buffered,
                self._slice,
                priority=exchange.terms.priority,
                deadline_seconds=exchange.deadline.seconds,
                conversation=exchange.terms.conversation,
            )
            for index, token_ids in enumerate(self._prompts)
        ]
        events = [self._gateway.dispatcher.events(call, exchange) for call in calls]
        return until(exchange.deadline, merge(events))

    def _builder(self, index: int, token_ids: TokenIds) -> Callable[[Choice], Awaitable[Generate]]:
        async def build(choice: Choice) -> Generate:
            ids = await token_ids(choice)
            self._prompt_tokens[index] = len(ids)
            self._exchange.input_tokens = sum(self._prompt_tokens)
            self._frame["model"] = choice.model.name
            most = allowed_tokens(len(ids), choice.model.context_tokens, self._asked_tokens, self._body.default_tokens)
            return Generate(
                id=secrets.token_hex(12),
                model=choice.model.name,
                token_ids=ids,
                sampling=self._body.sampling(most, choice.model.stop if self._chat else ()),
                tenant=self._exchange.tenant,
                arm=self._exchange.arm,
                speculative=self._body.speculative is not False,
                task=self._slice,
                conversation=self._exchange.terms.conversation,
                kv_reuse=self._reuses,
            )

        return build

    async def _whole(self) -> dict[str, Any]:
        chunks: list[list[Chunk]] = [[] for _ in self._prompts]
        reasons = [FinishReason.STOP] * len(self._prompts)
        usage = Usage()
        async with aclosing(self._events(buffered=True)) as events:
            async for index, item in events:
                match item:
                    case Chunk():
                        chunks[index].append(item)
                    case Done():
                        reasons[index] = item.finish_reason
                        self._count(usage, item)
                    case Restarted():
                        chunks[index].clear()
        choices = [
            self._form.choice(
                index,
                "".join(chunk.text for chunk in answer),
                reason,
                [logprob for chunk in answer for logprob in chunk.logprobs],
            )
            for index, (answer, reason) in enumerate(zip(chunks, reasons, strict=True))
        ]
        return self._frame | {"object": self._form.whole, "choices": choices, "usage": usage.to_dict()}

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        form, include_usage = self._form, self._body.include_usage
        opened: set[int] = set()
        usage = Usage()

        def part(choice: dict[str, Any]) -> bytes:
            frame = self._frame | {"object": form.part, "choices": [choice]}
            return event(frame | {"usage": None} if include_usage else frame)

        async with aclosing(self._events(buffered=False)) as events:
            async for index, item in events:
                if index not in opened:
                    opened.add(index)
                    if opening := form.opening(index):
                        yield part(opening)
                if isinstance(item, Chunk) and (item.text or item.logprobs):
                    yield part(form.delta(index, item.text, item.logprobs))
                elif isinstance(item, Done):
                    self._count(usage, item)
                    yield part(form.closing(index, item.finish_reason))
        if include_usage:
            yield event(self._frame | {"object": form.part, "choices": [], "usage": usage.to_dict()})
        yield DONE

    def _count(self, usage: Usage, done: Done) -> None:
        usage.prompt_tokens += done.prompt_tokens
        usage.cached_tokens += done.cached_tokens
        usage.completion_tokens += done.completion_tokens
        usage.drafted_tokens += done.drafted_tokens
        usage.accepted_tokens += done.accepted_tokens
        self._exchange.cached_tokens = usage.cached_tokens
        self._exchange.output_tokens = max(self._exchange.output_tokens, usage.completion_tokens)


async def _chain(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield first
        async for data in rest:
            yield data
    finally:
        await rest.aclose()
