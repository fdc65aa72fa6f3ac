//! What a layer enforces, for publication.

use std::fmt::Write as _;

use serde::Serialize;

use super::config::{Config, InFlight, MissingKey, OnOutage};
use super::header;
use super::problem::ProblemKind;
use crate::claim::OnAbandoned;
use crate::grpc_code::GrpcCode;
use crate::idempotency::Engine;
use crate::key::{KeySyntax, PersonalData};
use crate::retention::Disposition;

/// The idempotency specification that a resource must publish, its expiry included
/// (draft-ietf-httpapi-idempotency-key-header-07 section 2.5.2), as it is in force.
///
/// Serialise it as JSON, or print it with [`to_markdown`](Self::to_markdown).
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Policy {
    /// The request header that carries the key; absent if the body does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// The JSON pointers to the values in the body that make the key, or `function`; absent if a
    /// header carries it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_in_body: Option<Vec<String>>,
    /// `lenient` (Structured Field String or bare) or `strict` (Structured Field String).
    pub syntax: &'static str,
    /// The shortest key in bytes.
    pub key_min_bytes: usize,
    /// The longest key in bytes.
    pub key_max_bytes: usize,
    /// `any` or `uuid`.
    pub key_format: &'static str,
    /// Whether keys that look like personal data are refused.
    pub personal_data_refused: bool,
    /// Whether a guarded request must carry a key.
    pub required: bool,
    /// The methods that are guarded.
    pub methods: Vec<String>,
    /// Among whom keys are unique.
    pub scope: &'static str,
    /// What makes two requests the same request.
    pub fingerprint: Vec<String>,
    /// How long a result is kept, in seconds from the first request. After that the key is as one
    /// that was never used.
    pub retention_seconds: f64,
    /// For how many seconds a dead process blocks a key.
    pub lease_seconds: f64,
    /// Which responses are kept: `standard`, `draft`, `stripe`, or a name of the service's own.
    pub kept: &'static str,
    /// The statuses that are not kept and free the key; absent if a function decides.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released_statuses: Option<Vec<u16>>,
    /// The gRPC statuses that are not kept and free the key.
    pub grpc_released: Vec<&'static str>,
    /// The gRPC statuses after which the outcome is unknown.
    pub grpc_unknown: Vec<&'static str>,
    /// The paths of the gRPC methods whose responses are streams, which are not kept.
    pub grpc_streaming: Vec<String>,
    /// The largest request body in bytes.
    pub max_request_bytes: usize,
    /// The largest response body in bytes that is kept.
    pub max_response_bytes: usize,
    /// `reject` or `wait`.
    pub in_flight: &'static str,
    /// How long a request waits for a twin that is in flight, in seconds; 0 if it does not.
    pub wait_seconds: f64,
    /// `hold` or `rerun`.
    pub on_abandoned: &'static str,
    /// `reject` or `pass-through`.
    pub on_outage: &'static str,
    /// The response header on replays.
    pub replay_marker: String,
    /// The response header that names the code of a refusal.
    pub error_header: String,
    /// Response headers that are not replayed; a name that ends in `*` stands for all that begin so.
    pub headers_not_replayed: Vec<String>,
    /// The refusals: status and code.
    pub problems: Vec<PolicyProblem>,
    /// Where it is all explained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documentation: Option<String>,
}

/// One way to be refused.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct PolicyProblem {
    /// The status.
    pub status: u16,
    /// The status where the request is a gRPC call.
    pub grpc_status: &'static str,
    /// The code in the problem document and in `Idempotency-Error`.
    pub code: &'static str,
    /// The title.
    pub title: String,
}

impl Policy {
    pub(super) fn of(config: &Config, engine: &Engine) -> Self {
        let wait = match config.in_flight {
            InFlight::Reject => None,
            InFlight::Wait(max) => Some(max.as_secs_f64()),
        };
        let problems = ProblemKind::ALL.iter().map(|kind| {
            let mut problem = config.problem(*kind);
            if let Some(reword) = &config.reword {
                reword(&mut problem);
            }
            PolicyProblem {
                status: problem.status.as_u16(),
                grpc_status: problem.grpc_status.name(),
                code: kind.code(),
                title: problem.title.into_owned(),
            }
        });
        let grpc = |disposition| {
            let all = GrpcCode::ALL.iter();
            all.filter(|code| config.retention.decide_grpc(**code) == disposition)
                .map(|code| code.name())
                .collect()
        };
        Self {
            header: config
                .source
                .as_header()
                .map(|name| header::display_name(name.as_str())),
            key_in_body: config.source.in_body(),
            syntax: match config.syntax {
                KeySyntax::Lenient => "lenient",
                KeySyntax::Strict => "strict",
            },
            key_min_bytes: config.format.min(),
            key_max_bytes: config.format.max(),
            key_format: if config.format.is_uuid() {
                "uuid"
            } else {
                "any"
            },
            personal_data_refused: config.format.personal() == PersonalData::Reject,
            required: config.missing_key == MissingKey::Reject,
            methods: config.methods.iter().map(ToString::to_string).collect(),
            scope: config
                .scope
                .as_ref()
                .map_or("by the caller's credentials", |scope| scope.describe()),
            fingerprint: config.fingerprint.describe().hashed,
            retention_seconds: config.kept_for(engine).as_secs_f64(),
            lease_seconds: engine.settings.lease.as_secs_f64(),
            kept: config.retention.name(),
            released_statuses: config.retention.released_statuses(),
            grpc_released: grpc(Disposition::Release),
            grpc_unknown: grpc(Disposition::LeaveUnknown),
            grpc_streaming: config
                .grpc_streaming
                .iter()
                .map(ToString::to_string)
                .collect(),
            max_request_bytes: config.request_limit,
            max_response_bytes: config.response_limit,
            in_flight: if wait.is_some() { "wait" } else { "reject" },
            wait_seconds: wait.unwrap_or(0.0),
            on_abandoned: match engine.settings.on_abandoned {
                OnAbandoned::Hold => "hold",
                OnAbandoned::Rerun => "rerun",
            },
            on_outage: match config.on_outage {
                OnOutage::Reject => "reject",
                OnOutage::PassThrough => "pass-through",
            },
            replay_marker: header::display_name(config.marker.as_str()),
            error_header: header::display_name(header::ERROR.as_str()),
            headers_not_replayed: {
                let mut names = config.never_stored.describe();
                let marker = config.marker.as_str();
                if !names.iter().any(|name| name == marker) {
                    names.push(marker.to_owned());
                }
                names
            },
            problems: problems.collect(),
            documentation: config.documentation.clone(),
        }
    }

    /// The policy as a JSON document.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    /// The policy as a chapter for an API's documentation. It speaks of HTTP; the statuses of gRPC
    /// are in the JSON.
    pub fn to_markdown(&self) -> String {
        let mut text = String::from("## Idempotency\n\n");
        // Writing to a String cannot fail.
        let _ = self.write_markdown(&mut text);
        text
    }

    fn write_markdown(&self, text: &mut String) -> std::fmt::Result {
        let required = if self.required {
            "must carry"
        } else {
            "may carry"
        };
        let carrier = match (&self.header, &self.key_in_body) {
            (Some(header), _) => format!("the header `{header}`"),
            (None, Some(places)) => format!("a key in the body (`{}`)", places.join("`, `")),
            (None, None) => "a key".to_owned(),
        };
        writeln!(
            text,
            "Requests with the methods {} {required} {carrier}: one unique key per operation, the \
             same one on every retry.\n",
            self.methods.join(", "),
        )?;
        writeln!(text, "| | |\n|---|---|")?;
        let syntax = match self.syntax {
            "strict" => "Structured Field String (in double quotes)",
            _ => "Structured Field String (in double quotes), or bare",
        };
        writeln!(
            text,
            "| key | {syntax}; {} to {} bytes; format: {} |",
            self.key_min_bytes, self.key_max_bytes, self.key_format
        )?;
        writeln!(text, "| keys are unique | {} |", self.scope)?;
        let fingerprint = match &self.fingerprint[..] {
            [] => "key, whatever else".to_owned(),
            parts => parts.join(", "),
        };
        writeln!(text, "| same request means same | {fingerprint} |")?;
        let retention = self.retention_seconds;
        writeln!(text, "| results are kept for | {retention} seconds |")?;
        let released = match &self.released_statuses {
            Some(statuses) if statuses.is_empty() => "every response".to_owned(),
            Some(statuses) => format!("every response but {}", ranges(statuses)),
            None => "as the service decides".to_owned(),
        };
        writeln!(text, "| kept | {released} (policy `{}`) |", self.kept)?;
        writeln!(
            text,
            "| limits | request {} bytes, kept response {} bytes |",
            self.max_request_bytes, self.max_response_bytes
        )?;
        writeln!(
            text,
            "| a replay carries | `{}: true` |\n",
            self.replay_marker
        )?;
        writeln!(
            text,
            "| status | `{}` | meaning |\n|---|---|---|",
            self.error_header
        )?;
        for problem in &self.problems {
            let PolicyProblem {
                status,
                code,
                title,
                ..
            } = problem;
            writeln!(text, "| {status} | `{code}` | {title} |")?;
        }
        Ok(())
    }
}

/// `[401, 403, 500, 501, 502]` as `401, 403, 500–502`.
fn ranges(statuses: &[u16]) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for status in statuses {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *status => *last = *status,
            _ => ranges.push((*status, *status)),
        }
    }
    let texts = ranges.iter().map(|(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}–{last}")
        }
    });
    texts.collect::<Vec<_>>().join(", ")
}
