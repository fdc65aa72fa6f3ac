//! For programs that call a service with keys: one key per operation, retries that cannot repeat it,
//! and an error for everything from which nobody can tell.
//!
//! ```no_run
//! use bytes::Bytes;
//! use http::Request;
//! use http_body_util::Full;
//! use hyper_util::client::legacy::Client;
//! use hyper_util::rt::TokioExecutor;
//! use tower::ServiceExt;
//! use tower_idempotency::client::{
//!     ClientError, ClientLayer, FileJournal, KeyJournal, OperationName, SetIdempotencyKeyLayer,
//! };
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! // Once, at start-up.
//! let journal = FileJournal::open("keys")?;
//! let key = SetIdempotencyKeyLayer::new().journal(journal.clone());
//! let http = Client::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
//! let client = ClientLayer::new().key(key).around(http);
//!
//! // For each payment, and again after a restart.
//! let request = Request::post("http://pay.example/payments")
//!     .extension(OperationName::new("order-17/charge"))
//!     .body(Full::from(r#"{"amount":1000}"#))?;
//! match client.oneshot(request).await {
//!     Ok(answer) => {
//!         // The service's answer (201, or 402 for a card that was declined), or a refusal that changed
//!         // nothing (400, 401): look at the status. Store it, and then:
//!         journal.forget("order-17/charge").await?;
//!     }
//!     Err(ClientError::OutcomeUnknown(unknown)) => {
//!         // Paid or not: nobody can tell yet. Show "pending"; ask for its state, or call again later.
//!     }
//!     Err(other) => return Err(other.into()), // nothing was sent, as there is a key
//! }
//! # Ok(()) }
//! ```
//!
//! # What it does
//!
//! [`ClientLayer`] puts three parts around a client, and each can be used alone:
//!
//! 1. [`SetIdempotencyKeyLayer`] gives the operation its key, above the retry loop, and
//!    [remembers](KeyJournal) it over restarts.
//! 2. [`RetryPolicy`] decides whether and when to send it again: 5 retries with full jitter below 0.5,
//!    1, 2, 4 and 8 s, 15.5 s at most; a budget for each host; an end after 2 min.
//! 3. [`OneTry`] reads one answer to its last byte within 10 s, so that an answer that breaks off is a
//!    try that failed.
//!
//! `Ok` is the operation's own answer, or a refusal that changed nothing. [`OutcomeUnknown`] says that
//! the operation may have happened, and carries the key. The
//! [table](crate::_documentation::readme#how-a-client-retries) says which is which.
//!
//! The service has to keep to its side. A service that ignores the header, or a method that it does not
//! guard, runs a retry again: no client can see that.
//!
//! # reqwest
//!
//! Its client takes a request type of its own. One closure turns one into the other, with [`Bytes`] as
//! the body of the request:
//!
//! ```
//! use bytes::Bytes;
//! use http::{Request, Response};
//! use tower::service_fn;
//! use tower_idempotency::client::ClientLayer;
//!
//! # fn main() -> Result<(), reqwest::Error> {
//! let http = reqwest::Client::builder()
//!     // A redirect would send the payment, and its key, somewhere else.
//!     .redirect(reqwest::redirect::Policy::none())
//!     // One retry loop is enough.
//!     .retry(reqwest::retry::never())
//!     .build()?;
//! let http = service_fn(move |request: Request<Bytes>| {
//!     let http = http.clone();
//!     async move {
//!         let answer = http.execute(request.try_into()?).await?;
//!         Ok::<_, reqwest::Error>(Response::<reqwest::Body>::from(answer))
//!     }
//! });
//! let client = ClientLayer::new().around(http); // takes `Request<Bytes>`, answers `Response<Bytes>`
//! # let _ = client.clone();
//! # Ok(()) }
//! ```
//!
//! # Do this, not that
//!
//! | do this | not that, because |
//! |---|---|
//! | the key above the retry loop: [`ClientLayer`] does, and a key layer inside of the loop makes [`RetryPolicy`] refuse to retry | a key for each try: each try is a payment |
//! | one key for what the customer wants once: an [`OperationName`] such as `order-17/charge`, or an [`IdempotencyKey`] from the order's row | a key for each job or each click: the second job pays again |
//! | save the key before the first try: a [`KeyJournal`] | a key in memory: after a crash nobody can ask what became of it |
//! | store the answer, then [forget](KeyJournal::forget) the name | forget first: a crash in between pays again |
//! | a random key, or one derived from the order | an e-mail address, a phone number, a time: they repeat, can be guessed, and are personal |
//! | after a 500 or a timeout: the same key later, or ask for the state of the payment | a new key: no answer does not mean that nothing happened |
//! | a new key after a *definitive* answer: another card after a 402 is another operation, with another name | the old key for another request: 422 `key_reused` |
//! | mend the request after 400 and 422 | send it again as it is: it stays wrong |
//! | an answer that is marked as a replay is the answer, a 500 too | retry it: it is kept, and comes back the same |
//! | the same bytes in every try: collect the body first, see [`ReplayableBody`] | build the body anew, with another time stamp in it: 422 `key_reused` |
//! | full jitter, the default | fixed delays: after an outage all clients come back in one moment, again and again |
//! | stop before the service forgets: [`SetIdempotencyKeyLayer::lifetime`], at most what its policy publishes | retry after days: a forgotten key is a new payment |
//! | one retry loop in the whole stack | loops in the library, the mesh and the queue: 6 × 6 × 6 tries |
//! | fresh credentials for the next try of the same caller | another caller's: 422 `caller_changed`, and whether it was paid stays open |

mod backoff;
mod budget;
mod error;
mod file_journal;
mod journal;
mod key;
mod one_try;
mod policy;
mod replay;
mod retry_after;
mod stack;
mod verdict;

#[cfg(doc)]
use {crate::key::IdempotencyKey, bytes::Bytes};

pub use error::{ClientError, GaveUp, OutcomeUnknown};
pub use file_journal::FileJournal;
pub use journal::{KeyJournal, MemoryJournal, OperationName, SavedKey};
pub use key::{KeyForm, SetIdempotencyKey, SetIdempotencyKeyLayer};
pub use one_try::OneTry;
pub use policy::RetryPolicy;
pub use replay::ReplayableBody;
pub use stack::{ClientLayer, RetryingClient};
