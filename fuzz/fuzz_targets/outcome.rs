//! Any bytes are refused or are one outcome, and building it again gives the same bytes.
//!
//! Run on the stable toolchain: `RUSTC_BOOTSTRAP=1 cargo fuzz run outcome`

#![no_main]

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use tower_idempotency::{Fields, Outcome};

fuzz_target!(|data: &[u8]| {
    let Ok(outcome) = Outcome::decode(Bytes::copy_from_slice(data)) else {
        return;
    };
    assert_eq!(&outcome.as_bytes()[..], data);
    let body = outcome.body();
    let (Some(headers), Some(trailers)) = (map(outcome.headers()), map(outcome.trailers())) else {
        return;
    };
    let again = match outcome.status() {
        None => Outcome::value(&body),
        Some(status) if outcome.is_tombstone() => Outcome::tombstone(status),
        Some(status) => Outcome::response(status, &headers, &[&body], Some(&trailers)),
    };
    assert_eq!(again, outcome);
});

/// The lines as a map, unless a map would order them anew or cannot hold them.
fn map(fields: Fields<'_>) -> Option<HeaderMap> {
    let lines: Vec<(HeaderName, HeaderValue)> = fields.clone().collect();
    assert_eq!(lines.len(), fields.len(), "a line was lost");
    let mut map = HeaderMap::new();
    for (name, value) in &lines {
        map.try_append(name, value.clone()).ok()?;
    }
    let in_order = map.iter().zip(&lines).all(|(a, b)| a == (&b.0, &b.1));
    in_order.then_some(map)
}
