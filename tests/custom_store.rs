//! The store of the example `custom_store` keeps the store contract: its own tests, run with all others.

#[allow(dead_code, reason = "an example has a main function")]
#[path = "../examples/custom_store.rs"]
mod custom_store;
