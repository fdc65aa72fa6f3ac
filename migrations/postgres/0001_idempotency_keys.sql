-- Version 1 of the tables of tower-idempotency's `PostgresStore`.
--
-- `PostgresStore::migrate()` runs this text, with the names that were set in place of the quoted
-- ones. Run it with your own tool if the service may not create tables; it can be run again.
-- The service needs SELECT, INSERT, UPDATE and DELETE on the first table and SELECT on the second.

CREATE TABLE IF NOT EXISTS "idempotency_keys" (
    -- SHA-256 of namespace, scope and key with their lengths: one size, and no two triples alike.
    id bytea NOT NULL,
    -- For people; nothing is looked up by them. NUL is written \0 and a backslash \\.
    namespace text COLLATE "C" NOT NULL,
    scope text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    state text COLLATE "C" NOT NULL,
    -- The HTTP status of the outcome; null for the value of a job and as long as there is none.
    status smallint,
    -- How often the key was claimed: the fencing token of the last claim.
    attempt bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    -- A started record past this is abandoned: nobody knows how its attempt ended.
    lease_until timestamp with time zone NOT NULL,
    completed_at timestamp with time zone,
    expires_at timestamp with time zone NOT NULL,
    -- What the claim asked for; an outcome that comes after the expiry is kept so long once more.
    retention interval NOT NULL,
    -- What the handler attached: the id under which another system knows the work, finished phases.
    correlation text,
    checkpoint_names text[],
    checkpoint_data bytea[],
    -- The encoding of the columns below.
    format smallint NOT NULL DEFAULT 1,
    fingerprint bytea NOT NULL,
    owner bytea NOT NULL,
    claim_sum integer NOT NULL,
    outcome bytea,
    outcome_sum integer,
    CONSTRAINT "idempotency_keys_pkey" PRIMARY KEY (id),
    CONSTRAINT "idempotency_keys_state" CHECK (state IN ('started', 'completed', 'released')),
    CONSTRAINT "idempotency_keys_outcome" CHECK ((state = 'completed') = (outcome IS NOT NULL))
)
-- Room on each page for the version of a row that its completion writes: a heap-only update, which
-- touches no index.
WITH (fillfactor = 90);

-- Bodies are kept as they are, and not tried for compression on every completion.
ALTER TABLE "idempotency_keys" ALTER COLUMN outcome SET STORAGE EXTERNAL;

-- For the purge. A completion leaves this column as it is, except where the record was expired
-- already or the outcome has a retention of its own.
CREATE INDEX IF NOT EXISTS "idempotency_keys_expires_at" ON "idempotency_keys" (expires_at);

-- What was applied. A release works with every version whose `oldest_reader` it has reached.
CREATE TABLE IF NOT EXISTS "idempotency_keys_schema" (
    version integer NOT NULL,
    oldest_reader integer NOT NULL,
    applied_at timestamp with time zone NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT "idempotency_keys_schema_pkey" PRIMARY KEY (version)
);

INSERT INTO "idempotency_keys_schema" (version, oldest_reader) VALUES (1, 1)
ON CONFLICT (version) DO NOTHING;
