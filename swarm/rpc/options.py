"""Options of gRPC channels and servers, and the metadata that every call carries."""

from __future__ import annotations

from swarm import PROTOCOL_VERSION
from swarm.messages import Contact
from swarm.wire.v1 import stage_pb2 as pb

SERVICE = str(pb.DESCRIPTOR.services_by_name["Stage"].full_name)

PROTOCOL_KEY = "swarm-protocol"
PEER_KEY = "swarm-peer"
SESSION_KEY = "swarm-session"
FAILURE_KEY = "swarm-failure-bin"

KEEPALIVE_SECONDS = 10.0
KEEPALIVE_TIMEOUT_SECONDS = 5.0

Options = tuple[tuple[str, int], ...]

CHANNEL_OPTIONS: Options = (
    # A machine that vanished without a word is found within KEEPALIVE + TIMEOUT, calls or no calls.
    ("grpc.keepalive_time_ms", int(KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A peer that restarted is reached again within a second.  The second figure is the time limit of a connection
    # attempt (several round trips), not a pause; a refused one fails at once all the same.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.client_idle_timeout_ms", 300_000),
    # Retrying is the caller's decision, at another peer; gRPC's own would keep a copy of what it sent.
    ("grpc.enable_retries", 0),
    # Peers are reached directly whatever http_proxy says, and each channel is its own connection.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS: Options = (
    # A port in use must be an error, not two servers that share its connections by chance.
    ("grpc.so_reuseport", 0),
    # Clients may ping as they like: by default a server hangs up on the third ping (grpc/grpc#32095).
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Calls of a client that vanished are cancelled.
    ("grpc.keepalive_time_ms", int(3 * KEEPALIVE_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(2 * KEEPALIVE_TIMEOUT_SECONDS * 1000)),
    # Per connection; a trainer has some tens of calls at one peer.
    ("grpc.max_concurrent_streams", 1024),
)


def path(method: str) -> str:
    """Full name of a method in HTTP/2."""
    return f"/{SERVICE}/{method}"


def call_metadata(to: Contact) -> tuple[tuple[str, str], ...]:
    """Whom the caller means to reach: an endpoint may have passed to another peer, or to its next life."""
    return ((PROTOCOL_KEY, str(PROTOCOL_VERSION)), (PEER_KEY, to.peer), (SESSION_KEY, to.session))
