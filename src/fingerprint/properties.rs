//! What holds for all documents and requests, checked on random ones.

use bytes::Bytes;
use http::Request;
use http::header::CONTENT_TYPE;
use proptest::prelude::*;
use serde_json::Value;

use super::{CallerPart, Fingerprint, FingerprintRecipe};

proptest! {
    #[test]
    fn writing_a_value_in_another_way_changes_nothing(
        value in any_value(),
        seeds in prop::collection::vec(any::<u8>(), 64),
    ) {
        let recipe = FingerprintRecipe::raw().json();
        let mut written = String::new();
        write(&value, &mut seeds.iter().copied().cycle(), &mut written);
        prop_assert_eq!(json(&recipe, &value.to_string()), json(&recipe, &written), "{}", written);
    }

    #[test]
    fn fingerprints_are_equal_exactly_when_the_values_are(
        (one, other) in (few_values(), few_values()),
        seeds in prop::collection::vec(any::<u8>(), 64),
    ) {
        let recipe = FingerprintRecipe::raw().json();
        let mut written = String::new();
        write(&other, &mut seeds.iter().copied().cycle(), &mut written);
        prop_assert_eq!(&serde_json::from_str::<Value>(&written).unwrap(), &other);
        let same = json(&recipe, &one.to_string()) == json(&recipe, &written);
        prop_assert_eq!(same, one == other, "{} {}", one, written);
    }

    #[test]
    fn a_body_is_read_exactly_when_another_parser_reads_it(
        value in any_value(),
        edits in prop::collection::vec((any::<prop::sample::Index>(), edit()), 0..4),
    ) {
        let mut body = value.to_string().into_bytes();
        for (at, edit) in edits {
            let at = at.index(body.len() + 1);
            match edit {
                Edit::Insert(byte) => body.insert(at, byte),
                Edit::Remove if at < body.len() => drop(body.remove(at)),
                Edit::Replace(byte) if at < body.len() => body[at] = byte,
                _ => {}
            }
        }
        let other = serde_json::from_slice::<Unambiguous>(&body);
        // The other parser refuses numbers past the range of `f64`.
        let out_of_range = other.as_ref().is_err_and(|e| e.to_string().contains("out of range"));
        prop_assume!(!out_of_range);
        let read = super::json::Document::parse(&body).is_some();
        prop_assert_eq!(read, other.is_ok(), "{}", body.escape_ascii());
    }

    #[test]
    fn leaving_out_is_the_same_as_removing(value in few_values(), name in "[ab]") {
        let except = FingerprintRecipe::raw().except([format!("/{name}")]).unwrap();
        let mut removed = value.clone();
        if let Some(members) = removed.as_object_mut() {
            members.remove(&name);
        }
        prop_assert_eq!(json(&except, &value.to_string()), json(&except, &removed.to_string()));
    }

    #[test]
    fn choosing_finds_what_another_reader_finds(
        value in few_values(),
        pointer in "(/(a|b|0|1))(/(a|b|0|1))?",
    ) {
        let recipe = FingerprintRecipe::raw().only([&pointer]).unwrap();
        let found = json(&recipe, &value.to_string());
        let mut expected = Value::Object(Default::default());
        // The same value in the same place, and nothing round it.
        if let Some(chosen) = value.pointer(&pointer) {
            expected = chosen.clone();
            for token in pointer[1..].split('/').rev() {
                expected = serde_json::json!({ token: expected });
            }
        }
        prop_assert_eq!(found, json(&recipe, &expected.to_string()));
    }

    #[test]
    fn forms_are_equal_exactly_when_their_parts_are(
        (one, other) in (few_parts(), few_parts()),
        boundary in "[a-zA-Z0-9'()+_,./:=?-]{20,70}",
    ) {
        let recipe = FingerprintRecipe::raw().multipart();
        let same = form(&recipe, &one, "boundary") == form(&recipe, &other, &boundary);
        prop_assert_eq!(same, one == other);
    }

    #[test]
    fn no_body_panics_and_frames_make_no_difference(
        frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..5),
        content_type in prop::sample::select(vec![
            "text/plain", "application/json", "multipart/form-data; boundary=b",
        ]),
    ) {
        let recipe = FingerprintRecipe::raw().json().multipart();
        let request = request(content_type, Bytes::from(frames.concat()));
        let whole = recipe.fingerprint(&request);
        let (head, _) = request.into_parts();
        let mut hasher = recipe.start(&head, "/", None, CallerPart::Scoped);
        for frame in &frames {
            hasher.frame(&Bytes::from(frame.clone()));
        }
        prop_assert_eq!(hasher.finish(|| Bytes::from(frames.concat())), whole);
    }
}

fn request(content_type: &str, body: Bytes) -> Request<Bytes> {
    let request = Request::post("/").header(CONTENT_TYPE, content_type);
    request.body(body).unwrap()
}

fn json(recipe: &FingerprintRecipe, body: &str) -> Fingerprint {
    let body = Bytes::copy_from_slice(body.as_bytes());
    recipe.fingerprint(&request("application/json", body))
}

fn form(recipe: &FingerprintRecipe, parts: &[(String, String)], boundary: &str) -> Fingerprint {
    let mut body = String::new();
    for (name, content) in parts {
        let head = format!("Content-Disposition: form-data; name=\"{name}\"");
        body += &format!("--{boundary}\r\n{head}\r\n\r\n{content}\r\n");
    }
    body += &format!("--{boundary}--\r\n");
    let content_type = format!("multipart/form-data; boundary=\"{boundary}\"");
    recipe.fingerprint(&request(&content_type, Bytes::from(body)))
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    values(leaf.boxed(), any::<String>().boxed())
}

/// Of so few that equal ones are met often. Integers only: a parser that keeps other numbers as
/// floats finds values equal that are written differently.
fn few_values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        Just(Value::from("a")),
        (0..2).prop_map(Value::from),
    ];
    values(leaf.boxed(), "[ab]".boxed())
}

fn values(leaf: BoxedStrategy<Value>, name: BoxedStrategy<String>) -> impl Strategy<Value = Value> {
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(name.clone(), inner, 0..4)
                .prop_map(|members| members.into_iter().collect()),
        ]
    })
}

fn few_parts() -> impl Strategy<Value = Vec<(String, String)>> {
    let part = (
        "[ab]",
        prop::sample::select(vec!["", "1", "\r\n", "1\r\n--"]),
    );
    let part = part.prop_map(|(name, content)| (name, content.to_owned()));
    prop::collection::vec(part, 0..3)
}

/// Writes a value with its members in another order, with white space, and with escapes.
fn write(value: &Value, seeds: &mut impl Iterator<Item = u8>, out: &mut String) {
    if let Some(seed @ 0..50) = seeds.next() {
        out.push([' ', '\n', '\r', '\t'][usize::from(seed % 4)]);
    }
    match value {
        Value::Array(elements) => {
            out.push('[');
            for (index, element) in elements.iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                write(element, seeds, out);
            }
            out.push(']');
        }
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            let by = usize::from(seeds.next().unwrap_or(0)) % members.len().max(1);
            members.rotate_left(by);
            out.push('{');
            for (index, (name, value)) in members.into_iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                write_string(name, seeds, out);
                out.push(':');
                write(value, seeds, out);
            }
            out.push('}');
        }
        Value::String(text) => write_string(text, seeds, out),
        other => *out += &other.to_string(),
    }
    out.push_str(if seeds.next() < Some(50) { "\t" } else { "" });
}

fn write_string(text: &str, seeds: &mut impl Iterator<Item = u8>, out: &mut String) {
    out.push('"');
    for char in text.chars() {
        if seeds.next() < Some(100) || char < ' ' || char == '"' || char == '\\' {
            for unit in char.encode_utf16(&mut [0; 2]) {
                *out += &format!("\\u{unit:04x}");
            }
        } else {
            out.push(char);
        }
    }
    out.push('"');
}

#[derive(Clone, Debug)]
enum Edit {
    Insert(u8),
    Remove,
    Replace(u8),
}

fn edit() -> impl Strategy<Value = Edit> {
    let byte = prop::sample::select(b"[]{},:\"\\ \n0-1.eE+u/tn\x01\x80a".to_vec());
    prop_oneof![
        byte.clone().prop_map(Edit::Insert),
        Just(Edit::Remove),
        byte.prop_map(Edit::Replace),
    ]
}

/// A document in which no name occurs twice in an object, as another parser reads it.
struct Unambiguous;

impl<'de> serde::Deserialize<'de> for Unambiguous {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Visitor)
    }
}

struct Visitor;

impl<'de> serde::de::Visitor<'de> for Visitor {
    type Value = Unambiguous;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_str<E>(self, _: &str) -> Result<Unambiguous, E> {
        Ok(Unambiguous)
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Unambiguous, A::Error> {
        while seq.next_element::<Unambiguous>()?.is_some() {}
        Ok(Unambiguous)
    }

    fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Unambiguous, A::Error> {
        let mut names = std::collections::HashSet::new();
        while let Some((name, Unambiguous)) = map.next_entry::<String, _>()? {
            if !names.insert(name) {
                return Err(serde::de::Error::custom("a name occurs twice"));
            }
        }
        Ok(Unambiguous)
    }
}
