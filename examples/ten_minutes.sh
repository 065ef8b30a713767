#!/usr/bin/env bash
# From a checkout to the first routed request in a fleet of your own. It says each command before it
# runs it, and stops what it started.
#
#   examples/ten_minutes.sh                                       two simulated workers: no GPU
#   WORKERS='http://10.0.0.1:8000 http://10.0.0.2:8000' MODEL_PATH=/models/llama examples/ten_minutes.sh
#
# WORKERS     engines of yours, vLLM or SGLang, that run already
# MODEL_PATH  the folder with their tokenizer.json and chat template
# PORT, ADMIN_PORT, WORKER_PORTS   other ports than 30000, 29000 and "8000 8001"
# KEEP=yes    leaves the gateway (and the simulated workers) running until Ctrl-C

set -euo pipefail

CHECKOUT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
FOLDER=$(mktemp -d)
PORT=${PORT:-30000}
ADMIN_PORT=${ADMIN_PORT:-29000}
WORKER_PORTS=${WORKER_PORTS:-8000 8001}
WORKERS=${WORKERS:-}
MODEL_PATH=${MODEL_PATH:-}
KEEP=${KEEP:-}
WAIT_S=60
PIDS=()
KEY=''

main() {
    check_ports
    install
    start_workers
    start_gateway
    make_a_key
    ask_twice
    explain
    say "That took $SECONDS s. Point a client of OpenAI's API at http://127.0.0.1:$PORT/v1 with such a key."
    if [ -n "$KEEP" ]; then
        say "KEEP is set: the gateway runs until Ctrl-C. A key for it: $KEY"
        wait
    fi
}

check_ports() { # what answers at one already would be taken for ours, and be given a key
    local port ports="$PORT $ADMIN_PORT"
    [ -n "$WORKERS" ] || ports="$ports $WORKER_PORTS"
    for port in $ports; do
        # A failed redirection ends the subshell alone, and says so on its stderr.
        if (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
            fail "port $port on 127.0.0.1 is in use; PORT and ADMIN_PORT take others, and so does WORKER_PORTS='8100 8101'"
        fi
    done
}

install() {
    say 'Install trunkline into an environment of its own (a minute; a C++ compiler makes it faster)'
    show python3 -m venv trunkline-env
    show . trunkline-env/bin/activate
    show pip install .
    if command -v trunkline >/dev/null; then
        echo "(trunkline is on the path already, $(command -v trunkline): skipped)"
        return
    fi
    cd "$CHECKOUT"
    python3 -m venv trunkline-env || fail 'Python has no venv module; apt install python3-venv'
    . trunkline-env/bin/activate
    pip install --quiet --disable-pip-version-check . ||
        fail 'pip could not install it; Python 3.11 or newer is needed, and a way to PyPI'
}

start_workers() {
    cd "$FOLDER"
    if [ -n "$WORKERS" ]; then
        say "Your workers: $WORKERS"
        local url
        for url in $WORKERS; do
            curl -sf -m 5 -o /dev/null "${url%%#*}/health" ||
                fail "${url%%#*}/health does not answer; is the engine up, and reachable from here?"
        done
        return
    fi
    say 'Start two simulated workers: what an engine shows of itself, without a GPU'
    local port
    for port in $WORKER_PORTS; do
        start "worker-$port" trunkline worker --port "$port"
        WORKERS="$WORKERS http://127.0.0.1:$port"
    done
    for port in $WORKER_PORTS; do
        await "http://127.0.0.1:$port/health" "worker-$port" \
            'is the port free? WORKER_PORTS="8100 8101" takes others'
    done
}

start_gateway() {
    say 'Start the gateway in front of them. The state folder keeps tenants and keys: it must survive restarts'
    local words=(trunkline serve --worker-urls)
    # A word each: the URLs hold no blanks.
    # shellcheck disable=SC2206
    words+=($WORKERS)
    [ -z "$MODEL_PATH" ] || words+=(--model-path "$MODEL_PATH")
    [ "$PORT" = 30000 ] || words+=(--port "$PORT")
    [ "$ADMIN_PORT" = 29000 ] || words+=(--admin-port "$ADMIN_PORT")
    start gateway "${words[@]}" --state-dir trunkline-state
    echo "\$ until curl -sf -o /dev/null http://127.0.0.1:$PORT/readiness; do sleep 1; done"
    await "http://127.0.0.1:$PORT/readiness" gateway \
        "are ports $PORT and $ADMIN_PORT free, and do the workers answer? PORT and ADMIN_PORT take others"
}

make_a_key() {
    say 'Make a tenant and a key. The key is shown once; a client sends it as a bearer token'
    local words=(trunkline keys create --tenant acme --create-tenant)
    at_admin_port
    echo "\$ KEY=\$(${words[*]})"
    KEY=$("${words[@]}") || fail "the admin port of the gateway said no; its log: $FOLDER/gateway.log"
}

ask_twice() {
    say 'Ask the same thing twice. The first answer fills a cache, the second should find it'
    ask
    ask
}

explain() {
    say 'Why did the second one go where it went?'
    local id words
    id=$(tr -d '\r' <answer.txt | sed -n 's/^x-request-id: //Ip')
    [ -n "$id" ] || fail "the answer in $FOLDER/answer.txt names no x-request-id"
    words=(trunkline explain)
    at_admin_port
    words+=("$id")
    show "${words[@]}"
    "${words[@]}" || fail "the gateway does not know the request $id; its log: $FOLDER/gateway.log"
}

# -- below: how it is done, not what ---------------------------------------------------------------

ask() {
    local question='{"max_tokens": 16, "messages": [{"role": "user", "content": "In one sentence: why is a
cache that many machines share worth more than as many caches that know nothing of each other?"}]}'
    question=${question//$'\n'/ }
    local words=(curl -si "http://127.0.0.1:$PORT/v1/chat/completions" -H "Authorization: Bearer $KEY"
        -H 'Content-Type: application/json' -d "$question")
    show "${words[@]}"
    "${words[@]}" >answer.txt || fail "the gateway is gone; its log: $FOLDER/gateway.log"
    cat answer.txt
    echo
    head -n 1 answer.txt | grep -q ' 200 ' ||
        fail "the gateway did not answer 200; what it says of its workers: curl http://127.0.0.1:$ADMIN_PORT/workers"
}

at_admin_port() { # adds to the caller's `words`
    [ "$ADMIN_PORT" = 29000 ] || words+=(--admin-url "http://127.0.0.1:$ADMIN_PORT")
}

say() { printf '\n== %s\n' "$*"; }

show() { # a command as one would type it, the key by its name
    local word line=''
    for word in "$@"; do
        [ -z "$KEY" ] || word=${word//"$KEY"/\$KEY}
        case $word in
        *'$KEY'*) word="\"$word\"" ;;
        *[!A-Za-z0-9_./:=@,+-]*) word="'$word'" ;;
        esac
        line="$line $word"
    done
    echo "\$$line"
}

start() { # NAME COMMAND...: in the background, its words in NAME.log
    local name=$1
    shift
    echo "$(show "$@") &"
    "$@" >"$name.log" 2>&1 &
    PIDS+=($!)
    echo $! >"$name.pid"
}

await() { # URL NAME REMEDY
    local ends=$((SECONDS + WAIT_S))
    until curl -sf -m 5 -o /dev/null "$1"; do
        if ! kill -0 "$(cat "$2.pid")" 2>/dev/null || [ $SECONDS -ge $ends ]; then
            tail -n 5 "$2.log" >&2
            fail "$2 does not answer at $1; $3"
        fi
        sleep 0.2
    done
}

fail() {
    printf '\nten_minutes.sh: %s\n' "$*" >&2
    exit 1
}

stop() {
    local status=$?
    trap - EXIT INT TERM
    [ ${#PIDS[@]} -eq 0 ] || kill "${PIDS[@]}" 2>/dev/null || true
    wait
    if [ $status -eq 0 ]; then
        rm -rf "$FOLDER"
    else
        echo "(logs are in $FOLDER)" >&2
    fi
    exit $status
}

trap stop EXIT
trap 'exit 130' INT TERM

command -v curl >/dev/null || fail 'curl is missing; apt install curl'
main
