"""Serves Envoy's external processing: one gRPC stream for each request that Envoy carries.

    request head ─► request body ─► (decided on the loop) ─► answer's head ─► [body] ─► closed

Owns the gRPC server, its threads, and the order of a stream's messages. A thread waits for each
open stream, and everything that is decided is decided on the gateway's loop. Synchronous gRPC, as
it costs half of what grpc.aio does (adr/0013). Must never: decide, or let a request on whose
decision failed. Read `gateway/delegated.py` for who does.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from trunkline.adapters.ext_proc_wire import (
    METHOD,
    BrokenMessage,
    Message,
    Part,
    answer_on,
    go_on,
    read_message,
    say,
    send_on,
)
from trunkline.errors import ConfigError
from trunkline.ports.proxy import Asked, Delegate, MakeDelegate, Said, Send

_OVERHEAD_BYTES = 1 << 20
"""What a message may have beside the longest body."""
_SURPLUS = 16
"""Streams beside those that may be served: a refusal is an answer, and needs one until it is over.
"""
_STOP_S = 2.0
_T = TypeVar("_T")


class ExtProcServer:
    """Listens from `start` to `stop`. What `make` gives is used on the loop that this was made on;
    `make` itself is called from any thread.
    """

    def __init__(
        self, *, host: str, port: int, streams: int, max_body_bytes: int, make: MakeDelegate
    ) -> None:
        """`streams`: as many `make` lets through at once. Raises ConfigError where gRPC is not
        installed.
        """
        try:
            self._grpc: Any = importlib.import_module("grpc")  # Any: an extra, without types
        except ImportError as error:
            text = "--ext-proc-port needs gRPC: pip install 'trunkline[picker]'"
            raise ConfigError(text) from error
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._threads = streams + _SURPLUS
        self._max_body_bytes = max_body_bytes
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._server: Any = None  # as above
        self.port = 0

    def start(self) -> None:
        """Raises ConfigError for an address that cannot be had."""
        grpc = self._grpc
        threads = ThreadPoolExecutor(self._threads, thread_name_prefix="ext-proc")
        limit = self._max_body_bytes + _OVERHEAD_BYTES
        self._server = grpc.server(
            threads,
            maximum_concurrent_rpcs=self._threads,
            options=[
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                ("grpc.so_reuseport", 0),
            ],
        )
        service, method = METHOD
        handler = grpc.stream_stream_rpc_method_handler(self._serve)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        try:
            self.port = self._server.add_insecure_port(self._address)
        except RuntimeError as error:
            text = f"{self._address} cannot be listened on; give another port with --ext-proc-port"
            raise ConfigError(text) from error
        self._server.start()

    def stop(self) -> None:
        """Ends every stream that is open; Envoy cuts their answers. Not to be called on the loop,
        which the ends of the streams still need.
        """
        if self._server is not None:
            self._server.stop(grace=None).wait(_STOP_S)

    # -- one stream, in its thread ---------------------------------------------------------------

    def _serve(self, messages: Iterator[bytes], context: Any) -> Iterator[bytes]:  # Any: gRPC's
        # What it does when it is made is nothing that belongs to the loop.
        delegate = self._make(context.cancel)
        try:
            yield from self._replies(delegate, messages, context)
        except BrokenMessage as error:
            context.abort(self._grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except (asyncio.CancelledError, self._grpc.RpcError):
            pass  # the request ended at Envoy's side
        finally:
            self._loop.call_soon_threadsafe(delegate.over)

    def _replies(
        self, delegate: Delegate, messages: Iterator[bytes], context: Any
    ) -> Iterator[bytes]:
        head: Message | None = None
        for raw in messages:
            message = read_message(raw)
            match message.part:
                case Part.REQUEST_HEADERS if not message.is_last:
                    head = message
                    yield go_on(message.part)
                case Part.REQUEST_HEADERS:
                    yield self._begin(delegate, message, message, context)
                case Part.REQUEST_BODY:
                    if head is None or not message.is_last:
                        raise BrokenMessage("request_body_mode has to be BUFFERED")
                    yield self._begin(delegate, head, message, context)
                case Part.ANSWER_HEADERS:
                    yield self._headed(delegate, message)
                case Part.ANSWER_BODY:
                    yield self._body(delegate, message)
                case _:
                    yield go_on(message.part)

    def _begin(self, delegate: Delegate, head: Message, last: Message, context: Any) -> bytes:
        asked, word, loop = _asked(head, last), _Word[Send | Said](), self._loop
        begun: list[asyncio.Task[Send | Said]] = []

        def end(task: asyncio.Task[Send | Said]) -> None:
            """However it ended; a task that is cancelled before its first step runs nothing."""
            if task.cancelled():
                word.fail(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                word.fail(error)
            else:
                word.say(task.result())

        def start() -> None:
            task = loop.create_task(delegate.begin(asked))
            task.add_done_callback(end)
            begun.append(task)
            if not context.is_active():
                task.cancel()

        def left() -> None:
            """The client has; asked for in any case, as gRPC may say so before it has begun."""
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in begun])

        loop.call_soon_threadsafe(start)
        if not context.add_callback(left):  # it ended before it could be asked for
            left()
        made = word.heard()
        return say(made) if isinstance(made, Said) else send_on(last.part, made)

    def _headed(self, delegate: Delegate, message: Message) -> bytes:
        fields = message.fields
        status = next((value for name, value in fields if name == b":status"), b"")
        if len(status) != 3 or not status.isdigit():
            raise BrokenMessage("an answer without a status")
        plain = [field for field in fields if not field[0].startswith(b":")]
        made = self._on_loop(lambda: delegate.headed(int(status), plain))
        return say(made) if isinstance(made, Said) else answer_on(made)

    def _body(self, delegate: Delegate, message: Message) -> bytes:
        if not message.is_last:  # longer than Envoy buffers: it says nothing as a whole
            return go_on(message.part)
        said = self._on_loop(lambda: delegate.whole(message.body))
        return go_on(message.part) if said is None else say(said)

    def _on_loop(self, work: Callable[[], _T]) -> _T:
        word = _Word[_T]()

        def run() -> None:
            try:
                word.say(work())
            except BaseException as error:
                word.fail(error)
                raise

        self._loop.call_soon_threadsafe(run)
        return word.heard()


class _Word(Generic[_T]):
    """What one thread waits for another to say: a tenth of the cost of a future."""

    __slots__ = ("_error", "_lock", "_said")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._said: list[_T] = []
        self._error: BaseException | None = None

    def say(self, what: _T) -> None:
        self._said.append(what)
        self._lock.release()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._lock.release()

    def heard(self) -> _T:
        """Raises what the other one failed with."""
        self._lock.acquire()
        if self._error is not None:
            raise self._error
        return self._said[0]


def _asked(head: Message, last: Message) -> Asked:
    pseudo = {name: value for name, value in head.fields if name.startswith(b":")}
    try:
        method = pseudo[b":method"].decode("ascii")
        target, authority = pseudo[b":path"], pseudo[b":authority"]
    except (KeyError, UnicodeDecodeError):
        raise BrokenMessage("a request without method, path or authority") from None
    return Asked(
        method=method,
        target=target,
        authority=authority,
        fields=[field for field in head.fields if not field[0].startswith(b":")],
        body=last.body,
        source=head.source,
        among=last.subset if head.subset is None else head.subset,
    )
