//! What one try says of the operation.

use std::time::Duration;

use http::{HeaderMap, HeaderName, Response, StatusCode};

use super::error::ClientError;
use super::retry_after::retry_after;
use crate::http::{ERROR, ProblemKind, REPLAYED, UNPROTECTED};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The operation's own answer.
    Final,
    /// A refusal that changed nothing. It may come from something that stands before the operation,
    /// so that it says nothing of earlier tries.
    Refusal,
    /// Another try may help.
    Retry(Trace),
    /// The server asks for time; if it says the same again, nobody knows more.
    RetryOnce,
    /// No retry helps, and the outcome cannot be told.
    Unknown,
    /// Nothing was tried: an error of another layer, to be handed on.
    NotTried,
}

/// What a try that failed may have left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trace {
    /// The server says that nothing ran.
    Nothing,
    /// The operation may have been begun, or done.
    MaybeDone,
}

/// One try, read.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) verdict: Verdict,
    pub(super) status: Option<StatusCode>,
    pub(super) problem: Option<ProblemKind>,
    pub(super) retry_after: Option<Duration>,
}

impl Reading {
    pub(super) fn of<R>(
        result: &Result<Response<R>, ClientError>,
        should_retry: Option<&HeaderName>,
    ) -> Self {
        match result {
            Ok(response) => Self::of_answer(response.status(), response.headers(), should_retry),
            Err(error) => Self::of_error(error),
        }
    }

    fn of_answer(
        status: StatusCode,
        headers: &HeaderMap,
        should_retry: Option<&HeaderName>,
    ) -> Self {
        let problem = headers.get(ERROR).map(|code| code.as_bytes());
        let problem = problem
            .and_then(|code| std::str::from_utf8(code).ok())
            .and_then(ProblemKind::from_code);
        let verdict = match problem {
            // The layer's own word, whatever status it was told to use.
            Some(problem) => of_problem(problem),
            // What the server keeps does not change by being asked for again.
            None if is_true(headers, &REPLAYED) || is_true(headers, &REPLAYED_ELSEWHERE) => {
                Verdict::Final
            }
            None => {
                let verdict = of_status(status);
                let told = should_retry
                    .filter(|_| status.is_client_error() || status.is_server_error())
                    .and_then(|name| headers.get(name))
                    .map(|told| told.as_bytes().trim_ascii());
                let unprotected = is_true(headers, &UNPROTECTED);
                match (told, verdict) {
                    // It ran without a claim: a retry would run it again.
                    (_, Verdict::Retry(_)) if unprotected => Verdict::Unknown,
                    (Some(b"true"), _) if !unprotected => Verdict::Retry(Trace::MaybeDone),
                    (Some(b"false"), Verdict::Retry(_)) => Verdict::Unknown,
                    _ => verdict,
                }
            }
        };
        Self {
            verdict,
            status: Some(status),
            problem,
            retry_after: retry_after(headers),
        }
    }

    fn of_error(error: &ClientError) -> Self {
        let (verdict, status) = match error {
            ClientError::Transport(_) | ClientError::TimedOut { .. } => {
                (Verdict::Retry(Trace::MaybeDone), None)
            }
            // It would be as long again.
            ClientError::AnswerTooLong { status, .. } => (Verdict::Unknown, Some(*status)),
            ClientError::InvalidKey(_)
            | ClientError::Journal(_)
            | ClientError::OutcomeUnknown(_) => (Verdict::NotTried, None),
        };
        Self {
            verdict,
            status,
            problem: None,
            retry_after: None,
        }
    }
}

fn of_problem(problem: ProblemKind) -> Verdict {
    match problem {
        ProblemKind::InProgress => Verdict::Retry(Trace::MaybeDone),
        ProblemKind::BodyUnreadable
        | ProblemKind::TooEarly
        | ProblemKind::StoreUnavailable
        | ProblemKind::Overloaded => Verdict::Retry(Trace::Nothing),
        ProblemKind::OutcomeUnknown => Verdict::RetryOnce,
        // It is done, or was begun, and this is all that the server will ever say.
        ProblemKind::ResponseNotKept
        | ProblemKind::RecordUnreadable
        | ProblemKind::CallerChanged => Verdict::Unknown,
        ProblemKind::MissingKey
        | ProblemKind::EventIdMissing
        | ProblemKind::InvalidKey
        | ProblemKind::BodyTooLarge
        | ProblemKind::KeyReused
        | ProblemKind::ScopeUnavailable => Verdict::Refusal,
    }
}

fn of_status(status: StatusCode) -> Verdict {
    match status.as_u16() {
        425 | 429 => Verdict::Retry(Trace::Nothing),
        408 | 500 | 502 | 503 | 504 => Verdict::Retry(Trace::MaybeDone),
        // A gateway's or a router's as often as the operation's. 409 without a code is the
        // application's, or a server's that has no codes.
        301 | 302 | 307 | 308 | 401 | 403 | 404 | 405 | 407 | 409 | 413 | 421 | 431 | 501 | 505 => {
            Verdict::Refusal
        }
        506..=599 => Verdict::Unknown,
        _ => Verdict::Final,
    }
}

fn is_true(headers: &HeaderMap, name: &HeaderName) -> bool {
    let value = headers.get(name).map(|value| value.as_bytes().trim_ascii());
    value.is_some_and(|value| value.eq_ignore_ascii_case(b"true"))
}

/// Stripe's name for it, and that of who follows Stripe.
const REPLAYED_ELSEWHERE: HeaderName = HeaderName::from_static("idempotent-replayed");
