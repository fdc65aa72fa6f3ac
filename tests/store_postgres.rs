//! The store on PostgreSQL keeps the store contract: whatever the default isolation level, with and
//! without prepared statements, behind a pooler, and behind an `Arc`.

#[path = "support/postgres.rs"]
mod postgres;

use std::sync::Arc;

use postgres::{Fresh, bouncer, database_with_isolation, shared};
use tower_idempotency::{PreparedStatements, Store, store_conformance};

mod with_defaults {
    use super::*;
    store_conformance!(Fresh::store().await);
}

mod in_an_arc {
    use super::*;
    store_conformance!(
        Fresh::store()
            .await
            .behind(|store| Arc::new(store) as Arc<dyn Store>)
    );
}

mod under_repeatable_read {
    use super::*;
    store_conformance!(
        Fresh::with(
            &database_with_isolation("repeatable read").await,
            |options| options
        )
        .await
    );
}

mod under_serializable {
    use super::*;
    store_conformance!(
        Fresh::with(&database_with_isolation("serializable").await, |options| {
            options
        })
        .await
    );
}

mod without_prepared_statements {
    use super::*;
    store_conformance!(
        Fresh::with(shared().url(), |options| options
            .prepared_statements(PreparedStatements::Never))
        .await
    );
}

mod behind_pgbouncer {
    use super::*;
    store_conformance!(Fresh::with(bouncer().url(), |options| options).await);
}
