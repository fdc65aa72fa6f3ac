//! The in-process store.

/// Placeholder until the store is written.
#[derive(Debug)]
pub struct MemoryStore;
