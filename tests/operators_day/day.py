"""An operator's day, with the commands of the docs alone: `python -m operators_day.day` prints it.

A broker with TLS and tokens, two tenants with a prefill and a decode engine each, real processes
all. What each command has to print is said beside it: a day that goes otherwise ends with an error.
"""

from __future__ import annotations

from operators_day.shell import Page, Shell

PROMPT = "<bos> anna has apple . bob has river . carl has stone . ? carl anna bob :"
ANSWER = r"stone \. apple \. river \."
SHOWN_PORTS = (7350, 9464, 8000, 8001, 8100, 8101, 8102, 8103, 8104)
"""Of the broker, of its metrics, of the routers of tenants a and b, and of engines."""
KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
CURL = "curl -s -w '%{http_code}\\n' -H 'Content-Type: application/json'"
TITLE = """# An operator's day

What a shell printed on which the commands of [Running a broker](operators.md) and
[Security](security.md) were typed. Nothing is left out but waiting: a command that was tried again
until it showed what is told is here once. `PYTHONPATH=tests python -m operators_day.day` runs all
of it again and prints this page; a test runs it, too. Who types it by hand says `set +m` first:
with job control `setsid` leaves its shell another process's number.
"""


def start(shell: Shell) -> None:
    """Make an authority and tokens, and start a broker."""
    shell.say(
        "## Start\n\nAn authority, a certificate for the broker that is good for two days,"
        " tokens for two tenants and "
        "for the operator."
    )
    shell.run(
        f"openssl req -x509 {KEY} -days 3650 -subj /CN=restow -keyout ca.key -out ca.pem 2>"
        f" openssl.log"
    )
    shell.run(
        f"issue() {{ openssl req -new {KEY} -subj /CN=broker -keyout new.key -out new.csr;"
        " openssl x509 -req -in new.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days $1"
        " -out new.pem"
        " -extfile <(echo subjectAltName=DNS:localhost,IP:127.0.0.1);"
        " mv new.key broker.key; mv new.pem broker.pem; }"
    )
    shell.run("issue 2 2>> openssl.log")
    for tenant in "ab":
        shell.run(
            f"{tenant}=$(restow token --role engine --role agent --tenant {tenant} --engine"
            f" '*' --out {tenant}.token)"
        )
    shell.run("me=$(restow token --role operator --out me.token)")
    shell.run('echo "[$a, $b, $me]" > tokens.json')
    shell.run(
        "serve() { restow serve --listen 127.0.0.1:7350 --tls-cert broker.pem --tls-key broker.key"
        " --tokens tokens.json --tenant-max-live 8 >> broker.log 2>&1 & broker=$!; }"
    )
    shell.run("serve")
    shell.run("export RESTOW_BROKER=localhost:7350 RESTOW_TLS_CA=ca.pem RESTOW_TOKEN_FILE=me.token")
    shell.see("restow status", "^engines")
    shell.run("grep started broker.log", "version")


def two_tenants(shell: Shell) -> None:
    """Start engines and a router for each tenant, and send one request to each."""
    shell.say(
        "## Two tenants\n\nEach has a prefill engine of two ranks, a decode engine of one"
        " rank and another layout, "
        "and a router."
    )
    shell.run(
        "engine() { RESTOW_TOKEN_FILE=$1.token setsid python -m restow.demo.serve --name $2"
        ' "${@:3}" > $1-$2.log 2>&1 & disown; }'
    )
    shell.run("engine a p0 --port 8100 --tp 2; p0=$!")
    shell.run("engine a d0 --port 8101 --conv-layout DS --page-tokens 8; d0=$!")
    shell.run("engine b p0 --port 8102 --tp 2")
    shell.run("engine b d0 --port 8103 --conv-layout DS --page-tokens 8")
    shell.run(
        "router() { restow router --listen 127.0.0.1:$1 --prefill http://127.0.0.1:$2"
        ' $(printf -- "--decode http://127.0.0.1:%s " "${@:3}") >> router.log 2>&1 & router=$!; }'
    )
    shell.run("router 8000 8100 8101; router_a=$router")
    shell.run("router 8001 8102 8103")
    shell.see(
        "restow engines -A",
        *(rf"{tenant} +{engine}" for tenant in "ab" for engine in ("d0 +1 of 1", "p0 +2 of 2")),
    )
    shell.run(
        "ask() { curl -s -w '%{http_code}\\n' -H 'Content-Type: application/json' http://127.0.0.1:$1/v1/completions"
        f' -d \'{{"prompt": "{PROMPT}"}}\'; }}'
    )
    shell.see("ask 8000", ANSWER, "200$")
    shell.see("ask 8001", ANSWER, "200$")
    shell.run("restow handoffs -A", r"^a .* DONE", r"^b .* DONE")
    shell.run("restow tenants", r"^a +2 ", r"^b +2 ")
    shell.run("RESTOW_TOKEN_FILE=a.token restow handoffs", "FORBIDDEN", rc=None)


def upgrade(shell: Shell) -> None:
    """Replace an engine and then the broker while requests come."""
    shell.say(
        "## An upgrade under load\n\nTenant a sends one request after another. Its decode"
        " engine is replaced: a new one "
        "starts, the old one drains. Then the broker ends (SIGTERM drains it) and starts again."
    )
    shell.run("engine a d1 --port 8104 --conv-layout DS --page-tokens 8; d1=$!")
    shell.see("restow engines --tenant a", r"^d1 +1 of 1 .*open")
    shell.run("kill $router_a; wait $router_a; router 8000 8100 8101 8104")
    shell.see("ask 8000", "200$")
    shell.run("while ask 8000 | tail -c 4; do :; done > codes.txt & load=$!")
    shell.see("sort codes.txt | uniq -c", "[1-9][0-9] 200$")
    shell.run("restow drain --tenant a --engine d0 --wait --yes")
    shell.run("kill $d0")
    shell.see("restow engines --tenant a", r"(?s)\A(?!.*^d0)")
    shell.run("before=$(wc -l < codes.txt)")
    shell.run("kill $broker; wait $broker; serve")
    shell.see("restow engines --tenant a", r"^d1 +1 of 1 .*open", r"^p0 +2 of 2 .*open")
    shell.see("tail -n +$before codes.txt | sort | uniq -c", "[1-9][0-9] 200$")
    shell.run("kill $load; sort codes.txt | uniq -c", "200$")


def dead_prefill(shell: Shell) -> None:
    """Kill P with a state that D had not yet asked for."""
    shell.say(
        "## A dead prefill engine\n\nOne request goes by hand, so that P's process can be"
        " killed between the two sides."
    )
    shell.run(
        f"""part() {{ {CURL} http://127.0.0.1:$1/v1/completions"""
        f""" -d "{{\\"prompt\\": \\"{PROMPT}\\", \\"kv_transfer_params\\":"""
        """ {\\"$2\\": true, \\"handoff_id\\": \\"$3\\"}}"; }"""
    )
    shell.run("part 8100 do_remote_decode request-4711", "200$")
    shell.run("kill -KILL -- -$p0")
    # An engine that is gone is in the lists for half a minute: first what these say.
    shell.see("restow engines --tenant a", "^p0 +0 of 2")
    shell.run("restow doctor --tenant a", "^bad +engine a/p0", rc=4)
    shell.run("part 8104 do_remote_prefill request-4711", "503$")
    shell.run("restow handoff --tenant a req", "FAILED|EXPIRED", "^Next: ")
    shell.run("engine a p0 --port 8100 --tp 2")
    shell.see("restow engines --tenant a", "^p0 +2 of 2 .*open")
    shell.see("ask 8000", ANSWER, "200$")
    shell.run("restow events -A --since-s 60 | tail -n 5", "request-4711")


def full_quota(shell: Shell) -> None:
    """Have tenant b's client ask P alone, for ever more states that nobody wants."""
    shell.say(
        "## A full quota\n\nSomebody of tenant b sends prompts to P alone, and to no D. A"
        " tenant may have 8 handoffs under "
        "way here (`--tenant-max-live`). The broker refuses more, so b's router has D compute "
        "prompts itself; tenant a notices nothing."
    )
    shell.run(
        "for i in 1 2 3 4 5 6 7 8 9; do part 8102 do_remote_decode lost-$i > lost.txt; done;"
        " cat lost.txt"
    )
    shell.run("ask 8001", ANSWER, "200$")
    shell.run("grep -c QUOTA_EXCEEDED router.log", "^[1-9]")
    shell.run("ask 8000", ANSWER, "200$")
    shell.run("restow reasons QUOTA_EXCEEDED", "tenant-max-live")
    shell.run("restow handoffs --tenant b --state ready", "READY")
    shell.run(
        "restow handoffs --tenant b --state ready -o name | xargs -n 1 restow release"
        " --tenant b --yes -o name",
        "^lost-8",
    )
    shell.see("ask 8001", ANSWER, '"handoff_id"', "200$")
    shell.run("grep -c QUOTA_EXCEEDED broker.log", "^[1-9]")


def expiring_certificate(shell: Shell) -> None:
    """Renew the broker's certificate in place."""
    shell.say("## A certificate that is about to end\n\nThat of the broker was made for two days.")
    shell.run("restow doctor --tenant a", "^warn +certificate of the broker")
    shell.run("issue 30 2>> openssl.log")
    shell.see("restow doctor --tenant a", "^ok +certificate of the broker")
    shell.run("ask 8000", ANSWER, "200$")


def evening(shell: Shell) -> None:
    """Show how the day went, and end the broker."""
    shell.say("## In the evening")
    shell.run("restow check", "well")
    shell.run("restow tenants", "^a +", "^b +")
    shell.run("restow drain --wait --yes")
    shell.run("kill $broker; wait $broker")
    shell.run("restow status", "BROKER_UNREACHABLE", rc=3)


PAGE = Page(
    TITLE,
    (start, two_tenants, upgrade, dead_prefill, full_quota, expiring_certificate, evening),
    SHOWN_PORTS,
)

if __name__ == "__main__":
    PAGE.print()
