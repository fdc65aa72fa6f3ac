-- Schema version 1 of the SQLite store. `SqliteStore::open` runs this file where it has not been run;
-- running it yourself beforehand comes to the same. SQLite 3.37 or later (STRICT tables).
--
-- The table is for reading. A record changed by hand no longer matches its checksum and answers
-- "unreadable" until it is removed; deleting a row is fine, and frees its key.
--
--     SELECT namespace, scope, key, state, status, attempt,
--            datetime(expires_at / 1000000, 'unixepoch') AS expires
--     FROM idempotency_records ORDER BY created_at DESC LIMIT 20;

CREATE TABLE IF NOT EXISTS idempotency_records (
    id           INTEGER PRIMARY KEY,
    -- Namespace, scope and key, joined with their lengths: what a record is looked up by.
    lookup_key   BLOB    NOT NULL UNIQUE,
    -- The same three once more, for people.
    namespace    TEXT    NOT NULL,
    scope        TEXT    NOT NULL,
    key          TEXT    NOT NULL,
    state        TEXT    NOT NULL CHECK (state IN ('started', 'completed', 'released')),
    -- The HTTP status of the outcome; NULL before there is one, and for the value of a job.
    status       INTEGER,
    -- How often the record was claimed: the fencing token of the last claim.
    attempt      INTEGER NOT NULL,
    owner        BLOB    NOT NULL,
    fingerprint  BLOB    NOT NULL,
    -- Instants are microseconds since the Unix epoch, UTC. A started record whose lease is over is
    -- abandoned: nobody knows how its attempt ended.
    lease_until  INTEGER,
    created_at   INTEGER NOT NULL,
    completed_at INTEGER,
    expires_at   INTEGER NOT NULL,
    -- Microseconds; counted once more by a completion after `expires_at`.
    retention    INTEGER NOT NULL,
    -- What the handler attached: the id under which another system knows the work, and named phases
    -- (for each: u32 length, name, u32 length, data; big endian).
    correlation  TEXT,
    checkpoints  BLOB,
    -- A version byte, and the first 16 bytes of a SHA-256 over everything that counts in this row.
    checksum     BLOB    NOT NULL,
    -- The encoded outcome. Last, so that reading the columns before it does not walk through a large one.
    outcome      BLOB
) STRICT;

-- For the purge. A completion does not move `expires_at`, so it does not touch this index.
CREATE INDEX IF NOT EXISTS idempotency_records_expiry
    ON idempotency_records (expires_at);

-- For the walk through abandoned records: as small as the number of attempts under way.
CREATE INDEX IF NOT EXISTS idempotency_records_started
    ON idempotency_records (id) WHERE state = 'started';

-- `version` is what the newest release made of the file; releases that know schema `readable_since` or
-- a later one may go on using it.
CREATE TABLE IF NOT EXISTS idempotency_schema (
    id             INTEGER PRIMARY KEY CHECK (id = 1),
    version        INTEGER NOT NULL,
    readable_since INTEGER NOT NULL
) STRICT;

INSERT OR IGNORE INTO idempotency_schema (id, version, readable_since) VALUES (1, 1, 1);
