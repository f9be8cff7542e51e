from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Request(_message.Message):
    __slots__ = ("id", "hello", "open", "attach", "match", "reserve", "commit", "abort", "release", "adopt", "fetch", "store", "touch", "hint", "pin", "delete", "clear", "explain", "keys", "status", "load")
    ID_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    TOUCH_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    id: int
    hello: Hello
    open: Open
    attach: Attach
    match: Match
    reserve: Reserve
    commit: Commit
    abort: Abort
    release: Release
    adopt: Adopt
    fetch: Fetch
    store: Store
    touch: Touch
    hint: Hint
    pin: Pin
    delete: Delete
    clear: Clear
    explain: Explain
    keys: Keys
    status: Status
    load: Load
    def __init__(self, id: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., match: _Optional[_Union[Match, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., adopt: _Optional[_Union[Adopt, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., store: _Optional[_Union[Store, _Mapping]] = ..., touch: _Optional[_Union[Touch, _Mapping]] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., delete: _Optional[_Union[Delete, _Mapping]] = ..., clear: _Optional[_Union[Clear, _Mapping]] = ..., explain: _Optional[_Union[Explain, _Mapping]] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("id", "error", "welcome", "opened", "attached", "matched", "reserved", "verdict", "explained", "key_page", "status_report", "fetched", "count", "loaded")
    ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    MATCHED_FIELD_NUMBER: _ClassVar[int]
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    EXPLAINED_FIELD_NUMBER: _ClassVar[int]
    KEY_PAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_REPORT_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    id: int
    error: Error
    welcome: Welcome
    opened: Opened
    attached: Attached
    matched: Matched
    reserved: Reserved
    verdict: Verdict
    explained: Explained
    key_page: KeyPage
    status_report: StatusReport
    fetched: Fetched
    count: Count
    loaded: Loaded
    def __init__(self, id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., attached: _Optional[_Union[Attached, _Mapping]] = ..., matched: _Optional[_Union[Matched, _Mapping]] = ..., reserved: _Optional[_Union[Reserved, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., explained: _Optional[_Union[Explained, _Mapping]] = ..., key_page: _Optional[_Union[KeyPage, _Mapping]] = ..., status_report: _Optional[_Union[StatusReport, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., count: _Optional[_Union[Count, _Mapping]] = ..., loaded: _Optional[_Union[Loaded, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "text")
    CODE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    code: int
    text: str
    def __init__(self, code: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version_min", "version_max", "features", "token", "client", "pid", "worker")
    VERSION_MIN_FIELD_NUMBER: _ClassVar[int]
    VERSION_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    version_min: int
    version_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    token: str
    client: str
    pid: int
    worker: bytes
    def __init__(self, version_min: _Optional[int] = ..., version_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., token: _Optional[str] = ..., client: _Optional[str] = ..., pid: _Optional[int] = ..., worker: _Optional[bytes] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "features", "epoch", "instance", "tenant", "domain", "mapped", "attach_address", "data_address", "frame_bytes_max", "keys_max", "reserve_max", "lease_ms")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    DOMAIN_FIELD_NUMBER: _ClassVar[int]
    MAPPED_FIELD_NUMBER: _ClassVar[int]
    ATTACH_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FRAME_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    RESERVE_MAX_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    version: int
    features: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    instance: bytes
    tenant: str
    domain: str
    mapped: bool
    attach_address: str
    data_address: str
    frame_bytes_max: int
    keys_max: int
    reserve_max: int
    lease_ms: int
    def __init__(self, version: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ..., instance: _Optional[bytes] = ..., tenant: _Optional[str] = ..., domain: _Optional[str] = ..., mapped: bool = ..., attach_address: _Optional[str] = ..., data_address: _Optional[str] = ..., frame_bytes_max: _Optional[int] = ..., keys_max: _Optional[int] = ..., reserve_max: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class PlaneRecord(_message.Message):
    __slots__ = ("name", "nbytes", "runs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    name: str
    nbytes: int
    runs: int
    def __init__(self, name: _Optional[str] = ..., nbytes: _Optional[int] = ..., runs: _Optional[int] = ...) -> None: ...

class PartRecord(_message.Message):
    __slots__ = ("name", "planes", "window")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLANES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    planes: _containers.RepeatedCompositeFieldContainer[PlaneRecord]
    window: int
    def __init__(self, name: _Optional[str] = ..., planes: _Optional[_Iterable[_Union[PlaneRecord, _Mapping]]] = ..., window: _Optional[int] = ...) -> None: ...

class NamespaceRecord(_message.Message):
    __slots__ = ("model", "revision", "kv_dtype", "kv_scales", "layout", "chunk_tokens", "parts", "key_scheme", "adapter", "rope", "salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_SCALES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    KEY_SCHEME_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    kv_dtype: str
    kv_scales: str
    layout: str
    chunk_tokens: int
    parts: _containers.RepeatedCompositeFieldContainer[PartRecord]
    key_scheme: str
    adapter: str
    rope: str
    salt: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_scales: _Optional[str] = ..., layout: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[PartRecord, _Mapping]]] = ..., key_scheme: _Optional[str] = ..., adapter: _Optional[str] = ..., rope: _Optional[str] = ..., salt: _Optional[str] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("namespace", "digest")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    namespace: NamespaceRecord
    digest: bytes
    def __init__(self, namespace: _Optional[_Union[NamespaceRecord, _Mapping]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("namespace", "warning")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    warning: str
    def __init__(self, namespace: _Optional[int] = ..., warning: _Optional[str] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("writable",)
    WRITABLE_FIELD_NUMBER: _ClassVar[int]
    writable: bool
    def __init__(self, writable: bool = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("token", "region_bytes", "regions")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    region_bytes: int
    regions: int
    def __init__(self, token: _Optional[bytes] = ..., region_bytes: _Optional[int] = ..., regions: _Optional[int] = ...) -> None: ...

class Match(_message.Message):
    __slots__ = ("namespace", "keys", "parts", "lease_ms", "peek", "prefill_tokens_s")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    PEEK_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_S_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    keys: bytes
    parts: int
    lease_ms: int
    peek: bool
    prefill_tokens_s: float
    def __init__(self, namespace: _Optional[int] = ..., keys: _Optional[bytes] = ..., parts: _Optional[int] = ..., lease_ms: _Optional[int] = ..., peek: bool = ..., prefill_tokens_s: _Optional[float] = ...) -> None: ...

class Matched(_message.Message):
    __slots__ = ("hits", "miss_outcome", "miss_reason", "lease", "lease_ms", "extents", "ssd_chunks", "load_ms", "skipped")
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISS_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SSD_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    hits: int
    miss_outcome: int
    miss_reason: int
    lease: bytes
    lease_ms: int
    extents: bytes
    ssd_chunks: int
    load_ms: int
    skipped: int
    def __init__(self, hits: _Optional[int] = ..., miss_outcome: _Optional[int] = ..., miss_reason: _Optional[int] = ..., lease: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., extents: _Optional[bytes] = ..., ssd_chunks: _Optional[int] = ..., load_ms: _Optional[int] = ..., skipped: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("lease", "parts", "upto", "have")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    UPTO_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    parts: int
    upto: int
    have: int
    def __init__(self, lease: _Optional[bytes] = ..., parts: _Optional[int] = ..., upto: _Optional[int] = ..., have: _Optional[int] = ...) -> None: ...

class Loaded(_message.Message):
    __slots__ = ("chunks", "pending", "outcome", "wait_us", "extents")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    WAIT_US_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    pending: bool
    outcome: int
    wait_us: int
    extents: bytes
    def __init__(self, chunks: _Optional[int] = ..., pending: bool = ..., outcome: _Optional[int] = ..., wait_us: _Optional[int] = ..., extents: _Optional[bytes] = ...) -> None: ...

class Adopt(_message.Message):
    __slots__ = ("lease", "parts")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    parts: int
    def __init__(self, lease: _Optional[bytes] = ..., parts: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: bytes
    def __init__(self, leases: _Optional[bytes] = ...) -> None: ...

class Touch(_message.Message):
    __slots__ = ("lease", "lease_ms")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    lease_ms: int
    def __init__(self, lease: _Optional[bytes] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("namespace", "parent", "keys", "parts", "lease_ms")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    parent: bytes
    keys: bytes
    parts: int
    lease_ms: int
    def __init__(self, namespace: _Optional[int] = ..., parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parts: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Reserved(_message.Message):
    __slots__ = ("outcomes", "lease", "lease_ms", "extents", "text")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    lease: bytes
    lease_ms: int
    extents: bytes
    text: str
    def __init__(self, outcomes: _Optional[bytes] = ..., lease: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., extents: _Optional[bytes] = ..., text: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("lease", "items")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    items: bytes
    def __init__(self, lease: _Optional[bytes] = ..., items: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("lease", "items")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    lease: bytes
    items: bytes
    def __init__(self, lease: _Optional[bytes] = ..., items: _Optional[bytes] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("outcomes", "lease_ms", "text")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    lease_ms: int
    text: str
    def __init__(self, outcomes: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("namespace", "keys", "lease", "parts", "first", "last", "ranges")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    keys: bytes
    lease: bytes
    parts: int
    first: int
    last: int
    ranges: bytes
    def __init__(self, namespace: _Optional[int] = ..., keys: _Optional[bytes] = ..., lease: _Optional[bytes] = ..., parts: _Optional[int] = ..., first: _Optional[int] = ..., last: _Optional[int] = ..., ranges: _Optional[bytes] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("hits", "miss_outcome", "miss_reason", "nbytes")
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISS_OUTCOME_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    hits: int
    miss_outcome: int
    miss_reason: int
    nbytes: int
    def __init__(self, hits: _Optional[int] = ..., miss_outcome: _Optional[int] = ..., miss_reason: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Store(_message.Message):
    __slots__ = ("namespace", "parent", "keys", "parts", "nbytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    parent: bytes
    keys: bytes
    parts: int
    nbytes: int
    def __init__(self, namespace: _Optional[int] = ..., parent: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., parts: _Optional[int] = ..., nbytes: _Optional[int] = ...) -> None: ...

class Hint(_message.Message):
    __slots__ = ("namespace", "keys", "will_continue", "gap_s", "ttl_ms", "ended", "stop_reason", "priority")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    WILL_CONTINUE_FIELD_NUMBER: _ClassVar[int]
    GAP_S_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    keys: bytes
    will_continue: float
    gap_s: float
    ttl_ms: int
    ended: bool
    stop_reason: str
    priority: int
    def __init__(self, namespace: _Optional[int] = ..., keys: _Optional[bytes] = ..., will_continue: _Optional[float] = ..., gap_s: _Optional[float] = ..., ttl_ms: _Optional[int] = ..., ended: bool = ..., stop_reason: _Optional[str] = ..., priority: _Optional[int] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("namespace", "keys", "ttl_ms", "unpin")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    keys: bytes
    ttl_ms: int
    unpin: bool
    def __init__(self, namespace: _Optional[int] = ..., keys: _Optional[bytes] = ..., ttl_ms: _Optional[int] = ..., unpin: bool = ...) -> None: ...

class Delete(_message.Message):
    __slots__ = ("namespace", "keys", "quarantine")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    keys: bytes
    quarantine: bool
    def __init__(self, namespace: _Optional[int] = ..., keys: _Optional[bytes] = ..., quarantine: bool = ...) -> None: ...

class Clear(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    def __init__(self, namespace: _Optional[int] = ...) -> None: ...

class Count(_message.Message):
    __slots__ = ("count",)
    COUNT_FIELD_NUMBER: _ClassVar[int]
    count: int
    def __init__(self, count: _Optional[int] = ...) -> None: ...

class Explain(_message.Message):
    __slots__ = ("namespace", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    keys: bytes
    def __init__(self, namespace: _Optional[int] = ..., keys: _Optional[bytes] = ...) -> None: ...

class Explained(_message.Message):
    __slots__ = ("outcomes", "reasons", "tiers", "nbytes", "parts", "leases", "pins", "age_ms", "children", "durable")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    outcomes: bytes
    reasons: bytes
    tiers: bytes
    nbytes: bytes
    parts: bytes
    leases: bytes
    pins: bytes
    age_ms: bytes
    children: bytes
    durable: bytes
    def __init__(self, outcomes: _Optional[bytes] = ..., reasons: _Optional[bytes] = ..., tiers: _Optional[bytes] = ..., nbytes: _Optional[bytes] = ..., parts: _Optional[bytes] = ..., leases: _Optional[bytes] = ..., pins: _Optional[bytes] = ..., age_ms: _Optional[bytes] = ..., children: _Optional[bytes] = ..., durable: _Optional[bytes] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("namespace", "cursor", "limit")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace: int
    cursor: int
    limit: int
    def __init__(self, namespace: _Optional[int] = ..., cursor: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class KeyPage(_message.Message):
    __slots__ = ("keys", "namespaces", "cursor")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    keys: bytes
    namespaces: bytes
    cursor: int
    def __init__(self, keys: _Optional[bytes] = ..., namespaces: _Optional[bytes] = ..., cursor: _Optional[int] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReport(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
