"""`HttpRequest` holds what the body of a client's HTTP request says of handoffs."""

from __future__ import annotations

import json
from dataclasses import dataclass

from restow.agents.engines.common.errors import ParametersError
from restow.agents.engines.common.parameters import HANDOFF_ID, Place, part_of


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
        last = Place(max(self.prompts - 1, 0), 0, "")
        if part_of(self.params, kv_role, "made by P", last) is not None and self.beams:
            raise ParametersError(
                "beam search begins with no other engine's state: ask without kv_transfer_params"
            )

    def handoff_ids(self, most: int) -> list[str]:
        """Return the handoffs of its requests, ``most`` of them; none if it names none."""
        given = self.params.get(HANDOFF_ID) if isinstance(self.params, dict) else None
        if not isinstance(given, str):
            return []
        places = (
            Place(prompt, choice, "")
            for prompt in range(min(self.prompts, most))
            for choice in range(min(self.choices, most))
        )
        return [one.handoff_id(given) for one, _ in zip(places, range(most), strict=False)]
