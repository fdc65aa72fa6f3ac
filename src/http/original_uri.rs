//! The URI that the client asked for, whatever the routers between have cut off.

use http::Uri;
use http::request::Parts;

/// Inside axum's `nest("/t/{id}", …)` the request's own URI lacks the prefix, which would make the
/// resources of two tenants one.
#[cfg(feature = "axum")]
pub(crate) fn original_uri(parts: &Parts) -> &Uri {
    let original = parts.extensions.get::<axum::extract::OriginalUri>();
    original.map_or(&parts.uri, |original| &original.0)
}

#[cfg(not(feature = "axum"))]
pub(crate) fn original_uri(parts: &Parts) -> &Uri {
    &parts.uri
}
