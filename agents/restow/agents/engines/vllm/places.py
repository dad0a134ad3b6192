"""Which answer to which prompt of a client's request a request of vLLM's is.

vLLM makes several requests of one that has many prompts or wants many answers (``n``), and names
them after it; all carry the same ``kv_transfer_params``. Each is a handoff of its own, whose id P
and D derive alike from the id that the router gave.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHOICE = re.compile(r"(\d+)_(.+)", re.DOTALL)
"""`ParentRequest.get_child_info`; the first answer of several is number 0."""
_PROMPT = re.compile(r"cmpl-.*?-(\d+)(?:-[0-9a-f]{8})?", re.DOTALL)
"""`OpenAIServingCompletion`; behind it what `InputProcessor.assign_request_id` adds."""


@dataclass(frozen=True, slots=True)
class Place:
    """A request's place among those of its client's request, and the id that all choices share."""

    prompt: int
    choice: int
    shared_id: str

    @classmethod
    def of(cls, request_id: str) -> Place:
        """As vLLM 0.32 names requests.

        >>> Place.of("1_cmpl-ab-2-0123abcd")
        Place(prompt=2, choice=1, shared_id='cmpl-ab-2-0123abcd')
        >>> Place.of("chatcmpl-ab-0123abcd")
        Place(prompt=0, choice=0, shared_id='chatcmpl-ab-0123abcd')
        """
        choice, shared_id = 0, request_id
        if (child := _CHOICE.fullmatch(request_id)) is not None:
            choice, shared_id = int(child[1]), child[2]
        prompt = _PROMPT.fullmatch(shared_id)
        return cls(int(prompt[1]) if prompt else 0, choice, shared_id)

    def handoff_id(self, given: str) -> str:
        """The handoff of this request, where the router gave ``given`` to all of them.

        >>> Place(2, 1, "").handoff_id("h"), Place(0, 0, "").handoff_id("h")
        ('h/prompt2/choice1', 'h')
        """
        prompt = f"/prompt{self.prompt}" if self.prompt else ""
        return given + prompt + (f"/choice{self.choice}" if self.choice else "")


ALONE = Place(0, 0, "")
"""That of a request with one prompt and one answer."""
