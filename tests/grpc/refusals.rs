//! The layer's own refusals: a status of gRPC that says when to come back, with the code over HTTP.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use tonic::{Code, Status};
use tower_idempotency::{
    ClaimRequest, Claimed, Completion, GrpcCode, IdempotencyLayer, MemoryStore, MissingKey,
    Outcome, ProblemKind, Scope, Store,
};

use crate::app::{self, Answer, App, Ask, Call, Gate, Settings};
use crate::shop::{CHARGE, Shop, assert_refused, defaults, paid, pay};

fn call() -> Ask {
    let call = app::post(CHARGE).header("content-type", "application/grpc");
    call.body(&b"\0\0\0\0\x07100 THB"[..])
}

/// The layer's own refusal of this kind, in every field; gives back what it says of a retry.
#[track_caller]
pub fn assert_status(answer: &Answer, kind: ProblemKind) -> Option<i32> {
    assert_eq!(answer.extensions.get(), Some(&kind), "{answer:?}");
    // Trailers-Only.
    assert_eq!(answer.status, 200);
    assert!(answer.body.is_empty() && answer.trailers.is_none());
    assert_eq!(answer.header("content-type"), "application/grpc");
    let number = kind.grpc_status().number();
    assert_eq!(answer.header("grpc-status"), number.to_string());
    assert_eq!(answer.header("idempotency-error"), kind.code());
    assert!(answer.header("grpc-message").len() > 20);
    // What HTTP has for it.
    for name in [
        "retry-after",
        "link",
        "cache-control",
        "idempotency-replayed",
    ] {
        assert!(!answer.headers.contains_key(name), "{name}");
    }
    let status = Status::from_header_map(&answer.headers).unwrap();
    let details = Details::read(status.details());
    assert_eq!(
        (details.code, &*details.message),
        (number as u64, status.message())
    );
    assert_eq!(details.reason, kind.code().to_uppercase());
    assert_eq!(details.domain, "idempotency-key");
    assert!(
        details
            .link
            .starts_with("https://docs.rs/tower-idempotency/")
    );
    let pushback = answer.headers.get("grpc-retry-pushback-ms");
    let pushback: Option<i32> = pushback.map(|value| value.to_str().unwrap().parse().unwrap());
    let delay = pushback.filter(|millis| *millis >= 0);
    assert_eq!(details.retry_millis, delay.map(|millis| millis as u64));
    pushback
}

#[tokio::test]
async fn a_key_that_is_missing_or_malformed_is_an_invalid_argument() {
    let required = |settings: Settings| settings.missing_key(MissingKey::Reject);
    let app = App::with(required, app::paid);
    let answer = app.send(call()).await;
    assert_eq!(assert_status(&answer, ProblemKind::MissingKey), Some(-1));
    let answer = app.send(call().key("\"open")).await;
    assert_eq!(assert_status(&answer, ProblemKind::InvalidKey), Some(-1));
    let details = Status::from_header_map(&answer.headers).unwrap();
    let details = Details::read(details.details());
    assert_eq!(details.metadata.len(), 1);
    assert_eq!(details.metadata[0].0, "reason");
    assert_eq!(app.runs(), 0);
}

#[tokio::test]
async fn a_key_of_another_call_is_a_failed_precondition_and_not_to_be_retried() {
    let app = App::new(app::paid);
    app.send(call().key("k").header("authorization", "a")).await;
    let other = call().body(&b"\0\0\0\0\x07200 THB"[..]).key("k");
    let answer = app.send(other.header("authorization", "a")).await;
    assert_eq!(assert_status(&answer, ProblemKind::KeyReused), Some(-1));
    let answer = app.send(call().key("k").header("authorization", "b")).await;
    assert_eq!(assert_status(&answer, ProblemKind::CallerChanged), Some(-1));
    assert_eq!(app.runs(), 1);
}

#[tokio::test]
async fn a_key_in_flight_is_aborted_and_to_be_retried() {
    let gate = Gate::new();
    let held = gate.clone();
    let app = App::new(move |call: Call| {
        let held = held.clone();
        async move {
            held.pass().await;
            app::paid(call).await
        }
    });
    let first = app.send(call().key("k"));
    let second = async {
        gate.entered().await;
        let answer = app.send(call().key("k")).await;
        assert_eq!(assert_status(&answer, ProblemKind::InProgress), Some(1000));
        let message = answer.header("grpc-message").to_owned();
        assert!(message.contains("grpc-retry-pushback-ms"), "{message}");
        assert!(!message.contains("Retry-After"), "{message}");
        gate.open();
    };
    tokio::join!(first, second);
}

#[tokio::test]
async fn a_body_over_the_limit_has_exhausted_a_resource() {
    let app = App::with(|settings| settings.request_limit(11), app::paid);
    let answer = app.send(call().key("k")).await;
    assert_eq!(assert_status(&answer, ProblemKind::BodyTooLarge), Some(-1));
}

#[tokio::test]
async fn a_body_that_breaks_off_may_be_sent_again() {
    let app = App::new(app::paid);
    let body = app::steps([app::data("half"), app::broken()]);
    let answer = app.send(call().key("k").stream(body)).await;
    assert_eq!(assert_status(&answer, ProblemKind::BodyUnreadable), None);
}

#[tokio::test]
async fn early_data_without_a_key_may_be_sent_again() {
    let app = App::new(app::paid);
    let answer = app.send(call().header("early-data", "1")).await;
    assert_eq!(assert_status(&answer, ProblemKind::TooEarly), None);
}

#[tokio::test]
async fn a_store_that_is_full_is_unavailable() {
    let layer = IdempotencyLayer::new(MemoryStore::new().max_entries(1));
    let app = App::behind(&layer, app::paid);
    app.send(call().key("first")).await;
    let answer = app.send(call().key("second")).await;
    assert_eq!(
        assert_status(&answer, ProblemKind::StoreUnavailable),
        Some(1000)
    );
}

/// A job's value under the same key: no client was ever answered with it.
#[tokio::test]
async fn a_record_that_is_no_answer_is_lost_data() {
    let app = App::new(app::paid);
    app.send(call().key("k")).await;
    let record = app.record("k").await.unwrap();
    let store = app.store();
    assert!(store.remove(&record.key).await.unwrap());
    let request = ClaimRequest::new(record.key, record.fingerprint);
    let Claimed::Acquired { claim, .. } = store.claim(&request).await.unwrap() else {
        panic!("the key is not free");
    };
    let value = Outcome::value(b"sealed");
    let completed = store.complete(&claim, &value, None).await.unwrap();
    assert_eq!(completed, Completion::Recorded);
    let answer = app.send(call().key("k")).await;
    assert_eq!(
        assert_status(&answer, ProblemKind::RecordUnreadable),
        Some(-1)
    );
}

#[test]
fn codes_are_those_that_clients_were_told() {
    let told: Vec<_> = ProblemKind::ALL
        .iter()
        .map(|kind| (kind.code(), kind.grpc_status().name()))
        .collect();
    let expected = [
        ("missing_key", "INVALID_ARGUMENT"),
        ("event_id_missing", "INVALID_ARGUMENT"),
        ("invalid_key", "INVALID_ARGUMENT"),
        ("body_unreadable", "UNAVAILABLE"),
        ("in_progress", "ABORTED"),
        ("outcome_unknown", "ABORTED"),
        ("response_not_kept", "ALREADY_EXISTS"),
        ("body_too_large", "RESOURCE_EXHAUSTED"),
        ("key_reused", "FAILED_PRECONDITION"),
        ("caller_changed", "FAILED_PRECONDITION"),
        ("too_early", "UNAVAILABLE"),
        ("scope_unavailable", "INTERNAL"),
        ("record_unreadable", "DATA_LOSS"),
        ("store_unavailable", "UNAVAILABLE"),
        ("overloaded", "UNAVAILABLE"),
    ];
    assert_eq!(told, expected);
    // Names and numbers are gRPC's own.
    for code in GrpcCode::ALL {
        let tonics = format!("{:?}", Code::from(code.number())).to_uppercase();
        assert_eq!(code.name().replace('_', ""), tonics);
    }
}

#[tokio::test]
async fn a_caller_who_cannot_be_told_is_an_internal_error_or_what_is_set() {
    let nobody = |settings: Settings| settings.scope(Scope::from_fn(|_| None));
    let app = App::with(nobody, app::paid);
    let answer = app.send(call().key("k")).await;
    assert_eq!(
        assert_status(&answer, ProblemKind::ScopeUnavailable),
        Some(-1)
    );

    let unauthenticated = |settings: Settings| {
        nobody(settings).problems(|problem| problem.grpc_status = GrpcCode::Unauthenticated)
    };
    let app = App::with(unauthenticated, app::paid);
    let answer = app.send(call().key("k")).await;
    assert_eq!(answer.header("grpc-status"), "16");
    assert_eq!(answer.header("idempotency-error"), "scope_unavailable");
}

#[tokio::test]
async fn any_text_reaches_tonics_client_as_it_was() {
    const TEXT: &str = "ชำระแล้ว 100% of \"it\"\r\n\u{7f}~ %zz %41";
    let worded = |settings: Settings| {
        settings.documentation(None).problems(|problem| {
            problem.title = "t".into();
            problem.detail = TEXT.into();
            problem.extensions.insert("odd".to_owned(), 7.into());
        })
    };
    let shop = Shop::unary(worded, paid).await;
    let client = shop.client().await;
    let answer = client.charge(pay("\"open")).await;
    assert_eq!(assert_refused(&answer, ProblemKind::InvalidKey), Some(-1));
    let status = answer.unwrap_err();
    assert_eq!(status.message(), format!("t. {TEXT}"));
    let details = Details::read(status.details());
    assert_eq!(details.message, format!("t. {TEXT}"));
    assert!(
        details
            .metadata
            .contains(&("odd".to_owned(), "7".to_owned()))
    );
    assert_eq!(details.link, "");
    assert_eq!(shop.runs(), 0);
}

#[tokio::test]
async fn the_fields_are_escaped_as_the_protocol_says() {
    let worded = |settings: Settings| {
        settings.problems(|problem| {
            problem.title = "$%& ~\u{7f}".into();
            problem.detail = "é\n".into();
        })
    };
    let app = App::with(worded, app::paid);
    let answer = app.send(call().key("\"open")).await;
    assert_eq!(answer.header("grpc-message"), "$%25& ~%7F. %C3%A9%0A");
    // Every remainder of three bytes.
    for title in ["", "a", "ab", "abc"] {
        let app = App::with(
            move |settings: Settings| {
                settings.problems(move |problem| problem.title = title.into())
            },
            app::paid,
        );
        let answer = app.send(call().key("\"open")).await;
        let details = answer.header("grpc-status-details-bin");
        let details = STANDARD_NO_PAD.decode(details).unwrap();
        assert!(
            Details::read(&details)
                .message
                .starts_with(&format!("{title}. "))
        );
    }
}

#[tokio::test]
async fn the_time_to_come_back_fits_what_clients_read() {
    for (after, expected) in [
        (Duration::from_nanos(1), "1"),
        (Duration::from_micros(1_500), "2"),
        (Duration::from_secs(3), "3000"),
        (Duration::from_secs(u64::MAX / 2), "2147483647"),
    ] {
        let later = move |settings: Settings| {
            settings.problems(move |problem| problem.retry_after = Some(after))
        };
        let app = App::with(later, app::paid);
        let answer = app.send(call().key("\"open")).await;
        assert_eq!(answer.header("grpc-retry-pushback-ms"), expected);
    }
}

#[tokio::test]
async fn tonics_client_reads_a_refusal_as_a_status() {
    let shop = Shop::unary(defaults, paid).await;
    let client = shop.client().await;
    let status = client.charge(pay("\"open")).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(
        status
            .message()
            .starts_with("Idempotency-Key is malformed. ")
    );
    let (answer, ended) = shop.raw(call().key("\"open")).await;
    assert!(ended && answer.trailers.is_none());
}

/// What of `google.rpc.Status` and its details there is to read (google/rpc/status.proto,
/// error_details.proto).
#[derive(Debug, Default)]
struct Details {
    code: u64,
    message: String,
    reason: String,
    domain: String,
    metadata: Vec<(String, String)>,
    retry_millis: Option<u64>,
    link: String,
}

impl Details {
    fn read(bytes: &[u8]) -> Self {
        let mut details = Self::default();
        for (field, value) in fields(bytes) {
            match field {
                1 => details.code = value.number(),
                2 => details.message = value.text(),
                3 => details.any(value.bytes()),
                _ => panic!("no such field: {field}"),
            }
        }
        details
    }

    fn any(&mut self, bytes: &[u8]) {
        let any = fields(bytes);
        let [(1, kind), (2, value)] = &any[..] else {
            panic!("no Any: {any:?}");
        };
        let value = fields(value.bytes());
        match &*kind.text() {
            "type.googleapis.com/google.rpc.ErrorInfo" => {
                for (field, value) in value {
                    match field {
                        1 => self.reason = value.text(),
                        2 => self.domain = value.text(),
                        _ => {
                            let entry = fields(value.bytes());
                            assert_eq!((field, entry[0].0, entry[1].0), (3, 1, 2));
                            self.metadata.push((entry[0].1.text(), entry[1].1.text()));
                        }
                    }
                }
            }
            "type.googleapis.com/google.rpc.RetryInfo" => {
                assert_eq!(value[0].0, 1);
                let millis = fields(value[0].1.bytes())
                    .into_iter()
                    .map(|(field, value)| {
                        let unit = [1000, 0][field - 1];
                        value.number() * unit
                            + if field == 2 {
                                value.number() / 1_000_000
                            } else {
                                0
                            }
                    });
                self.retry_millis = Some(millis.sum());
            }
            "type.googleapis.com/google.rpc.Help" => {
                let link = fields(value[0].1.bytes());
                assert_eq!((link[0].0, link[1].0), (1, 2));
                self.link = link[1].1.text();
            }
            kind => panic!("no such detail: {kind}"),
        }
    }
}

#[derive(Debug)]
enum Value<'b> {
    Number(u64),
    Bytes(&'b [u8]),
}

impl<'b> Value<'b> {
    fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Bytes(_) => panic!("no number"),
        }
    }

    fn bytes(&self) -> &'b [u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Number(_) => panic!("no bytes"),
        }
    }

    fn text(&self) -> String {
        String::from_utf8(self.bytes().to_vec()).unwrap()
    }
}

/// The fields of a protobuf message, by the encoding's own description.
fn fields(mut bytes: &[u8]) -> Vec<(usize, Value<'_>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let (byte, rest) = bytes.split_first().unwrap();
            *bytes = rest;
            number |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        number
    }
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let value = match tag & 7 {
            0 => Value::Number(varint(&mut bytes)),
            2 => {
                let length = varint(&mut bytes) as usize;
                let (value, rest) = bytes.split_at(length);
                bytes = rest;
                Value::Bytes(value)
            }
            wire_type => panic!("no such wire type: {wire_type}"),
        };
        all.push(((tag >> 3) as usize, value));
    }
    all
}
