//! Any header value is refused or is one key, and that key comes back from its string form.
//!
//! Run on the stable toolchain: `RUSTC_BOOTSTRAP=1 cargo fuzz run key`

#![no_main]

use http::{HeaderMap, HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use tower_idempotency::{IdempotencyKey, KeyFormat, KeySyntax};

const FIELD: HeaderName = HeaderName::from_static("idempotency-key");

fuzz_target!(|data: &[u8]| {
    let Ok(value) = HeaderValue::from_bytes(data) else {
        return;
    };
    let strict = IdempotencyKey::parse(&value, KeySyntax::Strict);
    let lenient = IdempotencyKey::parse(&value, KeySyntax::Lenient);
    if let Ok(strict) = &strict {
        // Lenient takes more, and never reads another key where strict reads one.
        assert_eq!(lenient.as_ref(), Ok(strict));
    }
    if let Ok(key) = &lenient {
        assert_eq!(IdempotencyKey::new(key.as_str()).as_ref(), Ok(key));
        assert!((1..=255).contains(&key.as_str().len()));
        let again = IdempotencyKey::parse(&key.to_sf_string(), KeySyntax::Strict);
        assert_eq!(again.as_ref(), Ok(key));
        let _ = KeyFormat::new().uuid().validate(key.as_str());
        let _ = KeyFormat::new().validate(key.as_str());
    }

    let mut headers = HeaderMap::new();
    headers.append(FIELD, value.clone());
    let read = IdempotencyKey::from_headers(&headers, &FIELD, KeySyntax::Lenient);
    assert_eq!(read, lenient.map(Some));
    headers.append(FIELD, value);
    let read = IdempotencyKey::from_headers(&headers, &FIELD, KeySyntax::Lenient);
    assert_eq!(read.unwrap_err().reason(), "multiple-lines");
});
