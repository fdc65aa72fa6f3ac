//! What makes two requests the same, and whose they are.

use crate::message::Request;
use crate::puppet::{Puppet, WIRES, Wire, ran};

#[tokio::test]
pub async fn each_part_of_a_request_is_part_of_its_identity() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name)
            .key(&name)
            .header("content-type", "text/plain")
            .header("authorization", "Bearer 1")
            .header("cookie", "session=1");
        let first = puppet.send(wire, &request).await;
        first.fresh(200);
        let path = |path: String| Request {
            path,
            ..request.clone()
        };
        let same = [
            request.clone(),
            // What a client may well change between two attempts.
            request.clone().header("accept", "text/html"),
            request.clone().header("user-agent", "retry/2"),
            request.clone().header("traceparent", "00-1-1-01"),
        ];
        for same in same {
            puppet.send(wire, &same).await.is_replay_of(&first, &[]);
        }
        let others = [
            Request {
                method: "PATCH".to_owned(),
                ..request.clone()
            },
            path(format!("/do/{name}?dry=1")),
            path(format!("/do/{name}?")),
            path(format!("/do/{name}/")),
            path(format!("/do/x/../{name}")),
            request.clone().without("content-type"),
            request
                .clone()
                .without("content-type")
                .header("content-type", "text/html"),
            request.clone().body("amount=10"),
            request.clone().body(""),
        ];
        for other in others {
            let refused = puppet.send(wire, &other).await;
            refused.problem(422, "key_reused");
        }
        for credentials in ["authorization", "cookie"] {
            let other = request.clone().without(credentials);
            puppet
                .send(wire, &other)
                .await
                .problem(422, "caller_changed");
            let other = other.header(credentials, "other");
            puppet
                .send(wire, &other)
                .await
                .problem(422, "caller_changed");
        }
        // None of them has harmed the record.
        puppet.send(wire, &request).await.is_replay_of(&first, &[]);
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn the_whole_uri_in_a_request_is_the_path_in_it() {
    let puppet = Puppet::start(&[]);
    let request = Request::post("form").key("form");
    let first = puppet.send(Wire::H1, &request).await;
    first.fresh(200);
    // As proxies send it (RFC 9112 section 3.2.2).
    let path = "http://another.example/do/form".to_owned();
    let absolute = Request {
        path,
        ..request.clone()
    };
    puppet
        .send(Wire::H1, &absolute)
        .await
        .is_replay_of(&first, &[]);
    puppet
        .send(Wire::H2, &request)
        .await
        .is_replay_of(&first, &[]);
    assert_eq!(puppet.count("form").await, ran(1));
}

#[tokio::test]
async fn two_callers_with_one_key_are_two_requests() {
    let puppet = Puppet::start(&["--scope", "header:x-caller"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key("same");
        let alice = request.clone().header("x-caller", format!("alice-{name}"));
        let bob = request.clone().header("x-caller", format!("bob-{name}"));
        let first = puppet.send(wire, &alice).await;
        first.fresh(200);
        let second = puppet.send(wire, &bob).await;
        second.fresh(200);
        assert_ne!(first.body, second.body);
        // Within a scope a renewed token is no other caller.
        let renewed = alice.header("authorization", "Bearer 2");
        puppet.send(wire, &renewed).await.is_replay_of(&first, &[]);
        puppet.send(wire, &bob).await.is_replay_of(&second, &[]);
        assert_eq!(puppet.count(&name).await, ran(2));
        // Without a caller there is no bucket that strangers share.
        let nobody = [
            request.clone(),
            request.clone().header("x-caller", ""),
            request
                .clone()
                .header("x-caller", "a")
                .header("x-caller", "b"),
        ];
        for nobody in nobody {
            let refused = puppet.send(wire, &nobody).await;
            refused.problem(500, "scope_unavailable");
        }
        assert_eq!(puppet.count(&name).await, ran(2));
    }
}

#[tokio::test]
async fn what_inner_layers_change_does_not_change_the_identity() {
    let puppet = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name).key(&name);
        let rewritten = request.clone().header("x-puppet-rewrite", "1");
        let first = puppet.send(wire, &rewritten).await;
        first.fresh(200);
        let saw = format!("/rewritten/{name}?by=an-inner-layer text/rewritten 9 bytes");
        assert_eq!(first.header("x-puppet-saw"), Some(&*saw));
        puppet
            .send(wire, &rewritten)
            .await
            .is_replay_of(&first, &[]);
        puppet.send(wire, &request).await.is_replay_of(&first, &[]);
        let other = rewritten.body("amount=1");
        puppet.send(wire, &other).await.problem(422, "key_reused");
        assert_eq!(puppet.count(&name).await, ran(1));
    }
}

#[tokio::test]
async fn json_is_compared_by_value_where_that_is_set() {
    let json = Puppet::start(&["--fingerprint", "json"]);
    let raw = Puppet::start(&["--fingerprint", "raw"]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let request = Request::post(&name)
            .key(&name)
            .header("content-type", "application/json");
        let body = |body: &str| request.clone().body(body);
        let first = body(r#"{"amount":100,"to":{"name":"bob","iban":null}}"#);
        let same = body("{ \"to\": {\"iban\":null, \"name\":\"b\\u006fb\"},\n\"amount\": 100 }");
        let others = [
            body(r#"{"amount":100.0,"to":{"name":"bob","iban":null}}"#),
            body(r#"{"amount":100,"to":{"name":"bob"}}"#),
        ];
        let answer = json.send(wire, &first).await;
        answer.fresh(200);
        json.send(wire, &same).await.is_replay_of(&answer, &[]);
        for other in others {
            json.send(wire, &other).await.problem(422, "key_reused");
        }
        assert_eq!(json.count(&name).await, ran(1));
        raw.send(wire, &first).await.fresh(200);
        raw.send(wire, &same).await.problem(422, "key_reused");
    }
}

#[tokio::test]
async fn a_new_boundary_is_the_same_form_where_that_is_set() {
    let multipart = Puppet::start(&["--fingerprint", "multipart"]);
    let raw = Puppet::start(&[]);
    for wire in WIRES {
        let name = format!("{wire:?}");
        let form = |boundary: &str, file: &str, bytes: &str| {
            let body = format!(
                "--{boundary}\r\nContent-Disposition: form-data; name=\"a\"; filename=\"{file}\"\
                 \r\n\r\n{bytes}\r\n--{boundary}--\r\n"
            );
            Request::post(&name)
                .key(&name)
                .header(
                    "content-type",
                    format!("multipart/form-data; boundary={boundary}"),
                )
                .body(body)
        };
        let first = multipart.send(wire, &form("one", "a.txt", "x")).await;
        first.fresh(200);
        let same = multipart.send(wire, &form("two", "a.txt", "x")).await;
        same.is_replay_of(&first, &[]);
        for other in [form("two", "b.txt", "x"), form("two", "a.txt", "y")] {
            multipart
                .send(wire, &other)
                .await
                .problem(422, "key_reused");
        }
        raw.send(wire, &form("one", "a.txt", "x")).await.fresh(200);
        let other = raw.send(wire, &form("two", "a.txt", "x")).await;
        other.problem(422, "key_reused");
    }
}
