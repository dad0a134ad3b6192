"""Identities, in certificates' URIs and in the list of tokens: what is one, and what is none."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restow.broker.errors import RestowError
from restow.broker.server.gate.guard import METHOD_ROLES, SERVICE_ROLES, roles_for
from restow.broker.trust.errors import TokenFileError, TokensFileError, TrustError
from restow.broker.trust.identity import Identity, IdentityInvalidError, Right, Role, identity_of
from restow.broker.trust.key_files import Reloaded
from restow.broker.trust.tokens import KnownTokens, digest_of, new_token, read_secret, read_tokens

ROOT = "spiffe://domain/restow"
ENGINE, AGENT, OPERATOR = Role.ENGINE, Role.AGENT, Role.OPERATOR


def identity(tenant: str | None, *rights: Right) -> Identity:
    return Identity(tenant, frozenset(rights))


# -- certificates ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uris", "expected"),
    [
        ([], None),
        (["spiffe://domain/other/operator", "https://domain/restow/operator"], None),
        (["spiffe://domain/restowed/operator", "SPIFFE://domain/restow/operator"], None),
        ([f"{ROOT}/operator"], identity(None, Right(OPERATOR))),
        ([f"{ROOT}/tenant/a/operator"], identity("a", Right(OPERATOR))),
        ([f"{ROOT}/tenant/a/engine/p-1"], identity("a", Right(ENGINE, "p-1"))),
        (
            [f"{ROOT}/tenant/a/engine/*", "spiffe://domain/x", f"{ROOT}/tenant/a/agent/p-1"],
            identity("a", Right(ENGINE, "*"), Right(AGENT, "p-1")),
        ),
    ],
)
def test_uris_of_a_certificate(uris: list[str], expected: Identity | None) -> None:
    assert identity_of(uris) == expected


@pytest.mark.parametrize(
    "uri",
    [
        ROOT,
        f"{ROOT}/",
        f"{ROOT}/operator/",
        f"{ROOT}/operator/x",
        f"{ROOT}/owner",
        f"{ROOT}/tenant/a",
        f"{ROOT}/tenant/a/engine",
        f"{ROOT}/tenant/a/engine/",
        f"{ROOT}/tenant/a/engine/p/q",
        f"{ROOT}/tenant//operator",
        f"{ROOT}/tenant/*/operator",
        f"{ROOT}/tenant/a b/operator",
        f"{ROOT}/tenant/a%2fb/operator",
        f"{ROOT}/tenant/a/engine/p*",
        f"{ROOT}/tenant/a/ENGINE/p",
        f"{ROOT}/tenant/{'a' * 300}/operator",
        "spiffe:///restow/operator",
    ],
)
def test_uris_that_begin_like_ours_and_go_on_otherwise(uri: str) -> None:
    with pytest.raises(IdentityInvalidError):
        identity_of([uri])
    with pytest.raises(IdentityInvalidError):
        identity_of([f"{ROOT}/tenant/a/operator", uri])


def test_uris_of_two_tenants() -> None:
    for other in ("tenant/b/agent/*", "operator"):
        with pytest.raises(IdentityInvalidError, match="several tenants"):
            identity_of([f"{ROOT}/tenant/a/engine/*", f"{ROOT}/{other}"])


@given(st.lists(st.text(alphabet="ab*/.-%: ", max_size=12), max_size=3))
def test_no_uri_gives_more_than_it_names(tails: list[str]) -> None:
    uris = [f"{ROOT}/{tail}" for tail in tails]
    try:
        found = identity_of(uris)
    except IdentityInvalidError:
        return
    assert found is None or set(uris) == {_uri(found, right) for right in found.rights}


def _uri(found: Identity, right: Right) -> str:
    whose = ROOT if found.tenant is None else f"{ROOT}/tenant/{found.tenant}"
    return f"{whose}/operator" if right.role is OPERATOR else f"{whose}/{right.role}/{right.engine}"


# -- what an identity may -------------------------------------------------------------------------


def test_for_which_engine_somebody_speaks() -> None:
    one = identity("a", Right(ENGINE, "p"), Right(AGENT, "*"))
    assert one.speaks_for(ENGINE, "p")
    assert not one.speaks_for(ENGINE, "q")
    assert not one.speaks_for(ENGINE, "pp")
    assert not one.speaks_for(ENGINE, "*")
    assert not one.speaks_for(ENGINE, "")
    assert one.speaks_for(AGENT, "q")
    assert not identity("a", Right(OPERATOR)).speaks_for(ENGINE, "p")


NO_IDENTITIES: dict[str, Callable[[], object]] = {
    "nothing": lambda: identity("a"),
    "engine of all": lambda: identity(None, Right(ENGINE, "*")),
    "agent of all": lambda: identity(None, Right(OPERATOR), Right(AGENT, "*")),
    "no tenant": lambda: identity("", Right(OPERATOR)),
    "tenant *": lambda: identity("*", Right(OPERATOR)),
    "no engine": lambda: Right(ENGINE),
    "long engine": lambda: Right(AGENT, "x" * 257),
    "operator of an engine": lambda: Right(OPERATOR, "p"),
}


@pytest.mark.parametrize("name", NO_IDENTITIES)
def test_what_is_no_identity(name: str) -> None:
    with pytest.raises(IdentityInvalidError):
        NO_IDENTITIES[name]()


def test_what_nobody_may_call() -> None:
    assert not roles_for("/restow.v1.Other/Method")
    assert not roles_for("")
    assert all(roles for roles in (*SERVICE_ROLES.values(), *METHOD_ROLES.values()))


# -- tokens ---------------------------------------------------------------------------------------


def listed(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_new_token_is_found_by_its_entry(tmp_path: Path) -> None:
    made = [
        new_token([ENGINE, AGENT], "a", "*"),
        new_token([ENGINE], "b", "p"),
        new_token([OPERATOR], None, ""),
        new_token([OPERATOR, ENGINE], "a", "p"),
    ]
    path = listed(tmp_path, [entry for _, entry in made])
    tokens = read_tokens(path)
    assert [tokens.find(secret) for secret, _ in made] == [
        identity("a", Right(ENGINE, "*"), Right(AGENT, "*")),
        identity("b", Right(ENGINE, "p")),
        identity(None, Right(OPERATOR)),
        identity("a", Right(OPERATOR), Right(ENGINE, "p")),
    ]
    for secret, entry in made:
        assert secret not in path.read_text()
        assert tokens.find(entry["sha256"]) is None
        assert tokens.find(secret[:-1]) is None
        assert len(secret) >= 43 + len("restow_")
    assert len({secret for secret, _ in made}) == 4
    assert tokens.find("") is None


def test_one_role_may_be_named_alone_and_a_list_may_be_empty(tmp_path: Path) -> None:
    entry = {"sha256": digest_of("x").hex(), "tenant": "a", "role": "engine", "engine": "p"}
    assert read_tokens(listed(tmp_path, [entry])).find("x") == identity("a", Right(ENGINE, "p"))
    assert read_tokens(listed(tmp_path, [])) == KnownTokens(())


GOOD = {"sha256": "0" * 64, "tenant": "a", "role": "engine", "engine": "p"}
SECRET = "restow_s3cretS3cretS3cretS3cret"  # noqa: S105


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("{", "is no JSON"),
        (f'[{{"sha256": "{SECRET}"]', "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ({}, "no JSON list"),
        ([SECRET], "entry 1: it is no JSON object"),
        ([GOOD, {**GOOD, "sha256": SECRET}], "entry 2: sha256 must be 64 hexadecimal digits"),
        ([{**GOOD, "sha256": None}], "entry 1: sha256 must be 64 hexadecimal digits"),
        ([{**GOOD, "sha256": "0" * 62}], "entry 1: sha256 must be 64 hexadecimal digits"),
        ([{**GOOD, "tennant": "a"}], "entry 1: it has keys other than"),
        ([{**GOOD, SECRET: "a"}], "entry 1: it has keys other than"),
        ([{**GOOD, "roles": ["agent"]}], "entry 1: it needs either role or roles"),
        ([{"sha256": "0" * 64, "tenant": "a"}], "entry 1: it needs either role or roles"),
        ([{**GOOD, "role": "owner"}], "entry 1: roles are some of engine, agent, router, operator"),
        ([{**GOOD, "role": ["engine"]}], "entry 1: roles are some of"),
        ([{"sha256": "0" * 64, "tenant": "a", "roles": []}], "entry 1: it has no rights"),
        ([{"sha256": "0" * 64, "tenant": "a", "roles": "engine"}], "entry 1: roles are some of"),
        ([{**GOOD, "tenant": None}], "entry 1: tenant and engine must be texts"),
        ([{**GOOD, "engine": 1}], "entry 1: tenant and engine must be texts"),
        ([{**GOOD, "engine": ""}], "entry 1: an engine needs the id"),
        ([{**GOOD, "tenant": "*"}], "entry 1: a tenant must have"),
        ([{"sha256": "0" * 64, "role": "engine", "engine": "*"}], "entry 1: only an operator"),
        ([{"sha256": "0" * 64, "role": "operator", "engine": "p"}], "entry 1: operators and"),
        (
            [{"sha256": "0" * 64, "role": "router", "tenant": "a", "engine": "p"}],
            "entry 1: operators and routers have no engine",
        ),
        ([{"sha256": "0" * 64, "role": "router"}], "entry 1: only an operator may have no tenant"),
        ([GOOD, GOOD], "lists a token twice"),
    ],
)
def test_lists_of_tokens_that_are_refused(tmp_path: Path, value: Any, what: str) -> None:
    path = listed(tmp_path, value)
    with pytest.raises(TokensFileError, match=what) as caught:
        read_tokens(path)
    error = caught.value
    assert str(path) in error.message
    assert "restow token" in error.message
    assert SECRET not in error.message + str(error.subject) + repr(error.__cause__)


def test_a_list_of_tokens_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TokensFileError, match="No such file"):
        read_tokens(tmp_path / "none.json")


def test_secrets_of_callers(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"\n {SECRET} \n")
    assert read_secret(path) == SECRET
    for wrong in ("", "  \n", "two words", "t\x00ken", "tökén", f"{SECRET}\n{SECRET}"):
        path.write_text(wrong)
        with pytest.raises(TokenFileError, match="holds no token") as caught:
            read_secret(path)
        assert SECRET not in caught.value.message
    with pytest.raises(TokenFileError, match="No such file"):
        read_secret(tmp_path / "none")


# -- files that change ----------------------------------------------------------------------------


def test_a_value_follows_its_file_while_it_is_good(tmp_path: Path) -> None:
    one, two = new_token([OPERATOR], None, ""), new_token([OPERATOR], "a", "")
    path, complaints = listed(tmp_path, [one[1]]), list[TrustError]()
    tokens = Reloaded([path], lambda: read_tokens(path), complaints.append)
    first = tokens.current()
    assert tokens.current() is first
    listed(tmp_path, [one[1], two[1]])
    assert tokens.current().find(two[0]) == identity("a", Right(OPERATOR))
    listed(tmp_path, "{")
    for _ in range(3):
        assert tokens.current().find(two[0]) is not None
    path.unlink()
    assert tokens.current().find(two[0]) is not None
    assert [error.reason for error in complaints] == ["TOKENS_FILE_INVALID"] * 2
    listed(tmp_path, [two[1]])
    assert tokens.current().find(one[0]) is None


def test_a_value_that_is_wrong_from_the_beginning(tmp_path: Path) -> None:
    with pytest.raises(RestowError):
        Reloaded([tmp_path / "x"], lambda: read_tokens(tmp_path / "x"), logging.error)
