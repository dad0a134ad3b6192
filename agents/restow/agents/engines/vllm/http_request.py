"""`HttpRequest` holds what the body of a client's HTTP request says of handoffs."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from restow.agents.engines.vllm.errors import ParametersError
from restow.agents.engines.vllm.parameters import HANDOFF_ID, AnswerIndex, parameters_of


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """Tells of a request that names a handoff, or means to."""

    params: object
    prompts: int
    choices: int
    beams: bool

    @classmethod
    def of(cls, body: bytes) -> HttpRequest | None:
        """Return None where no handoff is meant; what is no JSON vLLM refuses in its own words."""
        try:
            said = json.loads(body)
        except ValueError:
            return None
        if not isinstance(said, dict) or not said.get("kv_transfer_params"):
            return None
        prompt, choices = said.get("prompt"), said.get("n")
        # A list of numbers is one prompt, in tokens.
        many = prompt if isinstance(prompt, list) else []
        return cls(
            said["kv_transfer_params"],
            1 if all(isinstance(one, int) for one in many) else len(many),
            choices if isinstance(choices, int) and choices > 0 else 1,
            bool(said.get("use_beam_search")),
        )

    def check(self, kv_role: str) -> None:
        """Raise `ParametersError` where no handoff can come of it."""
        last = AnswerIndex(max(self.prompts - 1, 0))
        if parameters_of(self.params, kv_role, "made by P", last) is not None and self.beams:
            raise ParametersError(
                "beam search begins with no other engine's state: ask without kv_transfer_params"
            )

    def handoff_ids(self, most: int) -> list[str]:
        """Return the handoffs of its requests, ``most`` of them; none if it names none."""
        given = self.params.get(HANDOFF_ID) if isinstance(self.params, dict) else None
        if not isinstance(given, str):
            return []
        pairs = itertools.product(range(self.prompts), range(self.choices))
        return [AnswerIndex(*pair).handoff_id(given) for pair in itertools.islice(pairs, most)]
