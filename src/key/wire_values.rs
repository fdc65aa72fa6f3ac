//! What clients, proxies and attackers put into the field, and what becomes of it.

use http::{HeaderMap, HeaderName, HeaderValue};

use super::{IdempotencyKey, KeySyntax, format, syntax};

const FIELD: HeaderName = HeaderName::from_static("idempotency-key");

/// `Ok(None)`: no such field. `Ok(Some(key))`. `Err(reason)`.
type Answer<'a> = Result<Option<&'a str>, &'static str>;

struct Row<'a> {
    case: &'static str,
    lines: Vec<Vec<u8>>,
    strict: Answer<'a>,
    lenient: Answer<'a>,
}

/// Both syntaxes give the same answer.
fn both<'a>(case: &'static str, lines: &[&[u8]], answer: Answer<'a>) -> Row<'a> {
    apart(case, lines, answer, answer)
}

fn apart<'a>(
    case: &'static str,
    lines: &[&[u8]],
    strict: Answer<'a>,
    lenient: Answer<'a>,
) -> Row<'a> {
    Row {
        case,
        lines: lines.iter().map(|line| line.to_vec()).collect(),
        strict,
        lenient,
    }
}

fn key(key: &str) -> Answer<'_> {
    Ok(Some(key))
}

fn check(row: &Row<'_>, syntax: KeySyntax, expected: Answer<'_>) {
    let Row { case, lines, .. } = row;
    // Bytes that `HeaderValue` refuses (row by row: NUL, DEL, CR LF) still have to be refused here.
    if let [line] = lines.as_slice() {
        let read = syntax::decode_bytes(line, syntax)
            .and_then(|key| format::check_default_length(&key).map(|()| key));
        let read = match &read {
            Ok(key) => Ok(Some(key.as_ref())),
            Err(error) => Err(error.reason()),
        };
        assert_eq!(read, expected, "{case}, {syntax:?}, as bytes");
    }
    let values: Result<Vec<_>, _> = lines
        .iter()
        .map(|line| HeaderValue::from_bytes(line))
        .collect();
    let Ok(values) = values else {
        assert_eq!(expected, Err("sf-syntax"), "{case}: no header can hold it");
        return;
    };
    let mut headers = HeaderMap::new();
    for value in values {
        headers.append(FIELD, value);
    }
    let read = IdempotencyKey::from_headers(&headers, &FIELD, syntax);
    let read = match &read {
        Ok(key) => Ok(key.as_ref().map(IdempotencyKey::as_str)),
        Err(error) => Err(error.reason()),
    };
    assert_eq!(read, expected, "{case}, {syntax:?}, as a header");
}

#[test]
fn each_value_has_one_answer_in_each_syntax() {
    let uuid_digit = "8e03978e-40d5-43e8-bc93-6894a57f9324";
    let uuid_letter = "ae03978e-40d5-43e8-bc93-6894a57f9324";
    let k255 = "k".repeat(255);
    let quoted = |len: usize| format!("\"{}\"", "k".repeat(len)).into_bytes();
    let (q255, q256, q1024) = (quoted(255), quoted(256), quoted(1024));
    let bare256 = "k".repeat(256).into_bytes();
    let syntax = || Err("sf-syntax");
    let rows = [
        both("absent", &[], Ok(None)),
        both(
            "UUID of the draft",
            &[b"\"8e03978e-40d5-43e8-bc93-6894a57f9324\""],
            key(uuid_digit),
        ),
        both(
            "random string of the draft",
            &[b"\"clkyoesmbgybucifusbbtdsbohtyuuwz\""],
            key("clkyoesmbgybucifusbbtdsbohtyuuwz"),
        ),
        apart(
            "bare UUID, digit first",
            &[uuid_digit.as_bytes()],
            syntax(),
            key(uuid_digit),
        ),
        apart(
            "bare UUID, letter first",
            &[uuid_letter.as_bytes()],
            Err("not-a-string"),
            key(uuid_letter),
        ),
        apart("bare token", &[b"abc"], Err("not-a-string"), key("abc")),
        both("quoted token", &[b"\"abc\""], key("abc")),
        apart("empty field", &[b""], syntax(), Err("empty")),
        both("empty string", &[b"\"\""], Err("empty")),
        both("string of spaces", &[b"\"   \""], Err("blank")),
        both("spaces around the string", &[b"  \"abc\"  "], key("abc")),
        apart(
            "tab before the string",
            &[b"\t\"abc\""],
            syntax(),
            key("abc"),
        ),
        apart(
            "tab after the string",
            &[b"\"abc\"\t"],
            syntax(),
            key("abc"),
        ),
        both("spaces within the string", &[b"\" abc \""], key(" abc ")),
        both("escaped quote", &[br#""a\"b""#], key("a\"b")),
        both("escaped backslash", &[br#""a\\b""#], key("a\\b")),
        both("escape first", &[br#""\"abc""#], key("\"abc")),
        both("escaped n", &[br#""a\nb""#], syntax()),
        both("escaped closing quote", &[br#""abc\""#], syntax()),
        both("backslash last", &[br#""abc\"#], syntax()),
        both("unterminated", &[b"\"abc"], syntax()),
        both("text after the string", &[b"\"abc\"def"], syntax()),
        apart("single quotes", &[b"'abc'"], syntax(), key("'abc'")),
        both("UTF-8 in the string", &[b"\"k\xc3\xa9y\""], syntax()),
        both("byte 0xFF in the string", &[b"\"a\xffb\""], syntax()),
        apart("bare UTF-8", &[b"k\xc3\xa9y"], syntax(), Err("bare-syntax")),
        both("tab in the string", &[b"\"a\tb\""], syntax()),
        both("DEL in the string", &[b"\"a\x7fb\""], syntax()),
        both("NUL in the string", &[b"\"a\x00b\""], syntax()),
        both("header injection", &[b"\"a\r\nX-Evil: 1\""], syntax()),
        both("parameter", &[b"\"abc\";v=1"], key("abc")),
        both(
            "spaces before the parameter's name",
            &[b"\"abc\";  v=1"],
            key("abc"),
        ),
        both("space before the semicolon", &[b"\"abc\" ;v=1"], syntax()),
        both("parameter without a value", &[b"\"abc\";retry"], key("abc")),
        both("parameter in upper case", &[b"\"abc\";V=1"], syntax()),
        both(
            "parameter with a date",
            &[b"\"abc\";d=@1659578233"],
            key("abc"),
        ),
        both("semicolon last", &[b"\"abc\";"], syntax()),
        apart(
            "bare with a parameter",
            &[b"abc;v=1"],
            Err("not-a-string"),
            Err("bare-syntax"),
        ),
        both("list in one line", &[b"\"abc\", \"abc\""], syntax()),
        both(
            "two equal lines",
            &[b"\"abc\"", b"\"abc\""],
            Err("multiple-lines"),
        ),
        both(
            "two different lines",
            &[b"\"abc\"", b"\"def\""],
            Err("multiple-lines"),
        ),
        both(
            "string over two lines",
            &[b"\"foo", b"bar\""],
            Err("multiple-lines"),
        ),
        both("comma in the string", &[b"\"foo, bar\""], key("foo, bar")),
        apart(
            "bare with a comma",
            &[b"abc,def"],
            syntax(),
            Err("bare-syntax"),
        ),
        apart(
            "bare with a space",
            &[b"abc def"],
            syntax(),
            Err("bare-syntax"),
        ),
        apart("integer", &[b"12345"], Err("not-a-string"), key("12345")),
        apart("negative integer", &[b"-7"], Err("not-a-string"), key("-7")),
        apart(
            "integer of 16 digits",
            &[b"1234567890123456"],
            syntax(),
            key("1234567890123456"),
        ),
        apart("decimal", &[b"1.5"], Err("not-a-string"), key("1.5")),
        apart("boolean", &[b"?1"], Err("not-a-string"), key("?1")),
        apart(
            "byte sequence",
            &[b":YWJj:"],
            Err("not-a-string"),
            key(":YWJj:"),
        ),
        apart(
            "date",
            &[b"@1659578233"],
            Err("not-a-string"),
            key("@1659578233"),
        ),
        apart(
            "display string",
            &[b"%\"abc\""],
            Err("not-a-string"),
            Err("bare-syntax"),
        ),
        apart(
            "display string with escapes",
            &[b"%\"k%c3%a9y\""],
            Err("not-a-string"),
            Err("bare-syntax"),
        ),
        both("percent in the string", &[b"\"k%c3%a9y\""], key("k%c3%a9y")),
        apart("inner list", &[b"(\"abc\")"], syntax(), Err("bare-syntax")),
        apart(
            "token with a star",
            &[b"*abc/1:2"],
            Err("not-a-string"),
            key("*abc/1:2"),
        ),
        apart(
            "nanoid",
            &[b"_V1StGXR8_Z5jdHi6B-myT"],
            syntax(),
            key("_V1StGXR8_Z5jdHi6B-myT"),
        ),
        apart("base64", &[b"q83vEjRWeJA="], syntax(), key("q83vEjRWeJA=")),
        apart(
            "e-mail address",
            &[b"a@example.com"],
            syntax(),
            key("a@example.com"),
        ),
        both("255 in the string", &[&q255], key(&k255)),
        both("256 in the string", &[&q256], Err("too-long")),
        both("1024 in the string", &[&q1024], Err("too-long")),
        apart(
            "256 bare",
            &[&bare256],
            Err("not-a-string"),
            Err("too-long"),
        ),
    ];
    assert_eq!(rows.len(), 64);
    for row in &rows {
        check(row, KeySyntax::Strict, row.strict);
        check(row, KeySyntax::Lenient, row.lenient);
    }
}

#[test]
fn the_field_is_found_whatever_the_case_of_its_name() {
    let mut headers = HeaderMap::new();
    headers.append(
        HeaderName::from_bytes(b"IDEMPOTENCY-Key").unwrap(),
        HeaderValue::from_static("abc"),
    );
    let read = IdempotencyKey::from_headers(&headers, &FIELD, KeySyntax::Lenient);
    assert_eq!(read.unwrap().unwrap().as_str(), "abc");
}

#[test]
fn an_empty_second_line_counts_as_a_line() {
    let mut headers = HeaderMap::new();
    headers.append(FIELD, HeaderValue::from_static("abc"));
    headers.append(FIELD, HeaderValue::from_static(""));
    let read = IdempotencyKey::from_headers(&headers, &FIELD, KeySyntax::Lenient);
    assert_eq!(read.unwrap_err().reason(), "multiple-lines");
}
