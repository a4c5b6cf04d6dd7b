"""POST /v1/classify."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import lru_cache

from fastapi import APIRouter, Request
from starlette.responses import Response

from sixfold_api.runtime_config import EscalateConfig
from sixfold_api.scalars import Task
from sixfold_runtime.engine.protocol import Classify, Done, LabelScore
from sixfold_runtime.gateway.core import Gateway, exchange_of
from sixfold_runtime.gateway.deadline import until
from sixfold_runtime.gateway.dispatch import Call
from sixfold_runtime.gateway.errors import ApiError, bad_request, json_response
from sixfold_runtime.gateway.escalation import reason
from sixfold_runtime.gateway.exchange import Exchange
from sixfold_runtime.gateway.labels import ClassifyAnswer, EscalationError, LabelledText, LabelledWord, TokenUsage
from sixfold_runtime.gateway.merge import merge
from sixfold_runtime.gateway.openapi import classification_document
from sixfold_runtime.gateway.pool import Choice
from sixfold_runtime.gateway.schema import ClassifyBody
from sixfold_runtime.gateway.sse import while_connected
from sixfold_runtime.gateway.tasks import asked_task
from sixfold_runtime.gateway.tokenizer import INLINE_CHARACTERS
from sixfold_runtime.gateway.words import Word
from sixfold_runtime.modes.sanitize import Sanitizer, SanitizeResult


def router(gateway: Gateway) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/classify", response_class=Response, openapi_extra=classification_document())
    async def classify(request: Request) -> Response:
        """Label one text or several, or the words in them."""
        body = ClassifyBody.parse(await gateway.admit_task(request, Task.CLASSIFICATION))
        work = _Classification(gateway, exchange_of(request), body, asked_task(request.headers, body.task))
        return json_response(await while_connected(request.receive, work.answer()))

    return routes


_sanitizer = lru_cache(maxsize=8)(Sanitizer)


class _Classification:
    """One request: each text is one engine request, and another one where it is escalated."""

    def __init__(self, gateway: Gateway, exchange: Exchange, body: ClassifyBody, task: str) -> None:
        self._texts = body.inputs()
        config = gateway.choose_arm(exchange, lambda: self._texts[:1])
        self.task = task
        self.top_k = body.top_k
        self.early_exit = body.early_exit is not False
        self.escalate = config.escalate
        self._gateway = gateway
        self._exchange = exchange
        self._model = body.model or gateway.settings.policy
        exits = config.early_exit if self.early_exit and not task else None
        self._sanitize = None if exits is None else exits.sanitize
        self._prompt_tokens = self._completion_tokens = 0

    async def answer(self) -> ClassifyAnswer:
        labelled: dict[int, LabelledText] = {}
        texts = [self._labelled(index, text) for index, text in enumerate(self._texts)]
        async with aclosing(until(self._exchange.deadline, merge(texts))) as results:
            async for index, result in results:
                labelled[index] = result
        return ClassifyAnswer(
            id="cls-" + secrets.token_hex(12),
            model=self._exchange.model,
            task=self.task or None,
            data=[labelled[index] for index in range(len(texts))],
            usage=TokenUsage(
                self._prompt_tokens, self._completion_tokens, self._prompt_tokens + self._completion_tokens
            ),
        )

    async def _labelled(self, index: int, original: str) -> AsyncGenerator[LabelledText, None]:
        """Yields once."""
        text = _Text(self, index, original, self._exchange)
        call = Call(
            self._model,
            Task.CLASSIFICATION,
            text.build,
            buffered=True,
            slice=self.task,
            priority=self._exchange.terms.priority,
            deadline_seconds=self._exchange.deadline.seconds,
        )
        done: Done | None = None
        async with aclosing(self._gateway.dispatcher.events(call, self._exchange)) as events:
            async for event in events:
                if isinstance(event, Done):
                    done = event
        assert done is not None, "without an error there is a Done"
        self._count(done.prompt_tokens, 0)
        result = text.labelled(done)
        if self.escalate is not None and done.scores:
            await self._escalate(self.escalate, text, result, done.scores)
        del done.scores[self.top_k or len(done.scores) :]
        yield result

    async def sanitized(self, text: str) -> tuple[str, bool]:
        """The text as the classifier reads it, and whether that is another one."""
        if self._sanitize is None:
            return text, False
        sanitizer = _sanitizer(self._sanitize.keep, self._sanitize.other_scripts)
        cleaned = sanitizer(text) if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(sanitizer, text)
        self._gateway.metrics.sanitized(cleaned.result)
        return cleaned.text, cleaned.result is SanitizeResult.CHANGED

    async def _escalate(
        self, config: EscalateConfig, text: _Text, result: LabelledText, scores: Sequence[LabelScore]
    ) -> None:
        """Fill in what the generating model says of a text that no label is sure enough for."""
        result.escalated, result.label_source = False, "classification"
        if scores[0].score >= config.below_confidence:
            return
        try:
            reasoned = await reason(self._gateway, self._exchange, config, text.original, text.labels)
        except ApiError as error:
            result.escalation_error = EscalationError(error.code, error.message)
            self._gateway.metrics.escalated("failed")
            return
        self._gateway.metrics.escalated("unlabelled" if reasoned.label is None else "labelled")
        self._count(reasoned.prompt_tokens, reasoned.completion_tokens)
        result.escalated, result.answer = True, reasoned.answer
        if reasoned.label is not None:
            result.label, result.label_source = reasoned.label, "generation"
            result.score = next((entry.score for entry in scores if entry.label == reasoned.label), 0.0)

    def _count(self, prompt_tokens: int, completion_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._completion_tokens += completion_tokens
        self._exchange.input_tokens, self._exchange.output_tokens = self._prompt_tokens, self._completion_tokens


class _Text:
    """One text on its way: what was sent to the engine decides how its answer is read."""

    def __init__(self, request: _Classification, index: int, original: str, exchange: Exchange) -> None:
        self.original = original
        self.labels: Sequence[str] = ()
        self._request = request
        self._index = index
        self._exchange = exchange
        self._words: list[Word] | None = None
        self._cleaned: tuple[str, bool] | None = None

    async def build(self, choice: Choice) -> Classify:
        request, model = self._request, choice.model
        chosen = next((info for info in model.tasks if info.name == request.task), model)
        self.labels = chosen.labels
        if chosen.task == Task.TOKEN_CLASSIFICATION:
            if request.top_k is not None:
                raise bad_request("top_k is for labels of texts, and this labels tokens: leave it out", "top_k")
            # Never sanitised: offsets are those of the text as it was sent.
            ids, self._words = await choice.tokenizer.encode_words(self.original, model.context_tokens)
        else:
            self._words = None
            if self._cleaned is None:
                self._cleaned = await request.sanitized(self.original)
            ids = await choice.tokenizer.encode(self._cleaned[0], model.context_tokens)
        if len(ids) > model.context_tokens:
            raise _too_long(self._index, len(ids), model.context_tokens)
        return Classify(
            id=secrets.token_hex(12),
            model=model.name,
            token_ids=ids,
            tenant=self._exchange.tenant,
            arm=self._exchange.arm,
            task=request.task,
            # The generating model may name any label.
            top_k=request.top_k if request.escalate is None else None,
            early_exit=request.early_exit,
        )

    def labelled(self, done: Done) -> LabelledText:
        result = LabelledText(
            index=self._index, task=self._request.task or None, layers=done.layers, exited=done.exited
        )
        if self._words is not None:
            result.tokens = _labelled_words(self.original, self._words, done.token_labels)
            return result
        result.sanitized = self._cleaned is not None and self._cleaned[1]
        result.label, result.score = done.scores[0].label, done.scores[0].score
        result.scores = done.scores
        self.labels = self.labels or [entry.label for entry in done.scores]
        return result


def _labelled_words(text: str, found: Sequence[Word], labels: Sequence[LabelScore]) -> list[LabelledWord]:
    return [
        LabelledWord(
            text[word.start : word.end], word.start, word.end, labels[word.token].label, labels[word.token].score
        )
        for word in found
    ]


def _too_long(index: int, tokens: int, context_tokens: int) -> ApiError:
    return ApiError(
        400,
        "context_length_exceeded",
        f"input.{index} has {tokens} tokens or more, this model reads {context_tokens}; shorten it",
        f"input.{index}",
    )
