//! What makes two requests the same, recipe by recipe, and the bytes that must not change.

use bytes::Bytes;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, IF_MATCH};
use http::{HeaderName, Request};

use super::*;

#[test]
fn the_default_is_the_raw_recipe() {
    let request = post("/orders", "text/plain", "hello");
    let default = FingerprintRecipe::default().fingerprint(&request);
    assert_eq!(default, raw().fingerprint(&request));
}

#[test]
fn every_part_of_a_request_counts() {
    let mut put = post("/orders?dry=1", "text/plain", "hello");
    *put.method_mut() = http::Method::PUT;
    let mut untyped = post("/orders?dry=1", "text/plain", "hello");
    untyped.headers_mut().remove(CONTENT_TYPE);
    let mut typed_twice = post("/orders?dry=1", "text/plain", "hello");
    let plain = HeaderValue::from_static("text/plain");
    typed_twice.headers_mut().append(CONTENT_TYPE, plain);

    assert_all_differ(&[
        raw().fingerprint(&post("/orders?dry=1", "text/plain", "hello")),
        raw().fingerprint(&put),
        raw().fingerprint(&post("/orders/?dry=1", "text/plain", "hello")),
        raw().fingerprint(&post("/Orders?dry=1", "text/plain", "hello")),
        raw().fingerprint(&post("/order%73?dry=1", "text/plain", "hello")),
        raw().fingerprint(&post("/orders", "text/plain", "hello")),
        raw().fingerprint(&post("/orders?", "text/plain", "hello")),
        raw().fingerprint(&post("/orders?dry=0", "text/plain", "hello")),
        raw().fingerprint(&post("/orders?dry=1", "text/html", "hello")),
        raw().fingerprint(&post("/orders?dry=1", "", "hello")),
        raw().fingerprint(&untyped),
        raw().fingerprint(&typed_twice),
        raw().fingerprint(&post("/orders?dry=1", "text/plain", "hello ")),
        raw().fingerprint(&post("/orders?dry=1", "text/plain", "")),
    ]);
}

#[test]
fn the_same_request_is_the_same_whatever_else_it_carries() {
    let first = post("/orders", "text/plain", "hello");
    let mut second = first.clone();
    let headers = second.headers_mut();
    headers.insert(ACCEPT, HeaderValue::from_static("*/*"));
    headers.insert("traceparent", HeaderValue::from_static("00-1-2-00"));
    *second.version_mut() = http::Version::HTTP_2;
    assert_eq!(raw().fingerprint(&first), raw().fingerprint(&second));
}

#[test]
fn parts_do_not_run_into_each_other() {
    let start = |path: &str, query: Option<&str>, body: &'static str| {
        let (head, ()) = Request::new(()).into_parts();
        let recipe = raw();
        let mut hasher = recipe.start(&head, path, query, CallerPart::Scoped);
        let body = Bytes::from_static(body.as_bytes());
        hasher.frame(&body);
        hasher.finish(|| body)
    };
    assert_all_differ(&[
        start("/a", Some("b"), "c"),
        start("/ab", Some(""), "c"),
        start("/ab", None, "c"),
        start("/a", Some("bc"), ""),
        start("/a?b", None, "c"),
        start("/a", None, "bc"),
        start("/a", None, "\x01\x01\0\0\0\0\0\0\0b\0R\0c"),
    ]);
}

#[test]
fn frames_make_no_difference() {
    let json = r#"{"a":[1,"ä"]}"#;
    for (recipe, content_type, body) in [
        (raw(), "text/plain", "hello, world"),
        (raw().json(), "application/json", json),
        (raw().json(), "application/json", "[1,"),
        (raw().multipart(), FORM_TYPE, FORM),
        (raw().multipart(), FORM_TYPE, "--b\r\n"),
        (reversing(), "text/plain", "hello"),
        (FingerprintRecipe::without_content(), "text/plain", "hello"),
    ] {
        let whole = recipe.fingerprint(&post("/", content_type, body));
        let (head, ()) = post("/", content_type, body).map(|_| ()).into_parts();
        let frames = |frames: &[&'static [u8]]| {
            let mut hasher = recipe.start(&head, "/", None, CallerPart::Scoped);
            for frame in frames {
                hasher.frame(&Bytes::from_static(frame));
            }
            hasher.finish(|| Bytes::from(frames.concat()))
        };
        let body = body.as_bytes();
        for middle in 0..=body.len() {
            let (left, right) = body.split_at(middle);
            assert_eq!(whole, frames(&[left, b"", right]), "{recipe:?} {middle}");
        }
        assert_eq!(whole, frames(&body.chunks(1).collect::<Vec<_>>()));
    }
}

#[test]
fn the_original_path_counts_and_not_the_routed_one() {
    let (head, ()) = Request::post("/orders").body(()).unwrap().into_parts();
    let recipe = raw();
    let at = |path| {
        recipe
            .start(&head, path, None, CallerPart::Scoped)
            .finish(Bytes::new)
    };
    assert_eq!(at("/t/1/orders"), at("/t/1/orders"));
    assert_ne!(at("/t/1/orders"), at("/t/2/orders"));
}

#[test]
fn without_a_scope_other_credentials_are_recognised_as_such() {
    let (head, ()) = Request::post("/orders").body(()).unwrap().into_parts();
    let recipe = raw();
    let of = |caller| {
        recipe
            .start(&head, "/orders", None, caller)
            .finish(Bytes::new)
    };
    let with = |authorization: Option<&'static str>| {
        let lines = authorization.map(|line| (AUTHORIZATION, HeaderValue::from_static(line)));
        let part = caller_part(&lines.into_iter().collect(), b"lookup key");
        of(CallerPart::Credentials(part))
    };
    let (alice, bob, nobody) = (with(Some("a")), with(Some("b")), with(None));
    assert_eq!(alice.compare(&alice), FingerprintMatch::Same);
    assert_eq!(alice.compare(&bob), FingerprintMatch::OtherCaller);
    assert_eq!(alice.compare(&nobody), FingerprintMatch::OtherCaller);
    // A scope that is set in a deployment makes no mismatches.
    let scoped = of(CallerPart::Scoped);
    assert_eq!(nobody.compare(&scoped), FingerprintMatch::OtherRecipe);
}

#[test]
fn chosen_headers_count_by_lines_in_order() {
    let recipe = raw().headers([IF_MATCH, HOST]);
    let with = |lines: &[(HeaderName, &'static str)]| {
        let mut request = post("/", "text/plain", "");
        for (name, value) in lines {
            let value = HeaderValue::from_static(value);
            request.headers_mut().append(name, value);
        }
        recipe.fingerprint(&request)
    };
    assert_all_differ(&[
        with(&[]),
        with(&[(IF_MATCH, "")]),
        with(&[(IF_MATCH, "a")]),
        with(&[(IF_MATCH, "a, b")]),
        with(&[(IF_MATCH, "a"), (IF_MATCH, "b")]),
        with(&[(IF_MATCH, "b"), (IF_MATCH, "a")]),
        with(&[(HOST, "a")]),
        with(&[(IF_MATCH, "a"), (HOST, "b")]),
        with(&[(IF_MATCH, "b"), (HOST, "a")]),
    ]);
    let swapped = with(&[(HOST, "h"), (ACCEPT, "x"), (IF_MATCH, "a")]);
    assert_eq!(with(&[(IF_MATCH, "a"), (HOST, "h")]), swapped);
}

#[test]
fn a_digest_header_can_stand_for_the_body() {
    let name = HeaderName::from_static("content-digest");
    let recipe = FingerprintRecipe::without_content().headers([name.clone()]);
    let with = |digest, body| {
        let mut request = post("/", "text/plain", body);
        request
            .headers_mut()
            .insert(&name, HeaderValue::from_static(digest));
        recipe.fingerprint(&request)
    };
    assert_eq!(with("sha-256=:AA==:", "a"), with("sha-256=:AA==:", "b"));
    assert_ne!(with("sha-256=:AA==:", "a"), with("sha-256=:AQ==:", "a"));
}

#[test]
fn a_closure_says_what_the_content_is() {
    let recipe = FingerprintRecipe::closure("lower", |head, body| {
        let mut bytes = body.to_ascii_lowercase();
        bytes.extend(
            head.headers
                .get(ACCEPT)
                .map_or(&[][..], HeaderValue::as_bytes),
        );
        bytes
    });
    let same =
        |a: &Request<Bytes>, b: &Request<Bytes>| recipe.fingerprint(a) == recipe.fingerprint(b);
    let one = post("/", "text/plain", "Hello");
    assert!(same(&one, &post("/", "text/html", "hELLO")));
    assert!(!same(&one, &post("/other", "text/plain", "Hello")));
    assert!(!same(&one, &post("/", "text/plain", "Hallo")));
    let mut accepting = one.clone();
    accepting
        .headers_mut()
        .insert(ACCEPT, HeaderValue::from_static("x"));
    assert!(!same(&one, &accepting));
}

#[test]
fn of_a_json_content_type_only_the_media_type_counts() {
    let recipe = raw().json();
    let of = |content_type| recipe.fingerprint(&post("/", content_type, "{}"));
    assert_eq!(
        of("application/json"),
        of("Application/JSON; charset=utf-8")
    );
    assert_all_differ(&[
        of("application/json"),
        of("application/merge-patch+json"),
        of("text/plain"),
        of("text/plain;charset=utf-8"),
    ]);
}

#[test]
fn json_is_read_only_where_the_content_type_says_so() {
    for content_type in ["text/plain", "application/json-seq", ""] {
        let recipe = raw().json();
        let of = |body| recipe.fingerprint(&post("/", content_type, body));
        assert_ne!(of("[1]"), of("[ 1 ]"), "{content_type}");
    }
    let twice = |body| {
        let mut request = post("/", "application/json", body);
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().append(CONTENT_TYPE, json);
        raw().json().fingerprint(&request)
    };
    assert_ne!(twice("[1]"), twice("[ 1 ]"));
}

#[test]
fn json_that_cannot_be_read_counts_byte_for_byte() {
    let of = |content_type, body| raw().json().fingerprint(&post("/", content_type, body));
    for (body, spaced) in [
        ("", " "),
        ("[1,]", "[1, ]"),
        ("{\"a\":1,\"a\":1}", "{\"a\":1, \"a\":1}"),
        ("\u{feff}[]", "\u{feff}[ ]"),
    ] {
        assert_ne!(of("application/json", body), of("application/json", spaced));
        // The charset may say how such bytes are read, so it counts as well.
        let utf16 = of("application/json;charset=utf-16", body);
        assert_ne!(of("application/json", body), utf16);
    }
}

#[test]
fn raw_bytes_never_look_like_a_value() {
    // What the value `null` of this media type is written as, sent as a body that is no JSON.
    let media_type = "application/json";
    let mut body = vec![b'J', 16, 0, 0, 0, 0, 0, 0, 0];
    body.extend(media_type.as_bytes());
    body.push(b'n');
    let of = |body| raw().json().fingerprint(&post("/", media_type, body));
    assert_ne!(of(Bytes::from_static(b"null")), of(Bytes::from(body)));
}

#[test]
fn only_the_chosen_values_count() {
    let recipe = raw().only(["/amount", "/to/iban"]).unwrap();
    let of = |body| recipe.fingerprint(&json("/", body));
    let one = of(r#"{"amount":1,"to":{"iban":"X","name":"A"},"at":7}"#);
    assert_eq!(one, of(r#"{"to":{"name":"B","iban":"X"},"amount":1}"#));
    assert_all_differ(&[
        one,
        of(r#"{"amount":2,"to":{"iban":"X"}}"#),
        of(r#"{"amount":1,"to":{"iban":"Y"}}"#),
        of(r#"{"amount":1,"to":{"iban":null}}"#),
        of(r#"{"amount":1,"to":{}}"#),
        of(r#"{"to":{"iban":1}}"#),
        // Not JSON: nothing can be chosen, so all of it counts.
        of(r#"{"amount":1,"to":{"iban":"X"}"#),
        of(r#"{"amount":1,"to":{"iban":"X"}, "#),
    ]);
}

#[test]
fn what_is_left_out_may_change_or_be_missing() {
    let recipe = raw().except(["/trace", "/items/0/url"]).unwrap();
    let of = |body| recipe.fingerprint(&json("/", body));
    let one = of(r#"{"trace":"t1","items":[{"id":1,"url":"a"},{"url":"b"}]}"#);
    assert_eq!(one, of(r#"{"items":[{"url":[],"id":1},{"url":"b"}]}"#));
    assert_all_differ(&[
        one,
        of(r#"{"items":[{"id":2,"url":"a"},{"url":"b"}]}"#),
        of(r#"{"items":[{"id":1,"url":"a"},{"url":"c"}]}"#),
        of(r#"{"items":[{"id":1,"url":"a"},{}]}"#),
        of(r#"{"items":[{"id":1,"url":"a"}]}"#),
    ]);
    // Not configured, the same change is another request.
    let plain = |body| raw().json().fingerprint(&json("/", body));
    assert_ne!(plain(r#"{"trace":1}"#), plain(r#"{"trace":2}"#));
}

#[test]
fn chosen_values_may_have_parts_left_out() {
    let recipe = raw().only(["/a"]).unwrap().except(["/a/t"]).unwrap();
    let of = |body| recipe.fingerprint(&json("/", body));
    assert_eq!(of(r#"{"a":{"t":1,"x":2}}"#), of(r#"{"a":{"x":2},"b":3}"#));
    assert_ne!(of(r#"{"a":{"x":2}}"#), of(r#"{"a":{"x":3}}"#));
}

#[test]
fn forms_are_compared_by_their_parts() {
    let recipe = raw().multipart();
    let of = |boundary: &str, body: &str| {
        let content_type = format!("multipart/form-data; charset=utf-8; boundary={boundary}");
        let delimiter = format!("--{}", boundary.trim_matches('"'));
        let body = body.replace("--b", &delimiter);
        recipe.fingerprint(&post("/", &content_type, body))
    };
    let one = of("b", FORM);
    assert_eq!(one, of("----WebKitFormBoundary7MA4YWxkTrZu0gW", FORM));
    assert_eq!(one, of("\"new and quoted\"", FORM));
    assert_all_differ(&[
        one,
        of("b", &FORM.replace("f.txt", "g.txt")),
        of("b", &FORM.replace("hi", "hj")),
        of("b", &FORM.replace("text/plain", "text/html")),
        of("b", &FORM.replace("name=n", "name=m")),
        raw().fingerprint(&post("/", FORM_TYPE, FORM)),
    ]);
    assert_ne!(
        one,
        recipe.fingerprint(&post("/", "multipart/mixed; boundary=b", FORM))
    );
}

#[test]
fn a_recipe_reads_only_what_it_was_told_to() {
    let of = |recipe: FingerprintRecipe, content_type, body| {
        let fingerprint = recipe.fingerprint(&post("/", content_type, body));
        fingerprint.as_bytes()[4..].to_vec()
    };
    let json_type = "application/json";
    assert_eq!(
        of(raw().json(), FORM_TYPE, FORM),
        of(raw(), FORM_TYPE, FORM)
    );
    assert_eq!(
        of(raw().multipart(), json_type, "[1]"),
        of(raw(), json_type, "[1]")
    );
    let both = raw().multipart().json();
    assert_eq!(
        of(both.clone(), FORM_TYPE, FORM),
        of(raw().multipart(), FORM_TYPE, FORM)
    );
    assert_eq!(
        of(both, json_type, "[ 1 ]"),
        of(raw().json(), json_type, "[1]")
    );
}

#[test]
fn forms_that_cannot_be_read_count_byte_for_byte() {
    let recipe = raw().multipart();
    let of = |content_type, body| recipe.fingerprint(&post("/", content_type, body));
    let cut = "--b\r\nContent-Disposition: form-data; name=n\r\n\r\nx";
    assert_eq!(of(FORM_TYPE, cut), of(FORM_TYPE, cut));
    assert_all_differ(&[
        of(FORM_TYPE, cut),
        of(
            FORM_TYPE,
            "--b\r\nContent-Disposition: form-data; name=\"n\"\r\n\r\nx",
        ),
        // Another boundary divides the same bytes in another way.
        of("multipart/form-data; boundary=c", cut),
        of("multipart/form-data", cut),
    ]);
}

#[test]
fn the_last_word_on_the_content_stands() {
    let request = post("/", "text/plain", "hello");
    for setter in [
        FingerprintRecipe::without_content().json(),
        reversing().json(),
        reversing().except(["/a"]).unwrap(),
    ] {
        let list = setter.describe().hashed;
        assert!(list.contains(&"body".to_owned()), "{list:?}");
        let (bytes, other) = (
            setter.fingerprint(&request),
            post("/", "text/plain", "hullo"),
        );
        assert_eq!(
            bytes.as_bytes()[4..],
            raw().fingerprint(&request).as_bytes()[4..]
        );
        assert_ne!(bytes, setter.fingerprint(&other));
    }
}

#[test]
fn fingerprints_stay_the_same_between_releases() {
    let form = post("/orders", FORM_TYPE, FORM);
    let of = |recipe: FingerprintRecipe, request| hex(&recipe.fingerprint(request));
    let mut if_match = json(
        "/orders",
        r#"{"b": "\u00e4", "a": [1, 2.50, true, false, null]}"#,
    );
    if_match
        .headers_mut()
        .insert(IF_MATCH, HeaderValue::from_static("\"v1\""));
    let only = raw().only(["/c", "/a"]).unwrap().except(["/a/0"]).unwrap();
    let plain = post("/orders", "text/plain", "zyx");

    // Computed by another program from the table in the module's documentation: recipe, request, target.
    for (found, recipe, request) in [
        (
            of(raw(), &post("/orders?dry=1", "text/plain", "hello")),
            "59fa6598",
            "cc80ee49b90d168a5e602e0f5679e3fb703134f8ee6d0863561123e500c002cf",
        ),
        (
            of(raw().json().headers([IF_MATCH]), &if_match),
            "01b05e7a",
            "3467926cb74a7405f656806f224f4c9188a69e4b41266fa955c830f22359d004",
        ),
        (
            of(only, &if_match),
            "4a9af713",
            "89170fdadf7250659e2dca52d110dcdadfe157c2c883c6b70aecf1fdd14c3ef8",
        ),
        (
            of(raw().multipart(), &form),
            "6d426aed",
            "2731640b05bdd24411c04516197e63402c8bb5efa5cf17e7b5743cf06d12542b",
        ),
        (
            of(reversing(), &plain),
            "ad8f9da1",
            "24d9a720bbc98ecbc146f88a828269cf4b522a5d5f36bfc9129131ccb9c44fa6",
        ),
        (
            of(FingerprintRecipe::without_content(), &plain),
            "2c0d0d74",
            "a57ba43ea91f8119155f4478afa4a0f98ea81989782900042453986d2c6ea1be",
        ),
    ] {
        let caller = "0".repeat(24);
        let target = if recipe == "59fa6598" {
            "7a47a5d8"
        } else {
            "d9c7c439"
        };
        assert_eq!(found, format!("{recipe}{request}{caller}{target}"));
    }
}

#[cfg(feature = "blake3")]
#[test]
fn a_fingerprint_by_blake3_is_that_of_the_same_bytes() {
    let request = post("/orders?dry=1", "text/plain", "hello");
    let mut bytes = Vec::new();
    for text in ["POST", "/orders"] {
        bytes.extend((text.len() as u64).to_le_bytes());
        bytes.extend(text.bytes());
    }
    bytes.extend([1, 5, 0, 0, 0, 0, 0, 0, 0]);
    bytes.extend(*b"dry=1\0R\x01\x0a\0\0\0\0\0\0\0text/plain\0hello");
    let fingerprint = raw().blake3().fingerprint(&request);
    let request_part = &fingerprint.as_bytes()[4..36];
    assert_eq!(request_part, blake3::hash(&bytes).as_bytes());
}

#[cfg(feature = "blake3")]
#[test]
fn a_switch_to_blake3_turns_no_retry_into_a_mismatch() {
    let request = post("/orders", "application/json", "[1]");
    let elsewhere = post("/refunds", "application/json", "[1]");
    for recipe in [
        raw(),
        raw().json(),
        reversing(),
        FingerprintRecipe::without_content(),
    ] {
        let fast = recipe.clone().blake3();
        let (old, new) = (recipe.fingerprint(&request), fast.fingerprint(&request));
        assert_eq!(old.compare(&new), FingerprintMatch::OtherRecipe);
        assert_eq!(new.compare(&old), FingerprintMatch::OtherRecipe);
        let elsewhere = fast.fingerprint(&elsewhere);
        assert_eq!(old.compare(&elsewhere), FingerprintMatch::Different);
        assert_eq!(new.compare(&elsewhere), FingerprintMatch::Different);
    }
}

#[cfg(feature = "blake3")]
#[test]
fn blake3_reads_bodies_as_the_recipe_says() {
    let recipe = raw().except(["/trace"]).unwrap().blake3();
    let of = |body: &'static str| recipe.fingerprint(&json("/orders", body));
    assert_eq!(of(r#"{"a":1,"trace":2}"#), of(r#"{ "trace":3, "a":1}"#));
    assert_all_differ(&[of(r#"{"a":1}"#), of(r#"{"a":2}"#), of(r#"{"a":1"#)]);
    assert!(recipe.describe().text.starts_with("BLAKE3 of method"));
    assert_eq!(recipe.describe().hashed.last().unwrap(), "hash:blake3");
}

#[test]
fn a_layer_can_keep_a_hasher_across_an_await() {
    fn assert_send<T: Send>() {}
    assert_send::<hasher::FingerprintHasher<'static>>();
}

fn raw() -> FingerprintRecipe {
    FingerprintRecipe::raw()
}

fn reversing() -> FingerprintRecipe {
    FingerprintRecipe::closure("c1", |_, body| body.iter().rev().copied().collect())
}

fn json(uri: &str, body: impl Into<Bytes>) -> Request<Bytes> {
    post(uri, "application/json", body)
}

fn post(uri: &str, content_type: &str, body: impl Into<Bytes>) -> Request<Bytes> {
    Request::post(uri)
        .header(CONTENT_TYPE, content_type)
        .body(body.into())
        .unwrap()
}

fn assert_all_differ(fingerprints: &[Fingerprint]) {
    for (index, one) in fingerprints.iter().enumerate() {
        let same = fingerprints[..index].iter().position(|other| one == other);
        assert_eq!(same, None, "the same as number {index}");
    }
}

fn hex(fingerprint: &Fingerprint) -> String {
    let bytes = fingerprint.as_bytes().iter();
    bytes.map(|byte| format!("{byte:02x}")).collect()
}

const FORM_TYPE: &str = "multipart/form-data; boundary=b";
const FORM: &str = "--b\r\n\
    Content-Disposition: form-data; name=\"file\"; filename=\"f.txt\"\r\n\
    Content-Type: text/plain\r\n\
    \r\n\
    hi\r\n\
    --b\r\n\
    content-disposition: form-data; name=n\r\n\
    \r\n\
    \r\n\
    --b--\r\n";
