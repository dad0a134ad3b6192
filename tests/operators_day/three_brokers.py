"""From one broker to three and back, under load: `python -m operators_day.three_brokers` prints it.

Real processes all, and a real etcd. What each command has to print is said beside it.
"""

from __future__ import annotations

from etcd_harness.binary import etcd_program
from operators_day.day import ANSWER, CURL, PROMPT
from operators_day.shell import Page, Shell

SHOWN_PORTS = (7350, 7351, 7352, 2379, 2380, 8000, 8100, 8101)
"""Ports of three brokers, of etcd (for brokers and for members), of the router and of engines."""
BROKERS = "127.0.0.1:7350,127.0.0.1:7351,127.0.0.1:7352"
TITLE = """# From one broker to three, and back

Read this page to see, command by command, how an operator goes from one broker to
[three](operators.md#several-brokers) and back while requests arrive. The blocks show what a shell
printed. Here everything runs on one host, and etcd has one member. In production each broker has a
host of its own, etcd has three members, and `--advertise` says where each broker is reached.

`PYTHONPATH=tests python -m operators_day.three_brokers` runs all of it again and prints this page;
a test runs it too. If you type the commands yourself, begin with `set +m`: with job control a shell
reports each process that ends.
"""
ENGINES = (r"p0 +2 of 2 +open", r"d0 +1 of 1 +open")
"""Both, with all of their agents."""
THREE = tuple(rf"^127.0.0.1:{port} " for port in (7350, 7351, 7352))
ALL_WELL = r"\A *\d+ 200\Z"
"""Every request was answered."""
MANY_WELL = r"\A *[1-9][0-9]+ 200\Z"


def one(shell: Shell) -> None:
    """Start a broker, two engines and a router, and send requests."""
    shell.say(
        "## One broker\n\nEngines, their agents and commands take the addresses of all three"
        " future brokers from `RESTOW_BROKER`. If nobody answers at one address, they ask the"
        " next."
    )
    shell.run(
        "alone() { restow serve --listen 127.0.0.1:7350 >> broker-7350.log 2>&1 & pid[7350]=$!; }"
    )
    shell.run("alone")
    shell.run(f"export RESTOW_BROKER={BROKERS}")
    shell.run(
        'engine() { setsid python -m restow.demo.serve --name $1 "${@:2}" > $1.log 2>&1 & disown; }'
    )
    shell.run("engine p0 --port 8100 --tp 2")
    shell.run("engine d0 --port 8101 --conv-layout DS --page-tokens 8")
    shell.run(
        "restow router --listen 127.0.0.1:8000 --prefill http://127.0.0.1:8100"
        " --decode http://127.0.0.1:8101 > router.log 2>&1 &"
    )
    shell.see("restow engines", *ENGINES)
    shell.run(
        f'ask() {{ {CURL} http://127.0.0.1:8000/v1/completions -d \'{{"prompt": "{PROMPT}"}}\'; }}'
    )
    shell.see("ask", ANSWER, "200$")
    shell.run("while ask | tail -c 4; do :; done > codes.txt & load=$!")
    shell.see("sort codes.txt | uniq -c", "[1-9][0-9] 200$")


def etcd(shell: Shell) -> None:
    """Start one member of etcd."""
    shell.say(
        "## An etcd\n\nWith these two timers etcd grants leases of the requested length. If a"
        " leading member dies, another one leads within a second."
    )
    shell.run(
        "etcd --name e0 --data-dir etcd --heartbeat-interval 50 --election-timeout 500"
        " --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379"
        " --listen-peer-urls http://127.0.0.1:2380"
        " --initial-advertise-peer-urls http://127.0.0.1:2380"
        " --initial-cluster e0=http://127.0.0.1:2380 > etcd.log 2>&1 & etcd=$!"
    )
    shell.see("restow doctor --here --etcd 127.0.0.1:2379", "^ok +etcd 127.0.0.1:2379")


def three(shell: Shell) -> None:
    """Restart the broker with etcd, and start two standbys."""
    shell.say(
        "## Three brokers\n\nThe broker stops and starts again with `--etcd`. It leads, and its"
        " engines come back as after any restart. Then two others start, and stand by."
    )
    shell.run(
        "serve() { restow serve --listen 127.0.0.1:$1 --etcd 127.0.0.1:2379 --expect-brokers 3"
        " >> broker-$1.log 2>&1 &"
        " pid[$1]=$!; }"
    )
    shell.run("before=$(wc -l < codes.txt)")
    shell.run("kill ${pid[7350]}; wait ${pid[7350]}; serve 7350")
    shell.see("restow engines", *ENGINES)
    shell.run("serve 7351; serve 7352")
    shell.see("restow brokers", *THREE, r"leads in epoch \d+; there are 3 of 3")
    shell.see("tail -n +$before codes.txt | sort | uniq -c", MANY_WELL)
    shell.see("restow check", "^All is well")


def leader_dies(shell: Shell) -> None:
    """Kill the broker that leads."""
    shell.say(
        "## The leader dies\n\nThe leader is killed. A standby leads when the lease has ended"
        " (two seconds). No request fails; one takes longer."
    )
    shell.run(
        "leader() { restow brokers -o json | python -c"
        ' \'import json, sys; print(json.load(sys.stdin)["membership"]["leader"])\'; }'
    )
    shell.run("dead=$(leader); before=$(wc -l < codes.txt)")
    shell.run("kill -KILL ${pid[${dead##*:}]}")
    shell.see("tail -n +$before codes.txt | sort | uniq -c", MANY_WELL)
    shell.run('now=$(leader); echo "$dead, then $now"; test $now != $dead')
    shell.run("serve ${dead##*:}")
    shell.see("restow brokers", *THREE, r"leads in epoch \d+; there are 3 of 3")
    shell.see("restow check", "^All is well")


def back(shell: Shell) -> None:
    """Stop two brokers, and start the last broker anew without etcd."""
    shell.say(
        "## Back to one\n\nTwo brokers are stopped, one after the other. When a leader stops, a"
        " standby leads at once. The last broker restarts without etcd, and its engines come back"
        " as after any restart."
    )
    shell.run("before=$(wc -l < codes.txt)")
    shell.run("kill ${pid[7352]}; wait ${pid[7352]}")
    shell.run("kill ${pid[7351]}; wait ${pid[7351]}")
    shell.see("restow brokers", "^127.0.0.1:7350 leads in epoch", "there are 1 of 3")
    shell.run("kill ${pid[7350]}; wait ${pid[7350]}; alone")
    shell.see("restow engines", *ENGINES)
    shell.see("tail -n +$before codes.txt | sort | uniq -c", MANY_WELL)
    shell.run("kill $etcd; wait $etcd", rc=None)
    shell.run("restow brokers", "This is the only broker")
    shell.run("kill $load; sort codes.txt | uniq -c", ALL_WELL)


PAGE = Page(
    TITLE,
    (one, etcd, three, leader_dies, back),
    SHOWN_PORTS,
    lambda: {"etcd": f'exec "{etcd_program()}" "$@"\n'},
)

if __name__ == "__main__":
    PAGE.print()
