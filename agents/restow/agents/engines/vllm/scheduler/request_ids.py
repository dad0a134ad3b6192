"""vLLM's ids of requests say which answer to which prompt of a client's request each one is."""

from __future__ import annotations

import re

from restow.agents.engines.vllm.parameters import AnswerIndex

_CHOICE = re.compile(r"(\d+)_(.+)", re.DOTALL)
"""`ParentRequest.get_child_info`; the first answer of several is number 0."""
_PROMPT = re.compile(r"cmpl-.*?-(\d+)(?:-[0-9a-f]{8})?", re.DOTALL)
"""`OpenAIServingCompletion`; behind it what `InputProcessor.assign_request_id` adds."""


def answer_index(request_id: str) -> AnswerIndex:
    """Return the request's index, as vLLM 0.32 names requests.

    >>> answer_index("1_cmpl-ab-2-0123abcd")
    AnswerIndex(prompt=2, choice=1, shared_id='cmpl-ab-2-0123abcd')
    >>> answer_index("chatcmpl-ab-0123abcd")
    AnswerIndex(prompt=0, choice=0, shared_id='chatcmpl-ab-0123abcd')
    """
    choice, shared_id = 0, request_id
    if (child := _CHOICE.fullmatch(request_id)) is not None:
        choice, shared_id = int(child[1]), child[2]
    prompt = _PROMPT.fullmatch(shared_id)
    return AnswerIndex(int(prompt[1]) if prompt else 0, choice, shared_id)
