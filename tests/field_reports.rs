//! What went wrong for others, and what happens here.
//!
//! Each test names where the fault was seen. Faults of databases are tested with their stores.

#[path = "support/app.rs"]
mod app;

#[path = "field_reports/capture.rs"]
mod capture;
#[path = "field_reports/crashes.rs"]
mod crashes;
#[path = "field_reports/middleware.rs"]
mod middleware;
#[path = "field_reports/outcomes.rs"]
mod outcomes;
#[path = "field_reports/payload.rs"]
mod payload;
#[path = "field_reports/protocol.rs"]
mod protocol;
#[path = "field_reports/races.rs"]
mod races;
#[path = "field_reports/tenants.rs"]
mod tenants;
