//! Forms by their parts: what two `multipart/form-data` bodies have in common that differ only in
//! their boundary.

use super::content_type::{is_token, parameters, split_while};
use super::encoder::Encoder;

/// Writes the parts of a form (RFC 7578), in order, in linear time. `None`, with a part of it
/// written, if the body is not well-formed or if readers may disagree on where its parts end.
///
/// Of each part that is the parameters of its `Content-Disposition`, its `Content-Type`, its
/// `Content-Transfer-Encoding` and its bytes; other headers of parts are to be ignored (section
/// 4.8), and so is what stands before the first boundary and after the last.
pub(super) fn write(body: &[u8], boundary: &[u8], encoder: &mut Encoder<'_>) -> Option<()> {
    let mut delimiters = Delimiters {
        body,
        boundary,
        at: 0,
    };
    let at_once = body
        .strip_prefix(b"--")
        .is_some_and(|rest| rest.starts_with(boundary));
    // A delimiter at the very start has no line break before it.
    let mut delimiter = if at_once {
        delimiters.line(0, 2 + boundary.len())?
    } else {
        delimiters.next()?
    };
    while let Some(part) = delimiter.part {
        let next = delimiters.next()?;
        encoder.tag(1);
        write_part(body.get(part..next.start)?, encoder)?;
        delimiter = next;
    }
    encoder.tag(0);
    Some(())
}

fn write_part(part: &[u8], encoder: &mut Encoder<'_>) -> Option<()> {
    let mut disposition = None;
    let mut content_type = None;
    let mut transfer_encoding = None;
    let mut rest = part;
    loop {
        let line;
        (line, rest) = split_line(rest)?;
        if line.is_empty() {
            break;
        }
        let (name, value) = split_while(line, is_token);
        let value = value.strip_prefix(b":")?.trim_ascii();
        let field = if name.is_empty() {
            return None;
        } else if name.eq_ignore_ascii_case(b"content-disposition") {
            &mut disposition
        } else if name.eq_ignore_ascii_case(b"content-type") {
            &mut content_type
        } else if name.eq_ignore_ascii_case(b"content-transfer-encoding") {
            &mut transfer_encoding
        } else {
            continue;
        };
        if field.replace(value).is_some() {
            return None;
        }
    }
    write_disposition(disposition?, encoder)?;
    encoder.lines(content_type);
    encoder.lines(transfer_encoding);
    encoder.text(rest);
    Some(())
}

/// All parameters, by name: `name` and `filename`, and whatever a handler might look at besides.
fn write_disposition(value: &[u8], encoder: &mut Encoder<'_>) -> Option<()> {
    let mut parameters: Vec<(Vec<u8>, &[u8])> = parameters(value)?
        .into_iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect();
    parameters.sort_unstable();
    let repeated = parameters.windows(2).any(|pair| pair[0].0 == pair[1].0);
    let named = parameters.iter().any(|(name, _)| name == b"name");
    let (kind, _) = split_while(value, |byte| byte != b';');
    if repeated || !named || !kind.trim_ascii().eq_ignore_ascii_case(b"form-data") {
        return None;
    }
    encoder.lines(parameters.iter().flat_map(|(name, value)| [name, *value]));
    Some(())
}

/// A line without its line break, and what comes after. `None` if the line has no end, or has
/// control characters in it: bare line breaks above all.
fn split_line(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let (line, rest) = split_while(text, |byte| byte == b'\t' || !byte.is_ascii_control());
    Some((line, rest.strip_prefix(b"\r\n")?))
}

/// The lines of a body that divide its parts (RFC 2046, section 5.1.1), one after the other.
struct Delimiters<'b> {
    body: &'b [u8],
    boundary: &'b [u8],
    // Where the search goes on.
    at: usize,
}

struct Delimiter {
    // Of its line break, which is not part of the part before.
    start: usize,
    // Where the next part begins; `None` after the last one.
    part: Option<usize>,
}

impl Delimiters<'_> {
    /// The next one. `None` also for a line that only looks like one: one reader takes
    /// `--boundary2` or a boundary after a bare line feed for a delimiter, another for content.
    fn next(&mut self) -> Option<Delimiter> {
        loop {
            let feed = self.at + find(self.body.get(self.at..)?, b'\n')?;
            self.at = feed + 1;
            let line = self.body[self.at..].strip_prefix(b"--");
            // No boundary has a line feed in it, so no byte is compared twice.
            if line.is_some_and(|line| line.starts_with(self.boundary)) {
                let start = feed.checked_sub(1).filter(|at| self.body[*at] == b'\r')?;
                return self.line(start, self.at + 2 + self.boundary.len());
            }
        }
    }

    /// Reads a delimiter from the end of its boundary to the end of its line.
    fn line(&mut self, start: usize, end: usize) -> Option<Delimiter> {
        let rest = &self.body[end..];
        let (rest, last) = match rest.strip_prefix(b"--") {
            Some(rest) => (rest, true),
            None => (rest, false),
        };
        let (_padding, rest) = split_while(rest, |byte| byte == b' ' || byte == b'\t');
        let part = if rest.is_empty() && last {
            None
        } else {
            let part = self.body.len() - rest.strip_prefix(b"\r\n")?.len();
            (!last).then_some(part)
        };
        // At the line break, so that one delimiter right after another is seen.
        self.at = part.map_or(self.body.len(), |part| part - 1);
        Some(Delimiter { start, part })
    }
}

/// Where a byte occurs first. Chunk by chunk, because the standard library searches for a byte
/// many at a time when it need not say where it is.
fn find(bytes: &[u8], byte: u8) -> Option<usize> {
    let chunks = bytes.chunks(64);
    let (index, chunk) = chunks
        .enumerate()
        .find(|(_, chunk)| chunk.contains(&byte))?;
    Some(index * 64 + chunk.iter().position(|&found| found == byte)?)
}

#[cfg(test)]
mod tests {
    use sha2::{Digest, Sha256};

    use super::*;

    fn digest(body: impl AsRef<[u8]>, boundary: &str) -> Option<[u8; 32]> {
        let mut hash = Sha256::new();
        write(
            body.as_ref(),
            boundary.as_bytes(),
            &mut Encoder::new(&mut hash),
        )?;
        Some(hash.finalize().into())
    }

    /// A form with the boundary `b` from `head LF content` pairs.
    fn form(parts: &[(&str, &str)]) -> String {
        let parts = parts.iter().map(|(head, content)| {
            let head: String = head.lines().map(|line| format!("{line}\r\n")).collect();
            format!("--b\r\n{head}\r\n{content}\r\n")
        });
        parts.chain(["--b--\r\n".to_owned()]).collect()
    }

    fn readable(body: impl AsRef<[u8]>) -> [u8; 32] {
        let body = body.as_ref();
        digest(body, "b").unwrap_or_else(|| panic!("{}", body.escape_ascii()))
    }

    fn assert_unreadable(body: impl AsRef<[u8]>) {
        let body = body.as_ref();
        assert_eq!(digest(body, "b"), None, "{}", body.escape_ascii());
    }

    const A: (&str, &str) = ("Content-Disposition: form-data; name=\"a\"", "1");
    const B: (&str, &str) = (
        "Content-Disposition: form-data; name=\"b\"; filename=\"f\"\nContent-Type: text/plain",
        "2",
    );

    #[test]
    fn every_byte_of_a_part_counts_and_so_does_the_order() {
        let all = [
            form(&[]),
            form(&[A]),
            form(&[A, A]),
            form(&[A, B]),
            form(&[B, A]),
            form(&[A, B]).replace("\r\n2", "\r\n3"),
            form(&[A, B]).replace("\r\n2", "\r\n2\r\n"),
            form(&[A, B]).replace("\r\n2", "\r\n"),
            form(&[A, B]).replace("\"f\"", "\"g\""),
            form(&[A, B]).replace("\"f\"", "\"\""),
            form(&[A, B]).replace("; filename=\"f\"", ""),
            form(&[A, B]).replace("filename=", "filename*="),
            form(&[A, B]).replace("text/plain", "text/html"),
            form(&[A, B]).replace("text/plain", ""),
            form(&[A, B]).replace("Content-Type: text/plain\r\n", ""),
            form(&[A, B]).replace(
                "Content-Type: text/plain",
                "Content-Transfer-Encoding: base64",
            ),
            form(&[A, B]).replace("\"a\"", "\"c\""),
            form(&[A, B]).replace("\"a\"", "\"a\"; x=y"),
        ]
        .map(readable);
        for (index, one) in all.iter().enumerate() {
            let same = all[..index].iter().position(|other| one == other);
            assert_eq!(same, None, "the same as number {index}");
        }
    }

    #[test]
    fn the_spelling_of_a_form_makes_no_difference() {
        let one = readable(form(&[A, B]));
        for other in [
            form(&[A, B]).replace("--b", "--another:boundary"),
            form(&[A, B]).replace("name=\"a\"", "name=a"),
            form(&[A, B]).replace("Content-D", "content-d"),
            form(&[A, B]).replace("form-data; name=\"b\"", "Form-Data ;NAME=\"b\""),
            form(&[A, B]).replace("name=\"b\"; filename=\"f\"", "filename=f; name=b"),
            form(&[A, B]).replace("Content-Type: text/plain", "Content-Type:\ttext/plain "),
            form(&[A, B]).replace(
                "Content-Type",
                "Content-Length: 1\r\nX-Any: thing\r\nContent-Type",
            ),
            form(&[A, B])
                .replace("--b\r\n", "--b \t\r\n")
                .replace("--b--", "--b--  "),
            form(&[A, B]).trim_end().to_owned(),
            format!("a preamble\r\nof --b lines\r\n{}an epilogue", form(&[A, B])),
            format!("\r\n{}", form(&[A, B])),
        ] {
            let boundary = if other.contains("another") {
                "another:boundary"
            } else {
                "b"
            };
            assert_eq!(digest(&other, boundary), Some(one), "{other}");
        }
    }

    #[test]
    fn content_may_be_anything_but_a_delimiter() {
        let contents = [
            "",
            "\r\n",
            "\r\n\r\n",
            "x--b--",
            "\r\n--",
            "\r\n-b",
            "\r\n--a",
            "\n--",
            "\r--b",
            "\r\n\r",
            "a\r\n--\r\nb",
            "\0\u{ff}",
        ];
        let all = contents.map(|content| readable(form(&[(A.0, content), B])));
        for (index, one) in all.iter().enumerate() {
            assert!(!all[..index].contains(one), "{:?}", contents[index]);
        }
    }

    #[test]
    fn a_form_that_readers_may_understand_differently_is_unreadable() {
        let one = form(&[A, B]);
        for body in [
            String::new(),
            "--b".to_owned(),
            "--b\r\n".to_owned(),
            "no boundary".to_owned(),
            one.replace("--b--\r\n", ""),
            one.replace("--b--\r\n", "--b"),
            one.replace("--b--\r\n", "--b-"),
            one.replace("--b--\r\n", "--b--x"),
            one.replace("--b--\r\n", "--b--\n"),
            one.replace("\r\n", "\n"),
            one.replace("2\r\n--b", "2\n--b"),
            one.replace("1\r\n--b", "1\r\n--boundary\r\n--b"),
            one.replace("1\r\n--b", "1\n--b\r\n--b"),
            one.replace("1\r\n--b", "1\r\n--b\r\n--b"),
            one.replace("\r\n\r\n1", "\r\n1"),
            one.replace("\r\n\r\n1", ""),
            one.replace("\r\n\r\n1", "\n\n1"),
            one.replace("--b\r\nContent", "--bContent"),
            one.replace("--b\r\nContent", "--b\nContent"),
            one.replace("Content-Type:", "Content-Type :"),
            one.replace("Content-Type:", ":"),
            one.replace("Content-Type:", "Content Type:"),
            one.replace("Content-Type", " folded: x\r\nContent-Type"),
            one.replace("Content-Type", "no colon\r\nContent-Type"),
            one.replace("Content-Type", "Content-Type: text/plain\r\nContent-Type"),
            one.replace("text/plain", "text/\0plain"),
            one.replace("text/plain", "text/\nplain"),
            one.replace(
                "Content-Disposition: form-data; name=\"a\"",
                "Content-Type: a/b",
            ),
            one.replace("form-data; name=\"a\"", "attachment; name=\"a\""),
            one.replace("form-data; name=\"a\"", "form-data"),
            one.replace("name=\"a\"", "filename=\"a\""),
            one.replace("name=\"a\"", "name=\"a\"; Name=a"),
            one.replace("name=\"a\"", "name=\"a"),
            one.replace("name=\"a\"", "name=\"a\"x"),
            one.replace("name=\"a\"", "name=\"a\\\""),
        ] {
            assert_unreadable(body);
        }
    }

    #[test]
    fn a_delimiter_is_not_taken_for_a_header() {
        let head = "Content-Disposition: form-data; name=a\r\n\r\n";
        let one = format!("--x:b\r\n{head}\r\n--x:b--");
        assert!(digest(&one, "x:b").is_some());
        assert_eq!(digest(format!("--x:b\r\n{one}"), "x:b"), None);
    }

    #[test]
    fn a_byte_is_found_where_it_occurs_first() {
        for length in 0..200 {
            let mut bytes = vec![b'x'; length];
            assert_eq!(find(&bytes, b'\n'), None);
            bytes.extend(b"\nx\n");
            assert_eq!(find(&bytes, b'\n'), Some(length));
        }
    }

    #[test]
    fn delimiters_are_found_after_content_of_any_length() {
        let all: Vec<_> = (0..200)
            .map(|length| readable(form(&[(A.0, &"x".repeat(length)), B])))
            .collect();
        for (length, one) in all.iter().enumerate() {
            assert!(!all[..length].contains(one), "{length}");
        }
    }

    #[test]
    fn file_names_may_hold_quotes_and_any_letters() {
        for name in [
            "a\\\"b;c",
            "\u{e4}.txt",
            "C:\\dir\\f.txt",
            "a%22b",
            "a; name=b",
        ] {
            let head = format!("Content-Disposition: form-data; name=a; filename=\"{name}\"");
            assert_ne!(readable(form(&[(&head, "")])), readable(form(&[(A.0, "")])));
        }
    }

    // These would not end if any of them took quadratic time.
    #[test]
    fn hostile_forms_are_read_or_refused_in_passing() {
        const MIB: usize = 1 << 20;
        let boundary = "b".repeat(70);
        let nearly = format!("\r\n--{}", "b".repeat(69));
        assert_eq!(
            digest(nearly.repeat(2 * MIB / nearly.len()), &boundary),
            None
        );
        assert_unreadable("\n".repeat(2 * MIB));
        assert_unreadable("--b\r\n".repeat(MIB / 3));
        assert_unreadable(format!("--b\r\n{}", "x: y\r\n".repeat(MIB / 3)));
        assert_unreadable(format!(
            "--b\r\n{}: form-data{}",
            "Content-Disposition",
            ";a=b".repeat(MIB / 2)
        ));
        let parts = "--b\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n".repeat(MIB / 50);
        readable(parts + "--b--");
    }
}
