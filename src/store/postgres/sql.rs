//! Every statement of the store.
//!
//! Each is one atomic step, right under whatever isolation level is the default, and takes its time
//! from `clock_timestamp()`: `now()` is the time at which the transaction began, which after a wait
//! for a lock is long ago. Moves compare what they need in their own condition, so that what was
//! read before them only decides which of them is tried.

use tokio_postgres::types::Type;

use super::client::Parameter;
use super::names::Names;

/// One statement, and the types of its parameters: with them it needs no round trip to be prepared.
#[derive(Debug)]
pub(super) struct Statement {
    pub(super) text: String,
    pub(super) types: Vec<Type>,
}

impl Statement {
    /// Its parameters with their types, for a call that prepares nothing.
    pub(super) fn typed<'p>(&self, parameters: &[Parameter<'p>]) -> Vec<(Parameter<'p>, Type)> {
        let types = self.types.iter().cloned();
        parameters.iter().copied().zip(types).collect()
    }
}

#[derive(Debug)]
pub(super) struct Statements {
    pub(super) server: Statement,
    pub(super) version: Statement,
    pub(super) claim: Statement,
    pub(super) claim_again: Statement,
    pub(super) claim_afresh: Statement,
    pub(super) take_over: Statement,
    pub(super) renew: Statement,
    pub(super) complete: Statement,
    pub(super) release: Statement,
    pub(super) abandon: Statement,
    pub(super) annotate: Statement,
    pub(super) checkpoint: Statement,
    pub(super) resolve_completed: Statement,
    pub(super) resolve_released: Statement,
    pub(super) lookup: Statement,
    pub(super) look: Statement,
    pub(super) insert_completed: Statement,
    pub(super) abandoned: Statement,
    pub(super) remove: Statement,
    pub(super) erase: Statement,
    pub(super) purge: Statement,
    pub(super) watch: Statement,
}

impl Statements {
    pub(super) fn new(names: &Names) -> Self {
        let table = names.table();
        let statement = |text: &str, types: &[Type]| Statement {
            text: text
                .replace("$table", &table)
                .replace("$versions", &names.versions())
                .replace("$record", RECORD)
                .replace("$nothing", NOTHING)
                .replace("$expired", EXPIRED)
                .replace("$end", END),
            types: types.to_vec(),
        };
        Self {
            server: statement(SERVER, &[]),
            version: statement(VERSION, &[]),
            claim: statement(
                CLAIM,
                &[
                    Type::BYTEA,
                    Type::TEXT,
                    Type::TEXT,
                    Type::TEXT,
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INT4,
                    Type::INTERVAL,
                    Type::INTERVAL,
                ],
            ),
            claim_again: statement(
                CLAIM_AGAIN,
                &[
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INTERVAL,
                    Type::INTERVAL,
                ],
            ),
            claim_afresh: statement(
                CLAIM_AFRESH,
                &[
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INT8,
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INT8,
                    Type::INT4,
                    Type::INTERVAL,
                    Type::INTERVAL,
                ],
            ),
            take_over: statement(
                TAKE_OVER,
                &[
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INT8,
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INT8,
                    Type::INT4,
                    Type::INTERVAL,
                    Type::INTERVAL,
                ],
            ),
            renew: statement(RENEW, &[Type::BYTEA, Type::BYTEA, Type::INTERVAL]),
            complete: statement(
                COMPLETE,
                &[
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INT2,
                    Type::BYTEA,
                    Type::INT4,
                    Type::INTERVAL,
                ],
            ),
            release: statement(RELEASE, &[Type::BYTEA, Type::BYTEA]),
            abandon: statement(ABANDON, &[Type::BYTEA, Type::BYTEA]),
            annotate: statement(ANNOTATE, &[Type::BYTEA, Type::BYTEA, Type::TEXT]),
            checkpoint: statement(
                CHECKPOINT,
                &[Type::BYTEA, Type::BYTEA, Type::TEXT, Type::BYTEA],
            ),
            resolve_completed: statement(
                RESOLVE_COMPLETED,
                &[
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::TIMESTAMPTZ,
                    Type::INT2,
                    Type::BYTEA,
                    Type::INT4,
                ],
            ),
            resolve_released: statement(
                RESOLVE_RELEASED,
                &[Type::BYTEA, Type::BYTEA, Type::TIMESTAMPTZ],
            ),
            lookup: statement(LOOKUP, &[Type::BYTEA]),
            look: statement(LOOK, &[Type::BYTEA]),
            insert_completed: statement(
                INSERT_COMPLETED,
                &[
                    Type::BYTEA,
                    Type::TEXT,
                    Type::TEXT,
                    Type::TEXT,
                    Type::INT2,
                    Type::INT8,
                    Type::BYTEA,
                    Type::BYTEA,
                    Type::INT4,
                    Type::INTERVAL,
                    Type::BYTEA,
                    Type::INT4,
                    Type::TIMESTAMPTZ,
                ],
            ),
            abandoned: statement(ABANDONED, &[Type::BYTEA, Type::INT8, Type::INT8]),
            remove: statement(REMOVE, &[Type::BYTEA]),
            erase: statement(
                ERASE,
                &[Type::BYTEA, Type::INT8, Type::TEXT, Type::TEXT, Type::INT8],
            ),
            purge: statement(PURGE, &[Type::INT8]),
            watch: statement(WATCH, &[Type::BYTEA]),
        }
    }
}

/// The columns from which a record is read, in the order in which `row.rs` takes them.
const RECORD: &str = "\
    r.state, r.format, r.fingerprint, r.owner, r.attempt, r.claim_sum, r.created_at, r.expires_at, \
    r.lease_until, r.completed_at, r.correlation, r.checkpoint_names, r.checkpoint_data, \
    r.outcome, r.outcome_sum";

/// As many nulls of the same types.
const NOTHING: &str = "\
    NULL::text, NULL::smallint, NULL::bytea, NULL::bytea, NULL::bigint, NULL::integer, \
    NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::text, \
    NULL::text[], NULL::bytea[], NULL::bytea, NULL::integer, NULL::timestamptz";

/// Its retention is over, and no live lease keeps it.
const EXPIRED: &str = "(r.expires_at <= clock_timestamp() \
    AND (r.state <> 'started' OR r.lease_until <= clock_timestamp()))";

/// When a record may go that is completed now.
const END: &str = "CASE WHEN r.expires_at <= clock_timestamp() \
    THEN clock_timestamp() + r.retention ELSE r.expires_at END";

const SERVER: &str = "\
    SELECT current_setting('server_version_num')::integer, current_setting('server_encoding')";

const VERSION: &str = "\
    SELECT version, oldest_reader FROM $versions ORDER BY version DESC LIMIT 1";

/// The record that stands, or a new one, in one round trip; the row that stands is only read.
///
/// No row at all: somebody inserted theirs after this statement's snapshot was taken. Asking again
/// takes another snapshot, which shows it.
const CLAIM: &str = "\
    WITH r AS MATERIALIZED (
        SELECT *, clock_timestamp() AS now FROM $table WHERE id = $1
    ), fresh AS (
        INSERT INTO $table (id, namespace, scope, key, state, attempt, fingerprint, owner, \
            claim_sum, created_at, lease_until, expires_at, retention)
        SELECT $1, $2, $3, $4, 'started', 1, $5, $6, $7, clock_timestamp(), \
            clock_timestamp() + $8, clock_timestamp() + $9, $9
        WHERE NOT EXISTS (SELECT FROM r)
        ON CONFLICT (id) DO NOTHING
        RETURNING 1
    )
    SELECT $record, r.now FROM r UNION ALL SELECT $nothing FROM fresh";

/// By the owner whose reply was lost.
const CLAIM_AGAIN: &str = "\
    UPDATE $table r SET lease_until = clock_timestamp() + $4, \
        expires_at = clock_timestamp() + $5, retention = $5
    WHERE r.id = $1 AND r.owner = $2 AND r.fingerprint = $3 AND r.state = 'started' \
        AND NOT $expired
    RETURNING $record, clock_timestamp()";

/// Of a released or expired record.
const CLAIM_AFRESH: &str = "\
    UPDATE $table r SET state = 'started', status = NULL, fingerprint = $4, owner = $5, \
        attempt = $6, claim_sum = $7, format = 1, created_at = clock_timestamp(), \
        lease_until = clock_timestamp() + $8, completed_at = NULL, \
        expires_at = clock_timestamp() + $9, retention = $9, correlation = NULL, \
        checkpoint_names = NULL, checkpoint_data = NULL, outcome = NULL, outcome_sum = NULL
    WHERE r.id = $1 AND r.owner = $2 AND r.attempt = $3 AND (r.state = 'released' OR $expired)
    RETURNING $record, clock_timestamp()";

const TAKE_OVER: &str = "\
    UPDATE $table r SET owner = $5, attempt = $6, claim_sum = $7, \
        lease_until = clock_timestamp() + $8, expires_at = clock_timestamp() + $9, retention = $9
    WHERE r.id = $1 AND r.owner = $2 AND r.attempt = $3 AND r.fingerprint = $4 \
        AND r.state = 'started' AND r.lease_until <= clock_timestamp() AND NOT $expired
    RETURNING $record, clock_timestamp()";

const RENEW: &str = "\
    UPDATE $table r SET lease_until = clock_timestamp() + $3
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started'
    RETURNING 1";

const COMPLETE: &str = "\
    UPDATE $table r SET state = 'completed', status = $3, outcome = $4, outcome_sum = $5, \
        completed_at = clock_timestamp(), expires_at = coalesce(clock_timestamp() + $6, $end)
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started'
    RETURNING 1";

const RELEASE: &str = "\
    UPDATE $table r SET state = 'released', correlation = NULL, checkpoint_names = NULL, \
        checkpoint_data = NULL
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started'
    RETURNING 1";

const ABANDON: &str = "\
    UPDATE $table r SET lease_until = least(r.lease_until, clock_timestamp())
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started'
    RETURNING 1";

const ANNOTATE: &str = "\
    UPDATE $table r SET correlation = $3
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started'
    RETURNING 1";

/// Appends, or replaces the data of that name where it stands.
const CHECKPOINT: &str = "\
    UPDATE $table r SET \
        checkpoint_names = CASE WHEN array_position(r.checkpoint_names, $3) IS NULL \
            THEN array_append(r.checkpoint_names, $3) ELSE r.checkpoint_names END, \
        checkpoint_data = CASE WHEN array_position(r.checkpoint_names, $3) IS NULL \
            THEN array_append(r.checkpoint_data, $4) \
            ELSE r.checkpoint_data[:array_position(r.checkpoint_names, $3) - 1] || $4 \
                || r.checkpoint_data[array_position(r.checkpoint_names, $3) + 1:] END
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started'
    RETURNING 1";

const RESOLVE_COMPLETED: &str = "\
    UPDATE $table r SET state = 'completed', status = $4, outcome = $5, outcome_sum = $6, \
        completed_at = clock_timestamp(), expires_at = $end
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started' AND r.lease_until = $3 \
        AND r.lease_until <= clock_timestamp()
    RETURNING 1";

const RESOLVE_RELEASED: &str = "\
    UPDATE $table r SET state = 'released', correlation = NULL, checkpoint_names = NULL, \
        checkpoint_data = NULL
    WHERE r.id = $1 AND r.owner = $2 AND r.state = 'started' AND r.lease_until = $3 \
        AND r.lease_until <= clock_timestamp()
    RETURNING 1";

const LOOKUP: &str = "SELECT $record, clock_timestamp() FROM $table r WHERE r.id = $1";

/// The record, or nulls, and when the transaction began.
const LOOK: &str = "\
    SELECT $record, clock_timestamp(), now() FROM (SELECT) one LEFT JOIN $table r ON r.id = $1";

/// A record that is completed from its beginning, in the transaction that began at `$13`: in another
/// one its rows would not be those of the handler.
const INSERT_COMPLETED: &str = "\
    INSERT INTO $table AS r (id, namespace, scope, key, state, status, attempt, fingerprint, owner, \
        claim_sum, created_at, lease_until, completed_at, expires_at, retention, outcome, \
        outcome_sum)
    SELECT $1, $2, $3, $4, 'completed', $5, $6, $7, $8, $9, clock_timestamp(), clock_timestamp(), \
        clock_timestamp(), clock_timestamp() + $10, $10, $11, $12
    WHERE now() = $13
    ON CONFLICT (id) DO UPDATE SET state = EXCLUDED.state, status = EXCLUDED.status, \
        attempt = EXCLUDED.attempt, fingerprint = EXCLUDED.fingerprint, owner = EXCLUDED.owner, \
        claim_sum = EXCLUDED.claim_sum, format = 1, created_at = EXCLUDED.created_at, \
        lease_until = EXCLUDED.lease_until, completed_at = EXCLUDED.completed_at, \
        expires_at = EXCLUDED.expires_at, retention = EXCLUDED.retention, correlation = NULL, \
        checkpoint_names = NULL, checkpoint_data = NULL, outcome = EXCLUDED.outcome, \
        outcome_sum = EXCLUDED.outcome_sum
    WHERE r.attempt = $6 - 1 AND (r.state = 'released' OR $expired)
    RETURNING 1";

/// Looks at so many records after a position in the order of the primary key, which no move
/// disturbs, and shows those that are abandoned; beside them how many it looked at, and the last.
///
/// There is no index on what it looks for: a completion changes that, and would have to write to
/// the index each time.
const ABANDONED: &str = "\
    WITH looked AS MATERIALIZED (
        SELECT id, state, lease_until FROM $table WHERE id > $1 ORDER BY id LIMIT $2
    ), moment AS MATERIALIZED (
        SELECT clock_timestamp() AS now, (SELECT count(*) FROM looked) AS looks, \
            (SELECT id FROM looked ORDER BY id DESC LIMIT 1) AS last
    )
    SELECT $record, m.now, m.looks, m.last, r.id, r.namespace, r.scope, r.key
    FROM moment m LEFT JOIN (
        SELECT * FROM $table WHERE id = ANY (ARRAY(
            SELECT id FROM looked, moment WHERE state = 'started' AND lease_until <= now \
            ORDER BY id LIMIT $3))
    ) r ON true
    ORDER BY r.id";

const REMOVE: &str = "DELETE FROM $table WHERE id = $1 RETURNING 1";

/// Looks at so many records after a position in the order of the primary key, as `ABANDONED` does, and
/// removes those of a scope; how many it looked at, the last, and which it removed.
///
/// There is no index on the scope: every claim would have to write to it, for a duty that comes now
/// and then.
const ERASE: &str = "\
    WITH looked AS MATERIALIZED (
        SELECT id, namespace, scope FROM $table WHERE id > $1 ORDER BY id LIMIT $2
    ), gone AS (
        DELETE FROM $table WHERE id = ANY (ARRAY(
            SELECT id FROM looked WHERE scope = $4 AND starts_with(namespace, $3) \
            ORDER BY id LIMIT $5))
        RETURNING id
    )
    SELECT (SELECT count(*) FROM looked), (SELECT id FROM looked ORDER BY id DESC LIMIT 1), \
        ARRAY(SELECT id FROM gone)";

/// In the order of the index. The time is taken once, because an index cannot be searched for
/// something that changes from row to row; that it may be old by the end makes it only more careful.
const PURGE: &str = "\
    WITH gone AS (
        DELETE FROM $table WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM $table WHERE expires_at <= (SELECT clock_timestamp()) \
                AND (state <> 'started' OR lease_until <= (SELECT clock_timestamp())) \
            ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))
        RETURNING state
    )
    SELECT count(*), count(*) FILTER (WHERE state = 'started') FROM gone";

const WATCH: &str = "\
    SELECT state, owner, lease_until, clock_timestamp() FROM $table WHERE id = $1";
