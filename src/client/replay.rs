//! Bodies that can be sent more than once.

use bytes::Bytes;
use http_body_util::{Empty, Full};

/// A request body of which every try gets the same bytes.
///
/// A stream is none: after the first try it is used up. Collect it first, for instance into
/// [`Bytes`] or [`Full<Bytes>`](Full). The compiler says so, and not the first failure in production:
///
/// ```compile_fail,E0277
/// use http_body_util::StreamBody;
/// use hyper_util::{client::legacy::Client, rt::TokioExecutor};
/// use tower_idempotency::client::ClientLayer;
///
/// type Chunk = Result<http_body::Frame<bytes::Bytes>, std::io::Error>;
/// type Streamed = StreamBody<futures_util::stream::Empty<Chunk>>;
///
/// let http = Client::builder(TokioExecutor::new()).build_http::<Streamed>();
/// let client = ClientLayer::new().around(http);
/// ```
#[diagnostic::on_unimplemented(
    message = "a request with the body `{Self}` cannot be sent a second time",
    label = "this body can be sent once only",
    note = "collect the body before the retry layer, for instance into `Full<Bytes>` or `Bytes`"
)]
pub trait ReplayableBody {
    /// The same bytes from their begin. Called before the body is sent.
    #[must_use]
    fn replay(&self) -> Self;
}

macro_rules! replayable {
    ($($body:ty),*) => {
        $(impl ReplayableBody for $body {
            fn replay(&self) -> Self {
                self.clone()
            }
        })*
    };
}

replayable!((), Bytes, String, Vec<u8>, &'static str, &'static [u8]);

impl<D: Clone> ReplayableBody for Full<D> {
    fn replay(&self) -> Self {
        self.clone()
    }
}

impl<D> ReplayableBody for Empty<D> {
    fn replay(&self) -> Self {
        *self
    }
}
